"""Loading a trained Segmenter: predictions equal those of the evaluation, and other files are refused."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cribo.base.errors import InputError
from cribo.data.labelled.crops import Crops, MMSegPreparation, WholeImages
from cribo.evaluation.segmentation.finetuning import SegmenterFinetuning
from cribo.evaluation.segmentation.inference import Inference
from cribo.evaluation.segmentation.segmenter import MaskTransformer, Segmenter
from cribo.evaluation.segmentation.trained import (
    SEGMENTER_FILE,
    TrainedSegmenter,
    load_segmenter,
    save_segmenter,
)
from cribo.models import build_backbone
from cribo.models.licences import Licence
from cribo.models.numerics import Numerics

from .squares import Squares, tiny_vit, train

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")

INFERENCE = Inference("slide", window=64, stride=48)
SCALE = 96, 80


def trained() -> TrainedSegmenter:
    backbone = tiny_vit()
    backbone.mean, backbone.std = (0.5, 0.4, 0.3), (0.4, 0.4, 0.2)
    network = Segmenter(backbone, MaskTransformer(32, 4, layers=1))
    images = Squares()
    module = SegmenterFinetuning(network, learning_rate=1e-3, steps=20)
    train(module, Crops(images, MMSegPreparation(64, None), seed=0), steps=20, batch_size=4)
    return TrainedSegmenter(network.eval(), images.classes, tuple(images.palette), SCALE, INFERENCE)


def test_predictions_equal_those_of_the_evaluation(tmp_path: Path) -> None:
    segmenter = trained()
    save_segmenter(segmenter, tmp_path / SEGMENTER_FILE)
    module = SegmenterFinetuning(segmenter.network, learning_rate=1e-5, steps=1, inference=INFERENCE).eval()
    images = Squares(3)
    loaded = load_segmenter(tmp_path)
    assert (loaded.classes, loaded.palette) == (images.classes, tuple(images.palette))
    labels = []
    for index in range(3):
        pixels, truth = WholeImages(images, MMSegPreparation(64, SCALE))[index]
        labels.append(loaded.segment(images.load(index)))
        assert torch.equal(labels[-1], module.segment(pixels, (truth.shape[0], truth.shape[1]))[0])
        assert torch.equal(labels[-1], segmenter.segment(images.load(index)))
    assert len(torch.stack(labels).unique()) > 1


def test_the_epsilon_of_layer_norms_and_licences_are_stored(tmp_path: Path) -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 1, "embed_dim": 32, "num_heads": 2})
    backbone.set_numerics(Numerics(norm_eps=0.5))
    backbone.licences = (Licence("vit.dino", "apache-2.0", hub="timm/vit.dino"),)
    network = Segmenter(backbone, MaskTransformer(32, 3, width=64, heads=4)).eval()
    save_segmenter(TrainedSegmenter(network, ("a", "b", "c"), (), None, Inference()), tmp_path / "mine.safetensors")
    images = torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    again = load_segmenter(tmp_path / "mine.safetensors").network
    assert torch.equal(again(images), network(images))
    assert again.decoder.heads == 4
    assert again.backbone.licences == backbone.licences


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no tensors at all", "cannot be read .*: copy it again"),
        (safetensors.torch.save({"a": torch.ones(1)}), "is not a segmenter: give a file written by"),
        (
            safetensors.torch.save({"a": torch.ones(1)}, {"cribo_segmenter": json.dumps({"format": 3})}),
            "has format 3, this version of cribo reads up to 2: update cribo",
        ),
        (
            safetensors.torch.save({"a": torch.ones(1)}, {"cribo_segmenter": json.dumps({"format": 2})}),
            "its description is damaged",
        ),
        (
            safetensors.torch.save({"a": torch.ones(1)}, {"cribo_segmenter": json.dumps({"format": 2, "backbone": 3})}),
            "its description is damaged",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / SEGMENTER_FILE).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_segmenter(tmp_path)


def test_folders_without_a_segmenter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no segmenter at .*: give the folder of a finished"):
        load_segmenter(tmp_path)
