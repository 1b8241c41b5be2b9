import html
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from tests.explorer.conftest import COLOURS, draw_square, encoded

from cribo.base.errors import InputError
from cribo.cli import main
from cribo.data.config import Reading
from cribo.data.labelled.formats import find_examples
from cribo.data.labelled.inputs import open_labels
from cribo.data.sources.images import open_images
from cribo.explorer import segmenting
from cribo.explorer.example_folder import ExampleFolder
from cribo.explorer.images import FolderImages
from cribo.explorer.network import SharedNetwork
from cribo.explorer.painting import from_runs, to_runs
from cribo.explorer.segmenting import Session, Visitors
from cribo.explorer.uploads import Refused
from cribo.features import mean_colour_encoder

SQUARE, GROUND = (4, 4, 44, 44), (60, 60, 90, 90)  # of the images whose name starts with 0
KEYS = {f"{place}-{colour}": f"c{4 * place + n}" for place in (0, 1) for n, colour in enumerate(sorted(COLOURS))}

Area = tuple[int, tuple[int, int, int, int]]
"""A class and a box: left, top, right, bottom."""


def runs(*areas: Area) -> list[int]:
    """Return a painting of 96 x 96 pixels."""
    labels = torch.full((96, 96), 255, dtype=torch.uint8)
    for label, (left, top, right, bottom) in areas:
        labels[top:bottom, left:right] = label
    return to_runs(labels)


def paint(session: Session, image: str, *areas: Area, time: float = 1.0) -> None:
    """Paint on an image of the collection, and confirm."""
    session.draw(KEYS[image], time, runs(*areas))
    session.confirm(KEYS[image])


def predicted(session: Session, image: str) -> torch.Tensor:
    """Return the predicted labels of an image of the collection."""
    session.open(KEYS[image])
    return from_runs(session.canvas()["predicted"], (96, 96), len(session.classes))


@pytest.fixture
def visit(squares: Path) -> Iterator[Callable[..., Visitors]]:
    """Return a function that opens the squares as a collection, with a folder of examples if one is given."""
    opened: list[Visitors] = []

    def visit(examples: Path | None = None) -> Visitors:
        encoder = SharedNetwork(mean_colour_encoder(16))
        folder = None if examples is None else ExampleFolder(examples)
        opened.append(Visitors(encoder, FolderImages(open_images(squares)), folder))
        return opened[-1]

    yield visit
    for visitors in opened:
        visitors.close()


def fresh(visitors: Visitors, *, classes: tuple[str, ...] = ("square", "ground")) -> Session:
    """Return the session of a new visitor with some named classes."""
    session = visitors.session(f"visitor {len(visitors)}")
    session.name_classes([*session.classes, *(name for name in classes if name not in session.classes)])
    return session


@pytest.fixture
def session(visit: Callable[..., Visitors]) -> Session:
    return fresh(visit())


def test_a_painted_square_is_found_in_the_next_pictures(session: Session) -> None:
    session.begin()
    assert session.canvas()["predicted"] is None
    assert session.advice.startswith("No examples yet")
    before = {caption: picture for picture, caption in session.upcoming(9)}
    assert len(before) == 7
    assert tuple(before["1-blue.png"][70, 55]) == COLOURS["blue"]
    paint(session, "0-red", (0, SQUARE), (1, GROUND))
    assert re.fullmatch(r"1 example, \d+ patches: square, ground\.", session.advice)
    found = predicted(session, "1-red")
    assert (found[52:92, 36:76] == 0).all()
    assert (found[:, :28] == 1).all()
    tiles = {caption: picture for picture, caption in session.upcoming(9)}
    assert len(tiles) == 6  # neither the example nor the current picture
    square, ground = tiles["1-blue.png"][70, 55].astype(int), tiles["1-blue.png"][20, 20].astype(int)
    assert np.abs(square - (*COLOURS["blue"],)).max() > 20  # both are tinted
    assert ground.max() > 40
    paint(session, "1-red", (0, (36, 52, 76, 92)), (1, (0, 0, 28, 96)))
    session.score()
    assert "square, ground. mIoU on what is painted in left-out examples: " in session.advice


def test_corrections_replace_and_erasing_removes_an_example(session: Session) -> None:
    paint(session, "0-red", (0, SQUARE), (1, GROUND))
    paint(session, "0-red", (1, SQUARE), (0, GROUND), time=2)
    assert (predicted(session, "1-red")[52:92, 36:76] == 1).all()
    assert [caption for _, caption in session.painted()] == ["0-red.png"]
    paint(session, "0-red", time=3)
    assert session.painted() == []
    assert session.canvas()["predicted"] is None


def test_paintings_are_kept_until_they_are_confirmed(session: Session) -> None:
    session.open("c3")
    session.draw("c3", 5.0, runs((0, SQUARE)))
    session.draw("c3", 4.0, runs())  # arrives late
    assert session.canvas()["changed"]
    assert session.examples == []
    session.open(None)
    assert session.current != "c3"
    session.open(None)
    assert session.current == "c3"  # begun pictures come first
    assert session.canvas()["painted"] == runs((0, SQUARE))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        *((runs, "does not match") for runs in ([0, 9215], [0, 9216, 1, 0], [7, 9216], [0, 2**62] * 4 + [0, 9216])),
        *((runs, "is invalid") for runs in ([0, 2**70], [0, 9216, 1], "0,9216", None)),
    ],
)
def test_invalid_paintings_are_refused(session: Session, given: Any, named: str) -> None:
    with pytest.raises(Refused, match=named):
        session.draw("c0", 1.0, given)


@pytest.mark.parametrize("corners", [[0, 0, 60, 66], [20.5, 20]])
def test_a_region_is_proposed_for_a_box_or_a_point(session: Session, corners: list[float]) -> None:
    key = KEYS["0-red"]
    found = from_runs(session.propose(key, corners), (96, 96), 1)
    assert (found[:40, :40] == 0).all()
    assert (found[56:] == 255).all()
    assert (found[:, 56:] == 255).all()
    assert session.examples == []


@pytest.mark.parametrize("corners", [[96, 0, 120, 9], [5, 5, 5, 9], [-1, 4], [1e400, 4], ["a", 4], [4], {}, None, "45"])
def test_places_outside_the_picture_are_refused(session: Session, corners: Any) -> None:
    with pytest.raises(Refused, match=r"mark it again"):
        session.propose("c0", corners)


def upload_without_data(session: Session) -> None:
    """Upload a picture of two colours whose first 256 of 1,024 columns have no data: the first 192 that are shown."""
    values = np.full((64, 1024, 3), 200, dtype=np.uint8)
    values[:, :256], values[:, 512:] = 0, (30, 30, 160)
    file = io.BytesIO()
    tifffile.imwrite(file, values, photometric="rgb", extratags=[(42113, "s", 0, "0", True)])
    session.upload("part.tif", file.getvalue(), reading=Reading(max_pixels=10**5))


def columns(*areas: tuple[int, int, int]) -> torch.Tensor:
    """Paint vertical stripes on this picture: (class, first column, end column) each."""
    labels = torch.full((48, 768), 255, dtype=torch.uint8)
    for label, first, last in areas:
        labels[:, first:last] = label
    return labels


def test_pixels_without_data_have_no_label(visit: Callable[..., Visitors], tmp_path: Path) -> None:
    session = fresh(visit(tmp_path / "ex"))
    upload_without_data(session)
    session.draw("u0", 1.0, to_runs(columns((0, 100, 300), (1, 500, 700))))
    session.confirm("u0")
    canvas = session.canvas()
    assert canvas["painted"] == to_runs(columns((0, 192, 300), (1, 500, 700)))
    found = from_runs(canvas["predicted"], (48, 768), 2)
    assert (found[:, :192] == 255).all()
    assert (found[:, 192:] != 255).all()
    saved = open_labels(tmp_path / "ex" / "labels" / "part.png").labels
    assert (saved[:, :256] == 255).all()
    later = fresh(visit(tmp_path / "ex"))
    later.open_example(0)
    assert later.canvas()["painted"] == canvas["painted"]


def test_pixels_without_data_are_not_painted(session: Session) -> None:
    upload_without_data(session)
    found = from_runs(session.propose("u0", [100, 0, 380, 48]), (48, 768), 1)
    assert (found[:, :192] == 255).all()
    assert (found[:, 200:370] == 0).all()
    with pytest.raises(Refused, match="no data"):
        session.propose("u0", [20, 20])
    session.draw("u0", 1.0, to_runs(columns((0, 20, 120))))
    with pytest.raises(Refused, match="no data"):
        session.confirm("u0")
    assert session.examples == []


@pytest.mark.parametrize("key", ["c8", "u0", "../a.png", "", "c-1", "c" + "9" * 30])
def test_unknown_pictures_are_refused(session: Session, key: str) -> None:
    with pytest.raises(Refused, match="picture"):
        session.open(key)


def test_classes_have_different_names_and_keep_their_colours(session: Session) -> None:
    before = session.canvas()["classes"]
    session.name_classes(["square", "ground", *(f"class {number}" for number in range(30))])
    session.name_classes(["tile", *session.classes[1:]])
    colours = [tuple(each["colour"]) for each in session.canvas()["classes"]]
    assert len({*colours}) == 32
    assert colours[:2] == [tuple(each["colour"]) for each in before]
    assert session.classes[0] == "tile"
    for names, said in (
        (["a", " "], "must not be empty"),
        (["a", "bus #a0b1c2"], "must not end with a colour, got “bus #a0b1c2”"),
        (["a", "bus 1, 2 30"], "must not end with a colour"),
        (["a", "# bus"], "must not start with #"),
        (["a"], "There must be 32 to 255 classes, got 1"),
        ([*session.classes, "  tile "], "There is a class “tile” already"),
        ([str(number) for number in range(256)], "got 256"),
    ):
        with pytest.raises(Refused, match=said):
            session.name_classes(names)


def test_uploaded_pictures_are_used_like_those_of_the_collection(session: Session) -> None:
    content = encoded(draw_square(COLOURS["red"], (16, 16)))
    session.upload("../my photo.jpeg", content, reading=Reading(max_pixels=10**5))
    key = session.current
    session.upload("../my photo.jpeg", content, reading=Reading(max_pixels=10**5))
    assert session.current == key == "u0"
    assert session.canvas()["name"] == "my_photo.png"
    session.open("c0")
    assert session.upcoming(9)[0][1] == "my_photo.png"
    session.draw("u0", 1.0, runs((0, (16, 16, 60, 60)), (1, (70, 70, 90, 90))))
    session.confirm("u0")
    assert (predicted(session, "0-red")[4:44, 4:44] == 0).all()
    with pytest.raises(Refused, match="more than max_pixels"):
        session.upload("a.png", content, reading=Reading(max_pixels=100))
    with pytest.raises(Refused, match="not an image"):
        session.upload("a.png", b"no image", reading=Reading(max_pixels=100))


def test_without_a_collection_a_picture_is_requested() -> None:
    session = Session(SharedNetwork(mean_colour_encoder(16)))
    session.begin()
    assert session.canvas() == {"key": None, "classes": []}
    assert session.advice == "Upload a picture to paint on."


# ------------------------------------------------------------------------------------------ saving


def test_saved_examples_label_the_collection_with_segment(
    visit: Callable[..., Visitors], squares: Path, tmp_path: Path
) -> None:
    session = fresh(visit(tmp_path / "ex"))
    paint(session, "0-red", (0, SQUARE), (1, GROUND))
    paint(session, "0-green", (0, SQUARE), (1, GROUND))
    paint(session, "0-blue", (0, SQUARE))
    assert session.saved == "All examples are saved in “ex”."
    words = ["--backbone", "mean-colour", "--examples", str(tmp_path / "ex"), "--images", str(squares)]
    assert main(["segment", *words, "--out", str(tmp_path / "out"), "--pictures", "0"]) == 0
    assert json.loads((tmp_path / "out" / "about.json").read_text())["classes"] == ["square", "ground"]
    found = open_labels(tmp_path / "out" / "labels" / "1-red.png").labels
    assert (found[52:92, 36:76] == 0).all()
    assert (found[:, :28] == 1).all()


def test_a_later_session_continues_from_saved_examples(visit: Callable[..., Visitors], tmp_path: Path) -> None:
    first = fresh(visit(tmp_path / "ex"))
    paint(first, "0-red", (0, SQUARE), (1, GROUND))
    content = encoded(draw_square(COLOURS["red"], (16, 16)))
    first.upload("mine.png", content, reading=Reading(max_pixels=10**5))
    first.draw("u0", 1.0, runs((0, (16, 16, 60, 60))))
    first.confirm("u0")
    later = fresh(visit(tmp_path / "ex"), classes=("roof",))
    assert later.classes == ["square", "ground", "roof"]
    assert sorted(caption for _, caption in later.painted()) == ["0-red.png", "mine.png"]
    assert (predicted(later, "1-red")[52:92, 36:76] == 0).all()
    later.open(KEYS["0-red"])
    assert later.canvas()["painted"] == runs((0, SQUARE), (1, GROUND))
    paint(later, "0-green", (2, SQUARE))
    assert find_examples(tmp_path / "ex").listed_classes == ["square", "ground", "roof"]


def test_labels_from_before_the_session_are_replaced_only_after_confirmation(
    visit: Callable[..., Visitors], tmp_path: Path
) -> None:
    paint(fresh(visit(tmp_path / "ex")), "0-red", (0, SQUARE))
    labels = tmp_path / "ex" / "labels" / "0-red.png"
    before = labels.read_bytes()
    later = fresh(visit(tmp_path / "ex"))
    paint(later, "0-red", (0, SQUARE), (1, GROUND))
    assert later.saved == "Not saved in “ex”: 0-red.png (it contains other labels)."
    assert labels.read_bytes() == before
    later.replace()
    assert later.saved == "All examples are saved in “ex”."
    assert (open_labels(labels).labels[60:90, 60:90] == 1).all()
    paint(later, "0-red", (0, SQUARE), (1, SQUARE), time=2)  # its own now
    assert later.saved == "All examples are saved in “ex”."


def test_a_failed_save_is_reported_and_can_be_repeated(visit: Callable[..., Visitors], tmp_path: Path) -> None:
    session = fresh(visit(tmp_path / "ex"))
    (tmp_path / "ex").write_text("a file instead of the folder")
    paint(session, "0-red", (0, SQUARE))
    assert session.saved == "Not saved in “ex”: 0-red.png (Not a directory)."
    (tmp_path / "ex").unlink()
    session.replace()
    assert session.saved == "All examples are saved in “ex”."
    assert [*find_examples(tmp_path / "ex").names] == ["0-red.png"]


def test_downloaded_examples_can_be_read_by_cribo_segment(session: Session, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="There are no examples yet"):
        session.zipped()
    paint(session, "0-red", (1, SQUARE))
    with zipfile.ZipFile(io.BytesIO(session.zipped())) as archive:
        archive.extractall(tmp_path)
    found = find_examples(tmp_path / "examples")
    assert ([*found.names], found.listed_classes) == (["0-red.png"], ["square", "ground"])
    assert (open_labels(found.example(0).labels).labels[4:44, 4:44] == 1).all()
    assert session.saved.startswith("The examples are kept until the server stops")


def test_invalid_examples_are_reported_before_the_page_is_served(
    visit: Callable[..., Visitors], tmp_path: Path
) -> None:
    paint(fresh(visit(tmp_path / "ex")), "0-red", (1, SQUARE))
    (tmp_path / "ex" / "classes.txt").write_text("square\n")
    with pytest.raises(InputError, match=r"0-red\.png: labels must be in 0 \(1 classes\) or 255 \(ignored\), got 1"):
        visit(tmp_path / "ex").warm(lambda what, done, total: None)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "ex" / "labels" / "0-red.png")
    with pytest.raises(InputError, match="must have the size of image"):
        visit(tmp_path / "ex").warm(lambda what, done, total: None)


# ------------------------------------------------------------------------------------------ visitors


def test_sessions_are_separate_and_bounded(visit: Callable[..., Visitors], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "_MOST_VISITORS", 3)
    visitors = visit()
    first = visitors.session("first")
    first.name_classes(["square"])
    assert visitors.session("second").classes == []
    for name in ("third", "first", "fourth"):
        visitors.session(name)
    assert len(visitors) == 3
    assert visitors.session("first") is first  # it was used after the second
    assert "second" not in visitors


def test_the_uploads_of_a_visitor_are_bounded(visit: Callable[..., Visitors], monkeypatch: pytest.MonkeyPatch) -> None:
    visitors = visit()
    pictures = [noise(number) for number in range(3)]
    monkeypatch.setattr(segmenting, "_SESSION_BYTES", len(pictures[0]) + len(pictures[1]))
    session = visitors.session("a")
    for number in (0, 1, 0):  # an equal picture is kept once
        session.upload(f"{number}.png", pictures[number], reading=Reading(max_pixels=10**6))
    with pytest.raises(Refused, match="download the examples"):
        session.upload("2.png", pictures[2], reading=Reading(max_pixels=10**6))
    assert session.nbytes <= len(pictures[0]) + len(pictures[1])
    visitors.session("b").upload("2.png", pictures[2], reading=Reading(max_pixels=10**6))


def noise(seed: int) -> bytes:
    """Return a picture as a PNG."""
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(content, "PNG")
    return content.getvalue()


def test_names_are_shown_as_text(visit: Callable[..., Visitors], tmp_path: Path) -> None:
    session = visit(tmp_path / "<b>ex").session("a")
    name = "<svg><a href=javascript:x>"
    session.begin()
    session.name_classes([name])
    paint(session, "0-red", (0, SQUARE))
    for text in (session.advice, session.saved):
        assert "<" not in text
    assert name in html.unescape(session.advice)
    assert "<b>ex" in html.unescape(session.saved)


def test_the_memory_of_all_visitors_is_bounded(visit: Callable[..., Visitors], monkeypatch: pytest.MonkeyPatch) -> None:
    visitors = visit()
    for name in "abc":
        visitors.session(name).name_classes(["square"])
        paint(visitors.session(name), "0-red", (0, SQUARE))
    monkeypatch.setattr(segmenting, "_MOST_BYTES", 2 * visitors.session("c").nbytes)
    with pytest.raises(Refused, match="too many visitors"):
        visitors.session("d")  # nobody's work is lost to a new visitor
    with pytest.raises(Refused, match="download the examples"):
        paint(visitors.session("c"), "1-red", (0, SQUARE))  # nor to one with much work
    assert [name in visitors for name in "abcd"] == [True, True, True, False]
    monkeypatch.setattr(segmenting, "_IDLE_SECONDS", 0)
    visitors.session("c")
    assert [name in visitors for name in "abc"] == [False, True, True]
    monkeypatch.setattr(segmenting, "_MOST_BYTES", 2**30)
    monkeypatch.setattr(segmenting, "_MOST_PATCHES", 1)
    with pytest.raises(Refused, match="The memory is full: download the examples"):
        paint(visitors.session("c"), "0-blue", (0, SQUARE))
