"""The commands of the applications on a cluster of two worker processes."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.features.spread.inputs import (
    assert_equal_databases,
    assert_equal_features,
    assert_equal_labels,
    write_inputs,
)

from cribo.apps.embed import EmbedConfig, Embedder, embed_images
from cribo.apps.search import ObjectExtractor
from cribo.apps.search.config import IndexConfig
from cribo.apps.search.run import index_collection
from cribo.apps.segment import Labeller
from cribo.apps.segment.config import SegmentConfig
from cribo.apps.segment.run import segment_images
from cribo.features.config import BackboneSource
from cribo.features.spread.config import RayOptions
from cribo.features.spread.ray_engine import open_ray

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

RAY = RayOptions(workers=2, cpus_per_worker=1)  # Ray gives each worker a thread for each of its CPUs
IMAGES = 20


@pytest.fixture(scope="module", autouse=True)
def cluster(address: str) -> Iterator[None]:
    """Connect to a cluster, which the commands then use."""
    with open_ray(RayOptions(address=address, workers=2), writes_to=None):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute here with as many threads as in a worker, since sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), IMAGES)


def source(folder: Path) -> BackboneSource:
    return BackboneSource(str(folder / "backbone"))


@pytest.mark.usefixtures("one_thread")
def test_embed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # workers have another working folder
    options = {"features": "patches", "batch_size": 2, "size": 32}
    for name, engine in (("local", {}), ("ray", {"engine": "ray", "ray": RAY})):
        config = EmbedConfig("images", BackboneSource("backbone"), **options, **engine)
        done = embed_images(config, out=tmp_path / name)
        assert (done.images, [*done.skipped]) == (IMAGES, ["broken.jpg"])
    assert_equal_features(tmp_path / "local", tmp_path / "ray", parts=2)
    again = EmbedConfig(str(folder / "images"), source(folder), **options, engine="ray", ray=RAY)
    assert embed_images(again, out=tmp_path / "ray", resume=True).reused == IMAGES


@pytest.mark.usefixtures("one_thread")
def test_index(folder: Path, tmp_path: Path) -> None:
    found = []
    for name, engine in (("local", {}), ("ray", {"engine": "ray", "ray": RAY})):
        config = IndexConfig(
            str(tmp_path / name), str(folder / "images"), backbone=source(folder), size=32, batch_size=2, **engine
        )
        summary, database, _ = index_collection(config)
        assert (summary.new, [path for path, _ in summary.unreadable]) == (IMAGES, ["broken.jpg"])
        found.append(database)
    assert_equal_databases(*found)


@pytest.mark.usefixtures("one_thread")
def test_segment(folder: Path, tmp_path: Path) -> None:
    for name, engine in (("local", {}), ("ray", {"engine": "ray", "ray": RAY})):
        config = SegmentConfig(
            source(folder),
            str(folder / "images"),
            examples=str(folder / "examples"),
            instances=("1",),
            batch_size=2,
            **engine,
        )
        done = segment_images(config, out=tmp_path / name, pictures=0)
        assert (done.images, [*done.skipped]) == (IMAGES, ["broken.jpg"])
    assert_equal_labels(tmp_path / "local", tmp_path / "ray", IMAGES)
    local, spread = ((tmp_path / name / "instances.csv").read_text() for name in ("local", "ray"))
    assert local == spread


@pytest.mark.parametrize(
    "column",
    ["embedding", *(pytest.param(column, marks=pytest.mark.endurance) for column in ("vector", "labels"))],
)
def test_units_of_work_in_ray_data(folder: Path, tmp_path: Path, column: str) -> None:
    """Rows of Parquet with the bytes of files, as a user's own pipeline reads them."""
    paths = sorted(path for path in (folder / "images").rglob("*") if path.is_file())
    table = pa.table({"image": [path.name for path in paths], "bytes": [path.read_bytes() for path in paths]})
    pq.write_table(table, tmp_path / "images.parquet", row_group_size=8)
    config = SegmentConfig(
        source(folder), str(folder / "images"), examples=str(folder / "examples"), memory=str(tmp_path / "memory")
    )
    segment_images(config, out=tmp_path / "out", pictures=0)
    units = {
        "embedding": (Embedder, (source(folder),), {"features": "patches"}),
        "vector": (ObjectExtractor, (source(folder),), {}),
        "labels": (Labeller, (tmp_path / "memory", source(folder)), {}),
    }
    unit, args, options = units[column]
    rows = (
        ray.data.read_parquet(str(tmp_path / "images.parquet"))
        .map_batches(unit, fn_constructor_args=args, fn_constructor_kwargs=options, batch_size=8, concurrency=1)
        .to_pandas()
    )
    whole = unit(*args, **options)({"image": np.array([str(path) for path in paths])})
    whole["image"] = np.array([os.path.basename(name) for name in whole["image"]])  # noqa: PTH119
    rows = rows.sort_values("image", kind="stable")
    order = np.argsort(whole["image"], kind="stable")
    assert rows["image"].tolist() == whole["image"][order].tolist()
    assert rows["error"].tolist() == whole["error"][order].tolist()
    assert {image for image, error in zip(rows["image"], rows["error"], strict=True) if error} == {"broken.jpg"}
    if column != "labels":
        np.testing.assert_allclose(np.stack(rows[column].tolist()), whole[column][order], atol=1e-5)
