"""`cribo segment`, `index` and `search` with --pixel_size."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from tests.data.readers.test_scale import write_pyramid
from tests.features.test_windows import ground

from cribo.apps.search.database import ObjectDatabase
from cribo.base.errors import InputError
from cribo.cli import main
from cribo.data.config import Reading
from cribo.data.labelled.formats import find_examples
from cribo.data.sources.video_files import VideoFiles
from cribo.features.memory.storage import stored_reading

FULL, AT_2 = (480, 640), (240, 320)
COMMON = ["--backbone", "mean-colour", "--device", "cpu"]
PROBE = ["--head", "ridge", "--whiten", "false", "--refine", "none", "--scale", "1"]


def pyramid(path: Path, seed: int, size: tuple[int, int] = FULL) -> torch.Tensor:
    """Write a picture of pixels of 0.5 micrometres, and return the kind of ground of each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels, kinds = ground(*size, cell=120, seed=seed)
    write_pyramid(path, pixels.permute(1, 2, 0).numpy())
    return kinds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in (1, 2):
        kinds = pyramid(tmp_path / "examples" / f"{seed}.tif", seed)
        Image.fromarray(kinds.numpy()).save(tmp_path / "examples" / f"{seed}_labels.png")  # at full resolution
    (tmp_path / "examples" / "classes.txt").write_text("background\nsoil\nwater\n")
    np.save(tmp_path / "kinds.npy", pyramid(tmp_path / "images" / "map.tif", 3).numpy())
    return tmp_path


@pytest.fixture
def segment(folder: Path) -> Callable[..., int]:
    def run(*words: object, out: str = "out") -> int:
        return main(["segment", str(folder / "images"), "--out", str(folder / out), *COMMON, *map(str, words)])

    return run


def agreement(found: np.ndarray, folder: Path, step: int = 1) -> float:
    return float((found == np.load(folder / "kinds.npy")[step // 2 :: step, step // 2 :: step]).mean())


def test_a_memory_remembers_the_pixel_size(folder: Path, segment: Callable[..., int]) -> None:
    memory = folder / "memory.safetensors"
    options = ["--examples", folder / "examples", "--memory", memory, "--pixel_size", 1, *PROBE]
    assert segment(*options, "--write", "geojson,coco") == 0
    assert stored_reading(memory).pixel_size == 1
    with Image.open(folder / "out" / "labels" / "map.png") as labels:
        found = np.array(labels)
    assert found.shape == AT_2
    assert agreement(found, folder, 2) > 0.85
    for written in ("geojson", "coco.json"):  # both at full resolution, of the same labels
        read = find_examples(folder / "images", labels=folder / "out" / written).labels(0).numpy()
        np.testing.assert_array_equal(read, found.repeat(2, 0).repeat(2, 1))
    assert segment("--memory", memory, out="again") == 0
    assert (folder / "again/labels/map.png").read_bytes() == (folder / "out/labels/map.png").read_bytes()
    assert segment("--memory", memory, "--pixel_size", 2, out="other") == 2
    assert not (folder / "other").exists()


def test_windows_at_a_pixel_size(folder: Path, segment: Callable[..., int]) -> None:
    options = ["--examples", folder / "examples", "--pixel_size", 1, "--max_pixels", 400_000, "--window", 160]
    np.save(folder / "kinds.npy", pyramid(folder / "images" / "map.tif", 3, (1200, 1600)).numpy())
    assert segment(*options, *PROBE, "--write", "geojson,geotiff") == 2  # without coordinates
    assert segment(*options, *PROBE, "--write", "coco") == 2  # 1.9 million pixels at full resolution
    assert not (folder / "out").exists()
    assert segment(*options, *PROBE, "--write", "geojson") == 0
    with tifffile.TiffFile(folder / "out" / "labels" / "map.tif") as file:
        page = file.pages.first
        assert page.shape == (600, 800)
        assert agreement(page.asarray(), folder, 2) > 0.85
        assert page.get_resolution("MICROMETER") == (1, 1)
    features = json.loads((folder / "out" / "geojson" / "map.geojson").read_text())["features"]
    corners = np.concatenate([np.array(ring) for each in features for ring in each["geometry"]["coordinates"]])
    assert corners.max(axis=0).tolist() == [1600, 1200]


def test_files_without_a_pixel_size_are_named(folder: Path, segment: Callable[..., int], capsys) -> None:
    tifffile.imwrite(folder / "images" / "map.tif", np.zeros((64, 64, 3), np.uint8), photometric="rgb")
    assert segment("--examples", folder / "examples", "--pixel_size", 1, *PROBE) == 2
    assert "--pixel_size 0" in " ".join(capsys.readouterr().err.split())


def test_labels_on_a_map_lie_where_the_image_does(folder: Path, segment: Callable[..., int]) -> None:
    rasterio = pytest.importorskip("rasterio", reason="requires the extra geo")
    place = rasterio.Affine(0.5, 0, 500_000, 0, -0.5, 5_500_000)
    about = {"width": FULL[1], "height": FULL[0], "count": 3, "dtype": "uint8", "crs": "EPSG:32632"}
    pixels, kinds = ground(*FULL, cell=120, seed=3)
    for name in ("images/map.tif", "examples/1.tif", "examples/2.tif"):
        with rasterio.open(folder / name, "w", driver="GTiff", transform=place, photometric="RGB", **about) as file:
            file.write(pixels.numpy())
    for number in (1, 2):
        Image.fromarray(kinds.numpy()).save(folder / "examples" / f"{number}_labels.png")
    assert segment("--examples", folder / "examples", "--pixel_size", 2, *PROBE, "--write", "geotiff") == 0
    with rasterio.open(folder / "out" / "geotiff" / "map.tif") as file:
        assert file.shape == (120, 160)
        assert file.transform == rasterio.Affine(2, 0, 500_000, 0, -2, 5_500_000)


def test_video_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--pixel_size"):
        VideoFiles(tmp_path, ["a.mp4"], reading=Reading(pixel_size=1))


def test_a_database_remembers_the_pixel_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lance", reason="requires the extra search")
    database, images = folder / "objects.lance", str(folder / "images")
    index = ["index", images, "--db", str(database), *COMMON]
    assert main([*index, "--pixel_size", "1"]) == 0
    assert ObjectDatabase.open(str(database)).info.pixels == {"pixel_size": 1}
    pyramid(folder / "images" / "more.tif", 4)
    assert main(index) == 0
    opened = ObjectDatabase.open(str(database))
    objects = [each for name in ("map.tif", "more.tif") for each in opened.objects_of(name)]
    assert {each.mask.image for each in objects} == {AT_2}
    assert main([*index, "--pixel_size", "2"]) == 2
    search = ["search", "--db", str(database), "--image", str(folder / "images" / "map.tif"), "--device", "cpu"]
    capsys.readouterr()
    assert main([*search, "--coco", "--out", str(folder / "found")]) == 2
    assert "--pixel_size" in capsys.readouterr().err
    assert not (folder / "found").exists()
    assert main([*search, "--out", str(folder / "found")]) == 0
    assert json.loads((folder / "found" / "results.json").read_text())["pixels"] == {"pixel_size": 1}
