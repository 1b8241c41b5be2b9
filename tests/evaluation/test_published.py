import re
from pathlib import Path

import pytest

from cribo.data import SEGMENTATION_SETS
from cribo.evaluation.published import PublishedTable, architecture_name, published_tables

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "cribo-iclr2024.tex"
ROWS = {
    "table:hummingbird": 16,
    "table:linear_segmentation_1token": 12,
    "table:segmenter_segmentation": 11,
    "table:yolos": 4,
    "table:linear_segmentation_4tokens": 11,
}


def table_of(label: str) -> PublishedTable:
    (table,) = (table for table in published_tables() if table.label == label)
    return table


def test_all_tables_are_there_and_whole() -> None:
    assert {table.label: len(table.rows) for table in published_tables()} == ROWS
    for table in published_tables():
        assert {column["data"] for column in table.columns} == set(table.data)
        for row in table.rows:
            assert len(row.values) == len(table.columns)
            assert row.protocol in table.protocols


def test_data_sets_are_those_that_can_be_opened() -> None:
    for table in published_tables():
        if table.evaluation == "dense-nn":
            for name, wanted in table.data.items():
                sizes = SEGMENTATION_SETS[name].sizes
                assert (wanted["memory_images"], wanted["query_images"]) == (
                    sizes[wanted["memory"]],
                    sizes[wanted["queries"]],
                )


@pytest.mark.parametrize(
    ("method", "backbone", "pretraining", "data", "figures"),
    [
        ("CrIBo", "ViT-S/16", "COCO", "voc", {128: 0.391, 64: 0.440, 8: 0.528, 1: 0.581}),
        ("CrIBo", "ViT-S/16", "IN1K", "ade20k", {128: 0.137, 64: 0.165, 8: 0.232, 1: 0.283}),
        ("CrIBo", "ViT-B/16", "IN1K", "voc", {128: 0.505, 64: 0.603, 8: 0.708, 1: 0.749}),
        ("SlotCon", "ResNet-50", "COCO", "voc", {128: 0.373, 64: 0.428, 8: 0.529, 1: 0.572}),
        ("TimeT", "ViT-S/16", "IN1K+YTVOS", "ade20k", {128: 0.117, 64: 0.136, 8: 0.197, 1: 0.246}),
        ("LOCA", "ViT-B/16", "IN1K", "ade20k", {1: 0.185}),
        ("Hummingbird", "ViT-B/16", "IN1K", "voc", {128: 0.505, 64: 0.572, 1: 0.705}),
    ],
)
def test_figures_of_dense_retrieval(
    method: str, backbone: str, pretraining: str, data: str, figures: dict[int, float]
) -> None:
    table = table_of("table:hummingbird")
    assert table.source == "CrIBo, ICLR 2024, arXiv:2310.07855, Table 1"
    (row,) = (r for r in table.rows if (r.method, r.backbone, r.pretraining) == (method, backbone, pretraining))
    found = {at: metrics["miou"] for at, metrics in table.figures(row, data).points.items()}
    assert found == pytest.approx(figures)
    borrowed = method in ("LOCA", "Hummingbird")
    assert row.protocol == ("hummingbird" if borrowed else "paper")
    assert row.taken_from == ("Balazevic et al. 2023" if borrowed else None)


def test_figures_of_other_evaluations() -> None:
    detection = table_of("table:yolos")
    points = detection.figures(detection.rows[-1], "coco").points
    assert points == {None: pytest.approx({"ap": 0.357, "ap50": 0.556, "ap75": 0.374})}
    linear = table_of("table:linear_segmentation_1token")
    (small,) = (row for row in linear.rows if row.backbone == "ViT-S/8")
    assert linear.figures(small, "voc").points == {None: pytest.approx({"miou": 0.639})}


@pytest.mark.skipif(not PAPER.is_file(), reason="needs the paper in ../shared/paper")
@pytest.mark.parametrize("label", ROWS)
def test_tables_say_what_the_paper_says(label: str) -> None:
    text = PAPER.read_text(encoding="utf-8")
    place = text.index(rf"\label{{{label}}}")
    body = text[text.rindex(r"\begin{tabular}", 0, place) : place]
    names = dict(re.findall(r"\\newcommand\{\\(\w+)\}\{\\text\{([^}]*)\}\}", text))
    printed = [cells for line in body.splitlines() if (cells := _cells(line, names)) and cells[1][:3] in ("ViT", "Res")]
    order = (
        ("parameters", "epochs", "pretraining")
        if label.endswith("4tokens")
        else ("parameters", "pretraining", "epochs")
    )
    known = [
        [
            row.method + ("†" if row.reproduced else "*" if row.taken_from else ""),
            row.backbone,
            *(getattr(row, name) for name in order),
            *("-" if value is None else str(value) for value in row.values),
        ]
        for row in table_of(label).rows
    ]
    assert known == printed


def _cells(line: str, names: dict[str, str]) -> list[str]:
    """The cells of a line of LaTeX as one reads them; empty ones, which only make room, are left out."""
    line = re.sub(r"\\rowcolor\{\w+\}|\\cite\w*\{\w+\}", "", line).replace(r"^{\dagger}", "†").replace(r"^{\star}", "*")
    line = re.sub(r"\\textbf\{([^}]*)\}", r"\1", line).strip().removesuffix(r"\\")
    line = re.sub(r"\\(\w+)", lambda found: names.get(found[1], found[0]), line).replace("$", "")
    cells = [cell.strip() for cell in line.split("&")]
    return [cell for cell in cells if cell] if len(cells) > 5 else []


# ---------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    ("name", "dim", "patch_size", "args", "expected"),
    [
        ("vit_small_patch16_224.dino", 384, 16, {}, "ViT-S/16"),
        ("vit_base_patch16_224", 768, 16, {"depth": 12}, "ViT-B/16"),
        ("vit_small_patch16_224", 384, 8, {"patch_size": 8}, "ViT-S/8"),
        ("resnet50.a1_in1k", 2048, 32, {}, "ResNet-50"),
        ("resnet50", 2048, 16, {"output_stride": 16}, "ResNet-50"),
        ("vit_small_patch16_18x2_224", 384, 16, {}, None),
        ("vit_small_patch16_224", 384, 16, {"depth": 6}, None),
        ("vit_small_patch16_224", 192, 16, {"embed_dim": 192}, None),
        ("vit_small_r26_s32_224", 384, 32, {}, None),
        ("resnet50d", 2048, 32, {}, None),
        ("mean-colour", 3, 16, {}, None),
    ],
)
def test_architectures_have_the_names_of_papers(
    name: str, dim: int, patch_size: int, args: dict[str, int], expected: str | None
) -> None:
    backbone = {"architecture": name, "embed_dim": dim, "patch_size": patch_size, "args": args}
    assert architecture_name(backbone) == expected
