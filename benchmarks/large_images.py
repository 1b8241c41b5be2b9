"""Large images in windows: memory, time per megapixel and seams of segment, embed and index.

    uv run python -m benchmarks.large_images --side 20000
    uv run python -m benchmarks.large_images --side 4000 --backbone WEIGHTS

The image is a made-up map of three kinds of ground with noise, as a tiled TIFF with deflate compression; the examples
are eight others of 512 x 512 pixels. Each command runs in a process of its own, whose peak memory (maximum resident
set) is that of the whole command, with PyTorch. The plain path labels an image of 2000 x 2000 pixels as a whole, with
windows and scale of the other path. Seams: the share of pixels with the same label if the grid of windows is shifted by
5 patches down and 11 to the right, by cutting the image, without 256 pixels at its edges; and within a patch of the
borders of windows of either grid.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from PIL import Image

_TILE = 256
_CELL = 160  # spacing in pixels of the random values between which regions are interpolated
_COLOURS = np.array([[60, 120, 60], [150, 120, 90], [90, 90, 160]])
_SHIFT = (5, 11)  # patches
_MARGIN = 256  # pixels
_COMMAND = "import sys; from cribo.cli import main; sys.exit(main(sys.argv[1:]))"


class Measured(NamedTuple):
    """Duration and peak memory of a command."""

    seconds: float
    gib: float


class Ground:
    """A made-up map of any size, of which windows are computed."""

    def __init__(self, side: int, seed: int) -> None:
        self.side = side
        generator = torch.Generator().manual_seed(seed)
        self._values = torch.rand(side // _CELL + 6, side // _CELL + 6, generator=generator)
        self._seed = seed

    def window(self, top: int, left: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pixels (256, 256, 3) and classes (256, 256) of a tile."""
        y, x = (torch.arange(start, start + _TILE) / _CELL for start in (top, left))
        grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], dim=-1)
        places = 2 * (grid + 2) / (len(self._values) - 1) - 1
        field = F.grid_sample(self._values[None, None], places[None], mode="bicubic", align_corners=True)[0, 0].numpy()
        classes = (field > 0.35).astype(np.uint8) + (field > 0.6)
        noise = np.random.default_rng((self._seed, top, left)).normal(0, 25, (_TILE, _TILE, 1))
        return (_COLOURS[classes] + noise).clip(0, 255).astype(np.uint8), classes

    def tiles(self) -> Iterator[np.ndarray]:
        """Yield the tiles of the image, row by row."""
        for top in range(0, self.side, _TILE):
            for left in range(0, self.side, _TILE):
                yield self.window(top, left)[0]


def write_map(path: Path, side: int, seed: int) -> None:
    """Write a map as a tiled TIFF."""
    options = {"tile": (_TILE, _TILE), "compression": "zlib", "photometric": "rgb"}
    tifffile.imwrite(path, Ground(side, seed).tiles(), shape=(side, side, 3), dtype=np.uint8, **options)


def write_shifted(path: Path, source: Path, down: int, right: int) -> None:
    """Write an image without its first rows and columns, row of tiles by row of tiles."""
    from cribo.data.config import Reading
    from cribo.data.windows import open_large

    image = open_large(source, Reading())
    assert image is not None
    height, width = image.size[0] - down, image.size[1] - right

    def tiles() -> Iterator[np.ndarray]:
        with image.open() as read:
            for top in range(0, height, _TILE):
                rows = read(down + top, min(_TILE, height - top)).pixels.permute(1, 2, 0).numpy()[:, right:]
                for left in range(0, width, _TILE):
                    tile = rows[:, left : left + _TILE]
                    yield np.pad(tile, ((0, _TILE - tile.shape[0]), (0, _TILE - tile.shape[1]), (0, 0)))

    options = {"tile": (_TILE, _TILE), "compression": "zlib", "photometric": "rgb"}
    tifffile.imwrite(path, tiles(), shape=(height, width, 3), dtype=np.uint8, **options)


def write_examples(folder: Path, count: int = 8, side: int = 512) -> None:
    """Write examples and their label maps."""
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for number in range(count):
        ground = Ground(side, 100 + number)
        rows = [[ground.window(top, left) for left in range(0, side, _TILE)] for top in range(0, side, _TILE)]
        for place, part in enumerate(("images", "labels")):
            pixels = np.concatenate([np.concatenate([each[place] for each in row], axis=1) for row in rows])
            Image.fromarray(pixels).save(folder / part / f"{number}.png")


def run(*words: object) -> Measured:
    """Run a command, and measure it."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", _COMMAND, *map(str, words)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{words} failed")
    assert isinstance(usage, resource.struct_rusage)
    return Measured(time.perf_counter() - begun, usage.ru_maxrss / 2**20)


def agreement(labels: Path, shifted: Path, patch: int, borders: list[int]) -> tuple[float, float]:
    """Return the share of equal labels of two grids of windows: everywhere, and at the borders of windows of both."""
    first, second = tifffile.imread(labels), tifffile.imread(shifted)
    down, right = (patch * step for step in _SHIFT)
    equal = (first[down:, right:] == second)[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN]
    near = np.zeros(equal.shape, dtype=bool)
    for border in borders:
        for offset in (0, down):  # rows of windows of either grid
            row = border - down + offset - _MARGIN
            near[max(0, row - patch) : max(0, row + patch)] = True
        for offset in (0, right):
            column = border - right + offset - _MARGIN
            near[:, max(0, column - patch) : max(0, column + patch)] = True
    return float(equal.mean()), float(equal[near].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=20_000)
    parser.add_argument("--backbone", default="mean-colour")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=("segment", "embed", "index", "seams", "plain"))
    arguments = parser.parse_args()
    only = arguments.only or ("segment", "embed", "index", "seams", "plain")
    backbone = ("--backbone", arguments.backbone, "--device", arguments.device)
    limit = ("--max_pixels", min(178_956_970, (arguments.side - 400) ** 2))
    pixels = arguments.side**2 / 1e6
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("large", "shifted", "plain"):
            (folder / name).mkdir()
        image = folder / "large" / "map.tif"
        write_map(image, arguments.side, 0)
        write_examples(folder / "examples")
        options = ("--examples", folder / "examples", *backbone, "--pictures", 1)

        def report(name: str, found: Measured, megapixels: float = pixels) -> None:
            print(
                f"{name}: {found.seconds:.0f} s, {found.seconds / megapixels:.3f} s/Mpx, {found.gib:.2f} GiB",
                flush=True,
            )

        if {"segment", "seams"} & set(only):
            report("segment", run("segment", image, *options, *limit, "--out", folder / "out"))
        if "embed" in only:
            for kind in ("global", "patches", "objects"):
                if kind != "patches" or arguments.backbone == "mean-colour":  # others have too many channels
                    words = ("--features", kind, *backbone, *limit, "--out", folder / kind)
                    report(f"embed {kind}", run("embed", image.parent, *words))
        if "index" in only:
            report("index", run("index", image.parent, *backbone, *limit, "--db", folder / "objects.lance"))
        if "plain" in only:
            plain = folder / "plain" / "map.tif"
            write_map(plain, 2000, 0)
            side = 2000**2 / 1e6
            windows = ("--scale", 1, "--window", 518 if arguments.backbone != "mean-colour" else 512)
            report("segment, plain path", run("segment", plain, *options, *windows, "--out", folder / "whole"), side)
            words = ("segment", plain, *options, "--max_pixels", 2000**2 - 1, "--out", folder / "windows")
            report("segment, the same image in windows", run(*words), side)
        if "seams" in only:
            from cribo.features.encoder import Encoder
            from cribo.features.windows import WINDOW, WindowGrid

            patch = Encoder(arguments.backbone, device="cpu").patch_size
            shifted = folder / "shifted" / "map.tif"
            write_shifted(shifted, image, *(patch * step for step in _SHIFT))
            run("segment", shifted, *options, *limit, "--out", folder / "again")
            side = round(WINDOW / patch)
            windows = WindowGrid((arguments.side,) * 2, patch, side, side * 2 // 3)
            borders = [start * patch for start in windows.tops] + [(start + side) * patch for start in windows.tops]
            labels, others = (folder / out / "labels" / "map.tif" for out in ("out", "again"))
            found = agreement(labels, others, patch, borders)
            print(f"equal labels with a shifted grid: {found[0]:.4%}, at the borders of windows {found[1]:.4%}")


if __name__ == "__main__":
    main()
