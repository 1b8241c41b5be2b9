import numpy as np
import pytest

from cribo.objectives import Setting, Step
from cribo.objectives.config import BackboneConfig, HeadConfig, LossConfig, ObjectiveOptions, OptimConfig
from cribo.objectives.cribo import CrIBo
from cribo.pretraining.schedules import Schedules

EPOCHS, STEPS = 20, 7


def optim(**changes: object) -> OptimConfig:
    values = {
        "epochs": EPOCHS,
        "batch_size": 512,
        "lr": 5e-4,
        "final_lr": 1e-5,
        "warmup_epochs": 3,
        "momentum": (0.996, 1.0),
        **changes,
    }
    return OptimConfig(**values)


def schedules(**changes: object) -> Schedules:
    return Schedules(optim(**changes), STEPS)


def of_cribo(steps_per_epoch: int = STEPS, **losses: object) -> Schedules:
    """Return the schedules of a run with CrIBo."""
    options = ObjectiveOptions(
        backbone=BackboneConfig("vit_tiny_patch16_224", {"depth": 1, "embed_dim": 32, "num_heads": 2}),
        head=HeadConfig(hidden_dim=8, bottleneck_dim=8, prototypes=8),
        losses=LossConfig(teacher_temperature=(0.04, 0.07), **losses),  # pyright: ignore[reportArgumentType]
        optim=optim(),
    )
    objective = CrIBo(Setting(options, num_images=512 * steps_per_epoch, steps_per_epoch=steps_per_epoch))
    return Schedules(options.optim, steps_per_epoch, objective.schedules)


def values(of: Schedules, name: str) -> np.ndarray:
    return np.array([of.at(step)[name] for step in range(of.total_steps)])


def cosine(start: float, end: float, steps: int) -> np.ndarray:
    return end + 0.5 * (start - end) * (1 + np.cos(np.pi * np.arange(steps) / steps))


def test_learning_rate_warms_up_from_0_to_the_scaled_peak_and_falls_as_a_cosine() -> None:
    peak = 5e-4 * 512 / 256
    expected = np.concatenate((np.linspace(0, peak, 3 * STEPS), cosine(peak, 1e-5, (EPOCHS - 3) * STEPS)))
    np.testing.assert_allclose(values(schedules(), "lr"), expected, rtol=1e-12)


def test_final_learning_rate_is_not_scaled_with_the_batch() -> None:
    last = schedules(epochs=2000).at(2000 * STEPS - 1)["lr"]
    assert last == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("name", ["weight_decay", "momentum"])
def test_weight_decay_and_momentum_are_cosines_over_the_whole_run(name: str) -> None:
    start, end = {"weight_decay": (0.04, 0.4), "momentum": (0.996, 1.0)}[name]
    np.testing.assert_allclose(values(of_cribo(), name), cosine(start, end, EPOCHS * STEPS), rtol=1e-12)


def test_teacher_temperature_takes_one_linear_step_an_epoch() -> None:
    per_epoch = np.concatenate((np.linspace(0.04, 0.07, 5), np.full(EPOCHS - 5, 0.07)))
    found = values(of_cribo(teacher_temperature_epochs=5), "teacher_temperature")
    np.testing.assert_allclose(found, np.repeat(per_epoch, STEPS), rtol=1e-12)


def test_a_run_shorter_than_its_warm_up_stays_in_it() -> None:
    rates = values(schedules(epochs=2), "lr")
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(1e-3)
    assert (np.diff(rates) > 0).all()


def test_a_warm_up_of_one_step_starts_at_0_and_without_one_at_the_peak() -> None:
    assert schedules(warmup_epochs=0).at(0)["lr"] == pytest.approx(1e-3)
    of = Schedules(optim(warmup_epochs=1), steps_per_epoch=1)
    assert of.at(0)["lr"] == 0
    assert of.at(1)["lr"] == pytest.approx(1e-3)
    assert of.total_steps == EPOCHS


@pytest.mark.parametrize(
    ("epochs", "expected"), [(0, [0.07, 0.07, 0.07]), (1, [0.04, 0.07, 0.07]), (2, [0.04, 0.07, 0.07])]
)
def test_a_temperature_that_rises_over_few_epochs(epochs: int, expected: list[float]) -> None:
    """Equal to numpy.linspace(0.04, 0.07, epochs), and 0.07 afterwards."""
    of = of_cribo(3, teacher_temperature_epochs=epochs)
    assert [of.at(3 * epoch)["teacher_temperature"] for epoch in range(3)] == expected


def test_an_objective_without_schedules_has_those_of_the_optimiser() -> None:
    assert set(schedules().at(0)) == {"lr", "weight_decay"}
    assert set(of_cribo().at(0)) == {"lr", "weight_decay", "momentum", "teacher_temperature"}


def test_the_epoch_of_a_step() -> None:
    assert [schedules().step(number).epoch for number in (0, STEPS - 1, STEPS, EPOCHS * STEPS - 1)] == [0, 0, 1, 19]
    assert Step(3, 4, 8).cosine(1.0, 0.0) == pytest.approx((1 + np.cos(np.pi * 3 / 8)) / 2)
