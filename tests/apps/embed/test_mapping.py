import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import cribo.apps.embed.run as run
from cribo.apps.embed.config import EmbedConfig, Format
from cribo.apps.embed.embedder import Features
from cribo.apps.embed.mapping import MAP, write_map
from cribo.apps.embed.merging import merge_embeddings
from cribo.apps.embed.run import Embedded, embed_images
from cribo.apps.embed.writing import PARTS, complete_parts, write_part
from cribo.base.errors import ConfigError, DataError, InputError, MissingPackage
from cribo.base.job import read_record
from cribo.cli import main
from cribo.features import BackboneSource

FORMATS = ("parquet", "numpy", "safetensors", "lance")


def write_features(folder: Path, rows: np.ndarray, *, kind: Format = "parquet", part: int = 7) -> list[str]:
    """Write rows in parts, as `cribo embed` does, with an empty part in the middle; return the names of the images."""
    (folder / PARTS).mkdir(parents=True)
    names = [f"{number}.png" for number in range(len(rows))]
    places = [(start, min(len(rows), start + part)) for start in range(0, len(rows), part)]
    for number, (start, stop) in enumerate([*places[:1], (0, 0), *places[1:]]):
        columns = {"image": np.arange(stop - start, dtype=np.int32)}
        features = Features(names[start:stop], {}, columns, rows[start:stop], content="")
        write_part(folder, f"part-{number:05d}-aa", kind, features)
    complete_parts(folder, kind)
    return names


def points(folder: Path) -> tuple[list[str], np.ndarray]:
    table = pq.read_table(folder / MAP)
    return table["image"].to_pylist(), np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)


def groups(count: int = 20, dim: int = 24) -> np.ndarray:
    """Return features of three groups, `count` each."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(3, dim))
    return (centres.repeat(count, axis=0) + 0.1 * random.normal(size=(3 * count, dim))).astype(np.float32)


@pytest.mark.parametrize("kind", FORMATS)
def test_pca_has_the_principal_components_of_all_parts(tmp_path: Path, kind: Format) -> None:
    if kind == "lance":
        pytest.importorskip("lance", reason="needs pylance")
    rows = groups()
    names = write_features(tmp_path, rows, kind=kind)
    assert write_map(tmp_path, kind, "pca") == tmp_path / MAP
    found, places = points(tmp_path)
    assert found == names
    directions = rows.astype(np.float64) / np.linalg.norm(rows, axis=1, keepdims=True)
    centred = directions - directions.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    expected = centred @ axes[:2].T
    signs = np.sign((places * expected).sum(axis=0))
    np.testing.assert_allclose(places * signs, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (np.ones((1, 4)), [[0, 0]]),
        (np.ones((5, 4)), np.zeros((5, 2))),
        (np.zeros((5, 4)), np.zeros((5, 2))),
        (np.array([[3, 0], [0, 2]]), [[0.5**0.5, 0], [-(0.5**0.5), 0]]),
        (np.array([[1], [-2], [3]]), [[2 / 3, 0], [-4 / 3, 0], [2 / 3, 0]]),
    ],
    ids=["one row", "equal rows", "zeros", "two rows", "one channel"],
)
def test_pca_of_degenerate_features(tmp_path: Path, rows: np.ndarray, expected: Any) -> None:
    for precision in ("float32", "float16"):
        write_features(folder := tmp_path / precision, rows.astype(precision))
        write_map(folder, "parquet", "pca")
        _, places = points(folder)
        sign = np.sign((places * expected).sum()) or 1
        np.testing.assert_allclose(places * sign, expected, atol=1e-6)


@pytest.mark.slow
def test_umap_places_similar_rows_together_and_repeats_itself(tmp_path: Path) -> None:
    pytest.importorskip("umap", reason="needs umap-learn (the extra map)")
    names = write_features(tmp_path, groups())
    maps = []
    for seed in (0, 0, 1):
        write_map(tmp_path, "parquet", "umap", seed=seed)
        found, places = points(tmp_path)
        assert found == names
        centres = places.reshape(3, 20, 2).mean(axis=1)
        nearest = np.linalg.norm(places[:, None] - centres, axis=2).argmin(axis=1)
        assert (nearest == np.arange(3).repeat(20)).all()
        maps.append(places)
    assert (maps[0] == maps[1]).all()
    assert (maps[0] != maps[2]).any()
    for number, (rows, is_one_point) in enumerate([(groups()[:3], False), (np.ones((30, 4), np.float32), True)]):
        write_features(folder := tmp_path / f"{number}", rows)
        write_map(folder, "parquet", "umap")
        places = points(folder)[1]
        assert np.isfinite(places).all()
        assert (places == places[0]).all() == is_one_point
    write_features(folder := tmp_path / "two", groups()[:2])
    with pytest.raises(DataError, match="--map pca"):
        write_map(folder, "parquet", "umap")


def test_features_that_are_not_finite_have_no_map(tmp_path: Path) -> None:
    rows = groups()
    write_features(tmp_path, rows)
    write_map(tmp_path, "parquet", "pca")
    before = (tmp_path / MAP).read_bytes()
    shutil.rmtree(tmp_path / PARTS)
    rows[9, 3] = np.inf
    write_features(tmp_path, rows)
    with pytest.raises(DataError, match=r"9\.png"):
        write_map(tmp_path, "parquet", "pca")
    assert (tmp_path / MAP).read_bytes() == before


@pytest.mark.parametrize("kind", ["parquet", "numpy", "safetensors"])
def test_a_damaged_part_is_named(tmp_path: Path, kind: Format) -> None:
    write_features(tmp_path, groups(), kind=kind)
    part = sorted((tmp_path / PARTS).iterdir())[2]
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(InputError, match=f"{part.name}.*--overwrite"):
        write_map(tmp_path, kind, "pca")
    assert not (tmp_path / MAP).exists()


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "_MOST_IMAGES", 2)
    (tmp_path / "images").mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "images" / "3.png").write_bytes(b"nothing")
    return tmp_path / "images"


def embed(images: Path, out: str, *, resume: bool = False, **options: Any) -> Embedded:
    config = EmbedConfig(str(images), BackboneSource("mean-colour"), device="cpu", workers=1, **options)
    return embed_images(config, out=images.parent / out, resume=resume)


@pytest.mark.parametrize("features", ["global", "patches", "objects"])
def test_the_map_has_the_rows_and_columns_of_the_features(images: Path, features: Any) -> None:
    done = embed(images, "out", features=features, map="pca")
    assert done.map == images.parent / "out" / MAP
    table, own = pq.read_table(done.features), pq.read_table(done.map)
    assert own.column_names == [*table.column_names[:-1], "x", "y"]
    assert own.drop_columns(["x", "y"]).equals(table.drop_columns("embedding"))
    assert own["x"].type == own["y"].type == pa.float32()
    assert "3.png" not in own["image"].to_pylist()


def test_a_map_of_existing_and_of_merged_features(images: Path) -> None:
    embed(images, "whole", map="pca")
    expected = points(images.parent / "whole")
    for number in (1, 2):
        with pytest.raises(ConfigError, match="--part"):
            embed(images, f"p{number}", part=f"{number}/2", map="pca")
        embed(images, f"p{number}", part=f"{number}/2")
    merge_embeddings([images.parent / "p1", images.parent / "p2"], out=images.parent / "merged")
    done = embed(images, "merged", map="pca", resume=True)
    assert (done.images, done.reused) == (4, 4)
    names, places = points(images.parent / "merged")
    assert names == expected[0]
    np.testing.assert_array_equal(places, expected[1])


def test_an_interrupted_map_leaves_the_features(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_map", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embed(images, "out", map="pca")
    assert read_record(images.parent / "out", "embedding").finished
    assert not (images.parent / "out" / MAP).exists()
    assert embed(images, "out", map="pca", resume=True).reused == 4
    assert (images.parent / "out" / MAP).is_file()


def test_the_command(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = images.parent / "out"
    words = ["embed", str(images), "--backbone", "mean-colour", "--out", str(out), "--device", "cpu"]
    assert main([*words, "--map", "pca"]) == 0
    assert str(out / MAP) in capsys.readouterr().out


def test_umap_is_refused_before_any_work(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingPackage, match=r"umap.*--map pca"):
            embed(images, "out", map="umap")
    pytest.importorskip("umap", reason="needs umap-learn (the extra map)")
    for name in ("2.png", "3.png", "4.png"):
        (images / name).unlink()
    with pytest.raises(DataError, match="--map pca"):
        embed(images, "out", map="umap")
    assert not (images.parent / "out").exists()
