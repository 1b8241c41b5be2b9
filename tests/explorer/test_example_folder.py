import resource
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from tests.explorer.conftest import encoded

from cribo.base.errors import InputError
from cribo.data.config import DEFAULT_READING
from cribo.data.labelled.formats import find_examples
from cribo.data.labelled.inputs import open_labels
from cribo.data.reading import EncodedImage
from cribo.data.sources.images import open_images
from cribo.explorer.example_folder import ExampleFolder, ExistingLabels, PageOfStack, Written
from cribo.explorer.images import PageImage, image_in
from cribo.explorer.uploads import Refused


def picture(name: str, shade: int = 0, size: tuple[int, int] = (40, 30)) -> PageImage:
    """Return a grey image of a (width, height)."""
    return PageImage(name, EncodedImage(name, encoded(Image.new("RGB", size, (shade, shade, shade)))))


def halves(left: int, right: int = 255) -> torch.Tensor:
    """Return labels of 30 x 40 pixels."""
    labels = torch.full((30, 40), right, dtype=torch.uint8)
    labels[:, :20] = left
    return labels


def labels_of(folder: Path, name: str) -> torch.Tensor:
    return open_labels(folder / "labels" / name).labels


def names_in(folder: ExampleFolder) -> list[str]:
    return [*find_examples(folder.path).names]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_saved_examples_are_those_that_segment_reads(tmp_path: Path) -> None:
    folder, written = ExampleFolder(tmp_path / "new" / "ex"), Written()
    assert folder.examples() is None
    folder.save(picture("street/a.png", 10), halves(1), ["road", "sky"], written)
    folder.save(picture("b.png", 20), halves(0, 1), ["road", "sky"], written)
    found = find_examples(tmp_path / "new" / "ex")
    assert ([*found.names], found.listed_classes) == (["b.png", "street/a.png"], ["road", "sky"])
    assert torch.equal(labels_of(folder.path, "street/a.png"), halves(1))
    assert (folder.path / "images" / "street" / "a.png").read_bytes() == picture("street/a.png", 10).content


def test_labels_of_others_are_replaced_on_request_only(tmp_path: Path) -> None:
    folder, first, second = ExampleFolder(tmp_path / "ex"), Written(), Written()
    folder.save(picture("a.png"), halves(0), ["road"], first)
    folder.save(picture("a.png"), halves(0, 1), ["road", "sky"], first)  # its own
    before = files_of(folder.path)
    with pytest.raises(ExistingLabels, match=r"“ex” already contains labels of a\.png"):
        folder.save(picture("a.png"), halves(1), ["road", "tree"], second)
    assert files_of(folder.path) == before
    folder.save(picture("a.png"), halves(1), ["road", "tree"], second, replace=True)
    assert torch.equal(labels_of(folder.path, "a.png"), halves(2))
    with pytest.raises(ExistingLabels):  # the labels of the first session are gone
        folder.save(picture("a.png"), halves(0), ["road", "sky"], first)


def test_classes_of_several_sessions_are_matched_by_name(tmp_path: Path) -> None:
    folder = ExampleFolder(tmp_path / "ex")
    folder.save(picture("a.png", 1), halves(0, 1), ["road", "car"], Written())
    folder.save(picture("b.png", 2), halves(0, 1), ["tree", "road"], Written())
    assert folder.classes == ["road", "car", "tree"]
    assert torch.equal(labels_of(folder.path, "b.png"), halves(2, 0))
    palettes = [open_labels(path).palette or () for path in sorted((folder.path / "labels").iterdir())]
    assert palettes[0] == palettes[1][:2]


def test_colours_continue_those_of_the_folder(tmp_path: Path) -> None:
    folder = ExampleFolder(tmp_path / "ex")
    folder.save(picture("a.png", 1), halves(0, 1), ["road", "car"], Written())
    image = Image.open(folder.path / "labels" / "a.png")
    image.putpalette([1, 2, 3, 4, 5, 6])
    image.save(folder.path / "labels" / "a.png")
    again = ExampleFolder(tmp_path / "ex")
    again.save(picture("b.png", 2), halves(2), ["road", "car", "tree"], Written())
    assert again.palette[:2] == [(1, 2, 3), (4, 5, 6)]
    assert open_labels(again.path / "labels" / "b.png").palette == tuple(again.palette)


def test_another_image_of_the_same_name_gets_a_number(tmp_path: Path) -> None:
    folder, written = ExampleFolder(tmp_path / "ex"), Written()
    for shade in (1, 2, 1):
        folder.save(picture("a.png", shade), halves(0), ["road"], written)
    folder.save(picture("a.webp", 3), halves(0), ["road"], written)  # would share the labels of a.png
    assert names_in(folder) == ["a-2.png", "a-3.webp", "a.png"]


def test_a_page_of_a_stack_is_not_saved(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "stack.tif", np.zeros((3, 30, 40), np.uint8), photometric="minisblack")
    name = open_images(tmp_path).names[1]
    folder = ExampleFolder(tmp_path / "ex")
    with pytest.raises(PageOfStack):
        folder.save(image_in(tmp_path, name, reading=DEFAULT_READING), halves(0), ["road"], Written())
    assert not folder.path.exists()


def test_labels_pair_with_their_image_in_any_unicode_form(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    folder, written = ExampleFolder(tmp_path / "ex"), Written()
    folder.save(picture(f"{composed}.png"), halves(0), ["road"], written)
    (tmp_path / "ex" / "labels" / f"{composed}.png").rename(tmp_path / "ex" / "labels" / f"{decomposed}.png")
    with pytest.raises(ExistingLabels):
        folder.save(picture(f"{decomposed}.png"), halves(0, 1), ["road", "sky"], Written())
    folder.save(picture(f"{decomposed}.png"), halves(0, 1), ["road", "sky"], Written(), replace=True)
    assert names_in(folder) == [f"{composed}.png"]
    assert torch.equal(labels_of(folder.path, f"{decomposed}.png"), halves(0, 1))


def test_labels_are_enlarged_and_unchanged_pixels_keep_their_detail(tmp_path: Path) -> None:
    folder = ExampleFolder(tmp_path / "ex")
    large = picture("a.png", size=(400, 300))
    folder.save(large, halves(0), ["road", "sky"], Written())
    assert labels_of(folder.path, "a.png").shape == (300, 400)
    exact = open_labels(folder.path / "labels" / "a.png").labels.clone()
    exact[7, 250] = 1  # is lost when the labels are reduced
    Image.fromarray(exact.numpy()).save(folder.path / "labels" / "a.png")
    corrected = halves(0)
    corrected[20:] = 1
    folder.save(large, corrected, ["road", "sky"], Written(), replace=True)
    saved = labels_of(folder.path, "a.png")
    assert saved[7, 250] == 1
    assert (saved[200:] == 1).all()


def test_a_failed_save_leaves_the_folder_unchanged(tmp_path: Path) -> None:
    folder, written = ExampleFolder(tmp_path / "ex"), Written()
    folder.save(picture("a.png", 1), halves(0), ["road"], written)
    before = files_of(folder.path)
    noise = Image.effect_noise((200, 200), 90).convert("RGB")
    large = PageImage("b.png", EncodedImage("b.png", encoded(noise)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # writing the image fails halfway
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.save(large, halves(0), ["road"], written)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_of(folder.path) == before
    folder.save(large, halves(0), ["road"], written)
    assert names_in(folder) == ["a.png", "b.png"]


def test_a_single_painted_class_is_not_read_as_a_mask(tmp_path: Path) -> None:
    folder, written = ExampleFolder(tmp_path / "ex"), Written()
    folder.save(picture("a.png", 1), halves(0), ["road", "sky"], written)
    assert folder.classes == ["road"]
    assert (open_labels(find_examples(folder.path).example(0).labels).labels[:, 20:] == 255).all()
    folder.save(picture("b.png", 2), halves(1), ["road", "sky"], written)
    assert folder.classes == ["road", "sky"]
    folder.save(picture("b.png", 2), halves(0), ["road", "sky"], written)  # a correction
    assert (open_labels(find_examples(folder.path).example(0).labels).labels[:, 20:] == 255).all()
    folder.save(picture("b.png", 2), halves(1), ["road", "sky"], written)
    folder.remove(picture("b.png", 2), written)
    assert (open_labels(find_examples(folder.path).example(0).labels).labels[:, 20:] == 255).all()


def test_own_examples_can_be_removed(tmp_path: Path) -> None:
    folder, written = ExampleFolder(tmp_path / "ex"), Written()
    folder.save(picture("a.png", 1), halves(0), ["road"], Written())
    folder.save(picture("b.png", 2), halves(0), ["road"], written)
    assert not folder.remove(picture("a.png", 1), written)
    assert folder.remove(picture("b.png", 2), written)
    assert names_in(folder) == ["a.png"]


def test_own_classes_can_be_renamed(tmp_path: Path) -> None:
    folder, first, second = ExampleFolder(tmp_path / "ex"), Written(), Written()
    folder.rename_class("raod", "road", first)  # not saved yet
    folder.save(picture("a.png", 1), halves(0), ["raod"], first)
    folder.save(picture("b.png", 2), halves(0), ["sky"], second)
    folder.rename_class("raod", "road", first)
    assert folder.classes == ["road", "sky"]
    with pytest.raises(
        Refused, match=r"“sky” is a class of “ex”, and may be used by others: rename it in classes\.txt"
    ):
        folder.rename_class("sky", "heaven", first)
    with pytest.raises(Refused, match="There is a class “sky” in “ex”"):
        folder.rename_class("road", "sky", first)


def test_classes_without_names_are_numbered(tmp_path: Path) -> None:
    folder = ExampleFolder(tmp_path / "ex")
    folder.save(picture("a.png", 1), halves(1), ["x", "y"], Written())
    (folder.path / "classes.txt").unlink()
    assert folder.classes == ["0", "1"]
    folder.save(picture("b.png", 2), halves(0), ["road"], Written())
    assert (folder.path / "classes.txt").read_text() == "0\n1\nroad\n"


def test_folders_of_other_layouts_are_refused(tmp_path: Path) -> None:
    folder = ExampleFolder(tmp_path / "ex")
    folder.save(picture("a.png", 1), halves(0), ["road"], Written())
    side_by_side = tmp_path / "side"
    side_by_side.mkdir()
    shutil.copy(folder.path / "images" / "a.png", side_by_side / "a.jpg")
    shutil.copy(folder.path / "labels" / "a.png", side_by_side)
    with pytest.raises(InputError, match="has a layout that the page cannot extend"):
        ExampleFolder(side_by_side)
    for name in ("a.png", "b.png"):
        folder.save(picture(name, 1), halves(0, 1), ["road", "sky"], Written(), replace=True)
    for line, kind in (("road #00ff00\nsky #0000ff\n", "colours"), ("road\nsky\n", "masks of 0 and 255")):
        (folder.path / "classes.txt").write_text(line)
        if kind != "colours":
            for file in (folder.path / "labels").iterdir():
                Image.fromarray(255 * halves(0, 1).numpy()).save(file)
        with pytest.raises(InputError, match=f"the label maps in .* are {kind}, but the page writes class indices"):
            ExampleFolder(folder.path)
    with pytest.raises(InputError, match="is a file, not a folder"):
        ExampleFolder(side_by_side / "a.jpg")
