"""Features of a picture file agree between all ways of loading an export without this package."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.apps.export import TARGETS, ExportReport
from cribo.models import Backbone, normalise, save_backbone

ALONE = """
import json, sys
sys.modules["cribo"] = None  # what is None cannot be imported
import torch
from PIL import Image
tokens = {}
for way, text in json.load(open("lines.json")).items():
    names = {"picture": Image.open("picture.png")}
    with torch.no_grad():
        exec(text, names)
    tokens[way] = torch.as_tensor(names["tokens"] if "tokens" in names else names["feature_map"])
torch.save(tokens, "tokens.pt")
"""


@pytest.mark.parametrize("kind", ["vit", pytest.param("resnet", marks=pytest.mark.endurance)])
def test_all_ways_of_loading_give_equal_features(
    kind: str, exported: Callable[..., tuple[Backbone, ExportReport]], tmp_path: Path
) -> None:
    reports = {target: exported(kind, target) for target in TARGETS}
    lines = {target: report.how_to_load for target, (_, report) in reports.items()}
    backbone = reports["timm"][0]
    smooth = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8))
    picture = smooth.resize((211, 150), Image.Resampling.BICUBIC)
    picture.save(tmp_path / "picture.png")
    save_backbone(backbone, tmp_path)
    features = "tokens = model.forward_features(transform(picture)[None])"
    prefix = getattr(backbone.model, "num_prefix_tokens", None)
    lines["backbone.json"] = json.loads((tmp_path / "backbone.json").read_text())["how_to_load"] + (
        f"; {features}" if prefix is None else f"; {features}[:, {prefix}:]"
    )
    pixels = np.array(picture.resize((backbone.image_size, backbone.image_size), Image.Resampling.BICUBIC))
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        expected = backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std)).tokens
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, env=environment, check=True)
    found = torch.load(tmp_path / "tokens.pt")
    assert found.keys() == lines.keys()
    for way, tokens in found.items():
        tokens = tokens.flatten(2).mT if tokens.ndim == 4 else tokens
        # Resizing a tensor and a Pillow image occasionally round to different 8-bit values.
        difference = float((tokens - expected).abs().max() / expected.abs().max())
        assert difference < (2e-2 if way == "transformers" else 1e-4), way
