"""Files for end-to-end evaluations."""

from pathlib import Path

import pytest
from PIL import Image

from cribo.models import save_backbone

from .squares import Squares, tiny_vit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a set in the layout of `folder` with four training and two validation images, and a network."""
    root = tmp_path_factory.mktemp("squares")
    for split, images in (("train", Squares(4)), ("val", Squares(2, seed=1))):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for index in range(len(images)):
            pixels = images.load(index).permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(root / "images" / split / f"{index}.png")
            Image.fromarray(images.labels(index).numpy()).save(root / "labels" / split / f"{index}.png")
    (root / "classes.txt").write_text("\n".join(Squares().classes), encoding="utf-8")
    save_backbone(tiny_vit(), root / "network")
    return root


def command(evaluation: str, folder: Path, out: Path, *more: str) -> list[str]:
    """Return the arguments of an evaluation of the network and the set in `folder` on one CPU thread."""
    return [
        *(
            "evaluate",
            evaluation,
            "--backbone",
            str(folder / "network"),
            "--data",
            "folder",
            "--data.root",
            str(folder),
        ),
        *("--batch_size", "4", "--crop", "64", "--accelerator", "cpu", "--runtime.workers", "0"),
        *("--runtime.threads", "1", "--out", str(out), *more),
    ]
