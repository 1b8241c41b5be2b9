"""The loss, the schedule and the score shared by segmentation trainings."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from cribo.data.labelled.crops import Crops, MMSegPreparation, WholeImages
from cribo.evaluation.segmentation import training as shared
from cribo.evaluation.segmentation.inference import Inference
from cribo.evaluation.segmentation.training import SegmentationModule, pixel_cross_entropy, polynomial_decay
from cribo.features.scores import iou
from cribo.models import normalise

from .squares import Squares, score, tiny_vit

PATCH = 16

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")


class Watched(SegmentationModule):
    """Predicts the classes of squares from their colours, and records its inputs."""

    def __init__(self, heads: tuple[str, ...] = ("only",)) -> None:
        super().__init__(tiny_vit(), classes=4, heads=heads, steps=3, inference=Inference())
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[Tensor] = []

    def logits(self, images: Tensor, *, drop_path_noise: Tensor | None = None) -> Tensor:
        self.seen.append(images)
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (self.backbone.mean, self.backbone.std))
        colours = F.avg_pool2d(images, PATCH) * std + mean - 130 / 255
        found = torch.cat((torch.zeros_like(colours[:, :1]), colours), dim=1) * self.weight
        return torch.stack([found.roll(place, 1) for place in range(len(self.head_names))])

    def parameter_groups(self) -> list[dict]:
        return [{"params": [self.weight], "lr": 0.5}]


@pytest.mark.parametrize("budget", [1, 10**9])
def test_cross_entropy_over_pixels(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(shared, "_BUDGET", budget)  # image by image, or all at once
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (3, 24, 16), generator=generator).to(torch.uint8)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = 255
    logits, expected_logits = (torch.randn(3, 5, 3, 2, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    loss = pixel_cross_entropy(logits.requires_grad_(), labels)
    full = F.interpolate(expected_logits.requires_grad_(), size=(24, 16), mode="bilinear", align_corners=False)
    expected = F.cross_entropy(full, labels.long(), ignore_index=255, reduction="none").mean()
    assert torch.allclose(loss, expected)
    (2 * loss).backward()
    (2 * expected).backward()
    assert logits.grad is not None
    assert expected_logits.grad is not None
    assert torch.allclose(logits.grad, expected_logits.grad, atol=1e-7)


def test_cross_entropy_of_half_precision_is_computed_in_single() -> None:
    logits = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    labels = torch.randint(0, 3, (1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pixel_cross_entropy(logits.requires_grad_(), labels)
    assert found == pixel_cross_entropy(logits.detach().float(), labels)
    found.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_a_batch_without_labels_has_zero_gradients() -> None:
    logits = torch.randn(1, 3, 2, 2, requires_grad=True)
    loss = pixel_cross_entropy(logits, torch.full((1, 8, 8), 255, dtype=torch.uint8))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_learning_rates_fall_to_a_tenth() -> None:
    factor = polynomial_decay(80000)
    assert factor(0) == 1
    assert factor(79999) == factor(90000) == pytest.approx(0.1)
    assert factor(40000) == pytest.approx(0.1 + 0.9 * 0.5**0.9, abs=1e-4)
    assert polynomial_decay(1)(0) == 1


def test_learning_rates_without_a_floor_equal_torch() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(()))], lr=0.5)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=9, power=0.9)
    factor = polynomial_decay(10, last=0.0)
    for step in range(10):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * factor(step))
        optimizer.step()
        schedule.step()


def test_crops_are_filled_with_zeros_after_normalisation() -> None:
    module = Watched()
    crop = Crops(Squares(rows=1, columns=1), MMSegPreparation(144, None), seed=0)[0, 0]
    module.training_step(default_collate([crop]), 0)
    (seen,) = module.seen
    height, width = crop.extent.tolist()
    assert (seen[0, :, height:] == 0).all()
    assert (seen[0, :, :, width:] == 0).all()
    assert (seen[0, :, :height, :width] != 0).any(dim=0).all()


def test_the_loss_is_the_sum_of_the_heads() -> None:
    batch = default_collate([Crops(Squares(), MMSegPreparation(64, None), seed=0)[0, 0]])
    module = Watched(("a", "b"))
    images = normalise(batch.pixels / 255, mean=module.backbone.mean, std=module.backbone.std)
    single = [pixel_cross_entropy(head, batch.labels) for head in module.logits(images)]
    assert torch.allclose(module.training_step(batch, 0), single[0] + single[1])


def test_heads_are_scored_over_all_images_in_each_validation() -> None:
    module, images = Watched(("right", "wrong")), WholeImages(Squares(), MMSegPreparation(64, None))
    first = score(module, images)
    assert first[0] > 0.95  # except pixels at the edges of squares
    assert first[1] < 0.01
    assert int(module.confusions[0].sum()) == sum(images[index].labels.numel() for index in range(len(images)))
    assert first[0] == float(iou(module.confusions[0]).nanmean())
    assert score(module, images) == first


def test_predictions_have_the_requested_size() -> None:
    images = Squares()
    found = Watched().segment(images.load(0), (64, 96))
    assert (found[0] == images.labels(0)[1::2, 1::2]).float().mean() > 0.95


def test_networks_of_fixed_size_receive_that_size() -> None:
    class Fixed(Watched):
        def __init__(self) -> None:
            backbone = tiny_vit()
            backbone.takes_any_size = False
            SegmentationModule.__init__(self, backbone, classes=4, heads=("only",), steps=1, inference=Inference())
            self.weight, self.seen = nn.Parameter(torch.ones(())), []

    module = Fixed()
    module.segment(Squares().load(0)[:, :20, :20], (20, 20))
    assert module.seen[0].shape == (1, 3, 32, 32)
