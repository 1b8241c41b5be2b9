import json
import re
from pathlib import Path
from typing import Any

import pytest

from cribo.data import SEGMENTATION_SETS
from cribo.evaluation import published
from cribo.evaluation.published import PublishedRow, architecture_name, published_rows

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "cribo-iclr2024.tex"
ROWS = {
    "table:hummingbird": 16,
    "table:linear_segmentation_1token": 12,
    "table:segmenter_segmentation": 11,
    "table:yolos": 4,
    "table:linear_segmentation_4tokens": 11,
}
# One table of three evaluations; its row of dense retrieval with all losses is already in Table 1.
ABLATION, ABLATION_ROWS = "tab:ablation_loss", {"dense-nn": 2, "detection": 3, "image-nn": 3}
SWEEP, SWEEP_ROWS = "tab:ablation_hp", 25
OTHERS = {
    "DIP, ICCV 2025, arXiv:2506.18463, Table 1": 6,
    "Franca, CVPR 2026, arXiv:2507.14137v4, Table 3": 10,
    "open-hummingbird-eval 2.0.0, README": 6,
}


FILE: dict[str, Any] = json.loads(Path(published.__file__).with_suffix(".json").read_text(encoding="utf-8"))
TABLES: list[dict[str, Any]] = FILE["tables"]


def table_rows(label: str, evaluation: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a table of CrIBo's paper, which has several entries if its rows have several variants."""
    return [
        row
        for table in TABLES
        if table.get("label") == label and evaluation in (None, table["evaluation"])
        for row in table["rows"]
    ]


def published_row(data: str, **wanted: Any) -> PublishedRow:
    """Return the first row with these attributes; rows with several combinations of settings are equal otherwise."""
    return next(
        row
        for row in published_rows()
        if row.data == data and all(getattr(row, name) == value for name, value in wanted.items())
    )


def test_all_tables_are_complete() -> None:
    rows: dict[tuple[str, str], int] = {}
    for table in TABLES:
        key = table.get("label") or table["source"], table["evaluation"]
        rows[key] = (0 if key[0] in OTHERS else rows.get(key, 0)) + len(table["rows"])
        assert {column["data"] for column in table["columns"]} == set(table["data"])
        assert all(len(row["values"]) == len(table["columns"]) for row in table["rows"])
        assert table["comparable"]
    evaluations = {table["label"]: table["evaluation"] for table in TABLES if "label" in table}
    whole = {(label, evaluations[label]): count for label, count in (ROWS | {SWEEP: SWEEP_ROWS}).items()}
    whole |= {(ABLATION, evaluation): count for evaluation, count in ABLATION_ROWS.items()}
    assert rows == whole | {(source, "dense-nn"): count for source, count in OTHERS.items()}


def test_data_sets_can_be_opened() -> None:
    for row in published_rows():
        if row.evaluation == "dense-nn":
            memory, queries, *images = (
                row.conditions[f"data.{name}"] for name in ("memory", "queries", "memory_images", "query_images")
            )
            sizes = SEGMENTATION_SETS[row.data].sizes
            assert images == [sizes[memory], sizes[queries]]


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
def test_values_of_dense_retrieval(
    method: str, backbone: str, pretraining: str, data: str, figures: dict[int, float]
) -> None:
    source = "CrIBo, ICLR 2024, arXiv:2310.07855, Table 1"
    row = published_row(data, source=source, method=method, backbone=backbone, pretraining=pretraining)
    assert {at: metrics["miou"] for at, metrics in row.points.items()} == pytest.approx(figures)
    borrowed = method in ("LOCA", "Hummingbird")
    assert row.variant == ("hummingbird" if borrowed else "cribo")
    assert row.taken_from == ("Balazevic et al. 2023" if borrowed else None)


def test_values_of_other_evaluations() -> None:
    detection = published_row("coco", evaluation="detection", method="CrIBo", pretraining="IN1K")
    assert detection.points == {None: pytest.approx({"ap": 0.357, "ap50": 0.556, "ap75": 0.374})}
    assert detection.variant is None
    linear = published_row("voc", evaluation="linear", backbone="ViT-S/8")
    assert linear.points == {None: pytest.approx({"miou": 0.639})}


@pytest.mark.skipif(not PAPER.is_file(), reason="needs the paper in ../shared/paper")
@pytest.mark.parametrize("label", ROWS)
def test_tables_equal_the_paper(label: str) -> None:
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
            row["method"] + ("†" if row.get("reproduced") else "*" if row.get("taken_from") else ""),
            row["backbone"],
            *(row[name] for name in order),
            *("-" if value is None else str(value) for value in row["values"]),
        ]
        for row in table_rows(label)
    ]
    assert sorted(known) == sorted(printed)  # the file has an entry for each variant


@pytest.mark.skipif(not PAPER.is_file(), reason="needs the paper in ../shared/paper")
def test_table_numbers_equal_the_paper() -> None:
    """LaTeX counts captions of tables in the order of the text."""
    environments = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", PAPER.read_text(encoding="utf-8"), re.DOTALL)
    labels = [found[1] for text in environments if (found := re.search(r"\\label\{([^}]*)\}", text))]
    assert len(labels) == len(environments)
    assert FILE["source"] == "CrIBo, ICLR 2024, arXiv:2310.07855"
    for table in TABLES:
        assert "source" in table or table["number"] == labels.index(table["label"]) + 1


@pytest.mark.skipif(not PAPER.is_file(), reason="needs the paper in ../shared/paper")
def test_the_hyperparameter_sweep_equals_the_paper() -> None:
    text = PAPER.read_text(encoding="utf-8")
    place = text.index(rf"\label{{{SWEEP}}}")
    lines = text[text.rindex(r"\begin{tabular}", 0, place) : place].splitlines()
    head = next(line for line in lines if line.startswith("Dataset"))
    columns = re.findall(r"\d+\.\d|\d+k|\d+", head.split("&&", 1)[1])
    names = [f"{name} = {value}" for name, value in zip(["λ_pos"] * 6 + ["S"] * 3 + ["K"] * 5, columns, strict=True)]
    printed = {}
    for line in lines:
        if found := re.search(r"(Pascal VOC|ADE20K) & \\(xk|ck) (.*)", line):
            values = re.findall(r"\d+\.\d|-", found[3])
            title = "CrIBo" if found[2] == "ck" else "CrIBo, no cross-image loss"
            for name, value in zip(names, values, strict=True):
                if value != "-":
                    printed.setdefault(f"{title}, {name}", {})[found[1]] = float(value)
    known = {
        row["method"]: dict(zip(("Pascal VOC", "ADE20K"), row["values"], strict=True)) for row in table_rows(SWEEP)
    }
    assert known == printed


@pytest.mark.skipif(not PAPER.is_file(), reason="needs the paper in ../shared/paper")
def test_the_ablation_of_the_losses_equals_the_paper() -> None:
    text = PAPER.read_text(encoding="utf-8")
    place = text.index(rf"\label{{{ABLATION}}}")
    lines = text[text.rindex(r"\begin{tabular}", 0, place) : place].splitlines()
    printed = [
        (line.count(r"\ck "), [float(value) for value in re.findall(r"\d+\.\d+", line)])
        for line in lines
        if r"\ck &" in line
    ]
    names = {1: "CrIBo, global loss only", 2: "CrIBo, no cross-image loss", 3: "CrIBo"}
    # From the caption.
    known = {
        evaluation: {
            row["method"]: row["values"]
            for row in table_rows(ABLATION, evaluation)
            if (row["backbone"], row["pretraining"], row["epochs"]) == ("ViT-S/16", "COCO", "300")
        }
        for evaluation in ABLATION_ROWS
    }
    assert len(printed) == 3
    for losses, values in printed:
        name = names[losses]
        assert (known["detection"][name], known["image-nn"][name]) == (values[2:5], values[5:])
        if losses < 3:
            assert known["dense-nn"][name] == values[:2]
    rows = table_rows("table:hummingbird")
    (all_losses,) = (row["values"] for row in rows if (row["method"], row["pretraining"]) == ("CrIBo", "COCO"))
    assert [all_losses[-1], all_losses[3]] == printed[-1][1][:2]


def _cells(line: str, names: dict[str, str]) -> list[str]:
    """Return the text of the cells of a LaTeX row without empty spacing cells."""
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
        ("vit_giant_patch14_dinov2", 1536, 14, {}, "ViT-G/14"),
        ("vit_small_patch14_reg4_dinov2", 384, 14, {}, "ViT-S/14"),
        ("vit_small_patch16_18x2_224", 384, 16, {}, None),
        ("vit_small_patch16_224", 384, 16, {"depth": 6}, None),
        ("vit_small_patch16_224", 192, 16, {"embed_dim": 192}, None),
        ("vit_small_r26_s32_224", 384, 32, {}, None),
        ("resnet50d", 2048, 32, {}, None),
        ("mean-colour", 3, 16, {}, None),
    ],
)
def test_architectures_are_named_as_in_papers(
    name: str, dim: int, patch_size: int, args: dict[str, int], expected: str | None
) -> None:
    backbone = {"architecture": name, "embed_dim": dim, "patch_size": patch_size, "args": args}
    assert architecture_name(backbone) == expected
