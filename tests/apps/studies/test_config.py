"""Studies: rows from axes and lists, their configurations, and errors in their files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cribo.apps.studies.config import dump_study, load_study, study_names
from cribo.base.errors import ConfigError

STUDY: dict[str, Any] = {
    "title": "A study",
    "axes": {"losses.cross_image": [0, 1], "objects.num_objects": [4, 16]},
    "scores": {"dense-nn": {"data": "scenes", "ratios": 1}},
}


def written(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "study.yaml"
    content = {name: value for name, value in {**STUDY, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_axes_are_combined_and_named_by_their_values(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, {"rows": {"croc": {"base": "scenes_croc"}}, "changes": {"optim.epochs": 3}}))
    assert list(study.changes_of_rows) == [
        "cross_image 0, num_objects 4",
        "cross_image 0, num_objects 16",
        "cross_image 1, num_objects 4",
        "cross_image 1, num_objects 16",
        "croc",
    ]
    config = study.configuration("cross_image 1, num_objects 4", seed=7)
    assert (config.losses.cross_image, config.objects.num_objects, config.optim.epochs, config.seed) == (1, 4, 3, 7)
    assert study.configuration("croc", 0).objective.name == "croc"
    assert study.pairs[0] == ("cross_image 0, num_objects 16", "cross_image 0, num_objects 4")


def test_axes_are_varied_one_at_a_time(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, {"combine": "one at a time"}))
    assert list(study.changes_of_rows) == ["base", "cross_image 0", "cross_image 1", "num_objects 4", "num_objects 16"]
    assert [reference for _, reference in study.pairs] == ["base"] * 4


def test_a_row_given_twice_is_an_error(tmp_path: Path) -> None:
    file = written(tmp_path, {"axes": None})
    file.write_text(file.read_text() + "rows:\n  a: {}\n  b: {}\n  a: {optim.epochs: 3}\n")
    with pytest.raises(ConfigError, match=r"study.yaml has .*rows\.a .*lines \d+ and \d+"):
        load_study(file)


def test_a_written_study_is_read_back(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, {"budget": {"steps": 10}, "seeds": [3, 1]}))
    (tmp_path / "again.yaml").write_text(dump_study(study), encoding="utf-8")
    again = load_study(tmp_path / "again.yaml")
    assert again.changes_of_rows == study.changes_of_rows
    assert (again.budget, again.seeds, again.pairs) == (study.budget, (3, 1), study.pairs)


@pytest.mark.parametrize("name", study_names())
def test_the_rows_of_a_study_of_the_package_are_valid(name: str) -> None:
    study = load_study(name)
    for row in study.changes_of_rows:
        study.configuration(row, study.seeds[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": {"optim.lr": [1, 2]}}, "study.yaml: unknown key axis: did you mean axes"),
        ({"axes": {"losses.cross_image": [1]}}, r"axes.losses.cross_image must have at least two values, got \[1\]"),
        ({"axes": {"losses.cross_image": [1, 1]}}, "axes.losses.cross_image has the value 1 twice"),
        ({"axes": None}, "a study must have at least two rows, got 0"),
        ({"seeds": [1, 2, 1]}, "seeds has the seed 1 twice"),
        ({"seeds": 3}, r"seeds must be a list, such as \[0, 1, 2\], got 3"),
        ({"rows": {"croc": {}}, "compare": [["croc", "croc"]]}, "compare has the row 'croc' with itself"),
        ({"rows": {True: {}}}, "rows has the name True: .* quote it"),
        ({"rows": {"a": {"optim": {"epochs": 3}}}}, r"optim must be an option, such as optim.epochs: use dots"),
        ({"seeds": []}, "seeds must have at least one seed"),
        ({"scores": {}}, "scores must have at least one evaluation"),
        ({"budget": {"epochs": 1, "steps": 2}}, "budget must be one number, got epochs and steps"),
        ({"budget": {"cpu_seconds": 0}}, "budget.cpu_seconds must be > 0"),
        ({"rows": {"croc": {}}, "compare": [["croc", "crc"]]}, "there is no row 'crc': did you mean croc"),
        ({"paper": {"dense": {}}}, "paper.dense is not one of the scores: did you mean dense-nn"),
        ({"rows": {"cross_image 0, num_objects 4": {}}}, "has the name of a row of the axes"),
        ({"aggregate": ["objects.num_object"]}, "which is not one of the axes: did you mean objects.num_objects"),
        ({"aggregate": [*STUDY["axes"]]}, "an axis that is not in it, got combine all and 2 of 2 axes"),
        (
            {"aggregate": ["objects.num_objects"], "combine": "one at a time"},
            "got combine one at a time and 1 of 2 axes",
        ),
        ({"paper": {"dense-nn": {"cross_image 0, minimum": 1}}}, "there is no row 'cross_image 0, minimum'"),
    ],
)
def test_invalid_studies_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_study(written(tmp_path, changes))


def test_invalid_rows_and_unknown_studies_are_named(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, {"rows": {"wrong": {"losses.crossimage": 0}}}))
    with pytest.raises(ConfigError, match=r"row 'wrong': .*did you mean losses.cross_image"):
        study.configuration("wrong", 0)
    with pytest.raises(ConfigError, match="no study or file named table5_smal: did you mean table5_small"):
        load_study("table5_smal")
