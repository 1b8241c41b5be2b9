import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cribo.data.labelled.crops import Crops, MMSegPreparation, WholeImages
from cribo.evaluation.segmentation.finetuning import SegmenterFinetuning
from cribo.evaluation.segmentation.segmenter import MaskTransformer, Segmenter
from cribo.models import build_backbone

from .squares import Squares, score, train

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")

TINY = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8}


def vit(*, drop_path: float = 0.0, classes: int = 4) -> Segmenter:
    backbone = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32, drop_path=drop_path)
    return Segmenter(backbone, MaskTransformer(32, classes, layers=2, drop_path=drop_path))


def images_of(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def test_patches_of_the_last_block_are_decoded() -> None:
    segmenter = vit()
    images = images_of(2, 24, 40)
    scores = segmenter(images)
    assert scores.shape == (2, 4, 3, 5)
    tokens = segmenter.backbone.encode(images).tokens
    torch.testing.assert_close(scores, segmenter.decoder(tokens, (3, 5)))


def test_noise_drops_branches_of_the_backbone_and_then_of_the_decoder() -> None:
    segmenter = vit(drop_path=0.5)
    assert segmenter.num_drop_path_sites == 4  # attention and MLP of the last block of each
    images = images_of(2, 16, 16)
    kept, dropped = 0.9, 0.1
    noise = torch.tensor([[kept, kept, dropped, dropped], [dropped, kept, kept, kept]])
    scores = segmenter(images, drop_path_noise=noise)
    tokens = segmenter.backbone.encode(images, drop_path_noise=noise[:, :2]).tokens
    torch.testing.assert_close(scores, segmenter.decoder(tokens, (2, 2), drop_path_noise=noise[:, 2:]))
    other = torch.tensor([[kept] * 4] * 2)
    assert not torch.allclose(segmenter(images, drop_path_noise=other)[0], scores[0], atol=1e-3)
    assert not torch.allclose(segmenter(images, drop_path_noise=other)[1], scores[1], atol=1e-3)


def test_checkpointing_gives_equal_gradients() -> None:
    noise = torch.rand(2, 4, generator=torch.Generator().manual_seed(3))
    gradients = []
    for mode in ("none", "selective", "blocks"):
        segmenter = vit(drop_path=0.5)
        segmenter.backbone.set_checkpointing(mode)
        scores = segmenter(images_of(2, 16, 24), drop_path_noise=noise)
        nn.functional.cross_entropy(scores, torch.arange(12).view(2, 2, 3) % 4).backward()
        gradients.append({name: p.grad for name, p in segmenter.named_parameters() if p.requires_grad})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert gradient is not None, name
            torch.testing.assert_close(other[name], gradient)


def finetuning(*, drop_path: float = 0.0, rate: float = 1e-3, steps: int = 60) -> SegmenterFinetuning:
    return SegmenterFinetuning(vit(drop_path=drop_path), learning_rate=rate, steps=steps)


def crops(images: int = 4, *, size: int = 64, sites: int = 0) -> Any:
    return Crops(Squares(images), MMSegPreparation(size, None), seed=0, sites=sites)


def test_it_overfits_its_training_images() -> None:
    module = finetuning(drop_path=0.1)
    train(module, crops(sites=module.segmenter.num_drop_path_sites), steps=60, batch_size=4)
    (miou,) = score(module, WholeImages(Squares(4), MMSegPreparation(64, None)))
    assert module.confusions[0].diagonal().sum() / module.confusions[0].sum() > 0.95
    assert miou > 0.9


def test_exactly_the_used_parameters_are_trained() -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args={**TINY, "class_token": False, "global_pool": "avg"})
    module = SegmenterFinetuning(Segmenter(backbone, MaskTransformer(32, 4)), learning_rate=1e-3, steps=2)
    before = copy.deepcopy(dict(module.named_parameters()))
    train(module, crops(), steps=2, batch_size=2)
    unused = {f"backbone.model.{name}" for name in backbone.unused_parameters}
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in unused), name


def test_batch_norms_of_convolutional_networks_are_updated() -> None:
    backbone = build_backbone("resnet10t", args={"channels": (8, 8, 8, 16), "output_stride": 16}, image_size=64)
    module = SegmenterFinetuning(Segmenter(backbone, MaskTransformer(16, 4)), learning_rate=1e-3, steps=1)
    train(module, crops(), steps=1, batch_size=2)
    statistics = [value for name, value in backbone.state_dict().items() if name.endswith("num_batches_tracked")]
    assert statistics
    assert all(int(count) == 1 for count in statistics)


def test_noise_depends_only_on_the_key() -> None:
    first, again = crops(sites=3), crops(sites=3)
    assert torch.equal(first[2, 1].drop_path_noise, again[2, 1].drop_path_noise)
    assert len({tuple(first[key].drop_path_noise.tolist()) for key in ((0, 0), (0, 1), (1, 0))}) == 3
    crop = Crops(Squares(4), MMSegPreparation(64, None), seed=0)[2, 1]
    assert torch.equal(first[2, 1].pixels, crop.pixels)
    assert torch.equal(first[2, 1].labels, crop.labels)


def test_branches_are_dropped_in_training_only() -> None:
    module = finetuning(drop_path=0.5)
    batch = torch.utils.data.default_collate([crops(sites=4)[0, index] for index in range(2)])
    all_kept, all_dropped = (batch._replace(drop_path_noise=torch.full((2, 4), value)) for value in (0.9, 0.1))
    losses = [module.training_step(part, 0).item() for part in (all_kept, all_dropped)]
    assert losses[0] != pytest.approx(losses[1], abs=1e-4)
    images = images_of(1, 32, 32)
    undropped = SegmenterFinetuning(vit(), learning_rate=1e-3, steps=1)
    torch.testing.assert_close(module.logits(images), undropped.logits(images))
