"""Comparisons of rows, which are judged from three seeds on and corrected for their number, and aggregates of rows."""

import pytest

from cribo.apps.studies.config import StudyConfig
from cribo.apps.studies.table import Measured, Scored, StudyTable

BASE, BETTER = (0.50, 0.51, 0.52), (0.53, 0.55, 0.57)


def table(seeds: int, rows: int = 2) -> StudyTable:
    """Return a study in which all rows but the first are equally better."""
    scores = {f"row {row}": BETTER if row else BASE for row in range(rows)}
    results = {
        name: {seed: Scored(value, f"{name}-{seed}") for seed, value in enumerate(values[:seeds])}
        for name, values in scores.items()
    }
    study = StudyConfig(title="Rows", rows={name: {} for name in scores}, scores={"linear": {}}, seeds=(0, 1, 2))
    return StudyTable(study, {"linear": Measured("miou", results)})


@pytest.mark.parametrize(("seeds", "found"), [(1, "not enough seeds"), (2, "not enough seeds"), (3, "higher")])
def test_differences_are_judged_from_three_seeds_on(seeds: int, found: str) -> None:
    [sentence] = table(seeds).sentences
    assert found in sentence


def test_intervals_are_corrected_for_the_number_of_comparisons() -> None:
    few, many = table(3), table(3, rows=21)
    assert "higher" in few.sentences[0]
    assert len(many.sentences) == 20
    assert all("no significant difference" in sentence for sentence in many.sentences)
    [alone], [among] = few.tables(), many.tables()
    assert (alone.notes, among.notes) == (
        ["1 comparison, with intervals of 95 %; the smallest difference that they detect is 2.5."],
        ["20 comparisons, with intervals of 99.75 %; the smallest difference that they detect is 11.5."],
    )


def test_rows_are_aggregated_over_axes() -> None:
    """Each setting counts by its mean over seeds; one without results is left out."""
    study = StudyConfig(
        title="Criteria",
        axes={"objects.criterion": ["none", "cycle"], "objects.num_objects": [4, 8], "losses.image": [0, 1]},
        aggregate=["objects.num_objects", "losses.image"],
        scores={"linear": {}},
        seeds=(0, 1),
        compare=[],
        paper={"linear": {"criterion none, minimum": 49.1}},
    )
    means = dict(zip(study.changes_of_rows, (0.4, 0.1, 0.3, 0.2, 0.5, 0.6, 0.7, None), strict=True))
    results = {
        row: {seed: Scored(mean + 0.01 * (2 * seed - 1), f"{row}-{seed}") for seed in (0, 1) if mean is not None}
        for row, mean in means.items()
    }
    table = StudyTable(study, {"linear": Measured("miou", results)})
    aggregated = [
        ["criterion none, minimum", "10.0", "49.1", "-39.1"],
        ["criterion none, maximum", "40.0", "-", "-"],
        ["criterion none, mean", "25.0", "-", "-"],
        ["criterion cycle, minimum", "50.0 (3 rows)", "-", "-"],
        ["criterion cycle, maximum", "70.0 (3 rows)", "-", "-"],
        ["criterion cycle, mean", "60.0 (3 rows)", "-", "-"],
    ]
    assert table.tables()[0].blocks[1] == aggregated
    assert [row[:2] for row in table.means().blocks[1]] == [row[:2] for row in aggregated]
    recorded = table.record()["scores"]["linear"]["aggregates"]["criterion cycle, maximum"]
    assert recorded == {"value": pytest.approx(0.7), "rows": 3, "paper": None}
