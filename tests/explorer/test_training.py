import shutil
from pathlib import Path

import pytest
from tests.explorer.conftest import write_metrics

from cribo.explorer.training import Point, read_run, require_run, summary_table


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    """Copy a run in progress, so that tests can change it."""
    return shutil.copytree(run_folder, tmp_path / "run")


def test_a_run_in_progress_is_read_again(run: Path) -> None:
    before = read_run(run)
    write_metrics(run, epochs=4)
    after = read_run(run)
    assert (len(before.rows), len(after.rows)) == (4, 5)
    assert not after.is_finished
    (run / "summary.json").write_text('{"warnings": [{"step": 8, "text": "loss | rises"}]}')
    table = summary_table(read_run(run))
    assert "| state | finished |" in table
    assert "| epochs | 4.0 of 3 |" in table
    assert "| dense retrieval at start, now | 10.0 %, 50.0 % mIoU |" in table
    assert "| warning at step 8 | loss / rises |" in table


def test_curves_of_ratios_are_in_percent(run: Path) -> None:
    state = read_run(run)
    assert state.curve({"bootstrapping_ratio": "matched"})[1] == Point(2, 20.0, "matched")
    assert [point.value for point in state.curve({"dense_nn": "x"})] == pytest.approx([10, 20, 30, 40])
    # A loss is 0 until it is enabled.
    assert [point.epoch for point in state.curve({"loss_cross_image": "x"})] == [2, 3]
    assert state.curves["Losses"] == {"loss_image": "image", "loss_cross_image": "cross image"}
    assert state.columns == ["bootstrapping_ratio", "loss"]


def test_long_curves_are_subsampled_and_keep_their_ends(run: Path) -> None:
    write_metrics(run, epochs=7321)
    points = read_run(run).curve({"loss": "loss"})
    assert len(points) <= 501
    assert (points[0].epoch, points[-1].epoch) == (1, 7321)


def test_a_partially_written_row_is_skipped(run: Path) -> None:
    with (run / "metrics.csv").open("a") as file:
        file.write("16,4,2")
    assert len(read_run(run).rows) == 4
    (run / "metrics.csv").unlink()
    assert summary_table(read_run(run)).startswith("| state | started, no measurements yet |")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run \(no config.yaml\)"):
        require_run(tmp_path)
    (tmp_path / "streets").mkdir()
    with pytest.raises(FileNotFoundError, match="did you mean 'streets'"):
        require_run(tmp_path / "street")
