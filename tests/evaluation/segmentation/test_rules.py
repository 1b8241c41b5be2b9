"""Each rule of the variants, with known differences."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from cribo.base.errors import ConfigError
from cribo.data.labelled.crops import Crops, MMSegPreparation
from cribo.evaluation import evaluate
from cribo.evaluation.config import TrainingRuntime
from cribo.evaluation.data import SegmentationData
from cribo.evaluation.segmentation.finetuning import FinetunedSegmenter
from cribo.evaluation.segmentation.inference import Inference, segment_image
from cribo.evaluation.segmentation.linear import Linear, LinearSegmentation
from cribo.evaluation.segmentation.rules import LINEAR, SEGMENTER, Rules
from cribo.evaluation.segmentation.segmenter import MaskTransformer
from cribo.evaluation.segmentation.trained import load_segmenter
from cribo.evaluation.segmentation.training import (
    follow_rules,
    labelled_pixels,
    pixel_cross_entropy,
    preparation,
    step_decay,
)
from cribo.features import BackboneSource
from cribo.models import Backbone, build_backbone

from .squares import Squares, tiny_vit

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")

RELEASED = LINEAR["released"]
ARGS = {"depth": 2, "embed_dim": 32, "num_heads": 2}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def heads(rules: Rules, backbone: Backbone | None = None, **changes: Any) -> LinearSegmentation:
    settings: dict[str, Any] = {"classes": 4, "learning_rates": (0.5,), "steps": 10, "rules": rules}
    return LinearSegmentation(backbone or tiny_vit(), **(settings | changes))


def test_only_the_last_of_several_layers_passes_the_final_norm() -> None:
    backbone, images = tiny_vit(), noise(1, 3, 32, 32)
    norm = backbone.model.norm
    with torch.no_grad():
        norm.weight.fill_(3.0)
        norm.bias.fill_(1.0)
    layer = backbone.encode(images, 2, normalised_layers="last").tokens[..., :32]
    every, last = backbone.encode(images, 2).tokens, backbone.encode(images, 2, normalised_layers="last").tokens
    torch.testing.assert_close(every[..., :32], F.layer_norm(layer, (32,), norm.weight, norm.bias, norm.eps))
    torch.testing.assert_close(every[..., 32:], last[..., 32:])
    for rules, tokens in ((LINEAR["paper"], every), (RELEASED, last)):
        module = heads(rules, backbone, layers=2)
        (head,) = module.heads
        torch.testing.assert_close(module.logits(images)[0].flatten(2).mT, head(tokens))


@pytest.mark.parametrize("global_pool", ["token", "avg"])  # with `avg`, the final norm follows the pooling
def test_one_layer_always_passes_the_final_norm(global_pool: str) -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args={**ARGS, "global_pool": global_pool}, image_size=32)
    images = noise(1, 3, 32, 32)
    for every, last in zip(backbone.encode(images), backbone.encode(images, normalised_layers="last"), strict=True):
        torch.testing.assert_close(every, last)
    every, last = (backbone.encode(images, 2, normalised_layers=kind).tokens for kind in ("all", "last"))
    assert torch.equal(every[..., 32:], last[..., 32:])
    assert not torch.allclose(every[..., :32], last[..., :32], atol=1e-2)


def test_all_channels_have_equal_normalisation() -> None:
    backbone = tiny_vit()
    before = backbone.mean
    follow_rules(LINEAR["paper"], backbone)
    assert backbone.mean == before
    follow_rules(RELEASED, backbone)
    assert (backbone.mean, backbone.std) == ((0.5,) * 3, (0.5,) * 3)


def run_of(name: str, images: Any = None) -> Any:
    data = SimpleNamespace(train=images or Squares(), about={"name": name})
    return SimpleNamespace(source=BackboneSource("x"), data=data)


@pytest.mark.parametrize(
    ("variant", "name", "beyond"), [("paper", "voc", 0.0), ("released", "voc", -1.0), ("released", "ade20k", 0.0)]
)
def test_voc_is_padded_with_black(variant: Any, name: str, beyond: float) -> None:
    seen = []

    class Watched(LinearSegmentation):
        def logits(self, images: Tensor, **options: Any) -> Tensor:
            seen.append(images)
            return super().logits(images, **options)

    settings = Linear(variant=variant, drop_path=0.0).for_data(name, tiny_vit())
    backbone = tiny_vit()
    follow_rules(settings.rules, backbone)
    wide = Squares(rows=1, columns=8)  # resized to at most 512 x 2048 pixels times 0.5 to 2
    crops = Crops(wide, preparation(settings, run_of(name, wide)), seed=0)
    key = next((0, index) for index in range(4) if (crops[0, index].labels[-1] == 255).all())
    Watched(backbone, classes=4, learning_rates=(0.1,), steps=1).training_step(default_collate([crops[key]]), 0)
    assert (seen[0][0, :, -1] == beyond).all()


def test_pascal_context_is_cropped_at_480_of_512() -> None:
    large = Squares(rows=10, columns=10)
    sizes = {}
    for variant in ("paper", "released"):
        for name in ("pascal-context-60", "voc"):
            settings = Linear(variant=variant).for_data(name, tiny_vit())
            crops = Crops(large, preparation(settings, run_of(name, large)), seed=0)
            found = [crops[0, index] for index in range(4)]
            assert all(crop.pixels.shape == (3, 512, 512) for crop in found)
            sizes[variant, name] = max((crop.labels != 255).any(dim=0).sum().item() for crop in found)
    assert sizes["released", "pascal-context-60"] == 480
    assert {size for key, size in sizes.items() if key != ("released", "pascal-context-60")} == {512}


def test_weight_decay_is_added_to_the_gradient() -> None:
    """Adam divides gradients by their size: L2 moves a weight by the rate, AdamW's decay by rate x decay x weight."""
    for rules, moved in ((LINEAR["paper"], 0.0), (RELEASED, 0.5)):
        module = heads(rules)
        optimizer = module.configure_optimizers()["optimizer"]
        weight = next(module.heads.parameters())
        before = weight.detach().clone()
        for parameter in module.heads.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        torch.testing.assert_close(before - weight, moved * before.sign(), atol=0.01, rtol=0)


def test_drop_path_is_active_in_training_only() -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args=ARGS, image_size=32, drop_path=0.1)
    follow_rules(RELEASED, backbone)
    module = heads(RELEASED, backbone).train()
    images, plain = noise(1, 3, 32, 32), heads(LINEAR["paper"])
    torch.testing.assert_close(module.logits(images), plain.logits(images))
    assert backbone.num_drop_path_sites == 2  # the branches of the last block; the first block has rate 0
    crops = Crops(Squares(), MMSegPreparation(32, None), seed=0, sites=2)
    batch = default_collate([crops[0, 0]])
    losses = [
        module.training_step(batch._replace(drop_path_noise=torch.tensor([values])), 0).item()
        for values in ((0.05, 0.9), (0.9, 0.9), (0.9, 0.05))
    ]
    assert losses[0] == losses[1]
    assert losses[2] != pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("of_decoder", [False, True])
def test_drop_path_drops_only_the_feed_forward_branch(of_decoder: bool) -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args=ARGS, image_size=32, drop_path=0.5)
    decoder = MaskTransformer(32, 4, drop_path=0.5)
    follow_rules(SEGMENTER["released"], backbone, decoder)
    network: Any = decoder if of_decoder else backbone
    block: Any = (network if of_decoder else backbone.model).blocks[1]
    assert network.drop_path_rates == (0.0, 0.5)
    passed: dict[str, Tensor] = {}
    block.norm2.register_forward_hook(lambda _, inputs, __: passed.update(attended=inputs[0]))
    block.register_forward_hook(lambda _, __, output: passed.update(output=output))
    dropped = torch.zeros(1, 2)  # all branches that can be dropped
    if of_decoder:
        decoder(noise(1, 4, 32), (2, 2), drop_path_noise=dropped)
    else:
        backbone.encode(noise(1, 3, 32, 32), drop_path_noise=dropped)
    assert torch.equal(passed["output"], passed["attended"])
    assert passed["attended"].std() > 0


def test_the_loss_is_the_mean_over_labelled_or_all_pixels() -> None:
    labels = torch.tensor([[[0, 3], [1, 255]]], dtype=torch.uint8)
    logits = noise(1, 4, 2, 2).requires_grad_()
    over_all, over_labelled = (pixel_cross_entropy(logits, labels, count) for count in (None, labelled_pixels(labels)))
    torch.testing.assert_close(over_labelled, over_all * 4 / 3)
    torch.testing.assert_close(over_labelled, F.cross_entropy(logits, labels.long(), ignore_index=255))
    ignored = torch.full_like(labels, 255)
    nothing = pixel_cross_entropy(logits, ignored, labelled_pixels(ignored))
    nothing.backward()
    assert nothing == 0


def test_processes_divide_by_the_mean_of_their_labelled_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda count: count.add_(7)
    )  # the labelled pixels of the other process
    assert labelled_pixels(torch.tensor([[[0, 3], [1, 255]]], dtype=torch.uint8)) == (3 + 7) / 2


def test_neco_uses_momentum_and_weight_decay() -> None:
    module = heads(LINEAR["neco-linear"])
    group = module.configure_optimizers()["optimizer"].param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["lr"]) == (0.9, 1e-4, 0.5)
    factor = step_decay(2050)  # 25 epochs of 82 batches, the last five at a tenth
    assert [factor(step) for step in (0, 20 * 82 - 1, 20 * 82, 2049)] == [1.0, 1.0, 0.1, 0.1]
    made = Linear(variant="neco-linear").for_data("voc", tiny_vit())
    assert (made.iterations, made.batch_size, made.crop, made.learning_rates) == (2050, 128, 448, (0.01,))
    assert Linear(variant="neco-linear", schedule="short").for_data("voc", tiny_vit()).iterations == 300


def test_initial_decoders_follow_their_codes() -> None:
    original, other = (
        MaskTransformer(256, 5, initial_weights=rules.initial_weights)
        for rules in (SEGMENTER["paper"], SEGMENTER["released"])
    )
    for decoder, last, joint in ((original, 256**-0.5, 0.02), (other, 0.02, (2 / (4 * 256)) ** 0.5)):
        spread = {name: weight.std().item() for name, weight in decoder.named_parameters() if weight.ndim > 1}
        assert spread["project_patches.weight"] == pytest.approx(last, rel=0.05)
        assert spread["project_classes.weight"] == pytest.approx(last, rel=0.05)
        assert spread["blocks.0.attn.qkv.weight"] == pytest.approx(joint, rel=0.05)
        assert spread["blocks.1.mlp.fc1.weight"] == pytest.approx(0.02, rel=0.05)


def test_both_protocols_use_sliding_windows() -> None:
    modes = {
        (protocol.name, variant): protocol(variant=variant).for_data("voc", tiny_vit()).windows
        for protocol in (Linear, FinetunedSegmenter)
        for variant in ("paper", "released")
    }
    assert modes["linear", "paper"].mode == "whole"
    for key in (("linear", "released"), ("segmenter", "paper"), ("segmenter", "released")):
        assert (modes[key].mode, modes[key].window, modes[key].stride) == ("slide", 512, 480)
        assert modes[key].stretch == (key[1] == "released")


def test_logits_of_a_padded_window_are_stretched() -> None:
    """Logits of 2 x 4 patches; a window of 5 x 13 pixels covers 5/8 and 13/16 of their sides."""
    image = noise(3, 5, 13)

    def colours(images: Tensor) -> Tensor:
        return F.avg_pool2d(images, 4)[None]

    logits = colours(F.pad(image, (0, 3, 0, 3))[None])[0]
    stretched = F.interpolate(logits, size=(5, 13), mode="bilinear").argmax(dim=1)
    cut = F.interpolate(logits, size=(8, 16), mode="bilinear")[:, :, :5, :13].argmax(dim=1)
    assert not torch.equal(stretched, cut)
    for stretch, expected in ((True, stretched), (False, cut)):
        inference = Inference("slide", 16, 15, stretch=stretch)
        assert torch.equal(segment_image(image, colours, (5, 13), inference, divisor=4).long(), expected)


def test_rates_end_at_a_tenth_in_every_variant() -> None:
    for rules in LINEAR.values():
        module = heads(rules)
        optimisers = module.configure_optimizers()
        optimizer, schedule = optimisers["optimizer"], optimisers["lr_scheduler"]["scheduler"]
        for _ in range(9):
            optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_an_unknown_variant_is_refused() -> None:
    wrong: Any = "mmsegmentation"
    with pytest.raises(ValueError, match=r"segmenter: variant must be .*paper.*released, got 'mmsegmentation'"):
        FinetunedSegmenter(variant=wrong)


def test_explicit_settings_override_the_variant() -> None:
    made = Linear(variant="released", inference="whole", weight_decay=0.0).for_data("voc", tiny_vit())
    assert (made.rules.inference, made.rules.weight_decay, made.rules.drop_path) == ("whole", 0.0, 0.1)
    assert made.used(run_of("voc"))["variant"] == "released"
    assert dataclasses.replace(made.rules, inference="slide", weight_decay=0.01) == RELEASED
    with pytest.raises(ConfigError, match="weight_decay must be >= 0, got -1"):
        Linear(weight_decay=-1)


CPU = TrainingRuntime(accelerator="cpu", workers=0, threads=1)
TINY: dict[str, Any] = {"iterations": 2, "batch_size": 2, "crop": 32, "variant": "released"}


def test_an_evaluation_by_the_released_rules(folder: Path, tmp_path: Path) -> None:
    network, data = str(folder / "network"), SegmentationData("folder", str(folder))
    linear = Linear(**TINY, learning_rates=(0.1,))
    result, _ = evaluate(linear, BackboneSource(network, layers=2), data, CPU, out=tmp_path / "l", pictures=1)
    assert [result.settings[name] for name in ("variant", "inference", "weight_decay", "drop_path")] == [
        "released",
        "slide",
        0.01,
        0.1,
    ]
    segmenter = FinetunedSegmenter(**TINY, learning_rates=(1e-3,))
    result, out = evaluate(segmenter, network, data, CPU, out=tmp_path / "s", pictures=0)
    assert result.settings["variant"] == "released"
    trained = load_segmenter(out)
    assert (trained.network.backbone.mean, trained.network.backbone.std) == ((0.5,) * 3, (0.5,) * 3)
    assert trained.inference == Inference("slide", 32, 30, stretch=True)


def test_an_evaluation_by_necos_rules(folder: Path, tmp_path: Path) -> None:
    linear = Linear(**{**TINY, "variant": "neco-linear"}, learning_rates=(0.1,))
    data = SegmentationData("folder", str(folder))
    result, out = evaluate(linear, str(folder / "network"), data, CPU, out=tmp_path / "n", pictures=1)
    assert (result.settings["variant"], result.settings["optimiser"]) == ("neco-linear", "sgd")
    assert sum(map(sum, result.results[0]["confusion"])) == 2 * 100 * 100
    assert (out / "predictions.png").is_file()


def test_a_baseline_without_drop_path_is_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mean-colour has no drop path: use --drop_path 0, got 0\.1"):
        evaluate(Linear(**TINY), "mean-colour", SegmentationData("folder", str(folder)), CPU, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
