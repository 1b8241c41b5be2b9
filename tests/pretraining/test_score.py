"""Batch norms of an untrained network, which is the baseline of a score."""

import pytest
import torch

from cribo.data.scenes import Scenes
from cribo.models import build_backbone
from cribo.pretraining.score import calibrated


@pytest.mark.parametrize("needed", [True, False])
def test_batch_norms_are_calibrated_for_the_score_alone(needed: bool) -> None:
    backbone = build_backbone("test_resnet", seed=0).train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    image = torch.randn(1, 3, 64, 64)
    plain = backbone.eval().encode(image).tokens
    with calibrated(backbone.train(), Scenes(3, size=64), "cpu", needed=needed):
        means = [value.abs().sum() for name, value in backbone.named_buffers() if name.endswith("running_mean")]
        assert all(mean > 0 for mean in means) == needed
        assert torch.equal(backbone.eval().encode(image).tokens, plain) != needed
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert torch.equal(backbone.eval().encode(image).tokens, plain)
