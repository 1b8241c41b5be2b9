import pytest
import torch

from cribo.objectives import Output
from cribo.pretraining.sums import RunningSums


def alone() -> RunningSums:
    return RunningSums(lambda tensor: tensor[None])


def output(loss: float, **metrics: object) -> Output:
    return Output({"one": torch.tensor(loss), "two": torch.tensor(10.0)}, metrics)  # pyright: ignore[reportArgumentType]


def test_means_are_over_the_steps_since_the_last_reading() -> None:
    sums = alone()
    sums.add(output(1.0, share=(1, 2), spread=torch.tensor(4.0)), {"two": 0.5})
    sums.add(output(2.0, share=(torch.tensor(5), torch.tensor(6)), spread=0.0), {"two": 0.5})
    expected = {"loss_one": 1.5, "loss_two": 10, "loss": 6.5, "share": 0.75, "spread": 2}
    assert sums.read() == pytest.approx(expected)
    sums.add(output(7.0), {})
    assert sums.read() == pytest.approx({"loss_one": 7, "loss_two": 10, "loss": 17})
    assert sums.read() == {}


def test_a_ratio_with_denominator_0_is_omitted() -> None:
    sums = alone()
    sums.add(output(1.0, share=(0, 0)), {})
    assert "share" not in sums.read()


def test_an_occasional_metric_is_averaged_over_its_occurrences() -> None:
    sums = alone()
    sums.add(output(1.0), {})
    sums.add(output(1.0, rare=6.0), {})
    sums.add(output(1.0), {})
    assert sums.read()["rare"] == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_must_be_finite_but_metrics_need_not(value: float) -> None:
    sums = alone()
    sums.add(output(1.0, spread=value), {})
    assert sums.is_finite()
    sums.add(output(value), {})
    sums.add(output(1.0), {})
    assert not sums.is_finite()
    sums.read()
    assert sums.is_finite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_not_rounded_to_the_type_of_losses(dtype: torch.dtype) -> None:
    sums = alone()
    for _ in range(5000):
        sums.add(Output({"one": torch.ones((), dtype=dtype)}, {"share": (torch.tensor(1), 3)}), {})
    assert sums.read() == pytest.approx({"loss_one": 1, "loss": 1, "share": 1 / 3})
    assert sums.state_dict() == {}


def test_sums_of_all_devices_are_saved_and_restored_on_any_number() -> None:
    """Each of two devices gathers the values of both."""
    # Sums are means over the devices: on each of two, a pair counts twice, a scalar once.
    other = torch.tensor([[3.0, 1.0], [10.0, 1.0], [13.0, 1.0], [6.0, 16.0]])
    one_of_two = RunningSums(lambda tensor: torch.stack((tensor, other)), lambda: 2)
    one_of_two.add(output(1.0, share=(1, 2)), {})
    saved = one_of_two.state_dict()
    assert one_of_two.read() == pytest.approx({"loss_one": 2, "loss_two": 10, "loss": 12, "share": 4 / 10})
    on = RunningSums(lambda tensor: tensor[None])
    on.load_state_dict(saved, torch.device("cpu"))
    on.add(output(5.0, share=(2, 0)), {})
    # Losses of two steps with equal weight; a ratio over all objects of both steps.
    assert on.read() == pytest.approx({"loss_one": 3.5, "loss_two": 10, "loss": 13.5, "share": 6 / 10})


def test_a_ratio_in_a_row_does_not_depend_on_the_devices_of_each_step() -> None:
    """Two steps of four objects each, the first on two devices, the second on one."""
    first = [torch.tensor([[1.0, 1.0], [10.0, 1.0], [11.0, 1.0], [2 * 1.0, 2 * 2.0]])]
    two = RunningSums(lambda tensor: torch.stack((tensor, *first)), lambda: 2)
    two.add(output(1.0, share=(2, 2)), {})
    row = RunningSums(lambda tensor: tensor[None])
    row.load_state_dict(two.state_dict(), torch.device("cpu"))
    row.add(output(1.0, share=(0, 4)), {})
    assert row.read()["share"] == 3 / 8
