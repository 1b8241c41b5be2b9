import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cribo.objectives.collapse import collapse_advice
from cribo.pretraining import PretrainConfig
from cribo.pretraining.monitoring import read_metrics
from cribo.training.events import Events

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
    return collapse_advice(row, **{"cross_image": True, "needs_objects": True, "prototypes": 1024, **changes})


def test_rows_that_are_healthy_or_of_parts_that_are_off_give_no_advice() -> None:
    assert signs(HEALTHY) == signs({}) == {}
    assert signs({**HEALTHY, "bootstrapping_ratio": 0.0}, cross_image=False) == {}
    assert signs({**HEALTHY, "objects_per_image": 0.0}, needs_objects=False, cross_image=False) == {}


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
def test_each_problem_is_reported_separately_with_advice(column: str, value: float, sign: str, advice: str) -> None:
    found = signs({**HEALTHY, column: value})
    assert found.keys() == {sign}
    assert advice in found[sign]


@pytest.mark.parametrize("centring", ["mean", "sinkhorn"])
def test_a_healthy_run_logs_no_warnings(tiny: Tiny, train: Train, centring: str) -> None:
    changes = {
        "losses.centring": centring,
        "losses.teacher_temperature": (0.1, 0.1),
        "optim.batch_size": 12,
        "optim.lr": 0.002,
    }
    trained = train(tiny(changes))
    assert trained.run.summary["warnings"] == []


def test_a_persistent_problem_is_logged_once_and_added_to_the_summary(
    tiny: Tiny, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    """This high temperature makes all teacher distributions uniform."""
    config = tiny({"losses.teacher_temperature": (10.0, 10.0), "losses.student_temperature": 1.0})
    trained = train(config)
    summary = json.loads((trained.run.folder / "summary.json").read_text())
    uniform = [warning for warning in summary["warnings"] if "image distributions are uniform" in warning["text"]]
    assert [warning["step"] for warning in uniform] == [5]
    assert summary["warnings"] == trained.run.summary["warnings"]
    assert any("image distributions are uniform" in message for message in caplog.messages)


def test_metrics_csv_has_a_column_for_every_number_and_can_be_read(tiny: Tiny, train: Train) -> None:
    trained = train(tiny({"runtime.log_every": 5, "score.root": "scenes", "score.images": (4, 2)}))
    path = trained.run.folder / "metrics.csv"
    columns = path.read_text().splitlines()[0].split(",")
    assert columns[:5] == ["step", "epoch", "seconds", "images_per_second", "loss"]
    assert len(columns) == len(set(columns))
    assert set(columns[5:]) == {
        *("loss_image", "loss_cross_view", "loss_cross_image", "objects_per_image", "bootstrapping_ratio"),
        *("lr", "weight_decay", "momentum", "teacher_temperature", "dense_nn"),
        *(f"{level}_{entropy}" for level in ("image", "object") for entropy in ("entropy_of_mean", "mean_entropy")),
        *("feature_std", "distinct_neighbours"),
    }
    rows = read_metrics(path)
    # 0 and 12: the score before and after; 12 also has the last row of metrics, although 5 does not divide it.
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


def test_a_row_is_the_mean_over_its_steps(tiny: Tiny, whole: Train) -> None:
    common = {"losses.cross_image_from_epoch": 0, "optim.epochs": 2}
    each, four = whole(tiny(common)).rows, whole(tiny({**common, "runtime.log_every": 4})).rows
    for number, row in enumerate(four):
        steps = each[4 * number : 4 * number + 4]
        for name in ("loss", "loss_image", "loss_cross_view", "loss_cross_image", "objects_per_image"):
            assert float(row[name]) == pytest.approx(sum(float(step[name]) for step in steps) / 4, rel=1e-5)
        kept = [float(step["objects_per_image"]) for step in steps]
        valid = sum(float(step["bootstrapping_ratio"]) * k for step, k in zip(steps, kept, strict=True))
        assert float(row["bootstrapping_ratio"]) == pytest.approx(valid / sum(kept), rel=1e-5)
        assert row["lr"] == steps[-1]["lr"]


# ------------------------------------------------------------------ failed writes


class TearTable(L.Callback):
    """Truncates metrics.csv within a row and replaces it by a folder at one step; removes the folder at another."""

    def __init__(self, path: Path, torn: int, mended: int) -> None:
        self.path, self.torn, self.mended = path, torn, mended
        self.kept = path.with_name("kept")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.torn:
            self.path.replace(self.kept)
            self.path.mkdir()
        if trainer.global_step == self.mended:
            self.path.rmdir()
            self.path.write_text(self.kept.read_text() + "9,0.")


def test_rows_of_failed_writes_are_written_later(
    tiny: Tiny, train: Train, whole: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torn = train(tiny(), "torn", callbacks=[TearTable(tmp_path / "torn" / "metrics.csv", 5, 8)])
    assert sum("metrics.csv: Is a directory; training continues" in message for message in caplog.messages) == 3
    assert torn.rows == whole(tiny()).rows


def test_incomplete_lines_are_skipped(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    """A power failure can leave half a line, or zeros instead of it."""
    trained = train(tiny({"score.root": "scenes", "score.images": (4, 2), "optim.epochs": 1, "optim.warmup_epochs": 0}))
    content = (trained.run.folder / "metrics.csv").read_bytes()
    rows = read_metrics(trained.run.folder / "metrics.csv")
    starts = [position + 1 for position, byte in enumerate(content) if byte == ord("\n")]
    for number, (start, end) in enumerate(pairwise(starts)):
        for cut in range(start, end - 1, 5):
            # If its end is replaced by zeros, the line includes the next one.
            for rest in (b"", bytes(end - cut), bytes(end - cut) + content[end:]):
                (tmp_path / "metrics.csv").write_bytes(content[:cut] + rest)
                found = read_metrics(tmp_path / "metrics.csv")
                assert found[:number] == rows[:number]
                assert found[number:] in ([], rows[number + 2 :])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # from TensorBoard's writer
def test_tensorboard_continues_in_another_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = Events(tmp_path, name="", version="events")
    folder = Path(logger.log_dir)

    def put_something_in_the_way() -> None:
        folder.rename(tmp_path / f"kept-{len(list(tmp_path.iterdir()))}")
        folder.write_text("in the way")

    logger.log_metrics({"loss": 1.0}, 1)
    put_something_in_the_way()
    while not caplog.messages:  # another thread writes
        logger.log_metrics({"loss": 2.0}, 2)
        time.sleep(0.01)
    assert "Not a directory; training continues" in caplog.messages[0]
    logger.log_metrics({"loss": 3.0}, 3)  # it does not retry every time
    folder.unlink()
    logger._silent_until = 0.0
    logger.log_metrics({"loss": 4.0}, 4)
    logger.finalize("success")
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(4, 4.0)]

    logger._experiment = None
    logger.log_metrics({"loss": 5.0}, 5)
    logger.experiment.flush()  # otherwise its thread could fail at this value already
    put_something_in_the_way()
    logger.experiment.add_scalar("loss", 6.0, 6)
    logger.finalize("success")
    assert "Not a directory; training continues" in caplog.messages[-1]
