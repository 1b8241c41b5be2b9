import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.explorer.conftest import COLOURS, SECRET, draw_square

from cribo.apps.search import ObjectDatabase, index_images
from cribo.data.config import Reading
from cribo.data.sources.images import open_images
from cribo.explorer.collection import Collection
from cribo.explorer.network import SharedNetwork
from cribo.explorer.objects import ObjectFinder, query_picture, query_sentence
from cribo.explorer.uploads import Refused
from cribo.features import mean_colour_encoder


@pytest.fixture
def images(squares: Path, tmp_path: Path) -> Path:
    """Copy the squares, with the times of the files, so that tests can change them."""
    return shutil.copytree(squares, tmp_path / "squares")


@pytest.fixture
def finder(database: Path, images: Path) -> ObjectFinder:
    collection = Collection(ObjectDatabase.open(database, images=images), reading=Reading(max_pixels=10**6))
    return ObjectFinder(collection, SharedNetwork(mean_colour_encoder(16)))


def test_each_square_finds_the_same_colour_first(finder: ObjectFinder) -> None:
    for number in range(8):
        query = finder.of_collection(number)
        _, found = finder.matches(query, 1, 3)
        other = {"0": "1", "1": "0"}[query.name[0]] + query.name[1:]
        assert found[0].image == other
        assert found[0].similarity == pytest.approx(1, abs=1e-3)
        assert query.name not in {match.image for match in found}


def test_a_point_is_in_the_object_that_is_drawn_there(finder: ObjectFinder) -> None:
    query = finder.of_collection(2)
    assert query.name == "0-red.png"
    height, width = query.image.shape[:2]
    assert query.object_at(0.25 * width, 0.25 * height) == 1
    assert query.object_at(0.75 * width, 0.75 * height) == 0
    assert query.object_at(width + 9, height + 9) == 0
    shown = query_picture(query, 1)
    assert tuple(shown[height // 4, width // 4]) == COLOURS["red"]
    assert shown[height - 5, width - 5].max() < 100
    assert query_sentence(query, 1, []).startswith("Object 1 of 2 in 0-red.png (counted from 0, largest first), 25%")


def test_an_uploaded_picture_works_as_a_query(finder: ObjectFinder) -> None:
    picture = torch.from_numpy(np.array(draw_square(COLOURS["yellow"], (16, 32)))).permute(2, 0, 1)
    query = finder.of_picture(picture)
    drawn, found = finder.matches(query, 1, 2)
    assert {match.image for match in found} == {"0-yellow.png", "1-yellow.png"}
    assert [caption[:8] for _, caption in drawn] == ["1. 1.00 ", "2. 1.00 "]


def test_object_numbers_are_clamped_and_image_numbers_are_refused(finder: ObjectFinder) -> None:
    query = finder.of_collection(0)
    assert (query.object(99).number, query.object(-4).number) == (1, 0)
    for number in (-1, 8):
        with pytest.raises(Refused, match=f"image must be 0 to 7, got {number}"):
            finder.of_collection(number)


def test_a_link_out_of_the_folder_is_not_shown(finder: ObjectFinder, images: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    shutil.move(images / "1-red.png", outside)
    (images / "1-red.png").symlink_to(outside)
    (tmp_path / "secret.txt").write_text(SECRET)
    with pytest.raises(Refused, match=r"1-red.png is a link to a file outside the folder"):
        finder.of_collection(6)
    drawn, found = finder.matches(finder.of_collection(2), 1, 1)
    assert found[0].image == "1-red.png"
    assert "a link to a file outside the folder" in drawn[0][1]
    assert (drawn[0][0] == 128).all()
    thumbnails = finder.thumbnails(0)
    assert (thumbnails[6][0] == 128).all()
    assert not (thumbnails[2][0] == 128).all()


def test_changed_images_are_reported(finder: ObjectFinder, images: Path) -> None:
    Image.new("RGB", (96, 96)).save(images / "0-red.png")
    (images / "0-blue.png").unlink()
    with pytest.raises(Refused, match=r"0-red.png has changed since it was indexed: update the database"):
        finder.of_collection(2)
    with pytest.raises(Refused, match=r"0-blue.png has been deleted"):
        finder.of_collection(0)


def test_reindexed_images_are_shown_again(database: Path, images: Path, tmp_path: Path) -> None:
    own = shutil.copytree(database, tmp_path / "own.db")
    collection = Collection(ObjectDatabase.open(own, images=images), reading=Reading(max_pixels=10**6))
    finder = ObjectFinder(collection, SharedNetwork(mean_colour_encoder(16)))
    draw_square(COLOURS["yellow"], (0, 0)).save(images / "0-red.png")
    (images / "0-blue.png").unlink()
    with pytest.raises(Refused, match=r"0-red.png has changed since it was indexed"):
        finder.of_collection(2)
    known = ObjectDatabase.open(own, images=images)
    index_images(known, mean_colour_encoder(16), open_images(images), prune=True)
    _, found = finder.matches(finder.of_collection(2), 1, 2)
    assert {match.image for match in found} == {"0-yellow.png", "1-yellow.png"}
    with pytest.raises(Refused, match=r"0-blue.png has been deleted"):
        finder.of_collection(0)
