"""MAE, against its definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.objectives.conftest import batch_of
from tests.objectives.literal import assert_steps_are, unequal

from cribo.data.samples import Batch
from cribo.models import build_backbone, normalise, save_backbone
from cribo.objectives import Setting, Step
from cribo.objectives.rivals.dropping import KeepTokens
from cribo.objectives.rivals.mae import MAE, masked_error, patchify, sincos_positions
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(0, steps_per_epoch=4, total_steps=12)
ARGS = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> MAE:
    return MAE(Setting(tiny({"backbone.drop_path": 0.0, **(changes or {})}), 36, 4), **{**ARGS, **args})


def test_patches_are_cut_row_by_row() -> None:
    images = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    patches = patchify(images, 2)
    assert patches.shape == (2, 6, 12)
    for number, (row, column) in enumerate([(0, 0), (0, 2), (0, 4), (2, 0), (2, 2), (2, 4)]):
        expected = images[:, :, row : row + 2, column : column + 2].permute(0, 2, 3, 1).flatten(1)
        assert torch.equal(patches[:, number], expected)


def test_the_error_is_over_masked_patches_only() -> None:
    predicted, targets = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
    predicted[0, 1], predicted[0, 2], predicted[1, 0] = 1.0, 5.0, 2.0
    masked = torch.tensor([[1, 3], [0, 2]])
    assert masked_error(predicted, targets, masked) == pytest.approx((3 * 1 + 3 * 4) / 12)


def test_the_encoder_does_not_read_masked_patches(tiny: Tiny) -> None:
    objective = make(tiny).eval()
    batch = batch_of(objective)
    order, seen = batch["order"], objective.seen
    assert order.sort(dim=1).values.tolist() == [list(range(16))] * 4
    assert seen == 4
    images = normalise(batch["view"][:, 0].float() / 255)

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        with objective.keep.only(order[:, :seen]):
            return objective.backbone(pixels).tokens

    before = encode(images)
    assert before.shape == (4, seen, 32)
    changed = images.clone()
    place = int(order[0, seen])  # the first masked patch of the first image
    row, column = divmod(place, 4)
    changed[0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
    assert torch.equal(encode(changed), before)
    place = int(order[0, 0])
    row, column = divmod(place, 4)
    changed[0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
    assert not torch.equal(encode(changed), before)


def test_without_a_mask_the_backbone_is_unchanged(tiny: Tiny) -> None:
    objective = make(tiny)
    options = objective.options
    plain = build_backbone(options.backbone.name, args=options.backbone.args, image_size=32)
    plain.load_state_dict(objective.backbone.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(objective.exported().eval().encode(images), plain.eval().encode(images))


def test_the_decoder_restores_the_order_of_tokens(tiny: Tiny) -> None:
    """With embedding and prediction only, the output of a visible patch depends on its own token, after [CLS]."""
    objective = make(tiny)
    decoder = objective.decoder
    decoder.blocks = torch.nn.Sequential()
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(n)) for n in range(2)])
    seen = torch.randn(2, 5, 32, requires_grad=True)
    predicted = decoder(seen, order)
    assert predicted.shape == (2, 16, 3 * 64)
    (gradient,) = torch.autograd.grad(predicted[0, order[0, 2]].sum(), seen)
    assert gradient[0, 3].abs().sum() > 0
    assert gradient[0, [0, 1, 2, 4]].abs().sum() == gradient[1].abs().sum() == 0


def test_targets_are_normalised_by_patch(tiny: Tiny) -> None:
    """The error of a zero prediction is the targets' variance, which is 1 up to Bessel's correction."""
    objective = make(tiny)
    torch.nn.init.zeros_(objective.decoder.predict.weight)
    torch.nn.init.zeros_(objective.decoder.predict.bias)
    loss = objective(batch_of(objective), STEP).losses["mae"]
    assert loss.item() == pytest.approx(191 / 192, rel=1e-2)


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, torch.Tensor]:
    """Compute the squared error of the masked patches, one image and one patch at a time."""
    model, decoder = objective.backbone.model, objective.decoder
    pixels = batch["view"][:, 0].float() / 255
    images = normalise(pixels, mean=objective.backbone.mean, std=objective.backbone.std).double()
    errors = []
    for image, order in zip(images, batch["order"].tolist(), strict=True):
        embedded = model._pos_embed(model.patch_embed(image[None]))
        seen = [0, *(1 + patch for patch in order[: objective.seen])]
        cls, *encoded = decoder.embed(model.norm(model.blocks(embedded[:, seen]))[0])
        tokens = [decoder.mask_token[0, 0]] * 16
        for patch, token in zip(order, encoded, strict=False):
            tokens[patch] = token
        tokens = torch.stack([cls, *tokens]) + decoder.positions[0]
        predicted = decoder.predict(decoder.norm(decoder.blocks(tokens[None])))[0, 1:]
        for patch in order[objective.seen :]:
            row, column = 8 * (patch // 4), 8 * (patch % 4)
            pixels = image[:, row : row + 8, column : column + 8].permute(1, 2, 0).flatten()
            target = (pixels - pixels.mean()) / (pixels.var() + 1e-6).sqrt()
            errors.append((predicted[patch] - target).square().mean())
    return {"mae": torch.stack(errors).mean()}


def test_two_steps_are_those_written_out(tiny: Tiny) -> None:
    objective = unequal(make(tiny))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]
    assert_steps_are(objective, batches, written_losses, lambda own, step: None, tolerance=1e-5)


def test_positions_encode_rows_and_columns() -> None:
    positions = sincos_positions((3, 4), 16)[0].view(3, 4, 16)
    assert torch.equal(positions[0, :, :8], positions[0, :1, :8].expand(4, 8))  # the row's half
    assert torch.equal(positions[:, 0, 8:], positions[:1, 0, 8:].expand(3, 8))  # the column's half
    assert len(positions.flatten(0, 1).unique(dim=0)) == 12


def test_positions_of_the_encoder_are_fixed_unless_it_is_pretrained(tiny: Tiny, tmp_path: Any) -> None:
    objective = make(tiny)
    positions = objective.backbone.model.pos_embed
    assert not positions.requires_grad
    assert torch.equal(positions[:, 1:], sincos_positions((4, 4), 32))
    assert not positions[:, 0].any()
    pretrained = build_backbone("vit_tiny_patch16_224", args=tiny().backbone.args, image_size=32, seed=3)
    save_backbone(pretrained, tmp_path)
    continued = make(tiny, {"backbone.pretrained": str(tmp_path / "backbone.safetensors")}).backbone.model.pos_embed
    assert continued.requires_grad
    assert torch.equal(continued, pretrained.model.pos_embed)


def test_without_a_class_token_the_decoder_reads_patches_only(tiny: Tiny) -> None:
    args = {**tiny().backbone.args, "class_token": False, "global_pool": "avg"}
    objective = make(tiny, {"backbone.args": args})
    assert objective.decoder.get_buffer("positions").shape[1] == 16
    assert objective(batch_of(objective), STEP).losses["mae"] > 0


def test_prefix_tokens_are_always_kept() -> None:
    tokens = torch.arange(2 * 5.0).view(2, 5, 1)
    keep = KeepTokens(1)
    assert torch.equal(keep(tokens), tokens)
    keep.kept = torch.tensor([[3, 0], [1, 2]])
    assert keep(tokens)[..., 0].tolist() == [[0, 4, 1], [5, 7, 8]]


def test_it_trains(tiny: Tiny, tmp_path: Any) -> None:
    optim = {"optim.epochs": 12, "backbone.drop_path": 0.0, "optim.lr": 0.1}
    run = pretrain(tiny({**optim, "objective.name": "mae", "objective.args": ARGS}), out=tmp_path)
    assert run.summary["losses"]["mae"] < 1.0
