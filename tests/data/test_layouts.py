import pytest

from cribo.data.images import DataError
from cribo.data.layouts import read_stems


@pytest.mark.parametrize(
    "text",
    [
        "2007_000032\n2007_000039\n",
        "\ufeff2007_000032\r\n\r\n2007_000039",
        "/JPEGImages/2007_000032.jpg /SegmentationClassAug/2007_000032.png\nJPEGImages/2007_000039.jpg\n",
    ],
)
def test_lists(tmp_path, text):
    path = tmp_path / "val.txt"
    path.write_bytes(text.encode())
    assert read_stems(path) == {"2007_000032", "2007_000039"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", r"val\.txt names no image"),
        (b"\xff\xfe\x00\x01", "it is not UTF-8 text"),
        (b"2007_000032\n2007_000039 -1\n", r"val\.txt, line 2: must be a name, .*, got '2007_000039 -1'"),
    ],
)
def test_lists_that_are_none(tmp_path, content, message):
    path = tmp_path / "val.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_stems(path)
