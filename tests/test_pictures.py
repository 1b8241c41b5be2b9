"""The pictures of the documentation: every one is made by `python -m docs.pictures`, and its text is readable."""

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import docs.pictures
import pytest
from docs.pictures import IMAGES, PICTURES, Inputs, Unavailable, main, publish
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.text import Text
from PIL import Image

REPOSITORY = Path(__file__).parents[1]
GALLERY = re.findall(
    r"^!\[[^\]]*\]\(images/([\w-]+)\.png\)\n\n.*?\n```bash\n(.*?)^```",
    (REPOSITORY / "docs/gallery.md").read_text(),
    re.M | re.S,
)
"""The pictures of the gallery, in order, and their commands."""
SHOWN = 800  # width of a picture in the documentation, in pixels
SMALLEST = 9.5  # height of text at that width, in pixels


def test_all_pictures_of_the_documentation_are_made_and_used() -> None:
    assert {f"{name}.png" for name in PICTURES} == {path.name for path in IMAGES.iterdir()}
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    used = {name for page in pages for name in re.findall(r"images/([\w-]+)\.png\)", page.read_text())}
    assert used == set(PICTURES)


def test_the_gallery_shows_each_picture_once_with_one_sentence() -> None:
    assert sorted(name for name, _ in GALLERY) == sorted(PICTURES)
    parts = (REPOSITORY / "docs/gallery.md").read_text().split("\n![")[1:]
    for part in parts:
        _, sentence, command, *_ = part.split("\n\n")
        assert re.fullmatch(r"[^.]+(?: [^.]+)*\(\[[\w\s]+\]\([\w/.#-]+\)\)\.", sentence), sentence
        assert command.startswith("```bash\ncribo ")


@pytest.mark.endurance
def test_all_pictures_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[str] = []
    savefig = Figure.savefig

    def checked(self: Figure, path: Any, **options: Any) -> None:
        savefig(self, path, **options)
        if options["format"] == "png":
            self.draw_without_rendering()  # savefig leaves the layout at its own resolution
            faults.extend(f"{Path(path).name}: {fault}" for fault in unreadable(self))

    monkeypatch.setattr(Figure, "savefig", checked)
    commands: list[str] = []

    def recorded(*words: str | Path) -> None:
        commands.append(str(words[0]))
        call(*words)

    call = docs.pictures._call
    monkeypatch.setattr("docs.pictures._call", recorded)
    inputs, out = Inputs(tmp_path / "work", quick=True), tmp_path / "out"
    skipped: dict[str, str] = {}
    out.mkdir()
    with inputs.stack:
        for name, make in PICTURES.items():
            try:
                publish(make(inputs), out / f"{name}.png")
            except Unavailable as error:
                skipped[name] = str(error)
                continue
            with Image.open(out / f"{name}.png") as picture:
                assert 300 < picture.width <= 1000, name
            made_by = (
                "explore" if name.startswith("explorer") else " ".join(commands[-1].split()[:2]).partition(" --")[0]
            )
            assert dict(GALLERY)[name].splitlines()[-1].startswith(f"cribo {made_by}"), name
    assert all(name.startswith("explorer") and "apt-get install chromium" in why for name, why in skipped.items())
    assert not faults, "\n".join(faults)


def test_real_pictures_need_real_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("docs.pictures.SHARED", tmp_path)
    assert main(["linear", "--out", str(tmp_path / "out"), "--work", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"skipped linear: needs {tmp_path}/weights")
    assert "--quick needs no data" in message


# ---------------------------------------------------------------------- readable text


def unreadable(figure: Figure) -> Iterator[str]:
    """Describe texts of a drawn figure that are too small, cut at its border, or over each other."""
    boxes = []
    for text in texts(figure):
        height = float(text.get_fontsize()) / 72 * SHOWN / figure.get_figwidth()
        if height < SMALLEST:
            yield f"{text.get_text()!r} is {height:.1f} pixels high"
        box = text.get_window_extent()
        if not text.get_clip_on() or text.get_clip_path() is None:
            if min(box.x0, box.y0) < -2 or box.x1 > figure.bbox.x1 + 2 or box.y1 > figure.bbox.y1 + 2:
                yield f"{text.get_text()!r} is cut"
            if not text.get_path_effects():  # numbers in regions may touch
                boxes.append((text.get_text(), box.shrunk(0.9, 0.8)))
    for (one, first), (other, second) in combinations(boxes, 2):
        if first.overlaps(second):
            yield f"{one!r} is over {other!r}"


def texts(figure: FigureBase) -> Iterator[Text]:
    """Yield the visible texts of a figure."""
    every = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes if isinstance(figure, Figure) else ():
        every += [axes.title, axes._left_title, axes._right_title, *axes.texts, *ticks(axes)]  # pyright: ignore[reportAttributeAccessIssue]
        legend = axes.get_legend()
        every += legend.get_texts() if legend else ()
    yield from (text for text in every if text.get_visible() and text.get_text().strip())
    for part in figure.subfigs:
        yield from texts(part)


def ticks(axes: Axes) -> Iterator[Text]:
    """Yield the labels of both axes and of their ticks inside the limits."""
    if axes.axison:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            yield axis.label
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high:
                    yield tick.label1


def test_small_cut_and_overlapping_texts_are_found() -> None:
    figure = Figure(figsize=(8, 4))
    for x, y, text, size in (
        (0.1, 0.5, "one", 12),
        (0.1, 0.51, "two", 12),
        (0.98, 0.2, "cut", 12),
        (0.5, 0.1, "tiny", 5),
    ):
        figure.text(x, y, text, fontsize=size)
    assert list(unreadable(figure)) == ["'cut' is cut", "'tiny' is 6.9 pixels high", "'one' is over 'two'"]
