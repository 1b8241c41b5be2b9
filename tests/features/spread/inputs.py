"""Inputs of commands on a cluster, and comparisons of their results with those of one process."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from cribo.apps.search import ObjectDatabase
from cribo.models import build_backbone, save_backbone


def write_inputs(folder: Path, images: int) -> Path:
    """Write `images` of two sizes in three folders and a broken one, `examples` with labels, and a `backbone`."""
    random = np.random.default_rng(0)
    for number in range(images):
        path = folder / "images" / f"{number % 3}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (4 + number % 2, 6, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(path)
        if number < 2:
            (folder / "examples").mkdir(exist_ok=True)
            Image.fromarray(pixels).save(folder / "examples" / f"{number}.bmp")
            Image.fromarray((pixels[..., 0] > 127).astype(np.uint8)).save(folder / "examples" / f"{number}_labels.png")
    (folder / "images" / "broken.jpg").write_bytes(b"no picture")
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), folder / "backbone")
    return folder


def assert_equal_features(one: Path, other: Path, *, parts: int) -> None:
    """Assert that two results of `cribo embed` have the same parts with the same rows, bit for bit."""
    names, others = (sorted(path.name for path in (each / "features").iterdir()) for each in (one, other))
    assert names == others
    assert len(names) == parts
    for name in names:
        assert pq.read_table(one / "features" / name) == pq.read_table(other / "features" / name)


def assert_equal_databases(one: ObjectDatabase, other: ObjectDatabase) -> None:
    """Assert that two databases contain exactly the same images and objects, bit for bit."""
    rows, others = ([image._replace(entry=0) for image in each.images()] for each in (one, other))
    assert rows == others
    assert len(one) == len(other) == other.num_rows
    for image in rows:
        for first, second in zip(one.objects_of(image.path), other.objects_of(image.path), strict=True):
            assert (first.mask, first.box, first.area) == (second.mask, second.box, second.area)
            np.testing.assert_array_equal(first.vector, second.vector)


def assert_equal_labels(one: Path, other: Path, images: int) -> None:
    """Assert that two results of `cribo segment` have the same label maps, confidences and summary, byte for byte."""
    kinds = ("labels", "confidence")
    files, others = (
        sorted(path.relative_to(each) for kind in kinds for path in (each / kind).rglob("*.png"))
        for each in (one, other)
    )
    assert files == others
    assert len(files) == 2 * images
    for file in [*files, Path("summary.csv")]:
        assert (one / file).read_bytes() == (other / file).read_bytes()
