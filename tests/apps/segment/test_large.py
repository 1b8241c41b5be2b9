"""`cribo segment`, `embed` and `index` on images above the limit of pixels."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from tests.features.test_windows import ground

from cribo.apps.embed.config import Kind
from cribo.apps.embed.embedder import Embedder
from cribo.apps.search.extractor import ObjectExtractor
from cribo.cli import main
from cribo.data.config import Reading

# The peak of the process itself: that of `getrusage` contains the process that started it.
COMMAND = """
import re, sys
from pathlib import Path
from cribo.cli import main
status = main(sys.argv[1:])
sys.stderr.write("peak " + re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""
MOST_BYTES = 2 * 2**30


def write_tiff(path: Path, pixels: torch.Tensor) -> Path:
    path.parent.mkdir(exist_ok=True)
    options = {"photometric": "rgb", "tile": (256, 256), "compression": "zlib"}
    tifffile.imwrite(path, pixels.permute(1, 2, 0).numpy(), **options)
    return path


def write_examples(folder: Path) -> Path:
    folder.mkdir()
    for seed in (1, 2):
        pixels, kinds = ground(256, 256, seed=seed)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{seed}.png")
        Image.fromarray(kinds.numpy()).save(folder / f"{seed}_labels.png")
    return folder


def options(folder: Path) -> list[str]:
    probe = ["--head", "ridge", "--whiten", "false", "--refine", "none", "--scale", "1"]
    images = ["segment", str(folder / "images"), "--examples", str(folder / "examples"), "--out", str(folder / "out")]
    return [*images, "--backbone", "mean-colour", "--device", "cpu", *probe]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_segment_takes_bounded_memory(tmp_path: Path) -> None:
    pixels, kinds = ground(4000, 4000)
    write_tiff(tmp_path / "images" / "map.tif", pixels)
    write_examples(tmp_path / "examples")
    words = [*options(tmp_path), "--max_pixels", "4000000"]
    ended = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, check=True)
    assert int(ended.stderr.rpartition("peak ")[2]) * 1024 < MOST_BYTES
    labels = tifffile.imread(tmp_path / "out" / "labels" / "map.tif")
    assert labels.shape == (4000, 4000)
    assert (labels == kinds.numpy()).mean() > 0.85
    with Image.open(tmp_path / "out" / "overlays" / "map.jpg") as overlay:
        assert max(overlay.size) <= 2048


def test_images_of_all_sizes_are_labelled_and_faults_are_recorded(tmp_path: Path) -> None:
    pixels, _ = ground(700, 900)
    large = write_tiff(tmp_path / "images" / "large.tif", pixels)
    write_tiff(tmp_path / "images" / "small.tif", pixels[:, :300, :300])
    (tmp_path / "images" / "cut.tif").write_bytes(large.read_bytes()[:-300_000])
    write_examples(tmp_path / "examples")
    words = [*options(tmp_path), "--max_pixels", "600000"]
    assert main(words) == 0
    with (tmp_path / "out" / "summary.csv").open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert "truncated" in rows["cut.tif"]["error"]
    assert (rows["large.tif"]["width"], rows["large.tif"]["height"]) == ("900", "700")
    assert (tmp_path / "out" / "labels" / "small.png").exists()
    assert tifffile.imread(tmp_path / "out" / "confidence" / "large.tif").shape == (700, 900)
    written = (tmp_path / "out" / "labels" / "large.tif").stat().st_mtime_ns
    assert main([*words, "--resume"]) == 0
    assert (tmp_path / "out" / "labels" / "large.tif").stat().st_mtime_ns == written


def test_embed_and_index_read_windows(tmp_path: Path) -> None:
    pixels, _ = ground(640, 800)
    image, reading = str(write_tiff(tmp_path / "images" / "map.tif", pixels)), Reading(max_pixels=400_000)
    kinds: dict[Kind, int] = {"global": 1, "patches": 40 * 50}
    for kind, rows in kinds.items():
        embed = Embedder("mean-colour", features=kind, device="cpu", reading=reading)
        found = embed({"image": np.array([image])})
        assert list(found["error"]) == [""] * rows
        assert np.isfinite(found["embedding"]).all()
    found = ObjectExtractor("mean-colour", device="cpu", reading=reading)({"image": np.array([image])})
    assert len(found["number"]) > 16  # more than those of a window
    assert set(zip(found["height"], found["width"], strict=True)) == {(640, 800)}
    assert found["x1"].max() == 800
