"""The twelve tables of the paper: their published figures, and their small versions, which run."""

import re
from pathlib import Path

import pytest

from cribo.apps.studies.config import load_study, study_names
from cribo.apps.studies.run import run_study

SHARED = Path("../shared")
TABLES = [f"table{number}" for number in range(1, 13)]


def test_every_table_has_a_study_and_a_small_one() -> None:
    assert {*TABLES, *(f"{name}_small" for name in TABLES)} <= set(study_names())


@pytest.mark.parametrize("name", TABLES)
def test_published_figures_are_those_of_the_paper(name: str) -> None:
    """Each figure of a study is in the LaTeX of its table, and the other way round."""
    if not (paper := SHARED / "paper" / "cribo-iclr2024.tex").is_file():
        pytest.skip(f"needs {paper}")
    label = dict(zip(TABLES, _LABELS, strict=True))[name]
    tables = re.split(r"\\begin\{table\*?\}", paper.read_text(encoding="utf-8"))
    [table] = [text for text in tables if f"\\label{{{label}}}" in text]
    body = table.partition("\\midrule")[2].partition("\\end{tabular}")[0]
    plain = re.sub(r"\\(midrule|arrayrulecolor|cmidrule)(\[[^]]*\]|\{[^}]*\})*|\$[^$]*\$", "", body)
    numbers = {float(number) for number in re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", plain)}
    figures = [value for rows in load_study(name).paper.values() for value in rows.values()]
    assert figures
    if name != "table10":  # minutes and seconds
        assert {value for value in figures if value != 100} <= numbers
        assert numbers <= set(figures)


_LABELS = [
    "table:hummingbird",
    "table:linear_segmentation_1token",
    "table:segmenter_segmentation",
    "tab:ablation_hp",
    "tab:ablation_loss",
    "table:yolos",
    "table:linear_segmentation_4tokens",
    "tab:ablation_bt",
    "table:time_oh",
    "table:runtime_comparison",
    "tab:overclustering",
    "tab:clustering_ablation",
]


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.parametrize("name", [f"{name}_small" for name in TABLES])
def test_small_tables_run(name: str, tmp_path: Path) -> None:
    if "shared" in str(load_study(name).scores) and not (SHARED / "data").is_dir():
        pytest.skip(f"needs {SHARED / 'data'}")
    result = run_study(name, out=tmp_path)
    assert (result.failed, result.unfinished, result.missing) == ({}, [], {})
    for score in result.table.measured.values():
        assert all(value >= 0 for row in score.results for value in score.values(row))
    assert any(score.values(row) for score in result.table.measured.values() for row in score.results)
