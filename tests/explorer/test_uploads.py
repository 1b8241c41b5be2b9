from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cribo.explorer.config import Limits
from cribo.explorer.uploads import Refused, Uploads


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    (tmp_path / "sent").mkdir()
    return Uploads(tmp_path / "sent", Limits(max_megabytes=0.01, max_megapixels=0.01))


def test_a_picture_is_read_regardless_of_its_name(uploads: Uploads) -> None:
    Image.new("RGB", (40, 20), (9, 8, 7)).save(uploads.folder / "x.bin", "PNG")
    image = uploads.read({"path": str(uploads.folder / "x.bin"), "url": "http://elsewhere.example/x.png"})
    assert (tuple(image.shape), image[:, 3, 4].tolist()) == ((3, 20, 40), [9, 8, 7])


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (None, "No picture was uploaded yet"),
        ({}, "No picture was uploaded yet"),
        ({"path": 3}, "No picture was uploaded yet"),
        ({"path": "../outside.png"}, "was not uploaded to this page"),
        ({"path": "link.png"}, "was not uploaded to this page"),
        ({"path": "http://elsewhere.example/x.png"}, "was not uploaded to this page"),
        ({"path": "gone.png"}, "has expired"),
        ({"path": "heavy.png"}, r"0.0 MB, but at most 0.01 MB.*--max_megabytes"),
        ({"path": "large.png"}, r"200 x 100 pixels, but at most 0.01 megapixels.*--max_megapixels"),
        ({"path": "text.png"}, "not an image"),
        ({"path": "empty.png"}, "the file is empty"),
    ],
)
def test_refusals(uploads: Uploads, tmp_path: Path, what: Any, named: str) -> None:
    folder = uploads.folder
    Image.new("L", (200, 100)).save(folder / "large.png")
    for path, content in (("../outside", b"x"), ("heavy", b"0" * 20_000), ("text", b"hello"), ("empty", b"")):
        (folder / f"{path}.png").write_bytes(content)
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    if what and str(what["path"]).endswith(".png") and "//" not in what["path"]:
        what = {"path": str(folder / what["path"])}
    with pytest.raises(Refused, match=named):
        uploads.read(what)


@pytest.mark.parametrize("limits", [{"max_megabytes": 0}, {"max_megapixels": -1.0}])
def test_limits_must_be_positive(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"max_\w+ must be > 0, got"):
        Limits(**limits)
