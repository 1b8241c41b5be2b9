import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import cribo.apps.embed.run as run
from cribo.apps.embed.config import EmbedConfig
from cribo.apps.embed.run import Embedded, embed_images
from cribo.apps.search import ObjectSettings, extract_objects
from cribo.base.errors import ConfigError, DataError, FolderError
from cribo.base.job import read_record
from cribo.cli import main
from cribo.data.reading import read_image
from cribo.features import BackboneSource, Encoder
from cribo.models import build_backbone, load_backbone, save_backbone
from cribo.models.backbone import normalise

SIZES = ((32, 48), (48, 32), (32, 48), (32, 32), (40, 32))
NAMES = ["a/0.png", "a/1.png", "b/2.png", "b/3.png", "b/4.png"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number, (name, size) in enumerate(zip(NAMES, SIZES, strict=True)):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        pixels[:20, :20] = 250
        Image.fromarray(pixels).save(path)
    return tmp_path / "images"


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    return save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), tmp_path / "backbone")


def embed(images: Path, backbone: Path | str, *, resume: bool = False, out: str = "out", **changes: Any) -> Embedded:
    config = EmbedConfig(
        str(images),
        BackboneSource(str(backbone)),
        **{"device": "cpu", "workers": 2, "size": 0, "batch_size": 2, "format": "numpy", **changes},
    )
    return embed_images(config, out=images.parent / out, resume=resume)


def rows(images: Path, out: str = "out") -> dict[str, list[tuple[tuple[int, ...], np.ndarray]]]:
    """Return the index columns and features of each image."""
    found: dict[str, list[tuple[tuple[int, ...], np.ndarray]]] = {}
    for path in sorted((images.parent / out / "features").iterdir()):
        with np.load(path) as part:
            names = [str(name) for name in part["names"]]
            found.update({name: [] for name in names})
            places = [part[key] for key in part.files if key not in ("names", "image", "embedding")]
            for number, (image, vector) in enumerate(zip(part["image"], part["embedding"], strict=True)):
                found[names[image]].append((tuple(int(place[number]) for place in places), vector))
    return found


def test_global_features_equal_the_backbone(images: Path, backbone: Path) -> None:
    done = embed(images, backbone)
    assert (done.images, done.reused, done.skipped) == (5, 0, {})
    network = load_backbone(backbone).eval()
    found = rows(images)
    assert list(found) == NAMES
    for name in NAMES:
        pixels = read_image(images / name).float() / 255
        with torch.no_grad():
            expected = network.encode(normalise(pixels, mean=network.mean, std=network.std)[None]).global_token[0]
        [(place, vector)] = found[name]
        assert place == ()
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)


def test_features_of_patches_have_positions(images: Path, backbone: Path) -> None:
    embed(images, backbone, features="patches", blocks=(1, 2))
    network = load_backbone(backbone).eval()
    for name, found in rows(images).items():
        pixels = read_image(images / name).float() / 255
        with torch.no_grad():
            expected = network.encode(normalise(pixels, mean=network.mean, std=network.std)[None], 2)
        down, across = expected.grid
        assert [place for place, _ in found] == [(row, column) for row in range(down) for column in range(across)]
        np.testing.assert_allclose(np.stack([v for _, v in found]), expected.tokens[0].numpy(), atol=1e-5)


def test_features_of_objects_equal_the_index(images: Path, backbone: Path) -> None:
    embed(images, backbone, features="objects", num_objects=4, min_share=0.1)
    encoder = Encoder(load_backbone(backbone))
    settings = ObjectSettings(num_objects=4, min_share=0.1, size=None)
    for name, found in rows(images).items():
        [expected] = extract_objects(encoder, [read_image(images / name)], settings)
        assert [place for place, _ in found] == [(each.number, *each.box, each.area) for each in expected.objects]
        for (_, vector), each in zip(found, expected.objects, strict=True):
            np.testing.assert_allclose(vector, each.vector, atol=1e-5)


def test_all_formats_have_equal_content(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MOST_IMAGES", 3)
    for name in ("numpy", "parquet", "safetensors"):
        embed(images, "mean-colour", features="patches", precision="float16", format=name, out=name)
    expected: list[tuple[Any, ...]] = [
        (image, *place, vector) for image, found in rows(images, "numpy").items() for place, vector in found
    ]
    table = pq.read_table(images.parent / "parquet" / "features").to_pydict()
    named = []
    for path in sorted((images.parent / "safetensors" / "features").iterdir()):
        with safe_open(path, "np") as file:
            names = json.loads(file.metadata()["names"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        places = (tensors[key] for key in ("row", "column", "embedding"))
        named += zip([names[i] for i in tensors["image"]], *places, strict=True)
    read = list(zip(*(table[key] for key in ("image", "row", "column", "embedding")), strict=True))
    assert len(expected) == len(read) == len(named) > 5
    for one, other, third in zip(expected, read, named, strict=True):
        assert one[:3] == other[:3] == third[:3]
        assert one[3].dtype == third[3].dtype == np.float16
        np.testing.assert_array_equal(one[3], np.array(other[3], dtype=np.float16))
        np.testing.assert_array_equal(one[3], third[3])


def test_a_stopped_run_resumes_and_a_finished_one_is_kept(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MOST_IMAGES", 2)
    (images / "a" / "broken.png").write_bytes(b"nothing")
    embed(images, "mean-colour", out="whole")
    write = run.write_part

    def stopped(folder: Path, name: str, *rest: Any) -> None:
        if name.startswith("part-00002"):
            raise KeyboardInterrupt
        write(folder, name, *rest)

    monkeypatch.setattr(run, "write_part", stopped)
    with pytest.raises(KeyboardInterrupt):
        embed(images, "mean-colour")
    assert not read_record(images.parent / "out", "embedding").finished
    with pytest.raises(FolderError, match="resume it with --resume"):
        embed(images, "mean-colour")
    [first] = (images.parent / "out" / "features").glob("part-00000-*.npz")
    before = first.stat().st_mtime_ns
    monkeypatch.setattr(run, "write_part", write)
    done = embed(images, "mean-colour", resume=True)
    assert (done.images, done.reused, list(done.skipped)) == (5, 3, ["a/broken.png"])
    assert first.stat().st_mtime_ns == before
    for (name, own), (other, expected) in zip(rows(images).items(), rows(images, "whole").items(), strict=True):
        assert name == other
        assert len(own) == len(expected) == (name != "a/broken.png")
        np.testing.assert_array_equal([v for _, v in own], [v for _, v in expected])
    assert embed(images, "mean-colour", resume=True).reused == 5
    assert read_record(images.parent / "out", "embedding").finished


def test_other_settings_or_images_are_not_resumed_but_other_batches_are(images: Path) -> None:
    embed(images, "mean-colour", batch_size=4)
    assert embed(images, "mean-colour", batch_size=1, resume=True).reused == 5
    with pytest.raises(FolderError, match=r"precision was float32, is float16; size"):
        embed(images, "mean-colour", resume=True, precision="float16", size=64)
    (images / "a" / "0.png").unlink()
    with pytest.raises(FolderError, match=r"images was 5, is 4; images of .*images were added, removed or changed"):
        embed(images, "mean-colour", resume=True)
    with pytest.raises(FolderError, match=r"the place of the images was .*images, is .*images/b\."):
        embed(images / "b", "mean-colour", resume=True, out="../out")
    assert len(rows(images)) == 5


def test_invalid_input_leaves_no_files(images: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"blocks": (1,)}, "--blocks requires --features patches or objects"),
        ({"size": -1}, "size must be >= 0, got -1"),
        ({"features": "objects", "num_objects": 0}, "num_objects must be >= 1, got 0"),
        ({}, r"none of the 5 images of .* the first is .*a/0\.png: not an image"),
    ]
    for name in NAMES:
        (images / name).write_bytes(b"nothing")
    for changes, named in refused:
        with pytest.raises((ConfigError, DataError), match=named):
            embed(images, "mean-colour", **changes)
    assert not (images.parent / "out").exists()


def test_the_command(images: Path, backbone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = images.parent / "out"
    (images / "c.png").write_bytes(b"")
    words = ["embed", str(images), "--backbone", str(backbone), "--out", str(out), "--device", "cpu"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "5 images in" in said
    assert "1 image could not be read:\n  c.png: the file is empty" in said
    assert str(out / "features") in said
    table = pq.read_table(out / "features")
    assert table["image"].to_pylist() == NAMES
    assert table.schema.field("embedding").type.list_size == 32
    assert main(words) == 2
    assert main([*words, "--resume"]) == 0
    assert "0 images in 0:00, 5 already encoded" in capsys.readouterr().out


def test_an_image_that_can_be_read_again_is_not_listed(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (images / "a" / "0.png").read_bytes()
    (images / "a" / "0.png").write_bytes(b"x" * len(content))  # of the same size, so that the part keeps its name

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_part", killed)
        with pytest.raises(KeyboardInterrupt):
            embed(images, "mean-colour")
    (images / "a" / "0.png").write_bytes(content)
    assert embed(images, "mean-colour", resume=True).skipped == {}


@pytest.mark.parametrize("kind", ["numpy", "lance"])
def test_resume_refuses_other_images_of_equal_names_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    if kind == "lance":
        pytest.importorskip("lance")
    monkeypatch.setattr("cribo.apps.embed.run._MOST_IMAGES", 2)
    images, copies = tmp_path / "images", tmp_path / "copies"
    images.mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number}.bmp")

    def embed() -> Embedded:
        config = EmbedConfig(str(images), BackboneSource("mean-colour"), device="cpu", workers=1, format=kind)
        return embed_images(config, out=tmp_path / "out", resume=True)

    assert embed().reused == 0
    assert embed().reused == 4
    shutil.copytree(images, copies, copy_function=shutil.copyfile)  # new modification times
    images.rename(tmp_path / "before")
    copies.rename(images)
    assert embed().reused == 4
    status = (images / "3.bmp").stat()
    (images / "3.bmp").write_bytes((images / "0.bmp").read_bytes())
    assert (images / "3.bmp").stat().st_size == status.st_size
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(FolderError, match=r"among 2\.bmp to 3\.bmp"):
            embed()
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
