"""From image files to a trained backbone, with the user's commands."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image

import cribo

if TYPE_CHECKING:
    from cribo.pretraining import PretrainConfig

COMMAND = Path(sys.executable).with_name("cribo")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Twenty JPEGs of blurred noise, in two folders."""
    folder = tmp_path / "my images"
    for number in range(20):
        coarse = np.random.default_rng(number).integers(0, 255, (6, 8, 3), dtype=np.uint8)
        path = folder / ["cats", "dogs"][number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((64, 48), Image.Resampling.BICUBIC).save(path)
    return folder


@pytest.fixture
def config(tmp_path: Path, tiny: "Callable[..., PretrainConfig]") -> Path:
    from cribo.pretraining.loading import dump_config

    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(tiny({"optim.epochs": 2})))
    return path


@pytest.mark.slow
@pytest.mark.skipif(not COMMAND.exists(), reason="needs the package to be installed")
def test_the_command_on_a_folder_of_images(tmp_path: Path, images: Path, config: Path) -> None:
    done = subprocess.run(
        [COMMAND, "pretrain", "--config", config, "--data.root", images, "--data.workers", "1", "--name", "first"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    run = tmp_path / "runs" / "first"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["images"], summary["steps"]) == (20, 4)
    assert "runs/first/backbone.safetensors" in done.stdout
    assert (run / "report" / "matches.png").stat().st_size > 10_000
    features = cribo.load_backbone(run).eval().encode(torch.zeros(1, 3, 32, 48))
    assert features.tokens.shape == (1, 24, 32)
    assert features.grid == (4, 6)


def test_from_python(tmp_path: Path, images: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])
    run = cribo.pretrain(config, data=images, out=tmp_path / "out", overrides={"optim.epochs": 1})
    assert run.folder == tmp_path / "out" / "tiny"
    assert run.summary["images"] == 20
    backbone = run.backbone().eval()
    assert backbone.encode(torch.zeros(2, 3, 32, 32)).global_token.shape == (2, 32)
    again = cribo.load_config(run.folder)
    assert again.data.root == str(images)
    assert cribo.resume(run.folder).summary == run.summary


@pytest.mark.skipif(not COMMAND.exists(), reason="needs the package to be installed")
def test_the_help_does_not_import_torch() -> None:
    program = "import sys; from cribo.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "usage: cribo" in done.stdout
