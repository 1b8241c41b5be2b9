from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from cribo.base.painting import paint_classes
from cribo.data import colour_map
from cribo.evaluation.pictures import (
    RIGHT,
    WRONG,
    Panel,
    draw_confusion,
    paint_right_and_wrong,
    predictions_page,
    write_pictures,
)
from cribo.evaluation.results import EvaluationResult

CLASSES = ["sky", "road", "car", "tree", "sign"]
PALETTE = colour_map(6)[1:]


def a_panel(ignore_index: int = 255, size: tuple[int, int] = (8, 12)) -> Panel:
    """Left half sky, right half car, top row unlabelled; predicted: sky, except tree at the bottom right."""
    labels = torch.zeros(size, dtype=torch.uint8)
    labels[:, size[1] // 2 :] = 2
    labels[0] = ignore_index
    prediction = torch.zeros(size, dtype=torch.uint8)
    prediction[-1, -1] = 3
    image = torch.full((3, *size), 128, dtype=torch.uint8)
    return Panel("a.jpg", image, labels, prediction, ignore_index)


def a_result(rows: int = 2, **changes: Any) -> EvaluationResult:
    confusion = torch.eye(len(CLASSES), dtype=torch.long) * 5
    ratios = (1, 64, 8)[:rows]
    results = [{"ratio": ratio, "miou": 0.5 / ratio, "miou_std": None, "confusion": confusion} for ratio in ratios]
    values: dict[str, Any] = {
        "evaluation": "dense-nn",
        "settings": {},
        "backbone": {"name": "mine"},
        "data": {"name": "camvid"},
        "classes": CLASSES,
        "metrics": ["miou"],
        "varies": "ratio",
        "results": results,
        "seconds": 1.0,
        "versions": {},
        "command": "",
        "evaluation_title": "Dense nearest-neighbour retrieval",
    }
    return EvaluationResult(**{**values, **changes})


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for part in figure.subfigs for text in part.texts] + [
        text.get_text() for legend in figure.legends for text in legend.get_texts()
    ]


def titles(figure: Figure) -> list[str]:
    return [part.get_suptitle() for part in figure.subfigs]


# ---------------------------------------------------------------- predictions


def test_confusion_of_a_panel_counts_labelled_pixels() -> None:
    panel = a_panel()
    confusion = panel.confusion(5)
    assert confusion.shape == (5, 6)
    assert int(confusion.sum()) == 7 * 12
    assert confusion[0].tolist() == [42, 0, 0, 0, 0, 0]
    assert confusion[2].tolist() == [41, 0, 0, 1, 0, 0]


def test_a_prediction_of_no_class_is_wrong() -> None:
    panel = a_panel()
    prediction = panel.prediction.clone()
    prediction[4] = 255
    changed = Panel(panel.name, panel.image, panel.labels, prediction)
    assert changed.confusion(5)[:, 5].tolist() == [6, 0, 6, 0, 0]
    # On grey images, the tint shows which pixels are correct.
    right = paint_right_and_wrong(panel)
    wrong = paint_right_and_wrong(changed)
    assert (right[4, :6] != wrong[4, :6]).any(axis=1).all()
    assert (right[5] == wrong[5]).all()


def test_correct_and_wrong_pixels_have_their_colours() -> None:
    painted = paint_right_and_wrong(a_panel()).astype(int)

    def nearer(pixels: np.ndarray, colour: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return bool((np.abs(pixels - colour).sum(-1) < np.abs(pixels - other).sum(-1)).all())

    assert nearer(painted[1:, :6], RIGHT, WRONG)
    assert nearer(painted[1:, 6:], WRONG, RIGHT)
    unlabelled = painted[0]
    assert (unlabelled == unlabelled[:, :1]).all(), "no label is grey"
    assert len(np.unique(unlabelled)) == 2, "in stripes"


@pytest.mark.parametrize("ignore_index", [255, 4])
def test_classes_have_the_colours_of_the_palette(ignore_index: int) -> None:
    panel = a_panel(ignore_index)
    painted = paint_classes(panel.labels.numpy(), PALETTE, ignore_index)
    assert (painted[1:, :6] == PALETTE[0]).all()
    assert (painted[1:, 6:] == PALETTE[2]).all()
    assert (painted[0] == painted[0][:, :1]).all()


def test_the_legend_lists_the_classes_that_are_drawn() -> None:
    panel = a_panel()
    figure = predictions_page([panel], CLASSES, PALETTE).draw()
    assert texts(figure)[-6:] == ["0 sky", "2 car", "3 tree", "no class", "last column: right", "wrong"]
    handles = figure.legends[0].get_patches()
    assert [np.round(255 * np.array(to_rgb(patch.get_facecolor()))).astype(int).tolist() for patch in handles[:3]] == [
        list(PALETTE[0]),
        list(PALETTE[2]),
        list(PALETTE[3]),
    ]
    labelled = Panel("b.jpg", panel.image, panel.prediction, panel.prediction)
    assert texts(predictions_page([labelled], CLASSES, PALETTE).draw())[-4:] == [
        "0 sky",
        "3 tree",
        "last column: right",
        "wrong",
    ]


def test_a_row_shows_the_score_of_the_prediction() -> None:
    panel = a_panel()
    unlabelled = Panel("b.jpg", panel.image, torch.full_like(panel.labels, 255), panel.prediction)
    figure = predictions_page([panel, unlabelled], CLASSES, PALETTE).draw()
    # sky: 42 of 83; car: 0 of 42; tree: 0 of 1
    assert titles(figure)[:2] == [
        f"a.jpg: mIoU {100 * 42 / 83 / 3:.1f} %, {100 * 42 / 84:.1f} % of the pixels right",
        "b.jpg: no labels",
    ]


def test_a_row_shows_image_labels_prediction_and_errors() -> None:
    panel = a_panel()
    shown = [axes.images[0].get_array() for axes in predictions_page([panel], CLASSES, PALETTE).draw().subfigs[0].axes]
    expected = (
        panel.image.permute(1, 2, 0).numpy(),
        paint_classes(panel.labels.numpy(), PALETTE, 255),
        paint_classes(panel.prediction.numpy(), PALETTE, 255),
        paint_right_and_wrong(panel),
    )
    assert len(shown) == 4
    for found, wanted in zip(shown, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_invalid_pictures_are_refused() -> None:
    panel = a_panel()
    with pytest.raises(ValueError, match=r"of a\.jpg must be of one size, got \[\(4, 12\), \(8, 12\)\]"):
        Panel("a.jpg", panel.image, panel.labels, panel.prediction[:4])
    with pytest.raises(ValueError, match="a colour for each of the 5 classes, got 4"):
        predictions_page([panel], CLASSES, PALETTE[:4]).draw()


# ------------------------------------------------------------------- confusion


def test_the_confusion_shows_shares_of_the_labels() -> None:
    confusion = torch.tensor([[3, 1, 0, 0], [0, 0, 0, 0], [1, 0, 6, 1]])
    figure = draw_confusion(confusion, ["a", "b", "c"])
    matrix, bars, _ = figure.axes
    shares = matrix.images[0].get_array()
    assert shares is not None
    np.testing.assert_allclose(shares[[0, 2]], [[0.75, 0.25, 0, 0], [0.125, 0, 0.75, 0.125]])
    assert np.ma.getmaskarray(shares)[1].all(), "no label of b"
    assert [label.get_text() for label in matrix.get_xticklabels()] == ["a", "b", "c", "no class"]
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["a", "b", "c"]
    assert [text.get_text() for text in matrix.texts] == ["75", "25", "12", "75", "12"]
    # a: 3 of 5; b is predicted, but no label; c: 6 of 8
    assert [text.get_text() for text in bars.texts] == ["60.0", "0.0", "75.0"]
    assert bars.get_title() == "mIoU 45.0 %"


def test_class_accuracy_is_shown_for_whole_images() -> None:
    confusion = torch.tensor([[3, 1, 0], [0, 0, 0], [1, 0, 7]])
    _, bars, scale = draw_confusion(confusion, ["a", "b", "c"], metric="accuracy").axes
    assert [text.get_text() for text in bars.texts] == ["75.0", "does not occur", "87.5"]
    assert (bars.get_title(), bars.get_xlabel()) == ("mean 81.2 %", "accuracy [%]")
    assert scale.get_ylabel() == "share of the label's images (grey: no labels)"


def test_absent_classes_have_no_iou() -> None:
    bars = draw_confusion(torch.tensor([[3, 0], [0, 0]]), ["a", "b"]).axes[1]
    assert [text.get_text() for text in bars.texts] == ["100.0", "does not occur"]
    assert bars.get_title() == "mIoU 100.0 %"


@pytest.mark.parametrize(("count", "sorted_by_frequency"), [(60, False), (61, True)])
def test_many_classes_are_ordered_by_frequency(count: int, sorted_by_frequency: bool) -> None:
    names = [f"class {number}" for number in range(count)]
    figure = draw_confusion(torch.diag(torch.arange(1, count + 1)), names)
    matrix = figure.axes[0]
    shown = [label.get_text() for label in matrix.get_yticklabels()]
    assert shown == (names[::-1] if sorted_by_frequency else names)
    assert [label.get_text() for label in matrix.get_xticklabels()] == shown
    np.testing.assert_array_equal(np.asarray(matrix.images[0].get_array()), np.eye(count))
    assert ("from the most frequent" in figure.get_suptitle()) == sorted_by_frequency


@pytest.mark.parametrize("count", [11, 59, 150])
def test_class_names_are_neither_overlapping_nor_truncated(count: int) -> None:
    names = [f"television receiver {number}" for number in range(count)]
    figure = draw_confusion(torch.eye(count, dtype=torch.long), names)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    matrix = figure.axes[0]
    down = [label.get_window_extent() for label in matrix.get_yticklabels()]
    across = [label.get_window_extent() for label in matrix.get_xticklabels()]
    gaps = [upper.y0 - lower.y1 for upper, lower in pairwise(down)]
    gaps += [right.x0 - left.x1 for left, right in pairwise(across)]
    assert min(gaps) > -1  # in pixels: letters do not fill their boxes
    assert min(box.x0 for box in down) >= 0
    assert min(box.y0 for box in across) >= 0


def test_a_confusion_of_other_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have 3 rows and as many columns or one more.*, got 2 x 2"):
        draw_confusion(torch.eye(2, dtype=torch.long), ["a", "b", "c"])


# ----------------------------------------------------------------------- files


def test_pictures_are_written(tmp_path: Path) -> None:
    written = write_pictures(a_result(), [a_panel()] * 9, PALETTE, tmp_path)
    names = ["miou.png", "confusion.png", "predictions.png", "predictions-2.png"]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    sizes = [Image.open(path).size for path in written]
    assert sizes[2][1] > 3 * sizes[3][1], "eight rows and one"


def test_missing_data_gives_no_picture(tmp_path: Path) -> None:
    rows = [{"ratio": 1, "miou": 0.5}]
    assert write_pictures(a_result(results=rows), [], PALETTE, tmp_path) == []
