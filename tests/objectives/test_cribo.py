"""CrIBo's losses of a batch, against their definition; errors; custom clusterings and criteria."""

import copy
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cribo.data.samples import Batch, SampleDataset
from cribo.data.scenes import Scenes
from cribo.method import SelfDistillation
from cribo.objectives import Setting, Step
from cribo.objectives import pairs as module
from cribo.objectives.collapse import prototype_entropy
from cribo.objectives.config import ObjectsConfig
from cribo.objectives.cribo import CrIBo, Result
from cribo.objectives.headfree import soft_neighbour_loss
from cribo.objectives.objects import find_clustering, find_criterion, label_tokens
from cribo.objectives.views import normalised_views
from cribo.pretraining import PretrainConfig

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


def make(config: PretrainConfig) -> CrIBo:
    return CrIBo(Setting(config, num_images=64, steps_per_epoch=4))


class Bench:
    """An objective outside a run, with different student and teacher, and a bank with some images."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        self.objective = make(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.objective.student.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            for centre in (self.objective.image_centre, self.objective.object_centre):
                centre.value += 0.1 * torch.randn(centre.value.shape, generator=generator)
        remembered = self(list(range(40, 52)), epoch=0).objects
        assert remembered is not None
        assert self.objective.bank is not None
        self.objective.bank.push(remembered.teacher, remembered.images, remembered.counts)

    def batch(self, images: list[int], epoch: int = 0) -> Batch:
        dataset = SampleDataset(Scenes(64, size=40), self.objective.samples(), seed=self.config.seed)
        return dataset.__getitems__([(epoch, image) for image in images])

    def with_objects(self, **changes: Any) -> CrIBo:
        """Return the objective with other object options, and the same networks, centres and bank."""
        objects = dataclasses.replace(self.config.objects, **changes)
        other = make(dataclasses.replace(self.config, objects=objects))
        other.load_state_dict(copy.deepcopy(self.objective.state_dict()))
        return other

    def with_optim(self, **changes: Any) -> CrIBo:
        """Return the objective with other optimiser options."""
        optim = dataclasses.replace(self.config.optim, **changes)
        other = make(dataclasses.replace(self.config, optim=optim))
        other.load_state_dict(copy.deepcopy(self.objective.state_dict()))
        return other

    def __call__(self, images: list[int], *, objective: CrIBo | None = None, epoch: int = 1) -> Result:
        """Return an objective's result, with differentiable losses; L_ci^o is on from epoch 1."""
        used = self.objective if objective is None else objective
        output = used(self.batch(images), Step(4 * epoch, 4, 12))
        used.found.clear()  # no step follows
        for embeddings in used.embeddings.values():
            embeddings.clear()
        assert used.last_result is not None
        return dataclasses.replace(used.last_result, losses=output.losses)


@pytest.fixture
def bench(tiny: Tiny) -> Bench:
    return Bench(tiny({"objects.group_size": 4, "objects.bank_images": 16, "backbone.drop_path": 0.3}))


# ------------------------------------------------------------------ losses


def test_losses_are_means_over_groups_of_group_means(bench: Bench) -> None:
    whole = bench(list(range(8)))
    parts = [bench(list(range(4))), bench(list(range(4, 8)))]
    for name, loss in whole.losses.items():
        expected = sum(part.losses[name] for part in parts) / 2
        assert loss > 0
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_cycles_close_inside_a_group(bench: Bench) -> None:
    """In a larger group, a neighbour can return to more objects, so no more cycles close."""
    valid = []
    for size in (1, 2, 4, 8):
        matches = bench(list(range(8)), objective=bench.with_objects(group_size=size)).matches
        assert matches is not None
        valid.append(int(matches.valid.sum()))
    assert valid == sorted(valid, reverse=True)
    assert valid[0] > valid[-1] > 0


def test_a_group_without_objects_adds_0_and_stays_in_the_graph(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    find = module.find_objects
    with_objects = bench(list(range(4, 8)))

    def find_none_in_the_first_group(*args: Any) -> Any:
        found = find(*args)
        keep = found.rows >= 4
        return dataclasses.replace(
            found,
            teacher=found.teacher[:, keep],
            rows=found.rows[keep],
            clusters=found.clusters[keep],
            images=found.images[keep],
            counts=[0] * 4 + found.counts[4:],
        )

    monkeypatch.setattr(module, "find_objects", find_none_in_the_first_group)
    result = bench(list(range(8)))
    for name in ("cross_view", "cross_image"):
        torch.testing.assert_close(result.losses[name], with_objects.losses[name] / 2, rtol=1e-5, atol=1e-6)


def test_without_objects_the_object_losses_are_0_and_differentiable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = module.find_objects

    def find_none(*args: Any) -> Any:
        found = find(*args)
        none = found.rows[:0]
        return dataclasses.replace(
            found, teacher=found.teacher[:, :0], rows=none, clusters=none, images=none, counts=[0] * len(found.counts)
        )

    monkeypatch.setattr(module, "find_objects", find_none)
    result = bench(list(range(8)))
    assert result.losses["cross_view"].item() == result.losses["cross_image"].item() == 0
    bench.objective.zero_grad()
    (result.losses["image"] + result.losses["cross_view"] + result.losses["cross_image"]).backward()
    gradients = [p.grad for p in bench.objective.student.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_no_gradient_reaches_a_frozen_backbone_or_the_teacher(bench: Bench) -> None:
    objective = bench.with_optim(freeze_backbone_epochs=2)
    result = bench(list(range(4)), objective=objective)
    torch.stack(list(result.losses.values())).sum().backward()
    assert all(parameter.grad is None for parameter in objective.student.backbone.parameters())
    assert all(parameter.grad is None for parameter in objective.teacher.parameters())
    assert objective.student.head.mlp[0].weight.grad is not None


def test_a_forward_pass_changes_nothing_that_other_micro_batches_read(bench: Bench) -> None:
    before = copy.deepcopy(bench.objective.state_dict())
    step = Step(4, 4, 12)
    output = bench.objective(bench.batch(list(range(8))), step)
    after = bench.objective.state_dict()
    bank, unchanged = before.pop("_extra_state")["bank"], after.pop("_extra_state")["bank"]
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(unchanged[name])) for name, value in bank.items())
    bench.objective.after_step(step)
    moved = bench.objective.state_dict()
    for name in ("teacher.head.mlp.0.weight", "image_centre.value", "object_centre.value"):
        assert not torch.equal(moved[name], before[name])
    objects, images = output.metrics["objects_per_image"]
    assert (images, int(moved["_extra_state"]["bank"]["counts"][-8:].sum())) == (8, objects)


# ------------------------------------------------------------------ losses beyond the paper


def test_soft_neighbours_use_features_before_the_head(tiny: Tiny) -> None:
    options = {"losses.object_neighbours": 1.0, "losses.patch_neighbours": 0.5, "losses.neighbours": 3}
    bench = Bench(tiny({"backbone.drop_path": 0.0, "objects.bank_images": 16, **options}))
    objective, batch = bench.objective, bench.batch(list(range(8)))
    step = Step(4, 4, 12)
    assert objective.weights["patch_neighbours"] == 0.5
    objective(bench.batch(list(range(20, 28))), step)
    objective.after_step(Step(4, 4, 10**9))
    objects_of, patches_of = objective.bank, objective.patch_bank.bank
    assert objects_of is not None
    assert patches_of is not None
    assert len(patches_of) == 8 * 8
    losses = objective(batch, step).losses
    result = objective.last_result
    assert result is not None
    assert result.objects is not None
    assert result.points is not None
    views = normalised_views(batch, objective.options.views, objective.student.backbone)
    tokens = objective.student.backbone(views).tokens.unflatten(0, (-1, 2))
    pairs = {
        "object_neighbours": (objects_of, result.objects, result.objects.features(tokens)),
        "patch_neighbours": (patches_of, result.points, result.points.features(tokens)),
    }
    for name, (bank, found, student) in pairs.items():
        of_groups = [
            soft_neighbour_loss(student[:, rows], found.teacher[:, rows], found.images[rows], bank, neighbours=3)
            for rows in found.groups(4)
        ]
        wanted = torch.stack(of_groups).mean()
        torch.testing.assert_close(losses[name], wanted)
        assert wanted > 0
    early = objective(batch, Step(0, 4, 12)).losses  # soft neighbours are used from epoch 1 on
    assert early["object_neighbours"] == early["patch_neighbours"] == 0


def test_soft_neighbours_do_not_use_the_object_head(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    off = dict.fromkeys(("losses.image", "losses.cross_view", "losses.cross_image"), 0.0)
    bench = Bench(tiny({**off, "losses.object_neighbours": 1.0, "objects.bank_images": 16}))
    rows: list[int] = []
    head = bench.objective.student.head
    monkeypatch.setattr(head, "forward", lambda x, forward=head.forward: rows.append(x.shape[1]) or forward(x))
    losses = bench(list(range(4))).losses
    assert losses["object_neighbours"] > 0
    assert rows == [4]  # of the images


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("count", [0, 3, 6])
def test_a_batch_must_be_a_whole_number_of_groups(bench: Bench, count: int) -> None:
    batch = bench.batch(list(range(8))).narrow(0, count)
    with pytest.raises(ValueError, match=f"a whole number of groups of 4 images, got {count}"):
        bench.objective(batch, Step(0, 4, 12))


def test_entropies_distinguish_collapse_from_uniformity() -> None:
    prototypes = torch.eye(16)

    def entropies(embeddings: torch.Tensor, temperature: float) -> tuple[float, float]:
        distillation = SelfDistillation(prototypes, prototypes, torch.zeros(16), 0.1, temperature)
        of_mean, mean_of = prototype_entropy(embeddings, distillation)
        return float(of_mean), float(mean_of)

    assert entropies(torch.eye(16)[:1].repeat(32, 1), 0.02) == pytest.approx((0, 0), abs=1e-3)  # all on one
    assert entropies(torch.eye(16), 0.02) == pytest.approx((1, 0), abs=1e-3)  # one each: healthy
    assert entropies(torch.zeros(32, 16), 0.02) == pytest.approx((1, 1), abs=1e-6)  # uniform


# ------------------------------------------------------------------ incompatible options


def test_options_that_no_loss_uses_are_not_checked(tiny: Tiny) -> None:
    assert make(tiny({"losses.cross_image": 0, "objects.bank_images": 1})).weights["cross_image"] == 0
    without_objects = {"losses.cross_view": 0, "losses.cross_image": 0}
    assert make(tiny({**without_objects, "objects.num_objects": 99})).samples().num_objects == 0


@pytest.mark.parametrize(("first", "said"), [(2, False), (3, True)])
def test_a_cross_image_loss_that_never_starts_is_a_warning(
    tiny: Tiny, caplog: pytest.LogCaptureFixture, first: int, said: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        make(tiny({"losses.cross_image_from_epoch": first}))
    assert ("losses.cross_image_from_epoch 3 is beyond optim.epochs 3" in caplog.text) == said


# ------------------------------------------------------------------ clusterings and criteria


def test_kmeans_finds_objects_too(tiny: Tiny) -> None:
    bench = Bench(tiny({"objects.clustering": "kmeans", "objects.position_weight": 0.0}))
    result = bench(list(range(8)))
    assert result.objects is not None
    assert sum(result.objects.counts) > 0
    assert all(loss.isfinite() for loss in result.losses.values())


OWN = """
import torch

def halves(tokens, coordinates, *, num_objects, initial_tokens):
    "Above and below the middle of what both views show."
    height = coordinates[..., 1]
    return (height > height.mean(dim=1, keepdim=True)).long()

def of_the_first_view(objects, jumped):
    valid = torch.zeros(objects.shape[:2], dtype=torch.bool)
    valid[0] = True
    return valid

def too_few(tokens, coordinates, *, num_objects, initial_tokens):
    return torch.zeros(len(tokens), 3, dtype=torch.long)

def shares(tokens, coordinates, *, num_objects, initial_tokens):
    return torch.zeros(tokens.shape[:2])
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with custom functions."""
    (tmp_path / "functions_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "functions_of_mine"


def test_a_custom_clustering_and_criterion(tiny: Tiny, mine: str) -> None:
    bench = Bench(tiny({"objects.clustering": f"{mine}.halves", "objects.criterion": f"{mine}.of_the_first_view"}))
    result = bench(list(range(8)))
    assert result.objects is not None
    assert result.matches is not None
    height = bench.batch(list(range(8)))["coordinates"][..., 1]
    expected = height > height.mean(dim=(1, 2), keepdim=True)
    assert torch.equal(result.objects.labels, expected.long())
    assert set(result.objects.counts) <= {1, 2}
    assert result.matches.valid[0].all()
    assert not result.matches.valid[1].any()


def test_a_run_with_a_custom_clustering(tiny: Tiny, train: Train, resumed: Train, mine: str) -> None:
    own = {"objects.clustering": f"{mine}.halves", "objects.criterion": f"{mine}.of_the_first_view"}
    trained = train(tiny({**own, "losses.cross_image_from_epoch": 0, "optim.epochs": 1}))
    assert all(1 <= float(row["objects_per_image"]) <= 2 for row in trained.rows)
    # The bank is empty in the first step.
    assert [row["bootstrapping_ratio"] for row in trained.rows] == ["0", "0.5", "0.5", "0.5"]
    assert resumed(trust=True).run.summary == trained.run.summary


@pytest.mark.parametrize(("name", "got"), [("too_few", r"int64 of \(8, 3\)"), ("shares", r"float32 of \(8, 32\)")])
def test_a_clustering_with_an_invalid_result_is_named(tiny: Tiny, mine: str, name: str, got: str) -> None:
    with pytest.raises(ValueError, match=rf"{mine}.{name} must return integer labels .* \(B, 2N\) = \(\d+, 32\), got "):
        Bench(tiny({"objects.clustering": f"{mine}.{name}"}))
    bench = Bench(tiny({"objects.bank_images": 16}))
    objects = dataclasses.replace(bench.config.objects, clustering=f"{mine}.{name}")
    with pytest.raises(ValueError, match=f"got torch.{got}"):
        label_tokens(torch.randn(8, 2, 16, 32), bench.batch(list(range(8))), objects)


def test_clusterings_and_criteria_are_found_by_name() -> None:
    assert find_criterion(ObjectsConfig(criterion="none")) == "none"
    assert find_criterion(ObjectsConfig(criterion="cribo.method.cycle_consistency")).__name__ == "cycle_consistency"
    coordinates = torch.rand(2, 12, 2)
    tokens, start = torch.randn(2, 12, 8), torch.stack([torch.randperm(12)[:3] for _ in range(2)])
    for config in (ObjectsConfig(), ObjectsConfig(clustering="kmeans", position_weight=0.0)):
        labels = find_clustering(config)(tokens, coordinates, num_objects=3, initial_tokens=start)
        assert labels.shape == (2, 12)
        assert set(labels.flatten().tolist()) <= {0, 1, 2}
