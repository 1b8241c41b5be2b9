"""CrOC, against the public code's values, and properties of its clustering and training."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.objectives.conftest import batch_of
from tests.objectives.golden import cases, load
from tests.objectives.literal import MOMENTUM, assert_steps_are, follow, linear, unequal
from torch import Tensor

from cribo.base.errors import InputError
from cribo.data.samples import Batch
from cribo.method import Centre, SelfDistillation, cross_view_loss
from cribo.models import build_backbone
from cribo.objectives import Setting, Step
from cribo.objectives.rivals.croc import CrOC
from cribo.objectives.rivals.joint_clustering import (
    Clusters,
    JointClustering,
    Round,
    choose_clusters,
    cls_similarity,
    draw_clusters,
    pool_clusters,
)
from cribo.objectives.trunk import encode_with_keys
from cribo.objectives.views import normalised_views, split_views
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
DEEPER = {"patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2}

# ------------------------------------------------------------------------------------------------ the public code


class Golden:
    """A case of the public clustering, indexed (image, head)."""

    def __init__(self, path: Path) -> None:
        self.file = load(path)
        _, self.k_max, uniform, self.heads = self.file["settings"].tolist()
        self.images = self.file["patch_positions"].shape[1]
        self.clustering = JointClustering(
            k_max=self.k_max,
            position_weight=4.0,
            marginals="uniform" if uniform else "adaptive",
            images_per_range=self.images,
        )
        keys = self.file["teacher_keys"].unflatten(0, (2, self.images, self.heads)).permute(1, 2, 0, 3, 4)
        self.keys, self.cls_keys = keys[..., 1:, :], keys[..., 0, :]

    def by_problem(self, name: str) -> Tensor:
        return self.file[name].unflatten(0, (self.images, self.heads))

    def rounds(self) -> list[Round]:
        positions = self.file["patch_positions"].transpose(0, 1)
        return self.clustering.rounds(self.keys, self.cls_keys, positions, self.by_problem("seeds"))

    def objects(self, clusters: Clusters, name: str) -> tuple[Tensor, Tensor]:
        """Return the objects of a network (2, R, D), and its tokens."""
        tokens = self.file[f"{name}_tokens"].clone().requires_grad_()
        views = tokens.unflatten(0, (2, self.images))
        pooled = pool_clusters(
            views[:, :, 1:].transpose(0, 1), views[:, :, 0], clusters.weights, images_per_norm=self.images
        )
        return pooled[clusters.kept].transpose(0, 1), tokens


@pytest.fixture(scope="module", params=cases("croc_clustering"), ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=tolerance)


def test_golden_rounds(golden: Golden) -> None:
    rounds = golden.rounds()
    first, second, last = rounds[0], rounds[1], rounds[-1]
    close(first.token_mass, golden.by_problem("row_marginals"))
    close(first.cluster_mass, golden.by_problem("first_column_marginals"))
    close(first.cost, golden.by_problem("first_cost"))
    close(first.plan, golden.by_problem("first_plan"))
    close(second.cost, golden.by_problem("second_cost"))
    close(second.cluster_mass, golden.by_problem("second_column_marginals"))
    close(last.cluster_mass, golden.by_problem("last_column_marginals"))
    close(last.plan, golden.by_problem("last_plan"))
    close(torch.stack([round_.total_cost for round_ in rounds], dim=-1), golden.by_problem("costs"))


def test_golden_clusters(golden: Golden) -> None:
    clusters = choose_clusters(golden.rounds(), golden.k_max)
    assert torch.equal(clusters.chosen, golden.by_problem("chosen_k"))
    expected = golden.file["assignments"].unflatten(1, (golden.images, golden.heads)).permute(1, 2, 0, 3, 4)
    k = expected.shape[-1]
    close(clusters.weights[..., :k], expected)
    assert not clusters.weights[..., k:].any()
    assert torch.equal(clusters.kept[..., :k].flatten().nonzero()[:, 0], golden.file["valid"])


def test_golden_objects_and_their_gradient(golden: Golden) -> None:
    clusters = choose_clusters(golden.rounds(), golden.k_max)
    close(golden.objects(clusters, "teacher")[0], golden.file["teacher_objects"], 1e-5)
    objects, tokens = golden.objects(clusters, "student")
    close(objects, golden.file["student_objects"], 1e-5)
    ((objects[0] + 2 * objects[1]) @ golden.file["grad_probe"]).sum().backward()
    assert tokens.grad is not None
    close(tokens.grad, golden.file["student_tokens_grad"], 1e-5)


def test_golden_probabilities_of_initial_tokens(golden: Golden) -> None:
    similarity = cls_similarity(golden.keys, golden.cls_keys)[0, 0]
    noise = torch.rand(20_000, *similarity.shape, generator=torch.Generator().manual_seed(0))
    rows = similarity.expand_as(noise)
    drawn = draw_clusters(rows[:, None], noise[:, None], 2, marginals=golden.clustering.marginals)[:, 0]
    assert (drawn[:, 0] != drawn[:, 1]).all()
    p = golden.by_problem("sampling_probabilities")[0, 0]
    tokens = len(p)
    second = torch.stack([p[first] * p / (1 - p[first]) * (torch.arange(tokens) != first) for first in range(tokens)])
    for column, expected in ((0, p), (1, second.sum(dim=0))):
        found = drawn[:, column].bincount(minlength=tokens) / len(drawn)
        assert ((found - expected).abs() < 5 * (expected / len(drawn)).sqrt()).all()


@pytest.mark.parametrize("path", cases("croc_loss"), ids=lambda path: path.stem)
@pytest.mark.parametrize("level", ["image", "object"])
def test_golden_losses(path: Path, level: str) -> None:
    file, part = load(path), "" if level == "image" else "object_"
    student = file[f"student_{part}logits"].clone().requires_grad_()
    teacher = file[f"teacher_{part}logits"]
    number = student.shape[1]
    centre = Centre(number)
    centre.value.copy_(file[f"{part}centre_before"][0])
    temperature = float(file[f"{part}teacher_temperatures"][file["epoch"]])
    of_level = SelfDistillation(torch.eye(number), torch.eye(number), centre.value, 0.1, temperature)
    loss = cross_view_loss(student.unflatten(0, (2, -1)), teacher.unflatten(0, (2, -1)), of_level)
    assert float(loss.detach()) == pytest.approx(file[f"{level}_loss"], rel=1e-5)
    loss.backward()
    assert student.grad is not None
    close(student.grad, file[f"student_{part}logits_grad"], 1e-5)
    centre.update(teacher.sum(dim=0), torch.tensor(len(teacher)), torch.eye(number))
    close(centre.value, file[f"{part}centre_after"][0])


# ---------------------------------------------------------------------------------------------------- properties


def regions(images: int = 1, heads: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views with three regions of equal keys each, [CLS] keys, positions, and six initial tokens."""
    labels = torch.tensor([0] * 6 + [1] * 6 + [2] * 4).expand(images, heads, 2, 16)
    keys = torch.eye(8)[labels]
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    positions = torch.stack((columns, rows), dim=-1).flatten(0, 1).expand(images, 2, 16, 2)
    initial = torch.tensor([0, 3, 7, 12, 20, 27]).expand(images, heads, 6)
    return keys, torch.ones(images, heads, 2, 8), positions, initial


def test_clusters_are_the_regions_of_the_image() -> None:
    keys, cls_keys, positions, initial = regions()
    clusters = JointClustering(k_max=3, position_weight=0.0)(keys, cls_keys, positions, initial)
    assert clusters.chosen.item() == 3
    labels = clusters.weights[0, 0].argmax(dim=-1)
    assert torch.equal(labels[0], labels[1])
    assert [len(labels[0, part].unique()) for part in (slice(0, 6), slice(6, 12), slice(12, 16))] == [1, 1, 1]
    assert len(labels.unique()) == 3
    assert clusters.kept.all()


def test_a_cluster_in_one_view_only_is_no_object() -> None:
    clusters = Clusters(torch.zeros(1, 1, 2, 4, 3), torch.tensor([[3]]))
    clusters.weights[0, 0, 0, [0, 1, 2], [0, 1, 2]] = 1.0
    clusters.weights[0, 0, 1, [0, 1], [0, 2]] = 0.5
    assert clusters.kept.tolist() == [[[True, False, True]]]


def test_the_range_of_costs_is_of_a_group_or_of_an_image() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, cls_keys = torch.randn(4, 2, 2, 9, 8, generator=generator), torch.randn(4, 2, 2, 8, generator=generator)
    positions = torch.rand(4, 2, 9, 2, generator=generator)
    initial = draw_clusters(
        cls_similarity(keys, cls_keys), torch.rand(4, 2, 18, generator=generator), 5, marginals="adaptive"
    )
    arguments = (keys, cls_keys, positions, initial)

    def rounds(size: int, images: slice) -> list[Tensor]:
        clustering = JointClustering(k_max=4, position_weight=4.0, images_per_range=size)
        return [round_.cost for round_ in clustering.rounds(*(part[images] for part in arguments))]

    for size in (1, 2):
        for whole, part in zip(rounds(size, slice(0, 4)), rounds(size, slice(2, 4)), strict=True):
            close(whole[2:], part)
            groups = whole.unflatten(0, (-1, size)).flatten(1)
            close(groups.amin(dim=1), torch.zeros(len(groups)))
            close(groups.amax(dim=1), torch.ones(len(groups)))
    with pytest.raises(InputError, match="number of images must be a multiple of 3, got 4"):
        rounds(3, slice(0, 4))


@pytest.mark.parametrize("k_max", [1, 7])
def test_clusters_to_choose_are_limited(k_max: int) -> None:
    with pytest.raises(InputError, match=f"k_max must be 2 to 6, the initial number of clusters, got {k_max}"):
        JointClustering(k_max=k_max, position_weight=1.0)(*regions())


def test_equal_views_give_finite_clusters() -> None:
    keys, cls_keys, positions, initial = regions()
    blank = torch.ones_like(keys), cls_keys, torch.zeros_like(positions), initial
    clusters = JointClustering(k_max=4, position_weight=4.0)(*blank)
    assert clusters.weights.isfinite().all()
    assert clusters.kept.any()


# -------------------------------------------------------------------------------------------------------- network


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("args", [{}, {"qk_norm": True, "reg_tokens": 2}], ids=["plain", "registers and norm"])
def test_keys_are_those_that_attention_reads(frozen: int, args: dict[str, Any]) -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args={**DEEPER, **args}, image_size=32, seed=0)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    read: list[Tensor] = []
    norm = backbone.model.blocks[-1].attn.k_norm
    handle = norm.register_forward_hook(lambda module, inputs, output: read.append(output))
    with torch.no_grad():
        expected = backbone.encode(images)
        handle.remove()
        features, keys = encode_with_keys(backbone, backbone.encode_trunk(images, frozen) if frozen else images)
    assert backbone.key_heads == 2
    torch.testing.assert_close(keys, read[0])
    torch.testing.assert_close(features.tokens, expected.tokens)
    torch.testing.assert_close(features.global_token, expected.global_token)


def test_networks_without_keys_are_recognised() -> None:
    assert build_backbone("resnet18", args={"channels": (8, 8, 8, 8)}).key_heads is None
    differential = build_backbone("vit_tiny_patch16_224", args={**DEEPER, "attn_layer": "diff"}, image_size=32)
    assert differential.has_attention
    assert differential.key_heads is None


# ------------------------------------------------------------------------------------------------------- training


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> CrOC:
    options = {"backbone.drop_path": 0.0, "objects.position_weight": 4.0, **(changes or {})}
    return CrOC(Setting(tiny(options), 36, 4), **{"k_start": 6, "object_prototypes": 16, **args})


def test_forward_returns_the_losses_of_each_group(tiny: Tiny) -> None:
    objective = make(tiny, object_temperature=(0.09, 0.09))
    with torch.no_grad():
        for parameter in objective.teacher.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    batch = batch_of(objective, 8)
    output = objective(batch, STEP)
    alone = [objective(part, STEP).losses for part in batch.split(2)]  # a group of four images each
    for name, loss in output.losses.items():
        torch.testing.assert_close(loss, torch.stack([losses[name] for losses in alone]).mean())
    assert objective.level("object", STEP).teacher_temperature == 0.09
    assert objective.level("image", STEP).teacher_temperature == objective.schedules(STEP)["teacher_temperature"]
    assert len(objective.object_centre.value) == 16
    assert len(objective.image_centre.value) == 32


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, Tensor]:
    """Compute the losses of [CLS] and of objects, one image, view, head and cluster at a time."""
    temperatures = {"image": linear(0.04, 0.07, 3, step), "object": linear(0.06, 0.09, 3, step)}
    inputs = normalised_views(batch, objective.options.views, objective.student.backbone).double()
    with torch.no_grad():
        features, keys = encode_with_keys(objective.teacher.backbone, inputs)
        keys = torch.stack([keys[0::2], keys[1::2]], dim=2)  # (B, H, 2, 1 + N, d), [CLS] first
        of_cls, of_patches = keys[..., 0, :], keys[..., 1:, :]
        initial = draw_clusters(cls_similarity(of_patches, of_cls), batch["token_noise"], 6, marginals="adaptive")
        weights = objective.cluster(of_patches, of_cls, batch["coordinates"], initial).weights
    networks = {"teacher": split_views(features), "student": split_views(objective.student.backbone(inputs))}
    norms = {name: global_tokens.norm(dim=-1).mean() for name, (global_tokens, _) in networks.items()}

    def logits(name: str, level: str, rows: Tensor) -> Tensor:
        network = getattr(objective, name)
        return network.head(rows) @ network.prototypes(level).weight.T

    def pooled(name: str, image: int, view: int, own: Tensor) -> Tensor:
        return norms[name] * F.normalize(own[view] @ networks[name][1][image, view], dim=0)

    terms: dict[str, list[Tensor]] = {"image": [], "object": []}
    objective.seen = {"image": [], "object": []}

    def add(level: str, teacher: Tensor, student: Tensor) -> None:
        target = logits("teacher", level, teacher).detach()
        objective.seen[level].append(target)
        target = ((target - getattr(objective, f"{level}_centre").value) / temperatures[level]).softmax(dim=-1)
        terms[level].append(-(target * (logits("student", level, student) / 0.1).log_softmax(dim=-1)).sum())

    for image, view in itertools.product(range(len(batch)), (0, 1)):
        add("image", networks["teacher"][0][view, image], networks["student"][0][1 - view, image])
        for own in weights[image].movedim(3, 1).flatten(0, 1):  # of each head and cluster, (2, N)
            if (own > 0).any(dim=1).all():
                add("object", pooled("teacher", image, view, own), pooled("student", image, 1 - view, own))
    return {name: torch.stack(terms[level]).mean() for name, level in (("image", "image"), ("cross_view", "object"))}


def written_update(objective: Any, step: Step) -> None:
    for level, rows in objective.seen.items():
        centre = getattr(objective, f"{level}_centre").value
        centre.copy_(0.8 * centre + 0.2 * torch.stack(rows).mean(dim=0))
    follow(objective, step)


def test_two_steps_are_those_written_out(tiny: Tiny) -> None:
    changes = {"optim.momentum": MOMENTUM, "losses.centre_momentum": 0.8, "losses.cross_view": 0.7}
    changes |= {"losses.teacher_temperature": (0.04, 0.07), "losses.teacher_temperature_epochs": 3}
    objective = unequal(make(tiny, changes, object_temperature=(0.06, 0.09)))
    for centre in (objective.image_centre, objective.object_centre):
        centre.value += 0.1 * torch.randn(len(centre.value), generator=torch.Generator().manual_seed(1))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]
    assert_steps_are(objective, batches, written_losses, written_update, tolerance=1e-6)
    assert objective.weights == {"image": 1.0, "cross_view": 0.7}


def test_samples_carry_keyed_noise_for_each_head(tiny: Tiny) -> None:
    objective = make(tiny)
    first, again = batch_of(objective, 8), batch_of(objective, 8)
    assert first["token_noise"].shape == (8, 2, 32)
    assert torch.equal(first["token_noise"], again["token_noise"])
    assert not torch.equal(first["token_noise"][0], first["token_noise"][1])


def test_a_step_updates_centres_and_teacher(tiny: Tiny) -> None:
    objective = make(tiny)
    for part in batch_of(objective, 8).split(2):
        objective(part, STEP)
    before = {name: value.clone() for name, value in objective.teacher.named_parameters()}
    with torch.no_grad():
        for parameter in objective.student.parameters():
            parameter += 0.1
    objective.after_step(STEP)
    assert objective.image_centre.value.any()
    assert objective.object_centre.value.any()
    momentum = objective.schedules(STEP)["momentum"]
    for name, value in objective.teacher.named_parameters():
        torch.testing.assert_close(value, before[name] + (1 - momentum) * 0.1, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"losses.centring": "sinkhorn", "backbone.drop_path": 0.2},
        {"losses.image": 0.0, "objects.marginals": "uniform"},
        {"backbone.args": DEEPER, "backbone.train_blocks": 1, "backbone.cache_trunk": 2},
    ],
    ids=["sinkhorn", "objects only", "cached trunk"],
)
def test_it_trains(tiny: Tiny, tmp_path: Path, changes: dict[str, Any]) -> None:
    args = {"k_start": 6, "object_prototypes": 16, "cost_range": "image"}
    short = {"optim.epochs": 1, "optim.warmup_epochs": 0, "objective.name": "croc", "objective.args": args}
    run = pretrain(tiny({**short, **changes}), out=tmp_path)
    assert 0 < run.summary["losses"]["cross_view"] < 10
    assert run.backbone().embed_dim == 32
