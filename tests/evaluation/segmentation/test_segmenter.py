import json

import torch
from torch import Tensor, nn

from cribo.evaluation.segmentation.mask_transformer import MaskTransformer
from cribo.evaluation.segmentation.segmenter import Segmenter, describe_segmenter, rebuild_segmenter
from cribo.models import build_backbone

TINY = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8}


def vit(*, drop_path: float = 0.0, classes: int = 4) -> Segmenter:
    backbone = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32, drop_path=drop_path)
    return Segmenter(backbone, MaskTransformer(32, classes, layers=2, drop_path=drop_path))


def images_of(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def test_the_last_blocks_patches_are_decoded() -> None:
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


def test_gradients_of_both_parts_are_the_same_with_less_memory() -> None:
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


def test_a_description_builds_the_same_network() -> None:
    segmenter = vit(classes=3)
    segmenter.backbone.mean, segmenter.backbone.std = (0.5, 0.5, 0.5), (0.4, 0.4, 0.4)
    segmenter.backbone.set_norm_eps(1e-3)
    again = rebuild_segmenter(json.loads(json.dumps(describe_segmenter(segmenter))))
    again.load_state_dict(segmenter.state_dict())
    images = images_of(1, 40, 16)
    assert torch.equal(again(images), segmenter(images))
    assert (again.backbone.mean, again.backbone.std) == ((0.5, 0.5, 0.5), (0.4, 0.4, 0.4))
