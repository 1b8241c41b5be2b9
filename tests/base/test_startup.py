"""Commands start without PyTorch's compiler, and load it when it is first used."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

COMPILER = "torch._dynamo"

LATER = f"""
import sys
import torch
from cribo.base.startup import import_vision_libraries

disable = torch.compiler.disable
import_vision_libraries()
assert {COMPILER!r} not in sys.modules and "wandb" not in sys.modules
assert torch.compiler.disable is disable

import timm
from torchvision.ops import roi_align
from torchvision.ops.roi_align import is_compile_supported

boxes = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]])
assert roi_align(torch.ones(1, 1, 4, 4), boxes, 2).eq(1).all()
network = timm.create_model("test_vit").eval()
images = torch.randn(1, 3, 160, 160)
expected = network(images)
torch.testing.assert_close(torch.compile(network, backend="eager")(images), expected)
assert {COMPILER!r} in sys.modules
assert isinstance(is_compile_supported("cpu"), bool)
import torch._dynamo.utils
assert torch._dynamo.utils.__file__
"""

EMBED = f"""
import sys
from cribo.cli import main

assert main(["embed", "images", "--backbone", "test_vit", "--pretrained", "false", "--out", "embedded"]) == 0
assert {COMPILER!r} not in sys.modules
"""


@pytest.mark.parametrize("program", [LATER, EMBED], ids=["the libraries", "a command"])
def test_the_compiler_is_loaded_on_its_first_use(program: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (160, 160), "green").save(tmp_path / "images" / "0.png")
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
