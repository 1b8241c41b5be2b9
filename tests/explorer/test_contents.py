import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from cribo.base.colours import distinct_colours
from cribo.base.errors import InputError
from cribo.data.config import Reading
from cribo.explorer.config import ExploreConfig, Limits
from cribo.explorer.contents import Contents, open_contents
from cribo.explorer.uploads import Refused, Uploads
from cribo.explorer.view_pairs import PairSample
from cribo.features import BackboneSource


def opened(config: ExploreConfig, workspace: Path) -> Contents:
    workspace.mkdir()
    return open_contents(config, workspace, lambda what, done, total: None)


def test_a_run_without_a_database_indexes_some_of_its_images(run_folder: Path, tmp_path: Path) -> None:
    contents = opened(ExploreConfig(run=run_folder, limit=5, device="cpu"), tmp_path / "work")
    assert contents.finder is not None
    assert len(contents.finder.collection) == 5
    assert contents.visitors.images is not None
    assert len(contents.visitors.images) == 5  # the others are generated when they are used
    assert contents.notes == ()
    query = contents.finder.of_collection(0)
    _, found = contents.finder.matches(query, 0, 4)
    assert query.name not in {match.image for match in found}
    assert contents.title == "streets"


def test_a_backbone_and_a_folder_suffice(squares: Path, tmp_path: Path) -> None:
    config = ExploreConfig(backbone=BackboneSource("mean-colour"), images=squares, limit=4, device="cpu")
    contents = opened(config, tmp_path / "work")
    assert contents.finder is not None
    names = [contents.finder.collection.name(number) for number in range(4)]
    assert names == ["0-blue.png", "0-red.png", "1-blue.png", "1-red.png"]
    assert contents.visitors.images is not None
    assert len(contents.visitors.images) == 8
    assert contents.notes == ("Objects are those of 4 of 8 images: for all, use cribo index and --db.",)
    without_objects = opened(dataclasses.replace(config, limit=0), tmp_path / "without")
    assert without_objects.finder is None
    assert without_objects.visitors.images is not None
    alone = opened(ExploreConfig(backbone=BackboneSource("mean-colour"), device="cpu"), tmp_path / "alone")
    assert (alone.finder, alone.pairs, alone.notes) == (None, None, ())


def test_a_folder_without_readable_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "broken.png").write_bytes(b"")
    config = ExploreConfig(backbone=BackboneSource("mean-colour"), images=tmp_path / "images", device="cpu")
    with pytest.raises(InputError, match=r"broken\.png: the file is empty"):
        opened(config, tmp_path / "work")


def test_a_run_without_checkpoints_needs_a_backbone(run_folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    for name in ("backbone.safetensors", "backbone.json"):
        (run / name).unlink()
    with pytest.raises(InputError, match="has no checkpoint yet: wait for its first one, or give --backbone"):
        opened(ExploreConfig(run=run, device="cpu"), tmp_path / "work")
    given = ExploreConfig(run=run, backbone=BackboneSource("mean-colour"), limit=2, device="cpu")
    contents = opened(given, tmp_path / "given")
    assert contents.pairs is None
    assert contents.finder is not None


def test_examples_are_kept_apart_from_the_images(squares: Path, tmp_path: Path) -> None:
    config = ExploreConfig(backbone=BackboneSource("mean-colour"), images=squares, limit=0, examples=squares / "ex")
    with pytest.raises(InputError, match="ex is inside the folder of the images"):
        opened(config, tmp_path / "work")


def test_missing_images_are_reported(run_folder: Path, tmp_path: Path, squares: Path) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    config = (run / "config.yaml").read_text().replace("root: scenes", f"root: {tmp_path}/gone")
    (run / "config.yaml").write_text(config)
    with pytest.raises(InputError, match="gone"):
        opened(ExploreConfig(run=run, images=tmp_path / "gone", device="cpu"), tmp_path / "work")
    with pytest.raises(Refused, match="images of this run cannot be read: start the page with --images DIR"):
        PairSample(run, str(run), tmp_path / "gone", "cpu").picture(0)
    elsewhere = PairSample(run, str(run), squares, "cpu")
    assert elsewhere.picture(-1)[0] == 7


def test_pairs_are_views_of_one_image_with_common_colours(run_folder: Path) -> None:
    pairs = PairSample(run_folder, str(run_folder), None, "cpu")
    number, picture = pairs.picture(25)
    assert number == 1
    assert picture.sentence.startswith("Pair 1 of 24")
    for view, clusters in zip(picture.views, picture.clusters, strict=True):
        assert view.shape == clusters.shape == (128, 128, 3)
        assert not np.array_equal(view, clusters)
    # Outlines have the colours of the clusters, which must be the same in both views.
    first, second = ({tuple(pixel) for pixel in clusters.reshape(-1, 3)} for clusters in picture.clusters)
    outlines = first & set(distinct_colours(20))
    assert outlines
    assert outlines <= second
    assert np.array_equal(pairs.picture(1)[1].views[0], picture.views[0])


def test_images_of_five_channels_and_16_bits_are_read_by_the_range_of_the_collection(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    pixels = np.random.default_rng(0).integers(100, 900, (5, 32, 32), dtype=np.uint16)
    for name in ("a.tif", "b.tif"):
        tifffile.imwrite(tmp_path / "cells" / name, pixels, photometric="minisblack")
    reading = Reading(channels=(0, 1, 2, 3, 4))
    backbone = BackboneSource("vit_tiny_patch16_224", pretrained=False)
    config = ExploreConfig(
        backbone=backbone, images=tmp_path / "cells", examples=tmp_path / "ex", reading=reading, device="cpu"
    )
    contents = opened(config, tmp_path / "work")
    assert contents.reading.range is not None
    assert len(contents.reading.range) == 10
    assert contents.visitors.images is not None
    shown = contents.visitors.images[0].load(32)
    assert shown.shape == (5, 32, 32)
    assert shown.max() == 255  # not nearly black
    session = contents.visitors.session("v")
    uploads = Uploads(tmp_path, Limits(), contents.reading)
    session.upload("c.tif", (tmp_path / "cells" / "a.tif").read_bytes(), reading=uploads.reading)
    assert session.current is not None
    assert torch.equal(session.image(session.current).load(32), shown)
    contents.visitors.close()

    from cribo.explorer.page import build_page  # imports Gradio

    page = build_page(contents, uploads)
    [features] = (each for each in page.fns.values() if each.api_name == "features")
    assert features.fn is not None
    colours, *_ = features.fn(None, 0)  # without an upload, the first image
    assert colours is not None
