import csv
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import ConfigError, FolderError, TooManySkipped
from cribo.cli import main
from cribo.data.reading import read_image
from cribo.data.sources.collection import open_collection
from cribo.data.sources.images import open_images
from cribo.data.sources.shard_writing import write_shards


def save(path: Path, number: int, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def members(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                found[member.name] = content.read()
    return found


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Write forty small images of three formats to two folders."""
    for number in range(40):
        kind = ("jpg", "png", "webp")[number % 3]
        save(tmp_path / "photographs" / f"class{number % 2}" / f"{number}.{kind}", number)
    return tmp_path / "photographs"


def test_files_are_copied_unchanged(photographs: Path, tmp_path: Path) -> None:
    written = write_shards(open_images(photographs), tmp_path / "out", shard_bytes=10_000)
    files = {str(path.relative_to(photographs)): path.read_bytes() for path in photographs.rglob("*.*")}
    assert members(tmp_path / "out") == files
    assert (written.images, written.skipped) == (40, [])
    sizes = [path.stat().st_size for path in written.folder.glob("*.tar")]
    assert len(sizes) == written.shards > 4
    assert max(sizes) < 10_000 + 10_240 + max(map(len, files.values()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photographs"]
    images = open_collection(tmp_path / "out")
    for index in range(40):
        assert torch.equal(images.load(index), read_image(photographs / images.name(index).split("/", 1)[1]))


def test_shards_are_random_samples_and_reproducible(photographs: Path, tmp_path: Path) -> None:
    outs = [tmp_path / "a", tmp_path / "b"]
    for out, workers in zip(outs, (1, 4), strict=True):
        write_shards(open_images(photographs), out, shard_bytes=20_000, workers=workers)
    ours, theirs = ({path.name: path.read_bytes() for path in out.iterdir()} for out in outs)
    assert ours == theirs
    with tarfile.open(outs[0] / "images-000000.tar") as tar:
        assert {name.split("/")[0] for name in tar.getnames()} == {"class0", "class1"}


def test_size_reduces_larger_images(tmp_path: Path) -> None:
    photographs = tmp_path / "photographs"
    smooth = Image.linear_gradient("L").resize((900, 600)).convert("RGB")
    photographs.mkdir()
    smooth.save(photographs / "wide.jpg", quality=95)
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth.save(photographs / "turned.jpg", quality=95, exif=exif)
    smooth.save(photographs / "picture.png")
    smooth.resize((150, 100)).save(photographs / "small.png")
    small = (photographs / "small.png").read_bytes()
    write_shards(open_images(photographs), tmp_path / "out", size=100)
    found = members(tmp_path / "out")
    assert found.keys() == {"wide.jpg", "turned.jpg", "picture%2Epng.jpg", "small.png"}
    assert found["small.png"] == small
    for name, size in {"wide.jpg": (150, 100), "turned.jpg": (100, 150), "picture%2Epng.jpg": (150, 100)}.items():
        with Image.open(io.BytesIO(found[name])) as image:
            assert (image.format, image.size) == ("JPEG", size)
    with Image.open(io.BytesIO(found["wide.jpg"])) as image:
        difference = np.asarray(image, dtype=float) - np.asarray(smooth.resize((150, 100)), dtype=float)
    assert abs(difference).mean() < 1.5


def test_names_of_a_list_stay_inside_the_shard(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "a.png", 0)
    save(tmp_path / "lists" / "a.v2.png", 1)
    (tmp_path / "lists" / "list.txt").write_text(f"../elsewhere/a.png\na.v2.png\n{tmp_path}/elsewhere/a.png\n")
    write_shards(open_images(tmp_path / "lists" / "list.txt"), tmp_path / "out")
    assert members(tmp_path / "out").keys() == {"000000000/a.png", "a%2Ev2.png", "000000002/a.png"}


def test_unreadable_images_are_skipped_and_listed(photographs: Path, tmp_path: Path) -> None:
    (photographs / "class0" / "0.jpg").write_bytes((photographs / "class0" / "0.jpg").read_bytes()[:300])
    (photographs / "class1" / "1.png").write_bytes(b"")
    source = open_images(photographs)
    written = write_shards(source, tmp_path / "out", max_unreadable=0.05)
    with (tmp_path / "out" / "skipped.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == ["class0/0.jpg", "class1/1.png"]
    assert "truncated" in rows[0]["reason"].lower()
    assert rows[1]["reason"] == "the file is empty"
    assert written.images == len(open_collection(tmp_path / "out")) == 38
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TooManySkipped, match="2 of 40 images cannot be read, more than max_unreadable allows"):
        write_shards(source, tmp_path / "other", max_unreadable=0.04)
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_overwritten_or_half_written(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_images(photographs)
    for out in (tmp_path / "there", tmp_path / "file", tmp_path / "link"):
        if out.name == "there":
            out.mkdir()
        elif out.name == "file":
            out.write_text("mine")
        else:
            out.symlink_to(tmp_path / "nowhere")
        with pytest.raises(FolderError, match=r"already exists: choose another folder$"):  # it may be the user's
            write_shards(source, out)
    with pytest.raises(FolderError, match="file is a file, not a folder: choose another OUT"):
        write_shards(source, tmp_path / "file" / "out")
    write_shards(source, tmp_path / "shards")
    with pytest.raises(FolderError, match="already exists: choose another folder, or remove it"):
        write_shards(source, tmp_path / "shards")
    before = sorted(tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tarfile.TarFile.addfile", full)
    with pytest.raises(OSError, match="No space left"):
        write_shards(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1}, "size must be >= 2, got 1"),
        ({"shard_bytes": 100}, "shard_bytes must be >= 4096, got 100"),
        ({"workers": -1}, "workers must be >= 0, got -1"),
        ({"max_unreadable": 2}, "max_unreadable must be >= 0 and <= 1, got 2"),
    ],
)
def test_values_out_of_range(photographs: Path, tmp_path: Path, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_shards(open_images(photographs), tmp_path / "out", **arguments)  # pyright: ignore[reportArgumentType]


def test_the_command(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["shard", str(photographs), str(out), "--size", "20", "--shard_mb", "0.01"]) == 0
    output = capsys.readouterr().out
    assert "writing shards: 40/40" in output
    assert "40 images in" in output
    assert f"cribo pretrain --data.root {out}" in output
    assert main(["shard", str(photographs), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["shard", str(photographs), str(tmp_path / "other"), "--sise", "20"]) == 2
    assert "did you mean size?" in capsys.readouterr().err
    assert main(["shard", str(tmp_path / "photograph"), str(tmp_path / "other")]) == 2
    assert "did you mean 'photographs'?" in capsys.readouterr().err
    assert main(["shrad"]) == 2
    assert "did you mean shard?" in capsys.readouterr().err
