"""Options that objectives reject: bounds in the signatures of their constructors, and combinations."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.objectives.conftest import batch_of

from cribo.base.bounds import find_bounds
from cribo.base.errors import ConfigError, MissingData
from cribo.models import build_backbone, save_backbone
from cribo.objectives import Setting, Step, make_objective
from cribo.objectives.base import BUILT_IN, objective_class
from cribo.pretraining import PretrainConfig

REQUIRED: dict[str, dict[str, Any]] = {"distill": {"teacher": "resnet10t"}}
"""Arguments without a default."""


def outside() -> list[Any]:
    """Each argument with bounds of each objective, with values just outside."""
    cases = []
    for name in (*BUILT_IN, "tests.objectives.custom_objectives.Bounded"):
        for argument in inspect.signature(objective_class(name)).parameters.values():
            if (bounds := find_bounds(argument.annotation)) is None:
                continue
            for sign, limit in bounds.limits:
                value = {">=": limit - 1, ">": limit, "<=": limit + 1, "<": limit}[sign]
                is_pair = "tuple" in str(argument.annotation)
                cases.append((name, argument.name, [value, value] if is_pair else value))
    return cases


@pytest.mark.parametrize(("name", "argument", "value"), outside())
def test_arguments_out_of_bounds_are_refused(
    name: str, argument: str, value: Any, tiny: Callable[..., PretrainConfig]
) -> None:
    args = {**REQUIRED.get(name, {}), argument: value}
    with pytest.raises(ConfigError, match=rf"^objective\.args\.{argument} must be [<>].*, got "):
        make_objective(name, args, Setting(tiny(), 36, 4))


SUPERVISED = "cribo.objectives.controls.SupervisedCrIBo"
LOCAL = {"local_crops": 2, "local_size": 16}
VIT = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
NO_CLS = {**VIT, "class_token": False, "global_pool": "avg"}
RESNET = {"backbone.name": "resnet18", "backbone.args": {"channels": [8] * 4}}
SHORT_RESNET = {**RESNET, "backbone.args": {"layers": [1, 1, 1, 0], "channels": [8] * 4}, "views.size": 64}
DENSENET = {
    "backbone.name": "densenet121",
    "backbone.args": {"growth_rate": 4, "block_config": (1, 1, 1, 1)},
    "backbone.drop_path": 0.0,
}
BEIT = {"backbone.name": "beit_base_patch16_224", "backbone.args": {"depth": 1, "global_pool": "token"}}
EVA = {"backbone.name": "eva02_tiny_patch14_224", "backbone.args": {"depth": 1}, "views.size": 28}
NO_LOSS = {"losses.image": 0, "losses.cross_view": 0, "losses.cross_image": 0}


@pytest.mark.parametrize(
    ("name", "changes", "args", "option"),
    [
        ("alignment", {}, {"points": 0.0}, "objective.args"),
        ("alignment", {"objects.num_objects": 33}, {"cross_view": 1.0}, "objects.num_objects .* 32, .* got 33"),
        ("alignment", {"objects.bank_images": 7}, {"cross_image": 1.0}, "objects.bank_images .* 8 images, got 7"),
        ("alignment", {"losses.patch_neighbours": 0.5}, {}, "objective.args.patch_neighbours"),
        ("alignment", {"losses.patch_bank": 15}, {"patch_neighbours": 1.0}, "patch_bank .* 16, got 15"),
        ("alignment", {"backbone.train_blocks": 3}, {}, "backbone.train_blocks must be 1 to 2, .* got 3"),
        ("alignment", {**SHORT_RESNET, "backbone.train_blocks": 4}, {}, "train_blocks must be 1 to 3, .* got 4"),
        (
            "alignment",
            {**DENSENET, "backbone.train_blocks": 1},
            {},
            "backbone.train_blocks .* densenet121",
        ),
        ("byol", {"optim.micro_batches": 8}, {}, "batch_size 8 and optim.micro_batches 8"),
        ("contextual", {}, {"memory_images": 7}, "memory_images .* 8 images, got 7"),
        ("cribo", NO_LOSS, {}, "losses.image"),
        ("cribo", {"objects.clustering": "kmeans"}, {}, "objects.position_weight"),
        ("cribo", {"objects.bank_images": 7}, {}, "objects.bank_images .* 8 images, got 7"),
        ("cribo", {"objects.num_objects": 33}, {}, "objects.num_objects .* 32, .* got 33"),
        ("cribo", {"objects.clustering": "kmean"}, {}, "objects.clustering .* did you mean kmeans"),
        ("cribo", {"objects.criterion": "oracle"}, {}, "objects.criterion .* got 'oracle'"),
        ("cribo", {"objects.clustering": "math.pi"}, {}, "objects.clustering math.pi"),
        ("cribo", {"objects.criterion": "no_such_module.f"}, {}, "module 'no_such_module' not found"),
        ("croc", {}, {"k_start": 1}, "k_start must be 2 to 32, .* got 1"),
        ("croc", {}, {"k_start": 33}, "k_start must be 2 to 32, .* got 33"),
        ("croc", {}, {"k_start": 6, "k_max": 7}, "k_max must be 2 to 6, .*k_start.* got 7"),
        ("croc", {}, {"k_start": 6, "k_max": 1}, "k_max must be 2 to 6, .* got 1"),
        ("croc", {"losses.cross_view": 0.0}, {"k_start": 6}, "losses.cross_view"),
        ("croc", RESNET, {"k_start": 6}, r"\[CLS\].*, not resnet18"),
        ("croc", {"backbone.args": NO_CLS}, {"k_start": 6}, r"\[CLS\]"),
        ("dino", {}, {"local_size": 20}, "local_size .* 8, got 20"),
        ("dino", {}, {**LOCAL, "local_area": (0.5, 0.2)}, r"local_area must be ordered \(low, high\)"),
        ("distill", {}, {"teacher": "nothing"}, "objective.args.teacher: .*nothing"),
        ("distill", {}, {"global_token": 0.0, "patches": 0.0}, "objective.args"),
        ("ibot", RESNET, {"local_size": 32}, r"\[CLS\], not resnet18"),
        ("ibot", BEIT, LOCAL, "local_size must be 32 for beit_base_patch16_224, .* got 16"),
        ("ibot", {}, {**LOCAL, "mask_ratio": (0.5, 0.1)}, r"mask_ratio must be ordered \(low, high\)"),
        ("loca", {**RESNET, "views.size": 64}, {"local_size": 32}, "drop patches, not resnet18"),
        ("loca", EVA, {"local_size": 14}, "drop patches, not eva02_tiny_patch14_224"),
        ("loca", {"backbone.args": {**NO_CLS, "patch_size": 32}}, {"local_size": 32}, "views.size .* 64, got 32"),
        ("loca", {}, {**LOCAL, "reference_ratio": 0.03}, "reference_ratio must keep 1 to 16 .* got 0.03"),
        ("loca", {}, {**LOCAL, "query_ratio": 1.2}, "query_ratio must keep 1 to 16 .* got 1.2"),
        ("loca", {}, {"local_size": 4}, "local_size .* 8, got 4"),
        ("mae", {**RESNET, "views.size": 64}, {}, "timm vision transformer"),
        ("mae", {}, {"mask_ratio": 1.0}, "mask_ratio must leave 1 to 15 of 16 .* got 1.0"),
        ("mae", {"backbone.args": {"depth": 1, "embed_dim": 18, "num_heads": 2}}, {}, "multiple of 4 .* got 18"),
        ("mae", {}, {"decoder_dim": 16, "decoder_heads": 3}, "decoder_dim .* decoder_heads 3, got 16"),
        ("neco", {}, {"local_size": 20}, "local_size .* 8, got 20"),
        ("neco", {}, {**LOCAL, "local_area": (0.001, 0.01)}, "local_area .* 0.01 .*, got 0.01"),
        ("neco", {"views.area": (0.01, 0.02)}, LOCAL, "views.area .* 0.02 .*, got 0.02"),
        ("orl", {}, {"neighbours": 36, "patch_size": 16}, "neighbours 36 .* 37 images, but data.root has 36"),
        ("orl", {}, {"neighbours": 3, "patch_size": 20}, "patch_size .* 8, got 20"),
        ("orl", {"backbone.cache_trunk": 2}, {"neighbours": 3, "patch_size": 16}, "cache_trunk"),
        ("paka", {}, {"local_size": 20}, "local_size .* 8, got 20"),
        ("paka", {}, {"local_size": 8}, "local_size .* 16 .*, got 8"),
        ("paka", {}, {**LOCAL, "local_area": (0.5, 0.2)}, r"local_area must be ordered \(low, high\)"),
        ("slotcon", {"losses.centring": "sinkhorn"}, {}, "losses.centring mean"),
        ("slotcon", RESNET, {}, "resnet18 .* views.size .* 64, got 32"),
        (SUPERVISED, {}, {"clusters": False, "matches": False}, "clusters, matches"),
    ],
)
def test_incompatible_options_are_rejected(
    name: str,
    changes: dict[str, Any],
    args: dict[str, Any],
    option: str,
    tiny: Callable[..., PretrainConfig],
    tmp_path: Path,
) -> None:
    if name == "distill":
        save_backbone(build_backbone("vit_tiny_patch16_224", args=VIT, image_size=32), tmp_path)
        args = {"teacher": str(tmp_path), **args}
    with pytest.raises(ConfigError, match=option):
        make_objective(name, args, Setting(tiny(changes), 36, 4))


def test_label_maps_that_are_missing(tiny: Callable[..., PretrainConfig]) -> None:
    with pytest.raises(MissingData, match=r"objective\.args\.labels .* got /nowhere"):
        make_objective(SUPERVISED, {"labels": "/nowhere"}, Setting(tiny({}), 36, 4))


@pytest.mark.parametrize(
    ("name", "args"),
    [("croc", {"k_start": 6, "object_prototypes": 16}), ("loca", LOCAL), ("neco", {**LOCAL, "grid": 3})],
)
def test_a_batch_must_be_a_whole_number_of_groups(
    name: str, args: dict[str, Any], tiny: Callable[..., PretrainConfig]
) -> None:
    objective = make_objective(name, args, Setting(tiny(), 36, 4))
    with pytest.raises(ValueError, match="whole number of groups of 4 images, got 3"):
        objective(batch_of(objective, 3), Step(6, steps_per_epoch=4, total_steps=12))
