"""Contextual pretraining, our interpretation of Hummingbird, against a literal restatement of its formulas."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.objectives.conftest import batch_of
from tests.objectives.literal import MOMENTUM, assert_steps_are, follow, unequal
from torch import Tensor

from cribo.data.samples import Batch
from cribo.objectives import Setting, Step
from cribo.objectives.banks import RowQueue
from cribo.objectives.rivals.contextual import ContextNetwork, Contextual, attend, contrast
from cribo.objectives.views import normalised_views
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
DISTINCT = {"head.init_std": 0.2, "backbone.drop_path": 0.0}


def make(tiny: Tiny, changes: dict[str, Any] | None = None, *, rows: int = 0, **args: Any) -> Contextual:
    """Create an objective in float64 with random rows in its memory, and a teacher that differs from the student."""
    objective = Contextual(Setting(tiny({**DISTINCT, **(changes or {})}), 36, 4), **args).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in objective.teacher.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    for _ in range(rows):  # of different lengths
        row = torch.randn((1, objective.memory.rows.shape[1]), generator=generator)
        objective.memory.push((1 + 3 * torch.rand(1, generator=generator)) * row)
    return objective


def gradients(objective: Contextual, loss: Tensor) -> dict[str, Tensor]:
    objective.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in objective.student.named_parameters() if p.grad is not None}


def unit(vector: Tensor) -> Tensor:
    return vector / (vector @ vector).sqrt()


def softmax(logits: list[Tensor]) -> list[Tensor]:
    total = sum(logit.exp() for logit in logits)
    return [logit.exp() / total for logit in logits]


def literal_embedding(
    network: ContextNetwork, patches: Tensor, memory: Tensor, weight: float, temperature: float
) -> Tensor:
    """Embed one view patch by patch."""
    mixed: list[Tensor] = []
    for h in patches:
        direction = (1 - weight) * unit(h)
        if len(memory):
            attention = softmax([unit(h) @ unit(row) / temperature for row in memory])
            weighted = [a * network.values(row) for a, row in zip(attention, memory, strict=True)]
            direction = direction + weight * unit(torch.stack(weighted).sum(dim=0))
        else:
            direction = direction / (1 - weight)
        mixed.append(network.context(direction))
    pooled = []
    for query in network.pooling.queries:
        mask = softmax([query @ c for c in mixed])
        pooled.append(sum(m * c for m, c in zip(mask, mixed, strict=True)))
    return unit(network.projector(torch.cat(pooled)))


def literal_loss(objective: Contextual, batch: Batch) -> Tensor:
    """Compute the loss of a batch with loops over images, patches and rows of the memory."""
    settings = (objective.memory.read(), objective.context_weight, objective.context_temperature)
    embeddings: dict[str, list[list[Tensor]]] = {}
    for name, network in (("student", objective.student), ("teacher", objective.teacher)):
        tokens = network.backbone(normalised_views(batch, objective.options.views, network.backbone)).tokens
        embeddings[name] = [
            [literal_embedding(network, patches, *settings) for patches in pair]
            for pair in tokens.unflatten(0, (-1, 2))
        ]
    losses = []
    for own in range(len(batch)):
        for view in (0, 1):
            predicted = unit(objective.student.predictor(embeddings["student"][own][view]))
            terms = [
                (predicted @ other[1 - view].detach() / objective.temperature).exp() for other in embeddings["teacher"]
            ]
            losses.append(-(terms[own] / sum(terms)).log())
    return sum(losses, torch.zeros(())) / len(losses)


@pytest.mark.parametrize(("rows", "queries"), [(7, 1), (12, 3), (0, 1)], ids=["one mask", "three masks", "empty"])
def test_the_loss_and_its_gradients_are_those_of_the_formulas(tiny: Tiny, rows: int, queries: int) -> None:
    args = {"pooling_queries": queries, "context_weight": 0.3, "context_temperature": 0.2, "temperature": 0.3}
    objective = make(tiny, rows=rows, memory_images=12, **args)
    batch = batch_of(objective)
    loss, expected = objective(batch, STEP).losses["contrast"], literal_loss(objective, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    found, literal = gradients(objective, loss), gradients(objective, expected)
    assert any(name.startswith("values") for name in found) == (rows > 0)
    assert found.keys() == literal.keys()
    assert all(gradient.any() for gradient in found.values())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, literal[name], rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_two_steps_are_those_written_out(tiny: Tiny) -> None:
    """The second step reads what the first one has added to the memory."""
    objective = unequal(make(tiny, {"optim.momentum": MOMENTUM}, memory_images=12), scale=0.1)

    def losses(own: Any, batch: Batch, step: Step) -> dict[str, Tensor]:
        views = normalised_views(batch, own.options.views, own.teacher.backbone)
        own.seen = own.teacher.backbone(views).tokens.detach().unflatten(0, (-1, 2)).mean(dim=(1, 2))
        return {"contrast": literal_loss(own, batch)}

    def update(own: Any, step: Step) -> None:
        own.memory.rows[own.memory.written : own.memory.written + 4] = own.seen
        own.memory.written += 4
        follow(own, step)

    batches = [batch_of(objective, 4, first) for first in (0, 4)]
    assert_steps_are(objective, batches, losses, update, tolerance=1e-7)
    assert len(objective.memory) == 8


def test_blocks_change_neither_loss_nor_gradients(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = make(tiny, rows=12)
    batch = batch_of(objective)
    whole = objective(batch, STEP)
    expected = gradients(objective, whole.losses["contrast"])
    monkeypatch.setattr("cribo.objectives.rivals.contextual.rows_per_block", lambda *args: 5)
    split = objective(batch, STEP)
    torch.testing.assert_close(split.losses, whole.losses)
    torch.testing.assert_close(split.metrics["context_entropy"], whole.metrics["context_entropy"])
    torch.testing.assert_close(gradients(objective, split.losses["contrast"]), expected)


def test_images_of_other_ranks_are_negatives(tiny: Tiny) -> None:
    """Two halves of a batch, each with the embeddings of the other: the mean of their losses is that of the whole."""
    objective = make(tiny, rows=12)
    batch = batch_of(objective)
    whole = objective(batch, STEP).losses["contrast"]
    seen: list[Tensor] = []
    for part in batch.split(2):
        objective(part, dataclasses.replace(STEP, gather=lambda value: (seen.append(value), value[None])[1]))
    step = dataclasses.replace(STEP, gather=lambda value: torch.stack(seen))
    halves = [objective(part, step).losses["contrast"] for part in batch.split(2)]
    torch.testing.assert_close(torch.stack(halves).mean(), whole)


def test_entropy_and_accuracy_show_uniform_attention_and_collapse(tiny: Tiny) -> None:
    objective = make(tiny, rows=12)
    objective.memory.rows.copy_(torch.ones(()))
    output = objective(batch_of(objective), STEP)
    torch.testing.assert_close(output.metrics["context_entropy"], torch.tensor(1.0).double())
    _, entropy = attend(torch.eye(3), torch.eye(3), torch.eye(3), temperature=0.01)
    assert (entropy < 1e-6).all()  # of one row
    views = torch.eye(3, 5)
    order = torch.tensor([0, 2, 1])
    assert contrast(views, views, views, temperature=0.1)[1].tolist() == [True] * 3
    assert contrast(views[order], views, views, temperature=0.1)[1].tolist() == [True, False, False]
    same = torch.eye(1, 5).expand(3, 5)
    assert contrast(same, same, same, temperature=0.1)[1].tolist() == [False] * 3


def test_the_memory_holds_the_last_rows_and_is_restored() -> None:
    memory, rows = RowQueue(5, 2), torch.arange(24.0).view(12, 2)
    assert len(memory.read()) == 0
    memory.push(rows[:3])
    assert memory.read().tolist() == rows[:3].tolist()
    memory.push(rows[3:7])
    assert memory.read().tolist() == rows[[5, 6, 2, 3, 4]].tolist()
    restored = RowQueue(5, 2)
    restored.load_state_dict(memory.state_dict())
    for each in (memory, restored):
        each.push(rows[7:])
        assert sorted(each.read().tolist()) == rows[7:].tolist()
    assert restored.read().tolist() == memory.read().tolist()


def test_a_step_fills_the_memory_and_moves_the_teacher(tiny: Tiny) -> None:
    objective = make(tiny, memory_images=20)
    batch, backbone = batch_of(objective), objective.teacher.backbone
    tokens = backbone(normalised_views(batch, objective.options.views, backbone)).tokens
    expected = torch.stack([pair.flatten(0, 1).mean(dim=0) for pair in tokens.unflatten(0, (-1, 2))])
    before = {name: value.clone() for name, value in objective.teacher.named_parameters()}
    assert not any(name.startswith("predictor") for name in before)
    output = objective(batch, STEP)
    assert "context_entropy" not in output.metrics  # the memory is empty
    with torch.no_grad():
        for parameter in objective.student.parameters():
            parameter += 0.1
    objective.after_step(dataclasses.replace(STEP, gather=lambda rows: torch.stack((rows, 2 * rows))))
    torch.testing.assert_close(objective.memory.read(), torch.cat((expected, 2 * expected)))
    momentum, student = objective.schedules(STEP)["momentum"], dict(objective.student.named_parameters())
    for name, value in objective.teacher.named_parameters():
        torch.testing.assert_close(value, momentum * before[name] + (1 - momentum) * student[name])
    assert "context_entropy" in objective(batch, STEP).metrics


def test_without_weight_the_memory_is_not_read(tiny: Tiny) -> None:
    full, empty = (make(tiny, rows=rows, context_weight=0.0) for rows in (12, 0))
    outputs = [objective(batch_of(objective), STEP) for objective in (full, empty)]
    assert all("context_entropy" not in output.metrics for output in outputs)
    torch.testing.assert_close(outputs[0].losses, outputs[1].losses, rtol=0, atol=0)


def test_the_memory_holds_half_the_images_by_default(tiny: Tiny) -> None:
    for images, expected in ((36, 18), (10, 8), (1_281_167, 153_600)):
        assert len(Contextual(Setting(tiny(), images, 4)).memory.rows) == expected


def test_the_loss_falls_and_images_stay_different(tiny: Tiny) -> None:
    objective = make(tiny, {"optim.momentum": (0.9, 0.9)}, memory_images=16)
    optimiser = torch.optim.AdamW(objective.trainable().parameters(), lr=1e-3)
    batch, outputs = batch_of(objective, 8), []
    for _ in range(40):
        outputs.append(objective(batch, STEP))
        optimiser.zero_grad()
        outputs[-1].losses["contrast"].backward()
        optimiser.step()
        objective.after_step(STEP)
    assert outputs[-1].losses["contrast"] < 0.7 * outputs[0].losses["contrast"]
    assert outputs[-1].metrics["accuracy"][0] >= 12  # of 16 views; none if all are equal
    assert outputs[-1].metrics["context_entropy"] < 1


def test_a_convolutional_network_trains(tiny: Tiny, tmp_path: Any) -> None:
    network = {"backbone.name": "resnet18", "backbone.args": {"layers": [1, 1, 0, 0], "channels": [16] * 4}}
    short = {"optim.epochs": 1, "optim.warmup_epochs": 0, "objective.name": "contextual"}
    run = pretrain(tiny({**network, **short}), out=tmp_path)
    assert 0 < run.summary["losses"]["contrast"] < 5
