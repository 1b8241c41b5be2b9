"""The widget paints, labels all opened images, and leaves what a user made as it is."""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
pytest.importorskip("napari", reason="needs napari: pip install -e 'plugins/napari-cribo[test]'")
pytest.importorskip("pytestqt", reason="needs pytest-qt: pip install -e 'plugins/napari-cribo[test]'")

import napari
from napari.components import ViewerModel
from napari.utils.notifications import notification_manager
from napari_cribo.widget import StrokesWidget


def installed(name: str) -> bool:
    """Whether a package is installed, so that napari finds its manifest."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def picture(seed: int) -> np.ndarray:
    """Return a dark image with a bright right half and noise."""
    values = np.random.default_rng(seed).integers(0, 40, (96, 128), dtype=np.uint8)
    values[:, 64:] += 200
    return values


@pytest.fixture
def viewer() -> ViewerModel:
    """Return the model of a viewer, without a window: Qt's offscreen platform may lack OpenGL."""
    return ViewerModel()


@pytest.fixture
def widget(viewer: ViewerModel, qtbot: Any) -> StrokesWidget:
    """Return the widget, with a backbone."""
    made = StrokesWidget(viewer)
    qtbot.addWidget(made)
    made.backbone.setText("mean-colour")
    return made


def paint(viewer: ViewerModel, widget: StrokesWidget, name: str) -> Any:
    """Paint two strokes on an image; return their layer."""
    widget.image.setCurrentText(name)
    widget.paint.click()
    strokes = viewer.layers[f"{name} strokes"]
    assert viewer.layers.selection.active is strokes
    assert strokes.mode == "paint"
    strokes.brush_size = 3
    for label, column in ((1, 20), (2, 100)):
        strokes.selected_label = label
        place = viewer.dims.current_step[: strokes.ndim - 2]
        strokes.paint((*place, 30, column), label)
        strokes.paint((*place, 60, column), label)
    return strokes


def run(widget: StrokesWidget, qtbot: Any) -> None:
    """Label, and wait for the end."""
    widget.label.click()
    assert widget.label.text() == "Stop"
    qtbot.waitUntil(lambda: widget.label.text() == "Label", timeout=60_000)


def errors() -> list[str]:
    """Return the errors and warnings that napari has shown."""
    return [each.message for each in notification_manager.records if each.severity.name in ("ERROR", "WARNING")]


def test_strokes_on_one_image_label_all(viewer: ViewerModel, widget: StrokesWidget, qtbot: Any) -> None:
    for name in ("first", "second"):
        viewer.add_image(picture(len(viewer.layers)), name=name, scale=(0.5, 0.5))
    widget.classes.setText("dark, bright")
    strokes = paint(viewer, widget, "first")
    before = strokes.data.copy()
    run(widget, qtbot)
    for name in ("first", "second"):
        labels, confidence = viewer.layers[f"{name} labels"], viewer.layers[f"{name} confidence"]
        assert (labels.data[:, :60] == 1).all()
        assert (labels.data[:, 68:] == 2).all()
        assert 0 <= confidence.data.min() <= confidence.data.max() <= 1
        assert labels.scale.tolist() == [0.5, 0.5]
    assert np.array_equal(strokes.data, before)
    assert viewer.layers.selection.active is strokes
    assert "calibrated" in widget.report.text()
    # Results are not labelled in turn.
    assert [widget.image.itemText(index) for index in range(widget.image.count())] == ["first", "second"]
    widget.next.click()
    assert widget.image.currentText() == "second"
    assert viewer.layers["second"].visible
    assert not viewer.layers["first"].visible
    assert len(viewer.layers["paint here next"].data) == 1


def test_edited_results_are_left_as_they_are(viewer: ViewerModel, widget: StrokesWidget, qtbot: Any) -> None:
    viewer.add_image(picture(0), name="first")
    paint(viewer, widget, "first")
    run(widget, qtbot)
    labels = viewer.layers["first labels"]
    run(widget, qtbot)
    assert [layer.name for layer in viewer.layers if "labels" in layer.name] == ["first labels"]
    labels.selected_label = 1
    labels.paint((10, 120), 1)
    edited = labels.data.copy()
    run(widget, qtbot)
    assert np.array_equal(labels.data, edited)
    assert (viewer.layers["first labels [1]"].data[:, 68:] == 2).all()


def test_the_shown_plane_of_a_stack_is_labelled(viewer: ViewerModel, widget: StrokesWidget, qtbot: Any) -> None:
    stack = np.stack([picture(seed).astype(np.uint16) * 10 for seed in range(4)])
    viewer.add_image(stack, name="stack")
    viewer.dims.set_current_step(0, 1)
    paint(viewer, widget, "stack")
    viewer.dims.set_current_step(0, 2)
    run(widget, qtbot)
    labels = viewer.layers["stack labels"]
    assert labels.data.shape == stack.shape
    assert labels.data.any(axis=(1, 2)).tolist() == [False, False, True, False]
    viewer.dims.set_current_step(0, 3)
    run(widget, qtbot)
    assert labels.data.any(axis=(1, 2)).tolist() == [False, False, True, True]
    viewer.dims.set_current_step(0, 0)
    widget.next.click()
    assert viewer.dims.current_step[0] == 3


def test_channels_are_labelled_together(viewer: ViewerModel, widget: StrokesWidget, qtbot: Any) -> None:
    viewer.add_image(np.stack([picture(seed) for seed in range(5)]), name="cells", rgb=False)
    widget.channels.setChecked(True)
    strokes = paint(viewer, widget, "cells")
    assert strokes.data.shape == (96, 128)
    run(widget, qtbot)
    assert (viewer.layers["cells labels"].data[:, 68:] == 2).all()


@pytest.mark.parametrize("backbone", ["", "no/such/weights.safetensors"], ids=["none", "missing file"])
def test_errors_are_shown_and_the_widget_stays_usable(
    viewer: ViewerModel, widget: StrokesWidget, qtbot: Any, backbone: str
) -> None:
    viewer.add_image(picture(0), name="first")
    widget.backbone.setText(backbone)
    paint(viewer, widget, "first")
    count = len(errors())
    widget.label.click()
    qtbot.waitUntil(lambda: len(errors()) > count and widget.label.text() == "Label", timeout=60_000)
    assert "first labels" not in viewer.layers
    widget.backbone.setText("mean-colour")
    run(widget, qtbot)
    assert "first labels" in viewer.layers


def test_memories_are_saved_to_new_files_and_loaded(
    viewer: ViewerModel, widget: StrokesWidget, qtbot: Any, tmp_path: Path
) -> None:
    viewer.add_image(picture(0), name="first")
    widget.classes.setText("dark, bright")
    paint(viewer, widget, "first")
    run(widget, qtbot)
    widget.save_memory(tmp_path / "mine")
    content = (tmp_path / "mine.safetensors").read_bytes()
    count = len(errors())
    widget.save_memory(tmp_path / "mine.safetensors")
    assert len(errors()) == count + 1
    assert (tmp_path / "mine.safetensors").read_bytes() == content
    widget.classes.clear()
    widget.use_memory(tmp_path / "mine.safetensors")
    assert widget.classes.text() == "dark, bright"
    run(widget, qtbot)
    assert len(errors()) == count + 1


@pytest.mark.skipif(not installed("napari-cribo"), reason="needs pip install -e plugins/napari-cribo")
def test_napari_opens_and_closes_the_widget(qtbot: Any) -> None:
    viewer = napari.Viewer(show=False)
    try:
        dock, widget = viewer.window.add_plugin_dock_widget("napari-cribo", "Labels from strokes")
        assert isinstance(widget, StrokesWidget)
        viewer.window.remove_dock_widget(dock)
    finally:
        viewer.close()
