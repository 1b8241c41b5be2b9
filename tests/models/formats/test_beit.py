"""Errors and notes of BEiT and SimMIM's ViT; `cases_beit` compares their features."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.formats import cases_beit as beits

from cribo.models import load_backbone

ABSOLUTE = beits.hugging_face(**beits.WITH_CLS)


@pytest.mark.parametrize(
    ("write", "size", "others"),
    [
        (beits.finetuned, 64, [(96, 96), (64, 96)]),
        (beits.pretrained, 64, [(96, 96), (64, 96)]),
        (ABSOLUTE, 48, [(80, 80)]),
    ],
    ids=["BEiT", "BEiT, pretraining", "Hugging Face, absolute positions"],
)
def test_images_of_another_size_are_refused(tmp_path: Path, write: Any, size: int, others: list[tuple[int, int]]):
    backbone = load_backbone(write(tmp_path)[0])
    for other in others:
        with pytest.raises(ValueError, match=f"was built for {size}x{size} images and accepts no other size"):
            backbone.encode(torch.zeros(2, 3, *other))


def test_the_normalisation_of_beit_is_assumed_and_noted(tmp_path: Path):
    note = "assumed an image mean of 0.5, as in BEiT; BEiT v2 and the fine-tuned networks of SimMIM have ImageNet's"
    assert note in str(load_backbone(beits.finetuned(tmp_path)[0]).loaded)
    assert "assumed an image mean" not in str(load_backbone(beits.simmim(tmp_path)[0]).loaded)


@pytest.mark.parametrize(
    ("write", "groups"),
    [
        (beits.simmim, {"mask token", "buffer", "decoder", "training state"}),
        (beits.hugging_face("BeitForMaskedImageModeling", **beits.MASKED), {"mask token", "head"}),
    ],
    ids=["SimMIM", "Hugging Face"],
)
def test_ignored_keys_are_named(tmp_path: Path, write: Any, groups: set[str]):
    loaded = load_backbone(write(tmp_path)[0]).loaded
    assert loaded is not None
    assert set(loaded.dropped) == groups
