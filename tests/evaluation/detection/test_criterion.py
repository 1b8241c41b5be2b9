from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_convert, generalized_box_iou

from cribo.evaluation.detection.detector import SetLoss, SetLosses
from cribo.evaluation.detection.model import build_yolos
from cribo.models import Backbone

CLASSES = 3


def plain(logits: Tensor, boxes: Tensor, true_labels: list[Tensor], true_boxes: list[Tensor]) -> SetLosses:
    """Compute the loss of DETR's paper image by image (equations 1 and 2, appendix A.2)."""
    sums = {"label": torch.zeros((), dtype=logits.dtype), "box": 0.0, "giou": 0.0}
    weights = torch.zeros((), dtype=logits.dtype)
    for logit, box, labels, truth in zip(logits, boxes, true_labels, true_boxes, strict=True):
        corners, true_corners = (box_convert(each, "cxcywh", "xyxy") for each in (box, truth))
        distance = (box[:, None] - truth).abs().sum(dim=2)
        giou = generalized_box_iou(corners, true_corners)
        cost = 5 * distance - logit.softmax(dim=1)[:, labels] - 2 * giou
        predicted, objects = map(torch.tensor, linear_sum_assignment(cost.detach().numpy()))
        target = torch.full((len(logit),), CLASSES)
        target[predicted] = labels[objects]
        weight = torch.where(target == CLASSES, 0.1, 1.0).to(logits.dtype)
        sums["label"] = sums["label"] + (weight * F.cross_entropy(logit, target, reduction="none")).sum()
        weights = weights + weight.sum()
        sums["box"] = sums["box"] + distance[predicted, objects].sum()
        sums["giou"] = sums["giou"] + (1 - giou[predicted, objects]).sum()
    number = max(1, sum(map(len, true_labels)))
    label, box, giou = sums["label"] / weights, sums["box"] / number, sums["giou"] / number
    return SetLosses(label + 5 * box + 2 * giou, label, torch.as_tensor(box), torch.as_tensor(giou))


def batch(counts: list[int], queries: int = 9, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def boxes(*size: int) -> Tensor:
        centres = torch.rand(*size, 2, generator=generator, dtype=torch.float64)
        return torch.cat((centres, 0.05 + 0.4 * torch.rand(*size, 2, generator=generator, dtype=torch.float64)), dim=-1)

    logits = 2 * torch.randn(len(counts), queries, CLASSES + 1, generator=generator, dtype=torch.float64)
    labels = [torch.randint(CLASSES, (count,), generator=generator) for count in counts]
    return logits, boxes(len(counts), queries), labels, [boxes(count) for count in counts]


@pytest.mark.parametrize("counts", [[3, 5], [4, 0, 1], [0, 0], [9], [12, 2]])
def test_loss_and_gradients_equal_the_paper(counts: list[int]) -> None:
    logits, boxes, labels, truth = batch(counts)
    gradients = []
    found = []
    for loss in (plain, SetLoss(CLASSES).double()):
        inputs = [logits.clone().requires_grad_(), boxes.clone().requires_grad_()]
        losses = loss(inputs[0], inputs[1], labels, truth)
        found.append(losses)
        gradients.append(torch.autograd.grad(losses.total, inputs, allow_unused=True))
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected.to(value.dtype), rtol=1e-9, atol=1e-9)
    for expected, value in zip(*gradients, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-9)


def test_loss_on_one_device_equals_transformers(tiny_vit: Callable[..., Backbone]) -> None:
    model: Any = build_yolos(tiny_vit(), ["a", "b", "c"], positions=(32, 32), tokens=9)
    _, _, labels, truth = batch([3, 0])
    targets = [{"class_labels": label, "boxes": box.float()} for label, box in zip(labels, truth, strict=True)]
    outputs = model(torch.randn(2, 3, 32, 40), labels=targets)
    ours = SetLoss(CLASSES)(outputs.logits, outputs.pred_boxes, labels, [box.float() for box in truth])
    torch.testing.assert_close(ours.total, outputs.loss)


def test_two_devices_give_the_gradients_of_one() -> None:
    """The gradients of the halves, averaged like DDP, equal those of the whole batch."""
    logits, boxes, labels, truth = batch([6, 0, 1, 2])
    loss = SetLoss(CLASSES).double()
    inputs = [logits.requires_grad_(), boxes.requires_grad_()]
    whole = torch.autograd.grad(loss(logits, boxes, labels, truth).total, inputs)
    halves = [slice(0, 2), slice(2, 4)]
    counted: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        counted.append(value)
        return value

    for half in halves:
        loss(logits[half], boxes[half], labels[half], truth[half], mean_over_devices=note)
    mean = torch.stack(counted).mean(dim=0)
    parts = [
        loss(logits[half], boxes[half], labels[half], truth[half], mean_over_devices=lambda _: mean).total
        for half in halves
    ]
    for value, expected in zip(torch.autograd.grad(torch.stack(parts).mean(), inputs), whole, strict=True):
        torch.testing.assert_close(value, expected)


def test_matching_runs_in_single_precision() -> None:
    logits, boxes, labels, truth = batch([3, 2])
    narrow = SetLoss(CLASSES)(logits.bfloat16(), boxes.bfloat16(), labels, [box.float() for box in truth])
    wide = SetLoss(CLASSES)(logits.bfloat16().float(), boxes.bfloat16().float(), labels, [box.float() for box in truth])
    assert narrow.total.dtype == torch.float32
    assert torch.equal(narrow.total, wide.total)
