"""Comparisons of rows: they are judged from three seeds on, and corrected for their number."""

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
