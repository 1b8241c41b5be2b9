"""Image towers of CLIP and SigLIP: details that files do not show; `cases_towers` compares their features."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.formats import cases_towers as towers
from tests.models.formats.cases import deviation
from tests.models.formats.test_rows import TOLERANCE

from cribo.models import build_backbone, load_backbone, load_pretrained

SIZE = (80, 80)


def test_a_configuration_may_omit_defaults(tmp_path: Path):
    path, network, _ = towers.hugging_face_tower("CLIPModel")(tmp_path)
    config = json.loads((path / "config.json").read_text())
    for key in ("hidden_act", "layer_norm_eps"):
        del config["vision_config"][key]
    (path / "config.json").write_text(json.dumps(config))
    assert deviation(load_backbone(path), network, SIZE) < TOLERANCE
    del config["vision_config"]["num_attention_heads"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="12"):  # heads of 128 channels, as in transformers
        load_backbone(path)


def test_a_bare_file_of_clip_has_quick_gelu_and_a_note(tmp_path: Path):
    path, network, _ = towers.hugging_face_tower("CLIPVisionModel", bare=True, num_attention_heads=2)(tmp_path)
    assert "do not show the activation of their MLPs: assumed quick_gelu" in str(load_backbone(path).loaded)
    other = load_backbone(path, args={"act_layer": "gelu"})
    assert "assumed quick_gelu" not in str(other.loaded)
    assert deviation(other, network, SIZE) > 1e-3


@pytest.mark.parametrize(
    ("write", "expected", "unexpected"),
    [
        (
            towers.hugging_face_tower("CLIPModel"),
            "positions are resized to other sizes as the original does (bicubic)",
            "activation",
        ),
        (towers.open_clip_training, "assumed gelu; if it is another, give args={'act_layer': ...}", "as the original"),
        (towers.open_clip_configured, "open_clip", "took"),
        (towers.openai_clip, "OpenAI CLIP", "activation"),
    ],
    ids=["Hugging Face", "open_clip", "open_clip with its configuration", "OpenAI"],
)
def test_assumptions_are_noted(tmp_path: Path, write: Any, expected: str, unexpected: str):
    backbone = load_backbone(write(tmp_path)[0])
    assert expected in str(backbone.loaded)
    assert unexpected not in str(backbone.loaded)


@pytest.mark.parametrize(
    "write", [towers.hugging_face_tower("CLIPModel"), towers.open_clip_training], ids=["Hugging Face", "open_clip"]
)
def test_the_text_encoder_and_the_projection_are_ignored(tmp_path: Path, write: Any):
    loaded = load_backbone(write(tmp_path)[0]).loaded
    assert loaded is not None
    assert {"text encoder", "projection"} == set(loaded.dropped) - {"training state"}


def test_a_configuration_of_open_clip_gives_the_normalisation(tmp_path: Path):
    backbone = load_backbone(towers.open_clip_configured(tmp_path)[0])
    assert (backbone.mean, backbone.std) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def test_weights_of_openai_do_not_load_into_a_network_with_gelu(tmp_path: Path):
    path = towers.openai_clip(tmp_path)[0]
    args = {"embed_dim": 128, "depth": 2, "num_heads": 2}
    plain = build_backbone("vit_base_patch16_clip_224", args=args, image_size=48)
    with pytest.raises(ValueError, match=r"OpenAI CLIP.* act_layer quick_gelu .*the backbone has gelu"):
        load_pretrained(plain, path)


def test_the_activation_of_a_clip_of_timm_has_to_be_given(tmp_path: Path):
    path = towers.vit_of_timm("vit_base_patch16_clip_quickgelu_224")(tmp_path)[0]
    with pytest.raises(ValueError, match=r"a norm before the first block.*args=\{'act_layer': 'gelu'\}"):
        load_backbone(path)
