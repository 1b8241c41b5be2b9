"""Planes are labelled by strokes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from napari_cribo.planes import Plane
from napari_cribo.session import Result, Session, Strokes, Summary, least_certain

from cribo.base.errors import InputError
from cribo.features.memory import Segmentation, SegmentationMemory

BACKBONE = "mean-colour"


def picture(seed: int, *, deep: bool = False) -> np.ndarray:
    """Return a dark image with a bright right half and noise."""
    values = np.random.default_rng(seed).integers(0, 40, (96, 128), dtype=np.uint16)
    values[:, 64:] += 200
    return values * 16 if deep else values.astype(np.uint8)


def strokes() -> np.ndarray:
    """Return two strokes: label 1 on the left, 2 on the right."""
    drawn = np.zeros((96, 128), np.uint8)
    drawn[20:23, 5:50], drawn[60:63, 80:120] = 1, 2
    return drawn


def label(session: Session, drawn: list[Strokes], planes: list[Plane], *names: str) -> tuple[list[Result], Summary]:
    """Label planes to the end."""
    running = session.label(drawn, planes, names)
    results: list[Result] = []
    while True:
        try:
            results.append(next(running))
        except StopIteration as end:
            return results, end.value


@pytest.mark.parametrize("deep", [False, True], ids=["8 bits", "16 bits"])
def test_images_are_labelled_by_strokes_on_one(deep: bool) -> None:
    planes = [Plane(f"image {seed}", picture(seed, deep=deep)) for seed in range(3)]
    results, summary = label(Session(BACKBONE), [(planes[0], strokes())], planes, "dark")
    assert [result.plane for result in results] == planes
    for result in results:
        assert result.found is not None
        assert (result.found.labels[:, :60] == 0).all()
        assert (result.found.labels[:, 68:] == 1).all()
    assert summary.classes == ("dark", "class 2")
    assert summary.warning
    assert summary.suggestion is not None
    assert summary.suggestion.plane in planes[1:]


def test_channels_are_read() -> None:
    data = np.stack([picture(0)[::-1], picture(1), *[np.zeros((96, 128), np.uint8)] * 3])
    plane = Plane("cells", data, has_channels=True)
    (result,), _ = label(Session(BACKBONE), [(plane, strokes())], [plane])
    assert result.found is not None
    assert (result.found.labels[:, 68:] == 1).all()


def test_erased_strokes_are_forgotten() -> None:
    first, second = (Plane(f"image {seed}", picture(seed)) for seed in range(2))
    session = Session(BACKBONE)
    label(session, [(first, strokes()), (second, strokes())], [first])
    label(session, [(first, strokes())], [first])
    assert session.memory is not None
    assert session.memory.names == ["image 0"]


def test_a_score_is_expected_from_two_examples() -> None:
    planes = [Plane(f"image {seed}", picture(seed)) for seed in range(2)]
    _, summary = label(Session(BACKBONE), [(plane, strokes()) for plane in planes], planes)
    assert "100%" in summary.score


def test_a_plane_unlike_the_painted_ones_has_a_reason() -> None:
    painted, other = Plane("grey", picture(0)), Plane("cells", np.zeros((5, 96, 128), np.uint8), has_channels=True)
    (first, second), _ = label(Session(BACKBONE), [(painted, strokes())], [painted, other])
    assert first.found is not None
    assert second.found is None
    assert "cells" in second.reason


def test_saved_memories_are_continued(tmp_path: Path) -> None:
    file, session = tmp_path / "mine.safetensors", Session(BACKBONE)
    planes = [Plane(f"image {seed}", picture(seed, deep=True)) for seed in range(2)]
    label(session, [(planes[0], strokes())], planes, "dark", "bright")
    session.save(file)
    saved = SegmentationMemory.load(file, BACKBONE)
    assert saved.classes == ["dark", "bright"]
    assert saved.settings.range is not None
    before = file.read_bytes()
    continued = Session(BACKBONE, file)
    (result,), summary = label(continued, [(planes[1], strokes())], [planes[1]], "ignored")
    assert result.found is not None
    assert summary.classes == ("dark", "bright")
    assert continued.memory is not None
    assert continued.memory.names == ["image 0", "image 1"]
    with pytest.raises(InputError, match="exists"):
        continued.save(file)
    assert file.read_bytes() == before


PLANE = Plane("image", picture(0))


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ([], "nothing is painted"),
        ([(PLANE, np.minimum(strokes(), 1))], "second class"),
        ([(PLANE, strokes().astype(np.int32) * 200)], "labels must be"),
    ],
    ids=["nothing", "one class", "too many classes"],
)
def test_too_little_is_refused(drawn: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        label(Session(BACKBONE), drawn, [PLANE])


def test_labels_must_be_classes_of_the_memory(tmp_path: Path) -> None:
    session = Session(BACKBONE)
    label(session, [(PLANE, strokes())], [PLANE])
    session.save(tmp_path / "mine.safetensors")
    with pytest.raises(InputError, match=r"mine\.safetensors"):
        label(Session(BACKBONE, tmp_path / "mine.safetensors"), [(PLANE, strokes() + np.uint8(2))], [PLANE])


def test_nothing_can_be_saved_before_labels(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="label first"):
        Session(BACKBONE).save(tmp_path / "mine.safetensors")


def test_the_least_certain_place_is_inside_the_image() -> None:
    confidence = torch.ones(60, 80)
    confidence[:, :2] = 0.2
    labels = torch.zeros(60, 80, dtype=torch.uint8)
    row, column = least_certain(Segmentation(labels, confidence, {"dark": 1.0}), 16)
    assert 7 <= row <= 53
    assert 7 <= column <= 9
