from pathlib import Path

import pytest
from PIL import Image

from cribo.explorer.config import Limits
from cribo.explorer.uploads import Refused, Uploads


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    (tmp_path / "sent").mkdir()
    return Uploads(tmp_path / "sent", Limits(max_megabytes=0.01, max_megapixels=0.01))


def sent(uploads: Uploads, name: str, content: bytes) -> dict[str, str]:
    (uploads.folder / name).write_bytes(content)
    return {"path": str(uploads.folder / name)}


def test_a_picture_is_read_regardless_of_its_name(uploads: Uploads) -> None:
    Image.new("RGB", (40, 20), (9, 8, 7)).save(uploads.folder / "x.bin", "PNG")
    image = uploads.read({"path": str(uploads.folder / "x.bin"), "url": "http://elsewhere.example/x.png"})
    assert (tuple(image.shape), image[:, 3, 4].tolist()) == ((3, 20, 40), [9, 8, 7])


def test_refusals_contain_advice(uploads: Uploads, tmp_path: Path) -> None:
    Image.new("L", (200, 100)).save(uploads.folder / "large.png")
    (tmp_path / "outside.png").write_bytes(b"x")
    (uploads.folder / "link.png").symlink_to(tmp_path / "outside.png")
    for what, said in (
        (None, "No picture was uploaded yet: drop one on the page"),
        ({}, "No picture was uploaded yet"),
        ({"path": 3}, "No picture was uploaded yet"),
        ({"path": str(tmp_path / "outside.png")}, "was not uploaded to this page"),
        ({"path": str(uploads.folder / "link.png")}, "was not uploaded to this page"),
        ({"path": "http://elsewhere.example/x.png"}, "was not uploaded to this page"),
        ({"path": str(uploads.folder / "gone.png")}, "has expired: upload it again"),
        (sent(uploads, "heavy", b"0" * 20_000), r"0.0 MB, but at most 0.01 MB are allowed.*--max_megabytes"),
        (
            {"path": str(uploads.folder / "large.png")},
            r"200 x 100 pixels, but at most 0.01 megapixels.*--max_megapixels",
        ),
        (sent(uploads, "text.png", b"hello"), "cannot be used: not an image of a known format"),
        (sent(uploads, "empty.png", b""), "cannot be used: the file is empty"),
    ):
        with pytest.raises(Refused, match=said):
            uploads.read(what)


@pytest.mark.parametrize("limits", [{"max_megabytes": 0}, {"max_megapixels": -1.0}])
def test_limits_must_be_positive(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"max_\w+ must be > 0, got"):
        Limits(**limits)
