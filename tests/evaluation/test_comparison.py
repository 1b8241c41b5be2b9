import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from cribo.base.errors import FolderError, ResultError
from cribo.data import SEGMENTATION_SETS
from cribo.evaluation import DenseNN
from cribo.evaluation.comparison import COMPARISON, Comparison, compare
from cribo.evaluation.protocol import find_protocol
from cribo.evaluation.published import published_beside
from cribo.evaluation.results import NONE, EvaluationResult
from cribo.evaluation.segmentation.linear import Linear
from cribo.features import BackboneSource
from cribo.models import build_backbone

SETTINGS = {
    "variant": "cribo",
    "ratios": [1, 8],
    "draws": 5,
    "seed": 0,
    "neighbours": 50,
    "vote": "majority",
    "patch_labels": "hard",
    "unlabelled": "drop",
    "score": "patch",
    "size": None,
    "interpolation": "bicubic",
    "augmentations": 0,
    "memory_patches": 0,
    "search": "exact",
    "precision": "float32",
    "layers": 1,
}
HUMMINGBIRD = {
    "variant": "hummingbird",
    "neighbours": 30,
    "vote": "attention",
    "temperature": 0.02,
    "patch_labels": "soft",
    "score": "resized",
    "size": [512, 512],
    "augmentations": 1,
}
VOC = {
    "name": "voc",
    "root": "/sets/voc",
    "memory": "trainaug",
    "queries": "val",
    "partial": False,
    "limit": None,
    "memory_images": 10582,
    "query_images": 1449,
}
VIT_S = {"name": "mine", "architecture": "vit_small_patch16_224", "embed_dim": 384, "patch_size": 16, "args": {}}
VIT_B = {**VIT_S, "architecture": "vit_base_patch16_224", "embed_dim": 768}
VIT_S14, VIT_B14 = ({**vit, "patch_size": 14} for vit in (VIT_S, VIT_B))


def a_result(
    name: str = "mine",
    scores: dict[int, float] | None = None,
    *,
    settings: dict[str, Any] | None = None,
    backbone: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    per_class: dict[str, float] | None = None,
    **changes: Any,
) -> EvaluationResult:
    about_data = {**VOC, **(data or {})}
    classes = list(SEGMENTATION_SETS[about_data["name"]].classes)
    by_class = {**dict.fromkeys(classes, 0.5), **(per_class or {})}
    values: dict[str, Any] = {
        "evaluation": "dense-nn",
        "settings": {**SETTINGS, **(settings or {})},
        "backbone": {**(backbone or VIT_S), "name": name},
        "data": about_data,
        "classes": classes,
        "metrics": ["miou"],
        "varies": "ratio",
        "results": [
            {"ratio": ratio, "miou": score, "miou_std": 0.01 if ratio > 1 else None, "per_class": by_class}
            for ratio, score in (scores or {1: 0.5, 8: 0.4}).items()
        ],
        "seconds": 1.0,
        "versions": {},
        "command": "",
        "evaluation_title": "Dense nearest-neighbour retrieval",
    }
    return EvaluationResult(**{**values, **changes})


def printed(comparison: Comparison, width: int = 200) -> str:
    console = Console(width=width, soft_wrap=True)
    with console.capture() as capture:
        for table in comparison.tables():
            console.print(table)
    return capture.get()


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


# ----------------------------------------------------- published values


def test_published_values_of_the_same_setting_are_shown() -> None:
    figures, obstacles = published_beside(a_result())
    assert not obstacles
    coco, imagenet = ("DINO", "MAE", "CrOC", "CrIBo"), ("DINO", "CrOC", "TimeT", "CrIBo")
    assert [f.method for f in figures[:8]] == [*coco, *imagenet]
    assert [f.method for f in figures[8:]] == ["CrIBo, global loss only", "CrIBo, no cross-image loss"]
    assert [f.pretraining for f in figures[4:8]] == ["IN1K", "IN1K", "IN1K+YTVOS", "IN1K"]
    assert {f.pretraining for f in (*figures[:4], *figures[8:])} == {"COCO"}
    assert {f.backbone for f in figures} == {"ViT-S/16"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"neighbours": 30}}, "neighbours is 30, published with 50"),
        ({"settings": {"patch_labels": "soft"}}, "patch labels is soft, published with hard"),
        ({"settings": {"size": [512, 512]}}, "size is 512, 512, published with none"),
        ({"settings": {"augmentations": 1}}, "augmentations is 1, published with 0"),
        ({"settings": {"memory_patches": 10_240_000}}, "memory patches is 10240000, published with 0"),
        ({"settings": {"search": "faiss"}}, "search is faiss, published with exact"),
        ({"settings": {"layers": 4}}, "layers is 4, published with 1"),
        ({"settings": {"variant": "mine"}}, "variant is mine, published with cribo, hummingbird, dip, franca"),
        ({"settings": {"variant": "hummingbird"}}, "neighbours is 50, published with 30"),
        ({"data": {"memory": "train"}}, "memory is train, published with trainaug"),
        ({"data": {"queries": "train"}}, "queries is train, published with val"),
        ({"data": {"partial": True}}, "partial is yes, published with no"),
        ({"data": {"limit": 50}}, "limit is 50, published with none"),
        ({"data": {"query_images": 1448}}, "query images is 1448, published with 1449"),
        ({"backbone": {**VIT_S, "patch_size": 8}}, "none are of ViT-S/8"),
        ({"backbone": {"architecture": "mean-colour"}}, "none are of mean-colour"),
        ({"backbone": {"architecture": None}}, "none are of such a backbone"),
    ],
)
def test_published_values_of_other_settings_are_not_shown(changes: dict[str, Any], reason: str) -> None:
    result = a_result(**changes)
    figures, obstacles = published_beside(result)
    assert figures == []
    assert reason in obstacles
    text = printed(compare([result]))
    assert "(published)" not in text
    assert f"No published figures for mine: {obstacles[0]}" in text


def test_unknown_settings_hide_published_values() -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "size"}
    result = EvaluationResult(**{**vars(a_result()), "settings": settings})
    assert published_beside(result) == ([], ["size is not known, published with none"])


def test_settings_not_stated_in_the_paper_are_listed() -> None:
    other = {"vote": "similarity", "score": "pixel"}
    text = printed(compare([a_result("one"), a_result("two", settings=other), a_result("three")]))
    assert "CrIBo (published)" in text
    assert (
        "Not specified in the paper: vote majority, unlabelled drop, score patch, "
        "interpolation bicubic (one and three)." in text
    )
    assert (
        "Not specified in the paper: vote similarity, unlabelled drop, score pixel, interpolation bicubic (two)."
        in text
    )


@pytest.mark.parametrize("changes", [{"data": {"name": "camvid"}}, {"evaluation": "image-nn"}])
def test_unpublished_evaluations_need_no_reason(changes: dict[str, Any]) -> None:
    result = a_result(**changes)
    assert published_beside(result) == ([], [])
    assert "ublished" not in printed(compare([result]))


def test_the_hummingbird_variant_has_separate_rows() -> None:
    hummingbird = a_result(settings=HUMMINGBIRD, backbone=VIT_B)
    assert [f.method for f in published_beside(hummingbird)[0]] == ["LOCA", "Hummingbird"]
    paper = published_beside(a_result(backbone=VIT_B))[0]
    assert [f.method for f in paper] == ["DINO", "MAE", "CrIBo"]


@pytest.mark.parametrize(
    ("variant", "backbone", "more", "methods", "points"),
    [
        ("hummingbird", VIT_S14, {}, ["DINOv2"], {1: {"miou": 0.770}}),
        ("hummingbird", VIT_S, {}, ["DINO"], {1: {"miou": 0.466}}),
        ("hummingbird", VIT_S14, {"memory_patches": 102_400}, ["DINOv2"], {1: {"miou": 0.702}}),
        ("dip", VIT_S14, {}, ["DINOv2R", "NeCo", "DIP"], {1: {"miou": 0.810}, 8: {"miou": 0.777}}),
        ("franca", VIT_B14, {}, ["DINOv2", "DINOv2", "Franca"], {1: {"miou": 0.767}}),
        ("franca", VIT_S14, {}, [], {}),
        ("hummingbird-strict", VIT_S14, {}, [], {}),
        ("dip", VIT_S14, {"temperature": 0.02}, [], {}),
        ("hummingbird", VIT_S14, {"mean": "present"}, [], {}),
    ],
)
def test_other_tables_are_shown_only_with_their_variant(
    variant: Any,
    backbone: dict[str, Any],
    more: dict[str, Any],
    methods: list[str],
    points: dict[int, dict[str, float]],
) -> None:
    decided = DenseNN(variant=variant, **more).for_data(backbone["patch_size"], SEGMENTATION_SETS["voc"].classes)
    result = a_result(settings={**decided.effective(), "layers": 1}, backbone=backbone)
    figures, obstacles = published_beside(result)
    assert [f.method for f in figures] == methods
    assert bool(obstacles) == (not methods)
    if points:
        assert {at: figures[-1].points[at] for at in points} == {at: pytest.approx(row) for at, row in points.items()}
        text = printed(compare([result]))
        assert f"{methods[-1]} (published)" in text
        assert figures[-1].source.partition(", Table")[0] in text


def test_hyperparameter_sweeps_are_shown_on_request() -> None:
    """The values are from Table 4; its best row is that of Table 1."""
    shown, asked = (published_beside(a_result(), sweeps=sweeps)[0] for sweeps in (False, True))
    sweep = [f for f in asked if f not in shown]
    assert len(sweep) == 25
    assert {f.source for f in sweep} == {"CrIBo, ICLR 2024, arXiv:2310.07855, Table 4"}
    (few,) = (f for f in sweep if f.method == "CrIBo, K = 4")
    assert few.points == {1: pytest.approx({"miou": 0.499})}


def test_headings_contain_the_variant() -> None:
    cribo, hummingbird = a_result("one"), a_result("two", settings=HUMMINGBIRD)
    assert "Dense nearest-neighbour retrieval (cribo) on Pascal VOC" in printed(compare([cribo]))
    both = printed(compare([cribo, hummingbird]))
    assert "Dense nearest-neighbour retrieval (cribo, hummingbird) on Pascal VOC" in both
    assert "NOT comparable: the results differ in variant" in both


def test_only_ratios_of_the_result_are_compared() -> None:
    comparison = compare([a_result(settings=HUMMINGBIRD, backbone=VIT_B, scores={64: 0.5})])
    (figures,) = comparison.groups[0].published
    assert figures.method == "Hummingbird"  # LOCA is published at 1/1 alone
    assert rows_of(printed(comparison))[1] == ["Hummingbird* (published)", "ViT-B/16", "IN1K (300)", "57.2"]


# ------------------------------------------- published values of other evaluations

SEGMENTATION = {
    "variant": "paper",
    "schedule": "paper",
    "iterations": 80000,
    "batch_size": 16,
    "crop": 512,
    "optimiser": "adam",
    "weight_decay": 0.0,
    "seed": 0,
}
LINEAR = {
    **SEGMENTATION,
    "learning_rates": [8e-4, 3e-4, 1e-4, 8e-5],
    "inference": "whole",
    "drop_path": 0.0,
    "layers": 1,
}
RELEASED = {"variant": "released", "inference": "slide", "weight_decay": 0.01, "drop_path": 0.1}
SEGMENTER = {
    **SEGMENTATION,
    "learning_rates": [8e-5, 3e-5, 1e-5, 8e-6],
    "inference": "slide",
    "drop_path": 0.1,
    "decoder": {"layers": 2, "width": 384, "heads": 6},
}
DETECTION = {
    "protocol": "paper",
    "epochs": 150,
    "batch_size": 32,
    "learning_rate": 2.5e-5,
    "size": 800,
    "tokens": 100,
    "final_learning_rate": 1e-7,
    "weight_decay": 1e-4,
    "clip": 0.1,
    "seed": 0,
    "precision": "32-true",
}
IMAGE_NN = {"neighbours": [10, 20], "temperature": 0.07, "resize": 256, "crop": 224, "leave_one_out": False}


def trained(
    evaluation: str = "linear",
    name: str = "mine",
    *,
    settings: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    backbone: dict[str, Any] | None = None,
) -> EvaluationResult:
    """Return a result of the paper's setting with changes."""
    used, about, metrics, varies, rows = {
        "linear": (LINEAR, "voc", ["miou"], "learning_rate", {8e-4: [0.5], 3e-4: [0.6], 1e-4: [0.4], 8e-5: [0.3]}),
        "segmenter": (SEGMENTER, "voc", ["miou"], "learning_rate", {8e-5: [0.7], 3e-5: [0.6]}),
        "detection": (DETECTION, "coco", ["ap", "ap50", "ap75", "ap_small"], "learning_rate", {2.5e-5: [0.3] * 4}),
        "image-nn": (IMAGE_NN, "imagenet", ["top1", "top5"], "neighbours", {10: [0.5, 0.6], 20: [0.4, 0.7]}),
    }[evaluation]
    images = {"voc": (10582, 1449), "coco": (118287, 5000), "imagenet": (1281167, 50000)}[about]
    train = "trainaug" if about == "voc" else "train"
    return EvaluationResult(
        evaluation=evaluation,
        settings={**used, **(settings or {})},
        backbone={**(backbone or VIT_S), "name": name},
        data={
            "name": about,
            "train": train,
            "val": "val",
            "train_images": images[0],
            "val_images": images[1],
            "partial": False,
            "limit": None,
            **(data or {}),
        },
        classes=["a", "b"],
        metrics=metrics,
        varies=varies,
        results=[{varies: value, **dict(zip(metrics, row, strict=True))} for value, row in rows.items()],
        seconds=1.0,
        versions={},
        command="",
        evaluation_title=find_protocol(evaluation).title,
        class_metric=find_protocol(evaluation).class_metric,
    )


@pytest.mark.parametrize(
    ("evaluation", "more", "source", "rows", "figures"),
    [
        ("linear", {}, "Table 2", 8, {None: {"miou": 0.737}}),
        ("linear", {"settings": {"layers": 4}}, "Table 7", 8, {None: {"miou": 0.752}}),
        ("linear", {"settings": {"learning_rates": [8e-5, 1e-4, 3e-4, 8e-4]}}, "Table 2", 8, {None: {"miou": 0.737}}),
        ("linear", {"backbone": {**VIT_S, "patch_size": 8}}, "Table 2", 1, {None: {"miou": 0.639}}),
        ("segmenter", {}, "Table 3", 8, {None: {"miou": 0.823}}),
        ("segmenter", {"backbone": VIT_B}, "Table 3", 3, {None: {"miou": 0.834}}),
        ("detection", {}, "Table 5", 7, {None: {"ap": 0.302, "ap50": 0.484, "ap75": 0.310}}),
        ("image-nn", {}, "Table 5", 3, {20: {"top1": 0.382}}),
    ],
)
def test_results_of_the_paper_setting_show_its_rows(
    evaluation: str, more: dict[str, Any], source: str, rows: int, figures: dict[Any, dict[str, float]]
) -> None:
    found, obstacles = published_beside(trained(evaluation, **more))
    assert not obstacles
    assert len(found) == rows
    last = [published for published in found if published.method == "CrIBo"][-1]
    assert evaluation == "detection" or last.source.endswith(source)
    by_source = {published.source: published for published in found if published.method == "CrIBo"}
    (points,) = (published.points for name, published in by_source.items() if name.endswith(source))
    assert points == {value: pytest.approx(row) for value, row in figures.items()}


SHORT = {"schedule": "short", "iterations": 400, "batch_size": 8, "crop": 256}
LONG = {"name": "ade20k", "train": "train", "train_images": 20210, "val_images": 2000}


@pytest.mark.parametrize(
    ("evaluation", "more", "reasons"),
    [
        ("linear", {"settings": SHORT}, ["crop is 256", "batch size is 8", "iterations is 400"]),
        ("linear", {"settings": {"layers": 2}}, ["layers is 2, published with 1 or 4"]),
        (
            "linear",
            {"settings": {"learning_rates": [3e-4]}},
            ["learning rates is 0.0003, published with 0.0008"],
        ),
        ("linear", {"data": LONG}, ["iterations is 80000, published with 160000"]),
        ("linear", {"data": {"limit": 8, "train_images": 8}}, ["train images is 8, published", "limit is 8"]),
        ("segmenter", {"settings": {"decoder": {"layers": 1}}}, ["decoder layers is 1, published with 2"]),
        (
            "detection",
            {"settings": {"protocol": "short", "epochs": 40, "batch_size": 8, "learning_rate": 2e-4, "size": 256}},
            ["epochs is 40", "batch size is 8", "learning rate is 0.0002", "size is 256"],
        ),
        ("image-nn", {"settings": {"temperature": 0.1}}, ["temperature is 0.1, published with 0.07"]),
        ("image-nn", {"data": {"partial": True, "train_images": 1000}}, ["train images is 1000", "partial is yes"]),
    ],
)
def test_results_of_another_setting_state_the_reason(evaluation: str, more: dict[str, Any], reasons: list[str]) -> None:
    found, obstacles = published_beside(trained(evaluation, **more))
    assert found == []
    assert len(obstacles) == len(reasons)
    for obstacle, reason in zip(obstacles, reasons, strict=True):
        assert obstacle.startswith(reason)


@pytest.mark.parametrize("name", ["voc", "ade20k", "coco-stuff", "pascal-context-60"])
def test_defaults_of_linear_segmentation_are_the_paper_setting(name: str) -> None:
    args = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=32)
    run: Any = SimpleNamespace(source=BackboneSource("mine"), data=SimpleNamespace(about={"name": name}))
    used = Linear().for_data(name, backbone).used(run)
    sizes = SEGMENTATION_SETS[name].sizes
    train = "trainaug" if name == "voc" else "train"
    data = {"name": name, "train": train, "train_images": sizes[train], "val_images": sizes["val"]}
    found, obstacles = published_beside(trained("linear", settings=used, data=data))
    assert not obstacles
    assert len(found) == 8


def test_unpublished_sets_need_no_reason() -> None:
    assert published_beside(trained("linear", data={"name": "camvid"})) == ([], [])
    assert published_beside(trained("image-nn", data={"name": "folder"})) == ([], [])


@pytest.mark.parametrize("evaluation", ["linear", "segmenter"])
def test_differences_from_the_released_code_are_listed(evaluation: str) -> None:
    note = "setting differs from the released code"
    assert note in printed(compare([trained(evaluation)]))
    text = printed(compare([trained(evaluation, settings=RELEASED)]))
    assert "CrIBo (published)" in text
    assert note not in text
    changed = trained(evaluation, settings={**RELEASED, "weight_decay": 0.0})
    assert published_beside(changed) == ([], ["weight decay is 0, published with 0.01"])


def test_the_best_learning_rate_is_shown_and_named() -> None:
    comparison = compare([trained("linear", "one"), trained("linear", "two", settings={"inference": "slide"})])
    text = printed(comparison)
    rows = {row[0]: row for row in rows_of(text)}
    assert rows["one"][-1] == rows["two"][-1] == "60.0"
    assert rows["CrIBo (published)"][1:] == ["ViT-S/16", "IN1K (800)", "73.7"]
    assert "mIoU [%], best" in text
    assert "Best learning rate: one 0.0003, two 0.0003." in text
    assert "Not specified in the paper: inference whole, weight decay 0, drop path 0 (one)" in text
    assert "inference slide, weight decay 0, drop path 0 (two)" in text
    assert "These figures are NOT comparable: the results differ in inference." in text


def test_names_are_readable_in_a_narrow_terminal() -> None:
    rows = rows_of(printed(compare([trained("detection", "somebody's backbone"), trained("detection", "mine")]), 80))
    assert rows[0][0] == "somebody's"
    assert rows[0][3:] == ["30.0"] * 4
    assert [row[0] for row in rows].count("mine") == 1


def test_all_metrics_of_a_detector_have_columns() -> None:
    text = printed(compare([trained("detection")]))
    assert "AP [%]" in text
    assert "best" not in text.lower()
    rows = {(row[0], row[2]): row[3:] for row in rows_of(text)}
    assert rows["mine", NONE] == ["30.0"] * 4
    assert rows["CrIBo (published)", "COCO (300)"] == ["30.2", "48.4", "31.0", NONE]


def test_image_level_neighbours_have_a_table_for_each_metric() -> None:
    comparison = compare([trained("image-nn", "one"), trained("image-nn", "two")])
    text = printed(comparison)
    top1, top5 = text.split("on ImageNet-1k, top-5")
    rows = {row[0]: row[1:] for row in rows_of(top1)}
    assert rows["one"] == ["ViT-S/16", NONE, "50.0", "40.0"]
    assert rows["CrIBo, global loss only (published)"] == ["ViT-S/16", "COCO (300)", NONE, "34.3"]
    assert rows_of(top5) == [["one", "ViT-S/16", "60.0", "70.0"], ["two", "ViT-S/16", "60.0", "70.0"]]
    assert "Figures by neighbours." in top5
    assert "its figures stand at the k of DINO, 20" in top5
    (axes,) = comparison.figure().axes
    assert len((axes.get_legend() or pytest.fail("no legend")).get_texts()) == 5


# --------------------------------------------------------- results side by side


def test_results_share_a_table_with_published_ones() -> None:
    text = printed(compare([a_result("one", {1: 0.6, 8: 0.5}), a_result("two", {1: 0.4, 64: 0.3})]))
    assert rows_of(text)[:2] == [
        ["one", "ViT-S/16", "-", "-", "50.0 ± 1.0", "60.0"],
        ["two", "ViT-S/16", "-", "30.0 ± 1.0", "-", "40.0"],
    ]
    assert ["CrIBo (published)", "ViT-S/16", "COCO (300)", "44.0", "52.8", "58.1"] in rows_of(text)
    assert ["DINO† (published)", "ViT-S/16", "COCO (300)", "18.4", "25.5", "31.9"] in rows_of(text)
    assert "CrIBo, ICLR 2024, arXiv:2310.07855, Table 1; CrIBo, ICLR 2024, arXiv:2310.07855, Table 5" in text
    assert "NOT comparable" not in text


def test_differing_settings_are_listed_with_a_warning() -> None:
    one = a_result("one")
    two = a_result("two", settings={"vote": "attention", "temperature": 0.02, "seed": 3}, data={"memory": "train"})
    comparison = compare([one, two])
    (group,) = comparison.groups
    assert group.differences == {
        "settings.vote": ["majority", "attention"],
        "settings.temperature": [NONE, 0.02],
        "settings.seed": [0, 3],
        "data.memory": ["trainaug", "train"],
    }
    text = printed(comparison)
    assert "These figures are NOT comparable: the results differ in vote, temperature and data memory." in text
    assert ["vote", "majority", "attention"] in rows_of(text)
    assert ["seed", "0", "3"] in rows_of(text)
    assert "Comparable with one only." in text
    assert "No published figures for two: memory is train, published with trainaug" in text


def test_random_settings_are_listed_without_a_warning() -> None:
    comparison = compare([a_result("one"), a_result("two", settings={"seed": 1, "precision": "float16"})])
    text = printed(comparison)
    assert "NOT comparable" not in text
    assert "The results differ in seed and precision, which affects figures by noise or rounding only." in text


def test_the_location_of_a_known_set_is_ignored() -> None:
    elsewhere = a_result("two", data={"root": "/elsewhere"}, settings={"ratios": [1]})
    assert compare([a_result("one"), elsewhere]).groups[0].differences == {}
    named = a_result("two", data={"root": None, "train_annotations": "/a/train.json", "val_annotations": "/a/val.json"})
    assert compare([a_result("one"), named]).groups[0].differences == {}


def test_folders_with_other_images_are_other_data() -> None:
    def of_folder(name: str, root: str) -> EvaluationResult:
        folder = {**VOC, "name": "folder", "root": root}
        return EvaluationResult(**{**vars(a_result(name)), "data": folder})

    (group,) = compare([of_folder("one", "/a"), of_folder("two", "/b")]).groups
    assert list(group.differences) == ["data.root"]
    assert "NOT comparable" in group.verdict


def test_results_of_different_versions_are_named() -> None:
    old, new = (a_result(version, versions={"cribo": version}) for version in ("0.1.0", "0.2.0"))
    assert "Evaluated with different versions of cribo: 0.1.0 by 0.1.0 and 0.2.0 by 0.2.0" in printed(
        compare([old, new])
    )
    assert "different versions" not in printed(compare([new, a_result("other", versions=new.versions)]))


def test_other_evaluations_and_data_have_separate_tables() -> None:
    results = [
        a_result("one"),
        a_result("two", data={"name": "camvid"}),
        a_result("three", evaluation="linear"),
        a_result("four"),
        a_result("five", classes=["background"]),
    ]
    groups = compare(results).groups
    assert [list(group.results) for group in groups] == [["one", "four"], ["two"], ["three"], ["five"]]
    assert not any(group.differences for group in groups)


def test_the_best_of_several_learning_rates_is_compared() -> None:
    def tried(name: str, scores: dict[float, float]) -> EvaluationResult:
        rows = [{"learning_rate": rate, "miou": score} for rate, score in scores.items()]
        return a_result(name, evaluation="linear", varies="learning_rate", results=rows)

    comparison = compare([tried("one", {8e-4: 0.3, 3e-4: 0.5, 1e-4: 0.4}), tried("two", {1e-4: 0.2})])
    assert [row[-1] for row in rows_of(printed(comparison))[:2]] == ["50.0", "20.0"]
    assert "mIoU [%], best" in printed(comparison)


def test_several_metrics_have_separate_columns() -> None:
    rows = [{"seed": 0, "ap": 0.3, "ap50": 0.5}]
    result = a_result(evaluation="detection", metrics=["ap", "ap50"], varies="seed", results=rows)
    assert rows_of(printed(compare([result])))[0][-2:] == ["30.0", "50.0"]


# --------------------------------------------------------------------- classes


def test_classes_that_differ_most_come_first() -> None:
    rest = list(SEGMENTATION_SETS["voc"].classes[14:])  # that differ a little, seven of them
    one = a_result("one", per_class={"cat": 0.9, "dog": 0.1, "cow": math.nan, "car": 0.0} | dict.fromkeys(rest, 0.45))
    two = a_result("two", per_class={"cat": 0.8, "dog": 0.4, "cow": 0.9, "car": 0.25, "bus": 0.49})
    value, classes = compare([one, two]).groups[0].class_differences()
    assert value == 1
    assert classes[:3] == [("dog", 0.1, 0.4), ("car", 0.0, 0.25), ("cat", 0.9, 0.8)]
    assert [name for name, _, _ in classes[3:]] == rest, "ten in total, without those with smaller or no differences"
    text = printed(compare([one, two]))
    assert "Classes that differ most, IoU [%], memory share 1/1" in text
    assert ["dog", "10.0", "40.0", "+30.0"] in rows_of(text)
    assert ["cat", "90.0", "80.0", "-10.0"] in rows_of(text)


def test_classes_are_compared_where_both_have_them() -> None:
    better = {"cat": 0.75}
    two = a_result("two", {8: 0.3}, per_class=better)
    assert compare([a_result("one"), two]).groups[0].class_differences() == (8, [("cat", 0.5, 0.75)])
    assert compare([a_result("one"), a_result("two")]).groups[0].class_differences() == (1, [])
    assert compare([a_result("one"), a_result("two", {64: 0.3}, per_class=better)]).groups[0].class_differences() == (
        None,
        [],
    )
    assert compare([a_result("one"), two, a_result("three")]).groups[0].class_differences() == (None, [])


# ----------------------------------------------------------------------- names


def test_results_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    a_result("same").write(tmp_path / "first")
    a_result("same", settings={"neighbours": 30}).write(tmp_path / "second")
    a_result("other").write(tmp_path / "third")
    folders = [tmp_path / "first", tmp_path / "second" / "results.json", tmp_path / "third"]
    assert _names(compare(folders)) == ["same (first)", "same (second)", "other"]
    assert _names(compare([a_result("same"), a_result("same"), a_result("other")])) == ["same #1", "same #2", "other"]
    assert _names(compare(folders, names=["a", "b", "c"])) == ["a", "b", "c"]


def _names(comparison: Comparison) -> list[str]:
    return [name for group in comparison.groups for name in group.results]


def test_folders_of_the_same_name_are_distinguished_by_their_paths(tmp_path: Path) -> None:
    folders = [a_result("same").write(tmp_path / parent / "run").parent for parent in ("a", "b")]
    assert _names(compare(folders)) == [f"same ({folder})" for folder in folders]


def test_incomparable_results_are_refused(tmp_path: Path) -> None:
    one, two = (a_result().write(tmp_path / name).parent for name in ("one", "two"))
    again = tmp_path / "other" / ".." / "one"
    for given, names, message in (
        ([], None, "at least one result"),
        ([one, two, again, one], None, "one is given 3 times"),
        ([one, two, two], None, "two is given 2 times"),
        ([one, tmp_path / "nowhere"], None, "nowhere does not exist"),
        ([one, two], ["a", "a"], "names must be distinct, .* got a, a"),
    ):
        with pytest.raises(ResultError, match=message):
            compare(given, names=names)


# ----------------------------------------------------------------------- files


def test_a_comparison_is_written(tmp_path: Path) -> None:
    comparison = compare([a_result("a|b", {1: 1 / 3, 8: 0.4}), a_result("two", settings={"neighbours": 30})])
    written = comparison.write(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["compare.json", "compare.md", "compare.png"]
    assert {path.name for path in written} == {"compare.json", "compare.md", "compare.png"}
    (group,) = json.loads((tmp_path / "new" / COMPARISON).read_text())["groups"]
    assert group["results"][0]["figures"] == [
        {"ratio": 1, "miou": 1 / 3, "miou_std": None},
        {"ratio": 8, "miou": 0.4, "miou_std": 0.01},
    ]
    assert group["comparable"] is False
    assert group["differences"] == [{"setting": "settings.neighbours", "values": [50, 30]}]
    assert [row["method"] for row in group["published"]].count("CrIBo") == 2
    lines = (tmp_path / "new" / "compare.md").read_text().splitlines()
    assert "|  | backbone | pretraining (epochs) | 1/8 | 1/1 |" in lines
    assert r"| a\|b | ViT-S/16 | - | 40.0 ± 1.0 | 33.3 |" in lines
    assert "| neighbours | 50 | 30 |" in lines
    Image.open(tmp_path / "new" / "compare.png").load()


def test_a_comparison_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "compare.md").write_text("mine")
    with pytest.raises(FolderError, match=r"compare\.md already exists: choose another folder"):
        compare([a_result()]).write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["compare.md"]


def test_the_figure_has_a_curve_for_each_result_and_published_row() -> None:
    comparison = compare([a_result("one"), a_result("two", data={"name": "camvid"})])
    voc, camvid = comparison.figure().subfigs
    labels = [text.get_text() for text in (voc.axes[0].get_legend() or pytest.fail("no legend")).get_texts()]
    assert labels[0] == "one"
    assert "CrIBo ViT-S/16, COCO (300) (published)" in labels
    assert len(labels) == 11
    assert "Pascal VOC 2012" in voc.get_suptitle()
    assert "CamVid" in camvid.get_suptitle()


def test_the_figure_warns_of_incomparable_results() -> None:
    comparison = compare([a_result("one"), a_result("two", settings={"neighbours": 30})])
    assert "NOT comparable: the results differ in neighbours" in comparison.figure().subfigs[0].get_suptitle()


def test_narrow_terminals_truncate_nothing() -> None:
    names = ["checkpoint_of_the_teacher_after_300_epochs", "two"]
    console = Console(width=80)
    with console.capture() as capture:
        for table in compare([a_result(name) for name in names]).tables():
            console.print(table)
    assert "…" not in capture.get()
    assert "50.0" in capture.get()
