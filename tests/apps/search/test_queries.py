from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cribo.apps.search import IndexSummary, ObjectDatabase, extract_objects
from cribo.apps.search.queries import QueryPlace, make_query
from cribo.base.errors import ConfigError, DataError, MissingData
from cribo.data import read_image
from cribo.features import Encoder

from .conftest import write_picture

Index = Callable[..., tuple[ObjectDatabase, IndexSummary]]


@pytest.fixture
def opened(encoder: Encoder) -> Callable[[], Encoder]:
    return lambda: encoder


def refused() -> Encoder:
    raise AssertionError("no backbone is needed")


def test_the_stored_objects_of_an_unchanged_image_need_no_backbone(index: Index, pictures: Path) -> None:
    database, _ = index()
    stored = database.objects_of("a/1.png")
    for image in ("a/1.png", str(pictures / "a" / "1.png")):
        query = make_query(database, image, QueryPlace(), refused)
        assert query.indexed == "a/1.png"
        assert [region.object.mask for region in query.regions if region.object] == [each.mask for each in stored]
    query = make_query(database, "a/1.png", QueryPlace(number=1), refused)
    assert [region.name for region in query.regions] == ["object 1"]
    np.testing.assert_array_equal(query.regions[0].vector, stored[1].vector)


def test_a_point_selects_its_object(index: Index) -> None:
    database, _ = index()
    for each in database.objects_of("a/1.png"):
        rows, columns = each.mask.pixels().nonzero()
        query = make_query(database, "a/1.png", QueryPlace(point=(int(columns[0]), int(rows[0]))), refused)
        assert [region.name for region in query.regions] == [f"object {each.number}"]
        assert (query.regions[0].pixels(64, 96) == each.mask.pixels()).all()


def test_a_box_is_the_mean_of_its_patches(index: Index, opened: Callable[[], Encoder], encoder: Encoder) -> None:
    database, _ = index()
    query = make_query(database, "a/1.png", QueryPlace(box=(8, 8, 40, 40)), opened)
    [found] = extract_objects(encoder, [read_image(query.image)], database.info.settings)
    np.testing.assert_array_equal(query.regions[0].vector, found.box_vector((8, 8, 40, 40)))
    assert query.regions[0].pixels(64, 96).sum() == 32 * 32
    # The box is one of the rectangles, so its object is nearest.
    [nearest] = database.search(query.regions[0].vector[None], 1)
    assert nearest[0].image == "a/1.png"
    assert nearest[0].object.mask.pixels()[20, 20]


def test_a_changed_image_is_extracted_again(
    index: Index, pictures: Path, opened: Callable[[], Encoder], caplog: pytest.LogCaptureFixture
) -> None:
    database, _ = index()
    write_picture(pictures / "a" / "1.png", 4, (32, 48))
    query = make_query(database, "a/1.png", QueryPlace(), opened)
    assert "has changed since it was indexed" in caplog.text
    assert query.regions[0].pixels(32, 48).shape == (32, 48)
    assert query.indexed == "a/1.png"  # for excluding its stored objects


def test_an_image_from_elsewhere(index: Index, tmp_path: Path, opened: Callable[[], Encoder]) -> None:
    database, _ = index()
    write_picture(tmp_path / "new.png", 1)
    query = make_query(database, str(tmp_path / "new.png"), QueryPlace(), opened)
    assert query.indexed is None
    found = database.search(query.regions[0].vector[None], 1)[0][0]
    assert (found.image, found.similarity) == ("a/1.png", pytest.approx(1))  # a copy of it


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (QueryPlace(point=(96, 0)), r"--point must lie in the image, x in 0..95 and y in 0..63, got 96,0"),
        (QueryPlace(point=(0, -1)), "got 0,-1"),
        (QueryPlace(box=(10, 10, 10, 20)), r"x0 < x1 and y0 < y1, got 10,10,10,20"),
        (QueryPlace(box=(10, 30, 20, 20)), "got 10,30,20,20"),
        (QueryPlace(box=(0, 0, 97, 20)), r"--box must lie in the image of 96 x 64 pixels, got 0,0,97,20"),
        (QueryPlace(number=99), r"--object must be 0 to \d+ for .*1.png, got 99"),
        (QueryPlace(number=-1), "got -1"),
    ],
)
def test_places_outside_the_image_are_rejected(index: Index, place: QueryPlace, said: str) -> None:
    database, _ = index()
    with pytest.raises(ConfigError, match=said):
        make_query(database, "a/1.png", place, refused)


def test_a_point_in_no_object_is_rejected(index: Index, pictures: Path) -> None:
    database, _ = index()
    row = database.image("a/1.png")
    assert row is not None
    smallest = database.objects_of("a/1.png")[-1]
    database._objects.delete(f"entry = {row.entry} AND number = {smallest.number}")
    rows, columns = smallest.mask.pixels().nonzero()
    with pytest.raises(ConfigError, match="the region there is smaller than min_share: choose a pixel nearby"):
        make_query(database, "a/1.png", QueryPlace(point=(int(columns[0]), int(rows[0]))), refused)


def test_at_most_one_place_is_allowed() -> None:
    with pytest.raises(ConfigError, match="give at most one of --point, --box and --object"):
        QueryPlace(point=(1, 1), number=2)


def test_missing_images_raise(index: Index, pictures: Path, tmp_path: Path) -> None:
    database, _ = index()
    with pytest.raises(MissingData, match=r"there is no 'non.png'"):
        make_query(database, str(tmp_path / "non.png"), QueryPlace(), refused)
    with pytest.raises(DataError, match="is not a file: give an image"):
        make_query(database, str(tmp_path), QueryPlace(), refused)
    (pictures / "a" / "1.png").unlink()
    with pytest.raises(MissingData, match=r"there is no '1.png'"):
        make_query(database, "a/1.png", QueryPlace(), refused)
