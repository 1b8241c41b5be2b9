"""LOCA, against the released code's values and its definition."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.objectives.conftest import batch_of
from tests.objectives.golden import cases, load
from torch import Tensor, nn

from cribo.data.samples import Batch
from cribo.method import Crops, SelfDistillation, ViewRecipe
from cribo.models import build_backbone
from cribo.objectives import Setting, Step
from cribo.objectives.rivals.loca import (
    LOCA,
    PositionHead,
    cluster_losses,
    crops_of_uniform_height,
    position_loss,
    reference_places,
)
from cribo.objectives.sinkhorn import sinkhorn_centre
from cribo.pretraining import PretrainConfig, load_config, pretrain
from cribo.pretraining.schedules import Schedules

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
NO_CLS = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "class_token": False, "global_pool": "avg"}


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> LOCA:
    return LOCA(Setting(tiny(changes), 36, 4), **{"local_crops": 2, "local_size": 16, **args})


# ------------------------------------------------------------------ golden values


@pytest.mark.parametrize("path", cases("loca_losses"), ids=lambda path: path.stem)
def test_golden_losses(path: Path) -> None:
    case = load(path)
    places = case["position_targets"].where(case["has_target"], -1)
    assert position_loss(case["position_logits"], places).item() == pytest.approx(case["position_loss"], rel=1e-5)
    # With identity prototypes, embeddings are logits.
    identity = torch.eye(case["cluster_targets"].shape[1])
    level = SelfDistillation(identity, identity, torch.zeros(len(identity)), 0.1, 1.0)
    targets = case["cluster_targets"].clamp_min(1e-30).log()
    cluster, me_max = cluster_losses(0.1 * case["cluster_logits_over_temperature"], targets, places, level)
    assert cluster.item() == pytest.approx(case["cluster_loss"], rel=1e-5)
    assert me_max.item() == pytest.approx(case["me_max"], rel=1e-5)
    teacher = case["teacher_probabilities"].log()
    balanced = (teacher - sinkhorn_centre(teacher, identity, temperature=1.0)).softmax(dim=1)
    torch.testing.assert_close(balanced, case["teacher_assignments"], rtol=1e-4, atol=1e-6)


def arrays_of(case: dict[str, Any], part: str) -> dict[str, Any]:
    return {key.removeprefix(f"{part}/"): value for key, value in case.items() if key.startswith(f"{part}/")}


def heads_of(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the heads from Flax: kernels are (in, out), and attention is per head."""

    def linear(theirs: str, ours: str) -> dict[str, Tensor]:
        return {f"{ours}.weight": arrays[f"{theirs}/kernel"].T, f"{ours}.bias": arrays[f"{theirs}/bias"]}

    def norm(theirs: str, ours: str) -> dict[str, Tensor]:
        return {f"{ours}.weight": arrays[f"{theirs}/scale"], f"{ours}.bias": arrays[f"{theirs}/bias"]}

    projection, block = "projection_head_for_clustering_prediction", "cross_attention_block"
    attention, mlp = f"{block}/MultiHeadDotProductAttention_0", f"{block}/MlpBlock_0"
    inputs = [arrays[f"{attention}/{name}/kernel"].flatten(1).T for name in ("query", "key", "value")]
    biases = [arrays[f"{attention}/{name}/bias"].flatten() for name in ("query", "key", "value")]
    return {
        **linear(f"{projection}/Dense_0", "head.mlp.0"),
        **linear(f"{projection}/Dense_1", "head.mlp.2"),
        **linear(f"{projection}/Dense_2", "head.mlp.4"),
        "cluster_prototypes.direction": arrays[f"{projection}/prototypes/kernel"].T,
        **norm(f"{block}/LayerNorm_0", "position.query_norm"),
        **norm(f"{block}/LayerNorm_1", "position.reference_norm"),
        **norm(f"{block}/LayerNorm_2", "position.mlp_norm"),
        "position.attention.in_proj_weight": torch.cat(inputs),
        "position.attention.in_proj_bias": torch.cat(biases),
        "position.attention.out_proj.weight": arrays[f"{attention}/out/kernel"].flatten(0, 1).T,
        "position.attention.out_proj.bias": arrays[f"{attention}/out/bias"],
        **linear(f"{mlp}/Dense_0", "position.mlp.fc1"),
        **linear(f"{mlp}/Dense_1", "position.mlp.fc2"),
        **norm("final_norm", "position.norm"),
        **linear("position_predictor", "position.predict"),
    }


@pytest.mark.parametrize("path", cases("loca_step"), ids=lambda path: path.stem)
def test_golden_step(path: Path, tiny: Tiny, tmp_path: Path) -> None:
    """Weights and gradients of the backbone are read as a checkpoint of LOCA."""
    case = load(path)
    dim, prototypes = case["student/projection_head_for_clustering_prediction/prototypes/kernel"].shape
    width, hidden = case["student/cross_attention_block/MlpBlock_0/Dense_0/kernel"].shape
    patch, _, _, _ = case["student/ToTokenSequence_0/embedding/kernel"].shape
    _, heads, _ = case["student/cross_attention_block/MultiHeadDotProductAttention_0/query/kernel"].shape
    depth = len({name.split("/")[1] for name in case if name.startswith("student/encoderblock_")})
    images, size, _, _ = case["reference"].shape
    focal = [value for key, value in case.items() if key.startswith("query") and key[5:].isdigit()][1:]
    args = {"patch_size": patch, "depth": depth, "embed_dim": width, "num_heads": heads, "mlp_ratio": hidden / width}
    args |= {"class_token": False, "global_pool": "avg", "fc_norm": False, "act_layer": "gelu_tanh"}

    def backbone_of(part: str) -> dict[str, Any]:
        names = [name for name in arrays_of(case, part) if name.startswith(("ToToken", "encoder"))]
        np.savez(tmp_path / f"{part}.npz", **{f"params/{name}": case[f"{part}/{name}"].numpy() for name in names})
        return {
            "name": "vit_tiny_patch16_224",
            "args": args,
            "image_size": size,
            "pretrained": str(tmp_path / f"{part}.npz"),
        }

    loaded = {part: build_backbone(**backbone_of(part)) for part in ("student", "teacher", "gradient")}
    changes = {
        "views.size": size,
        "backbone.args": args,
        "backbone.pretrained": str(tmp_path / "student.npz"),
        "backbone.drop_path": 0.0,
        "head.hidden_dim": len(case["student/projection_head_for_clustering_prediction/Dense_1/bias"]),
        "head.bottleneck_dim": dim,
        "head.prototypes": prototypes,
        "head.train_gain": False,
        "losses.teacher_temperature": (0.05, 0.05),
        "objects.group_size": images,
        "optim.momentum": (0.996, 1.0),
        "optim.epochs": 100,
    }
    objective = make(tiny, changes, local_crops=len(focal), local_size=focal[0].shape[1])
    for name in ("student", "teacher"):
        network = getattr(objective, name)
        network.position = PositionHead(width, (size // patch) ** 2, heads=heads, hidden_dim=hidden)
        for index in (1, 3):
            network.head.mlp[index] = nn.GELU("tanh")
        network.position.mlp.act = nn.GELU("tanh")
        network.backbone.model.load_state_dict(loaded[name].model.state_dict())
        state = heads_of(arrays_of(case, name))
        assert set(network.load_state_dict(state, strict=False).missing_keys) == {
            *(key for key in network.state_dict() if key.startswith("backbone")),
            "cluster_prototypes.gain",
        }
    objective.teacher.requires_grad_(False)

    def channels_first(images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2)

    kept = case["query_tokens_kept"].long()
    masks = [case[f"query{number}_mask"].flatten(1) for number in range(len(focal) + 1)]
    samples = {
        "reference_kept": case["reference_tokens_kept"].long().expand(images, -1),
        "query_kept": kept.expand(images, -1),
        "places": torch.cat([masks[0][:, kept], *masks[1:]], dim=1).long(),
        "drop_path_noise": torch.zeros(images, len(masks) + 1, 0),
    }
    batch = Batch(samples, torch.arange(images), [])
    step = Step(5, steps_per_epoch=1251, total_steps=125_100)
    reference, random = (channels_first(case[name]) for name in ("reference", "query0"))
    small = torch.cat([channels_first(each) for each in focal])
    output = objective.compare(reference, random, small, batch, step)
    total = torch.stack(list(output.losses.values())).sum()
    clusters = output.losses["cluster"] + output.losses["me_max"]
    assert clusters.item() == pytest.approx(case["feature_loss"], rel=1e-5)
    assert total.item() == pytest.approx(case["total_loss"], rel=1e-5)
    total.backward()
    gradients = {
        **heads_of(arrays_of(case, "gradient")),
        **{f"backbone.model.{name}": value for name, value in loaded["gradient"].model.named_parameters()},
    }
    found = {name: value.grad for name, value in objective.student.named_parameters() if value.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name], gradient.detach(), rtol=1e-3, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert objective.schedules(step)["momentum"] == pytest.approx(case["momentum"], abs=1e-7)


@pytest.mark.parametrize("path", cases("loca_targets"), ids=lambda path: path.stem)
def test_golden_places(path: Path) -> None:
    """A few differ in the released code's float rounding."""
    case = load(path)
    grids = case["sizes_and_boxes"][:, 10]
    differing = total = 0
    for name, grid in (("random", 14), ("focal", 6)):
        rows = case["sizes_and_boxes"][grids == grid]
        for row, expected in zip(rows, case[f"targets_{name}"], strict=True):
            query = Crops(row[None, 6:10], torch.tensor([False]))
            places = reference_places(row[2:6], query, size=16 * grid, patch_size=16, reference_grid=14)
            differing += int((places[0] != expected).sum())
            total += len(expected)
    assert differing <= 0.003 * total


@pytest.mark.parametrize("path", cases("loca_schedules"), ids=lambda path: path.stem)
def test_golden_schedules_of_the_preset(path: Path) -> None:
    case = load(path)
    optim = load_config("loca_vitb16").optim
    steps = case["total_steps"] // optim.epochs
    schedules = Schedules(optim, steps)
    assert schedules.total_steps == case["total_steps"]
    assert round(optim.warmup_epochs * steps) == case["warmup_steps"]
    for number, lr, momentum in zip(case["steps"].tolist(), case["learning_rate"], case["momentum"], strict=True):
        # The released warm-up reaches its peak one step later.
        assert schedules.at(number)["lr"] == pytest.approx(float(lr), rel=1e-4, abs=1e-3 / case["warmup_steps"])
        assert schedules.step(number).cosine(*optim.momentum) == pytest.approx(float(momentum), abs=1e-6)


# ------------------------------------------------------------------ samples


def test_a_mirrored_query_has_mirrored_places() -> None:
    boxes = torch.tensor([[8, 16, 32, 32]] * 2)
    find = {"size": 32, "patch_size": 8, "reference_grid": 4}
    plain, mirrored = reference_places(
        torch.tensor([0, 0, 64, 64]), Crops(boxes, torch.tensor([False, True])), **find
    ).unflatten(1, (4, 4))
    assert plain.tolist() == [[1, 1, 2, 2], [5, 5, 6, 6], [5, 5, 6, 6], [9, 9, 10, 10]]
    assert torch.equal(mirrored, plain.flip(1))


def test_a_query_outside_the_reference_has_no_place() -> None:
    queries = Crops(torch.tensor([[0, 32, 32, 32], [0, 0, 32, 32]]), torch.tensor([False, True]))
    places = reference_places(torch.tensor([0, 0, 32, 32]), queries, size=16, patch_size=8, reference_grid=2)
    assert places.tolist() == [[-1] * 4, [1, 0, 3, 2]]


def test_patches_show_what_the_reference_shows_at_their_places(tiny: Tiny) -> None:
    """Each patch of a crop is similar to the reference's patch at its place, and not to others."""
    objective = make(tiny, {"views.area": (0.5, 1.0)}, query_ratio=0.5, local_crops=3)
    batch = batch_of(objective, 8)
    assert batch["places"].shape == (8, 8 + 3 * 4)
    assert (batch["places"] < 0).any()
    assert (batch["query_kept"].sort(dim=1).values.diff(dim=1) > 0).all()
    assert len(batch["query_kept"].unique(dim=0)) == 8
    assert (batch["reference_kept"].diff(dim=1) == 1).all()
    assert batch["reference_kept"].min() >= 0
    assert batch["reference_kept"].max() < 16
    assert len(batch["reference_kept"].unique(dim=0)) > 1

    def colours(views: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(views.flatten(0, 1).float(), 8).flatten(2).mT.unflatten(0, views.shape[:2])

    views, local = colours(batch["global"]), colours(batch["local"])
    kept = views[:, 1].gather(1, batch["query_kept"][..., None].expand(-1, -1, 3))
    queries = torch.cat((kept, local.flatten(1, 2)), dim=1)
    found = batch["places"] >= 0
    distances = torch.cdist(queries, views[:, 0])[found]
    own = distances.gather(1, batch["places"][found][:, None])
    assert own.median() < 0.4 * distances.median()


def test_the_reference_is_not_mirrored(tiny: Tiny) -> None:
    changes = {"views.area": (1.0, 1.0), "views.aspect": (1.0, 1.0), "views.flip": 1.0}
    objective = make(tiny, changes)
    batch = batch_of(objective, 8)
    reference, random = batch["global"].unbind(dim=1)
    assert torch.equal(reference, random.flip(-1))
    row, column = batch["query_kept"] // 4, batch["query_kept"] % 4
    assert torch.equal(batch["places"][:, : row.shape[1]], 4 * row + 3 - column)


@pytest.mark.parametrize(("area", "mean"), [((0.05, 0.32), 0.166), ((0.32, 1.0), 0.534)])
def test_crops_have_a_uniform_height(area: tuple[float, float], mean: float) -> None:
    """The released code's crops of an image of 375 x 500 pixels have these mean areas; uniform areas .185 and .66."""
    generator = torch.Generator().manual_seed(0)
    recipe = ViewRecipe(area=area, flip=0.5)
    crops = crops_of_uniform_height(375, 500, recipe, count=4000, generator=generator)
    top, left, height, width = crops.boxes.double().unbind(dim=1)
    share = height * width / (375 * 500)
    assert share.mean().item() == pytest.approx(mean, abs=0.01)
    assert share.min() >= area[0]
    assert share.max() <= area[1]
    assert min(top.min(), left.min()) >= 0
    assert (top + height).max() <= 375
    assert (left + width).max() <= 500
    assert crops.flips.double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_a_shape_that_never_fits_is_the_whole_image() -> None:
    recipe, generator = ViewRecipe(area=(0.9, 1.0)), torch.Generator().manual_seed(0)
    assert crops_of_uniform_height(10, 1000, recipe, count=1, generator=generator).boxes.tolist() == [[0, 0, 10, 1000]]


def test_samples_are_keyed(tiny: Tiny) -> None:
    objective = make(tiny)
    first, again = batch_of(objective, 8), batch_of(objective, 8)
    for name in ("global", "local", "reference_kept", "query_kept", "places"):
        assert torch.equal(first[name], again[name])


# ------------------------------------------------------------------ the objective


@pytest.mark.parametrize("args", [{}, {"backbone.args": NO_CLS}], ids=["[CLS]", "no [CLS]"])
def test_the_student_does_not_read_dropped_patches(tiny: Tiny, args: dict[str, Any]) -> None:
    objective = make(tiny, {"backbone.drop_path": 0.0, **args})
    batch = batch_of(objective, 8)
    reference, random = torch.randn(2, 8, 3, 32, 32)
    focal = torch.randn(16, 3, 16, 16)

    def losses(crops: Tensor) -> dict[str, float]:
        output = objective.compare(reference, crops, focal, batch, STEP)
        return {name: loss.item() for name, loss in output.losses.items()}

    def changed(patch: int) -> Tensor:
        crops, (row, column) = random.clone(), divmod(patch, 4)
        crops[0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
        return crops

    kept = batch["query_kept"][0].tolist()
    dropped = next(patch for patch in range(16) if patch not in kept)
    assert losses(changed(dropped)) == losses(random)
    assert losses(changed(kept[0])) != losses(random)


def test_paths_are_dropped_in_the_teacher_and_for_each_crop(tiny: Tiny) -> None:
    """Stochastic depth of the reference, in the teacher, of the large query and of the small ones, in the student."""
    objective = make(tiny, {"backbone.drop_path": 0.4})
    batch = batch_of(objective)
    batch["drop_path_noise"].fill_(0.99)  # drops none
    kept = objective(batch, STEP).losses["cluster"].item()
    for crop in range(4):
        batch["drop_path_noise"].fill_(0.99)
        batch["drop_path_noise"][:, crop] = 0.0
        assert objective(batch, STEP).losses["cluster"].item() != kept


def test_the_position_head_reads_only_the_kept_patches_of_the_reference(tiny: Tiny) -> None:
    objective = make(tiny, {"backbone.drop_path": 0.0}).eval()
    batch = batch_of(objective, 8)
    reference, random = torch.randn(2, 8, 3, 32, 32)
    focal = torch.randn(16, 3, 16, 16)
    seen: list[Tensor] = []
    objective.student.position.register_forward_hook(lambda _, args, __: seen.append(args[1]))
    objective.compare(reference, random, focal, batch, STEP)
    tokens = objective.teacher.backbone(reference).tokens
    for image in range(8):
        torch.testing.assert_close(seen[0][image], tokens[image, batch["reference_kept"][image]])
    assert not seen[0].requires_grad


def test_losses_are_means_over_groups(tiny: Tiny) -> None:
    objective = make(tiny)
    batch = batch_of(objective, 8)
    whole = objective(batch, STEP)
    halves = [objective(part, STEP) for part in batch.split(2)]
    for name, loss in whole.losses.items():
        torch.testing.assert_close(torch.stack([half.losses[name] for half in halves]).mean(), loss)
    larger = make(tiny, {"objects.group_size": 8})(batch, STEP)
    assert larger.losses["me_max"] != whole.losses["me_max"]


def test_only_the_student_has_gradients_and_they_are_finite_without_any_place(tiny: Tiny) -> None:
    objective = make(tiny)
    batch = batch_of(objective, 8)
    batch["places"].fill_(-1)
    output = objective(batch, STEP)
    assert output.losses["position"] == output.losses["cluster"] == 0
    torch.stack(list(output.losses.values())).sum().backward()
    assert all(p.grad is None for p in objective.teacher.parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in objective.student.head.parameters())


def test_a_step_updates_the_whole_teacher(tiny: Tiny) -> None:
    objective = make(tiny)
    before = {name: value.clone() for name, value in objective.teacher.named_parameters()}
    assert any(name.startswith("position") for name in before)
    with torch.no_grad():
        for parameter in objective.student.parameters():
            parameter += 0.1
    objective.after_step(STEP)
    momentum = objective.schedules(STEP)["momentum"]
    for name, value in objective.teacher.named_parameters():
        torch.testing.assert_close(value, before[name] + (1 - momentum) * 0.1, rtol=1e-4, atol=1e-6)


def test_the_losses_fall_and_clusters_stay_in_use(tiny: Tiny) -> None:
    """Over the same batch, on which the position head can reach every position."""
    changes = {"backbone.drop_path": 0.0, "head.init_std": 0.2, "losses.teacher_temperature": (0.05, 0.05)}
    objective = make(tiny, {**changes, "views.jitter": 0.0, "objects.group_size": 8}, reference_ratio=0.5)
    batch = batch_of(objective, 8)
    optimiser = torch.optim.AdamW(objective.trainable().parameters(), lr=3e-3)
    output, outputs = objective(batch, STEP), []
    for _ in range(60):
        output = objective(batch, STEP)
        optimiser.zero_grad()
        torch.stack(list(output.losses.values())).sum().backward()
        optimiser.step()
        objective.after_step(STEP)
        outputs.append({name: loss.item() for name, loss in output.losses.items()})
    assert outputs[-1]["position"] < 0.7 * outputs[0]["position"]
    assert outputs[-1]["cluster"] < 0.9 * outputs[0]["cluster"]
    assert outputs[-1]["me_max"] < -3.0  # of log 32 = 3.47 with all clusters in use
    correct, places = output.metrics["position_accuracy"]
    assert correct > 0.3 * places
    tokens = objective.exported().encode(torch.randn(4, 3, 32, 32)).tokens.flatten(0, 1)
    assert nn.functional.normalize(tokens - tokens.mean(dim=0), dim=1).std() > 0.05


@pytest.mark.parametrize(
    "network",
    [{"backbone.train_blocks": 1}, {"backbone.args": NO_CLS}],
    ids=["frozen blocks", "no [CLS]"],
)
def test_it_trains(tiny: Tiny, tmp_path: Path, network: dict[str, Any]) -> None:
    loca = {"objective.name": "loca", "objective.args": {"local_crops": 2, "local_size": 16}}
    changes = {"optim.lr": 0.1, "optim.epochs": 6, "head.init_std": 0.2, **network}
    run = pretrain(tiny({**loca, **changes}), out=tmp_path)
    assert 0 < run.summary["losses"]["position"] < 3.0  # 3.2 at the start; log 16 = 2.77 for uniform predictions
    assert run.summary["losses"]["me_max"] < -2.0
    assert 0 < run.summary["position_accuracy"] < 1
