"""Every row of the table of formats, against the features of the project's own code."""

import importlib.util
from pathlib import Path

import pytest
from tests.models.formats.cases import Case, deviation, epsilon, load_cases, measure

from cribo.models import build_backbone, load_backbone, load_pretrained, save_backbone
from cribo.models.formats.reading import flatten, read_weights
from cribo.models.formats.table import NAMINGS, PROJECTS

TOLERANCE = 1e-5
CASES = load_cases()


def needed(case: Case) -> None:
    for row, package in (("Hugging Face", "transformers"), ("msgpack", "msgpack")):
        if row in case.name and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_of_each_project_gives_its_features(tmp_path: Path, case: Case):
    needed(case)
    backbone, largest = measure(case, tmp_path)
    assert backbone.loaded is not None
    assert backbone.loaded.format == case.row
    assert (backbone.mean, epsilon(backbone)) == (case.mean, case.norm_eps)
    assert backbone.numerics.final_norm_eps == case.final_norm_eps
    if case.positions is not None:
        assert backbone.numerics.positions == case.positions
    assert largest < TOLERANCE
    # All keys are accounted for, and an existing network gets the same weights: once for each row.
    loaded = backbone.loaded
    assert "not of the network" not in loaded.dropped
    tensors = flatten(read_weights(Path(loaded.source)))
    assert sorted([*loaded.used, *(key for keys in loaded.dropped.values() for key in keys)]) == sorted(tensors)
    if not case.about:
        other = build_backbone(backbone.name, args=backbone.args, image_size=backbone.image_size, seed=5)
        load_pretrained(other, loaded.source, positions=case.options.get("positions"))
        assert other.fingerprint() == backbone.fingerprint()
    # A saved network is restored, even if timm does not have it.
    save_backbone(backbone, tmp_path / "saved")
    assert load_backbone(tmp_path / "saved").fingerprint() == backbone.fingerprint()


@pytest.mark.parametrize("case", [case for case in CASES if case.positions], ids=lambda case: case.name)
def test_the_sizes_distinguish_resizing_methods(tmp_path: Path, case: Case):
    """Otherwise the comparison above would not test resizing."""
    needed(case)
    path, teacher, _ = case.write(tmp_path)
    other = "bilinear_corners" if case.positions == "bilinear" else "bilinear"
    backbone = load_backbone(path, **{**case.options, "positions": other})
    deviations = [deviation(backbone, teacher, size) for size in case.sizes]
    if "image_size" not in case.options:
        assert deviations.pop(0) < TOLERANCE, "resized at the size of training"
    assert max(deviations) > 100 * TOLERANCE


def test_every_row_has_a_case():
    rows = {row.name for row in (*PROJECTS, *NAMINGS)}
    assert {case.row for case in CASES} == rows


def test_the_page_lists_the_rows_of_the_table():
    page = Path(__file__).parents[3] / "docs/checkpoints.md"
    written = page.read_text(encoding="utf-8").partition("<!-- table")[2].partition("<!-- end")[0]
    lines = [line.split(" | ") for line in written.splitlines() if line.startswith("| ")][2:]
    rows = {row.name: row.source.replace("github.com/", "") for row in (*PROJECTS, *NAMINGS)}
    assert {line[0].removeprefix("| "): line[1] for line in lines} == rows
