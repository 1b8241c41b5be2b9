"""The losses of a batch, by their definition."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cribo.data.pairs import ViewPairDataset, ViewPairs, collate
from cribo.data.scenes import Scenes
from cribo.method import MemoryBank, SelfDistillation
from cribo.pretraining import PretrainConfig, PretrainingModule
from cribo.pretraining.objective import Objective, prototype_entropy

Tiny = Callable[..., PretrainConfig]


def a_batch(config: PretrainConfig, module: PretrainingModule, images: list[int], epoch: int = 0) -> ViewPairs:
    backbone = module.student.backbone
    dataset = ViewPairDataset(
        Scenes(64, size=40),
        config.views,
        grid=(4, 4),
        num_objects=config.objects.num_objects,
        drop_path_sites=backbone.num_drop_path_sites,
        seed=config.seed,
    )
    return collate([dataset[epoch, image] for image in images])


class Bench:
    """An objective outside of a run, with a student that is not its teacher, and a bank with some images in it."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        self.module = PretrainingModule(config, num_images=64, steps_per_epoch=4)
        self.bank = MemoryBank(num_images=16, num_objects=config.objects.num_objects, dim=32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.module.student.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            for centre in (self.module.image_centre, self.module.object_centre):
                centre.value += 0.1 * torch.randn(centre.value.shape, generator=generator)
        remembered = self(list(range(40, 52)), epoch=0)
        self.bank.push(remembered.objects.teacher, remembered.objects.images, remembered.objects.counts)

    def objective(self, config: PretrainConfig) -> Objective:
        module = self.module
        return Objective(
            config,
            student=module.student,
            teacher=module.teacher,
            image_centre=module.image_centre,
            object_centre=module.object_centre,
            bank=self.bank,
        )

    def __call__(self, images: list[int], *, epoch: int = 1, **objects: Any) -> Any:
        config = dataclasses.replace(self.config, objects=dataclasses.replace(self.config.objects, **objects))
        batch = a_batch(config, self.module, images)
        return self.objective(config)(batch, epoch=epoch, teacher_temperature=0.05, train_backbone=True)


@pytest.fixture
def bench(tiny: Tiny) -> Bench:
    return Bench(tiny({"losses.cross_image_from_epoch": 1, "objects.group_size": 4, "backbone.drop_path": 0.3}))


def test_the_losses_are_means_over_groups_of_their_own_means(bench: Bench) -> None:
    whole = bench(list(range(8)))
    parts = [bench(list(range(4))), bench(list(range(4, 8)))]
    for name, loss in whole.losses.items():
        expected = sum(part.losses[name] for part in parts) / 2
        assert loss > 0
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_the_group_decides_what_a_cycle_may_end_on(bench: Bench) -> None:
    """A larger group has more objects that an object's neighbour may return to: never more cycles close."""
    valid = [int(bench(list(range(8)), group_size=size).matches.valid.sum()) for size in (1, 2, 4, 8)]
    assert valid == sorted(valid, reverse=True)
    assert valid[0] > valid[-1] > 0


def test_a_group_without_objects_adds_0_and_stays_in_the_graph(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from cribo.pretraining import objective

    find = objective.find_objects
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

    monkeypatch.setattr(objective, "find_objects", find_none_in_the_first_group)
    result = bench(list(range(8)))
    for name in ("cross_view", "cross_image"):
        torch.testing.assert_close(result.losses[name], with_objects.losses[name] / 2, rtol=1e-5, atol=1e-6)


def test_without_any_object_the_object_losses_are_0_and_can_be_differentiated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cribo.pretraining import objective

    find = objective.find_objects

    def find_none(*args: Any) -> Any:
        found = find(*args)
        none = found.rows[:0]
        return dataclasses.replace(
            found, teacher=found.teacher[:, :0], rows=none, clusters=none, images=none, counts=[0] * len(found.counts)
        )

    monkeypatch.setattr(objective, "find_objects", find_none)
    result = bench(list(range(8)))
    assert result.losses["cross_view"].item() == result.losses["cross_image"].item() == 0
    bench.module.zero_grad()
    (result.losses["image"] + result.losses["cross_view"] + result.losses["cross_image"]).backward()
    gradients = [p.grad for p in bench.module.student.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_no_gradient_reaches_a_frozen_backbone_or_the_teacher(bench: Bench) -> None:
    batch = a_batch(bench.config, bench.module, list(range(4)))
    result = bench.objective(bench.config)(batch, epoch=1, teacher_temperature=0.05, train_backbone=False)
    bench.module.zero_grad()
    torch.stack(list(result.losses.values())).sum().backward()
    assert all(parameter.grad is None for parameter in bench.module.student.backbone.parameters())
    assert all(parameter.grad is None for parameter in bench.module.teacher.parameters())
    assert bench.module.student.head.mlp[0].weight.grad is not None


def test_kmeans_finds_objects_too(tiny: Tiny) -> None:
    bench = Bench(tiny({"objects.clustering": "kmeans", "objects.position_weight": 0.0}))
    result = bench(list(range(8)))
    assert sum(result.objects.counts) > 0
    assert all(loss.isfinite() for loss in result.losses.values())


def test_entropies_tell_collapse_from_uniformity() -> None:
    prototypes = torch.eye(16)

    def entropies(embeddings: torch.Tensor, temperature: float) -> tuple[float, float]:
        distillation = SelfDistillation(prototypes, prototypes, torch.zeros(16), 0.1, temperature)
        of_mean, mean_of = prototype_entropy(embeddings, distillation)
        return float(of_mean), float(mean_of)

    assert entropies(torch.eye(16)[:1].repeat(32, 1), 0.02) == pytest.approx((0, 0), abs=1e-3)  # all on one
    assert entropies(torch.eye(16), 0.02) == pytest.approx((1, 0), abs=1e-3)  # each on its own: healthy
    assert entropies(torch.zeros(32, 16), 0.02) == pytest.approx((1, 1), abs=1e-6)  # uniform
