import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from cribo.data.sources.images import open_images
from cribo.explorer.candidates import Candidates
from cribo.explorer.images import FolderImages
from cribo.explorer.network import SharedNetwork
from cribo.explorer.segmenting import empty_memory, probe_of
from cribo.explorer.uploads import Refused
from cribo.features import mean_colour_encoder
from cribo.features.probes.fitting import Choice

SHADES = (0, 5, 10, 120, 125, 250)


@pytest.fixture
def encoder() -> SharedNetwork:
    return SharedNetwork(mean_colour_encoder(16))


@pytest.fixture
def candidates(encoder: SharedNetwork, tmp_path: Path) -> Iterator[Candidates]:
    """Encode six images of one colour each, and a file that is not an image."""
    for number, shade in enumerate(SHADES):
        Image.fromarray(np.full((32, 32, 3), (shade, 128, 255 - shade), np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "6.png").write_bytes(b"not an image")
    memory = empty_memory(encoder)
    candidates = Candidates(FolderImages(open_images(tmp_path)), memory.encode, probe_of(encoder).blocks)
    yield candidates
    candidates.stop()


def encode_all(candidates: Candidates) -> None:
    """Wait until the background thread has encoded all images."""
    candidates.start()
    for thread in threading.enumerate():
        if thread.name == "candidates":
            thread.join()


def test_suggestions_cover_the_collection(candidates: Candidates) -> None:
    assert sorted(candidates.order(None, [], set(), 9)) == [0, 1, 2, 3, 4, 5, 6]  # before they are encoded
    encode_all(candidates)
    groups = [{0, 1, 2}, {3, 4}, {5}]
    found = candidates.order(None, [], set(), 3)
    assert all(group & {*found} for group in groups)
    assert candidates.order(None, [found[0]], set(), 2) == found[1:]  # the order stays when the first one is opened
    assert {*candidates.order(None, [], {5}, 9)} == {0, 1, 2, 3, 4}


def test_images_with_uncertain_labels_are_suggested_first(candidates: Candidates, encoder: SharedNetwork) -> None:
    encode_all(candidates)
    memory = empty_memory(encoder)
    for label, number in enumerate((0, 5)):
        image = candidates.images[number].load(32)
        memory.add(image, torch.full((32, 32), label))
    fitted = memory.fitted_with(Choice(probe_of(encoder), 1.0, None, None, {}, ""))
    assert candidates.order(fitted, [], {0, 5}, 1)[0] in (3, 4)


def test_patches_without_data_are_not_suggested(encoder: SharedNetwork, tmp_path: Path) -> None:
    red, blue, black = (200, 30, 30), (30, 30, 200), (0, 0, 0)
    pictures = [((red, 4),), ((red, 2), (black, 4)), ((blue, 1),), ((black, 4),)]
    for number, parts in enumerate(pictures):
        values = np.concatenate([np.full((16, 16 * patches, 3), colour, np.uint8) for colour, patches in parts], axis=1)
        nodata = [(42113, "s", 0, "0", True)]
        tifffile.imwrite(tmp_path / f"{number}.tif", values, photometric="rgb", extratags=nodata)
    candidates = Candidates(FolderImages(open_images(tmp_path)), empty_memory(encoder).encode, probe_of(encoder).blocks)
    encode_all(candidates)
    candidates.stop()
    assert candidates.order(None, [0], set(), 9) == [2, 1]


def test_nothing_is_encoded_while_requests_are_processed(candidates: Candidates) -> None:
    with candidates.paused():
        candidates.start()
        before = candidates.order(None, [], set(), 9)
        time.sleep(0.1)
        assert candidates.order(None, [], set(), 9) == before
    encode_all(candidates)


def test_images_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder, secret = tmp_path / "images", tmp_path / "secret.png"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(secret)
    (folder / "a.png").symlink_to(secret)
    images = FolderImages(open_images(folder))
    with pytest.raises(Refused, match=r"a\.png is a link to a file outside the folder"):
        images[0]
    with pytest.raises(Refused, match="The picture must be 0 to 0, got 1"):
        images[1]
