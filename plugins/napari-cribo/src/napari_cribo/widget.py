"""The dock widget: paint strokes, see all opened images labelled."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Shaped
from napari.layers import Image, Labels, Layer, Points
from napari.qt.threading import create_worker
from napari.utils.notifications import notification_manager, show_error, show_info, show_warning
from qtpy.QtWidgets import (
    QCheckBox,
    QComboBox,
    QFileDialog,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from cribo.base.errors import InputError
from cribo.base.wording import counted
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.features.memory import SegmentationMemory
from napari_cribo.planes import Plane, painted
from napari_cribo.session import Result, Session, Strokes, Suggestion, Summary

if TYPE_CHECKING:
    from napari.viewer import Viewer

STROKES, LABELS, CONFIDENCE = "strokes", "labels", "confidence"
"""Layers of an image "cells" are called "cells strokes", "cells labels" and "cells confidence"."""

_BRUSH = 10  # pixels
_NOTHING = "Choose a backbone and an image, click Paint, and paint parts of two classes."


class StrokesWidget(QWidget):
    """Labels all opened images from strokes on some of them.

    Strokes on an image are the Labels layer named like the image, followed by "strokes". Results are layers of their
    own; those that were edited are left as they are.

    Args:
        napari_viewer: the viewer; napari passes it by this name.
    """

    def __init__(self, napari_viewer: "Viewer") -> None:
        super().__init__()
        self._viewer = viewer = napari_viewer
        self._session: Session | None = None
        self._worker: Any = None
        self._suggestion: Suggestion | None = None
        self._suggested: Layer | None = None
        self._written: dict[tuple[Layer, str], tuple[Layer, dict[tuple[int, ...], np.ndarray]]] = {}
        self._memory_file: Path | None = None
        self._build()
        for event in (viewer.layers.events.inserted, viewer.layers.events.removed, viewer.layers.events.reordered):
            event.connect(self._list_images)
        self._list_images()
        active = viewer.layers.selection.active
        if isinstance(active, Image):
            self.image.setCurrentText(active.name)
        self.image.activated.connect(self._show_only)

    def _build(self) -> None:
        self.backbone = QLineEdit()
        self.backbone.setPlaceholderText("file, run or timm name")
        self.backbone.setToolTip("As for cribo segment --backbone: a run, a checkpoint, hf://..., or a name of timm")
        browse = QPushButton("Browse…")
        browse.clicked.connect(self._browse)
        self.memory = QLabel("none")
        self.load = QPushButton("Load…")
        self.load.setToolTip("Add the strokes to the examples in a file, which is not changed")
        self.load.clicked.connect(self._load)
        self.save = QPushButton("Save…")
        self.save.setToolTip("Write all examples to a new file, for cribo segment --memory and cribo serve")
        self.save.clicked.connect(self._save)
        self.image = QComboBox()
        self.image.setToolTip("Choosing an image shows it with its strokes and labels, and hides the others")
        self.channels = QCheckBox("The first axis is channels")
        self.classes = QLineEdit()
        self.classes.setPlaceholderText("names of labels 1, 2, ...: road, sky")
        self.paint = QPushButton("Paint")
        self.paint.setToolTip("Paint strokes on this image; each class is a label, from 1")
        self.paint.clicked.connect(self._paint)
        self.label = QPushButton("Label")
        self.label.setToolTip("Label the shown plane of all opened images")
        self.label.clicked.connect(self._start_or_stop)
        self.busy = QProgressBar()
        self.busy.setVisible(False)
        self.next = QPushButton("Show where to paint next")
        self.next.setEnabled(False)
        self.next.clicked.connect(self._show_suggestion)
        self.report = QLabel(_NOTHING)
        self.report.setWordWrap(True)

        form = QFormLayout()
        form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
        form.addRow("Backbone", _row(self.backbone, browse))
        form.addRow("Memory", _row(self.memory, self.load, self.save))
        form.addRow("Image", self.image)
        form.addRow("", self.channels)
        form.addRow("Classes", self.classes)
        layout = QVBoxLayout(self)
        layout.addLayout(form)
        layout.addWidget(_row(self.paint, self.label))
        layout.addWidget(self.busy)
        layout.addWidget(self.report)
        layout.addWidget(self.next)
        layout.addStretch()

    # ------------------------------------------------------------------------------------------------- layers

    def _images(self) -> list[Image]:
        """Return the images to label, without the layers of results."""
        results = [layer for layer, _ in self._written.values()]
        return [layer for layer in self._viewer.layers if isinstance(layer, Image) and layer not in results]

    def _list_images(self) -> None:
        chosen = self.image.currentText()
        self.image.clear()
        self.image.addItems([layer.name for layer in self._images()])
        if chosen:
            self.image.setCurrentText(chosen)

    def _current(self) -> Image:
        image = next((layer for layer in self._images() if layer.name == self.image.currentText()), None)
        if image is None:
            raise InputError("no image is opened: open one, with File > Open")
        return image

    def _strokes(self, image: Image) -> Labels | None:
        """Return the layer of strokes on an image."""
        name = f"{image.name} {STROKES}"
        return next((layer for layer in self._viewer.layers if isinstance(layer, Labels) and layer.name == name), None)

    def _plane(self, image: Image) -> Plane:
        """Return the shown plane of an image.

        Raises:
            InputError: the viewer does not show planes of Y and X, or the layer is no such image.
        """
        dims = self._viewer.dims
        if dims.ndisplay != 2 or tuple(dims.displayed) != (dims.ndim - 2, dims.ndim - 1):
            raise InputError("strokes and labels are on planes of the last two axes: show these in 2D")
        has_channels = self.channels.isChecked() and not image.rgb
        data: Any = image.data[0] if image.multiscale else image.data
        axes = len(data.shape) - image.rgb - 2
        if has_channels and not axes:
            raise InputError(f"{image.name} has two axes and no channels")
        place = image.world_to_data(dims.point)[:axes]
        index = [min(max(round(each), 0), size - 1) for each, size in zip(place, data.shape, strict=False)]
        return Plane(image.name, data, tuple(index[1:] if has_channels else index), image.rgb, has_channels)

    def _beside(self, image: Image, plane: Plane) -> dict[str, Any]:
        """Return the placement of a layer over an image."""
        axes = len(plane.shape)
        return {
            "scale": image.scale[-axes:],
            "translate": image.translate[-axes:],
            "units": image.units[-axes:],
            "axis_labels": image.axis_labels[-axes:],
            "metadata": {"image": image.name},
        }

    def _write(self, image: Image, plane: Plane, kind: str, values: Shaped[np.ndarray, "h w"]) -> None:
        """Update the layer of a result; add a new layer if there is none, or if it was edited."""
        layer, written = self._written.get((image, kind), (None, {}))
        before = written.get(plane.index)
        if layer is not None and layer in self._viewer.layers and layer.data.shape == plane.shape:
            shown = layer.data[plane.index]
            untouched = np.array_equal(shown, before) if before is not None else not shown.any()
            if untouched:
                layer.data[plane.index] = values
                written[plane.index] = values.copy()
                layer.refresh()
                return
        data = np.zeros(plane.shape, values.dtype)
        data[plane.index] = values
        name, about = f"{image.name} {kind}", self._beside(image, plane)
        if kind == LABELS:
            new: Layer = Labels(data, name=name, opacity=0.5, visible=image.visible, **about)
        else:
            new = Image(data, name=name, contrast_limits=(0, 1), colormap="viridis", visible=False, **about)
        self._written[image, kind] = (new, {plane.index: values.copy()})
        strokes = self._strokes(image)
        below = strokes if strokes is not None else image
        place = self._viewer.layers.index(below) + (strokes is None)
        active = self._viewer.layers.selection.active
        self._viewer.layers.insert(place, new)
        self._viewer.layers.selection.active = active  # so that painting can go on

    def _show_only(self) -> None:
        """Show the chosen image with its strokes and labels; hide the other images with theirs."""
        chosen = self.image.currentText()
        for image in self._images():
            shown = image.name == chosen
            labels = self._written.get((image, LABELS), (None, {}))[0]
            for layer in (image, self._strokes(image), labels):
                if layer is not None:
                    layer.visible = shown
            confidence = self._written.get((image, CONFIDENCE), (None, {}))[0]
            if confidence is not None and not shown:
                confidence.visible = False
            if shown:
                self._viewer.layers.selection.active = self._strokes(image) or image

    # ------------------------------------------------------------------------------------------------ actions

    def _browse(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Weights of a backbone")
        if path:
            self.backbone.setText(path)

    def _load(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "A memory of cribo", filter="Memories (*.safetensors)")
        if path:
            self.use_memory(Path(path))

    def use_memory(self, path: Path) -> None:
        """Add strokes to the examples in a file from now on, and show its classes."""
        try:
            memory = SegmentationMemory.load(path, None)
        except (InputError, OSError) as error:
            show_error(str(error))
            return
        self._memory_file = path
        self.memory.setText(f"{path.name}, {counted(len(memory), 'example')}")
        self.classes.setText(", ".join(memory.classes))
        self.classes.setReadOnly(True)
        self.classes.setToolTip("The classes of the memory")

    def _save(self) -> None:
        path, _ = QFileDialog.getSaveFileName(self, "Save the memory", filter="Memories (*.safetensors)")
        if path:
            self.save_memory(Path(path))

    def save_memory(self, path: Path) -> None:
        """Write all examples to a new file."""
        try:
            if self._session is None:
                raise InputError("nothing is labelled yet: paint two classes and label first")
            path = path if path.suffix else path.with_suffix(".safetensors")
            self._session.save(path)
        except (InputError, OSError) as error:
            show_error(str(error))
        else:
            show_info(f"Saved {path}")

    def _paint(self) -> None:
        try:
            image = self._current()
            plane = self._plane(image)
        except InputError as error:
            show_error(str(error))
            return
        strokes = self._strokes(image)
        if strokes is None:
            name = f"{image.name} {STROKES}"
            strokes = Labels(np.zeros(plane.shape, np.uint8), name=name, **self._beside(image, plane))
            self._viewer.add_layer(strokes)
            strokes.brush_size = _BRUSH
        self._viewer.layers.selection.active = strokes
        strokes.mode = "paint"

    def _start_or_stop(self) -> None:
        if self._worker is not None:
            self._worker.quit()
            self.report.setText("Stopping after this image…")
            return
        try:
            images, strokes, planes = self._collected()
            session = self._opened_session()
        except InputError as error:
            show_error(str(error))
            return
        names = [name.strip() for name in self.classes.text().split(",") if name.strip()]

        worker: Any = create_worker(session.label, strokes, planes, names, _ignore_errors=True)
        self._worker = worker
        worker.yielded.connect(lambda result: self._show(images, result))
        worker.returned.connect(self._summarise)
        worker.aborted.connect(lambda: self.report.setText("Stopped."))
        worker.errored.connect(self._fail)
        worker.finished.connect(self._end)
        self.label.setText("Stop")
        self.report.setText("Labelling…")
        self.busy.setRange(0, 0)
        self.busy.setVisible(True)
        worker.start()

    def _collected(self) -> tuple[dict[int, Image], list[Strokes], list[Plane]]:
        """Return the image of each plane (by `id`), all strokes, and the shown planes, the current one first."""
        current = self._current()
        images: dict[int, Image] = {}
        strokes: list[Strokes] = []
        planes: list[Plane] = []
        for image in (current, *(image for image in self._images() if image is not current)):
            try:
                plane = self._plane(image)
            except InputError as error:
                if image is current or self._strokes(image) is not None:
                    raise
                show_warning(f"not labelled: {error}")
                continue
            layer = self._strokes(image)
            if layer is not None:
                strokes += painted(np.asarray(layer.data), plane)
            images[id(plane)] = image
            planes.append(plane)
        return images, strokes, planes

    def _opened_session(self) -> Session:
        """Return the session of the chosen backbone and memory; a new one if they have changed."""
        backbone = self.backbone.text().strip()
        if not backbone:
            raise InputError("no backbone is chosen: give the file or the folder of one, or a name of timm")
        session = self._session
        if session is None or (session.backbone, session.memory_file) != (backbone, self._memory_file):
            session = self._session = Session(backbone, self._memory_file)
        return session

    def _show(self, images: dict[int, Image], result: Result) -> None:
        image, found = images[id(result.plane)], result.found
        if found is None:
            show_warning(f"not labelled: {result.reason}")
            return
        if image not in self._viewer.layers:
            return
        labels = found.labels.numpy()
        shown = np.where(labels == IGNORE_INDEX, 0, labels + np.uint8(1)).astype(np.uint8)
        self._write(image, result.plane, LABELS, shown)
        self._write(image, result.plane, CONFIDENCE, found.confidence.numpy().astype(np.float32))
        self._list_images()

    def _summarise(self, summary: Summary) -> None:
        if not self.classes.isReadOnly():
            self.classes.setText(", ".join(summary.classes))
        self._suggestion = summary.suggestion
        self.next.setEnabled(summary.suggestion is not None)
        lines = [summary.score]
        if summary.warning:
            lines.append(f"Confidence is not calibrated: {summary.warning}.")
        if summary.suggestion is not None:
            lines.append(f"Paint next: {summary.suggestion.plane.title}.")
        self.report.setText("\n\n".join(lines))

    def _fail(self, error: Exception) -> None:
        """Show an error: its message if the user can fix it, else with napari's traceback."""
        self.report.setText(str(error))
        if isinstance(error, InputError | ImportError | OSError):
            show_error(str(error))
        else:
            notification_manager.receive_error(type(error), error, error.__traceback__)

    def _end(self) -> None:
        self._worker = None
        self.label.setText("Label")
        self.busy.setVisible(False)

    def _show_suggestion(self) -> None:
        """Show the suggested plane, with a ring around its least certain place."""
        suggestion = self._suggestion
        image = next((each for each in self._images() if suggestion and each.name == suggestion.plane.name), None)
        if suggestion is None or image is None:
            show_error("the suggested image is no longer opened: label again")
            return
        plane = suggestion.plane
        self.image.setCurrentText(image.name)
        self._show_only()
        point = np.array([*plane.index, suggestion.row, suggestion.column], dtype=float)
        start = self._viewer.dims.ndim - len(point)
        for axis, place in enumerate(point[:-2]):
            self._viewer.dims.set_point(
                start + axis, float(place * image.scale[-len(point) + axis] + image.translate[-len(point) + axis])
            )
        if self._suggested is not None and self._suggested in self._viewer.layers:
            self._viewer.layers.remove(self._suggested)
        active = self._viewer.layers.selection.active
        about = self._beside(image, plane)
        self._suggested = Points(
            point[None],
            name="paint here next",
            size=min(plane.shape[-2:]) / 8,
            face_color="transparent",
            border_color="yellow",
            border_width=0.1,
            **about,
        )
        self._viewer.add_layer(self._suggested)
        self._viewer.layers.selection.active = active


def _row(*widgets: QWidget) -> QWidget:
    row = QWidget()
    layout = QHBoxLayout(row)
    layout.setContentsMargins(0, 0, 0, 0)
    for widget in widgets:
        layout.addWidget(widget, stretch=1 if isinstance(widget, QLineEdit | QLabel) else 0)
    return row
