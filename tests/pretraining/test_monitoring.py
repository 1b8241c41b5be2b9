import json
from collections.abc import Callable
from typing import Any

import pytest

from cribo.pretraining import PretrainConfig
from cribo.pretraining.monitoring import COLUMNS, read_metrics, signs_of_trouble

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]

HEALTHY = {
    "image_entropy_of_mean": 0.8,
    "image_mean_entropy": 0.5,
    "object_entropy_of_mean": 0.9,
    "object_mean_entropy": 0.6,
    "feature_std": 0.7,
    "distinct_neighbours": 0.4,
    "objects_per_image": 6.0,
    "bootstrapping_ratio": 0.2,
}


def signs(row: dict[str, float], **changes: Any) -> dict[str, str]:
    return signs_of_trouble(row, **{"cross_image": True, "needs_objects": True, "prototypes": 1024, **changes})


def test_a_healthy_row_has_no_signs() -> None:
    assert signs(HEALTHY) == {}
    assert signs({}) == {}


@pytest.mark.parametrize(
    ("column", "value", "sign", "advice"),
    [
        ("image_entropy_of_mean", 0.05, "image prototypes", "optim.momentum"),
        ("object_entropy_of_mean", 0.05, "object prototypes", "losses.centring sinkhorn"),
        ("image_mean_entropy", 0.999, "image uniform", "losses.teacher_temperature"),
        ("object_mean_entropy", 1.0, "object uniform", "losses.teacher_temperature"),
        ("feature_std", 0.01, "features", "optim.warmup_epochs"),
        ("distinct_neighbours", 0.001, "neighbours", "objects.bank_images"),
        ("objects_per_image", 0.0, "no objects", "objects.num_objects"),
        ("bootstrapping_ratio", 0.0, "no bootstrapping", "objects.bank_images"),
    ],
)
def test_each_sign_comes_alone_and_with_advice(column: str, value: float, sign: str, advice: str) -> None:
    found = signs({**HEALTHY, column: value})
    assert found.keys() == {sign}
    assert advice in found[sign]


def test_a_part_that_is_not_at_work_gives_no_sign() -> None:
    assert signs({**HEALTHY, "bootstrapping_ratio": 0.0}, cross_image=False) == {}
    assert signs({**HEALTHY, "objects_per_image": 0.0}, needs_objects=False, cross_image=False) == {}


@pytest.mark.parametrize("centring", ["mean", "sinkhorn"])
def test_a_healthy_run_warns_of_nothing(tiny: Tiny, train: Train, centring: str) -> None:
    changes = {
        "losses.centring": centring,
        "losses.teacher_temperature": (0.1, 0.1),
        "optim.batch_size": 12,
        "optim.lr": 0.002,
        "optim.epochs": 6,
    }
    trained = train(tiny(changes))
    assert trained.run.summary["warnings"] == []


def test_a_lasting_sign_is_warned_of_once_and_reaches_the_summary(
    tiny: Tiny, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    """A temperature this high makes every teacher distribution uniform."""
    config = tiny({"losses.teacher_temperature": (10.0, 10.0), "losses.student_temperature": 1.0})
    trained = train(config)
    summary = json.loads((trained.run.folder / "summary.json").read_text())
    uniform = [warning for warning in summary["warnings"] if "image distributions are uniform" in warning["text"]]
    assert [warning["step"] for warning in uniform] == [5]
    assert summary["warnings"] == trained.run.summary["warnings"]
    assert any("image distributions are uniform" in message for message in caplog.messages)


def test_metrics_csv_has_all_columns_and_reads_back(tiny: Tiny, train: Train) -> None:
    trained = train(tiny({"runtime.log_every": 5, "score.root": "scenes", "score.images": (4, 2)}))
    path = trained.run.folder / "metrics.csv"
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    rows = read_metrics(path)
    # 0 and 12: the score before and after; 12: the last row of numbers too, though 5 does not divide it.
    assert [row["step"] for row in rows] == [0, 5, 10, 12, 12]
    assert [row["epoch"] for row in rows] == [0, 1.25, 2.5, 3, 3]
    assert [("loss" in row, "dense_nn" in row) for row in rows] == [
        (False, True),
        (True, False),
        (True, False),
        (True, False),
        (False, True),
    ]
    numbers = [row for row in rows if "loss" in row]
    assert all(row["images_per_second"] > 0 for row in numbers)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)


def test_a_row_is_the_mean_over_its_steps(tiny: Tiny, train: Train) -> None:
    each, four = train(tiny(), "each").rows, train(tiny({"runtime.log_every": 4}), "four").rows
    for number, row in enumerate(four):
        steps = each[4 * number : 4 * number + 4]
        for name in ("loss", "loss_image", "loss_cross_view", "loss_cross_image", "objects_per_image"):
            assert float(row[name]) == pytest.approx(sum(float(step[name]) for step in steps) / 4, rel=1e-5)
        kept = [float(step["objects_per_image"]) for step in steps]
        valid = sum(float(step["bootstrapping_ratio"]) * k for step, k in zip(steps, kept, strict=True))
        assert float(row["bootstrapping_ratio"]) == pytest.approx(valid / sum(kept), rel=1e-5)
        assert row["lr"] == steps[-1]["lr"]
