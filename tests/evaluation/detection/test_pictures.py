from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.patches import Rectangle

from cribo.data.labelled.detection import BoxedImages, open_detection
from cribo.evaluation.detection.protocol import boxes_page
from cribo.evaluation.detection.scoring import Detections
from cribo.evaluation.pictures import write_pages


@pytest.fixture
def images(rectangles: Path) -> BoxedImages:
    return open_detection(rectangles).val


@pytest.fixture
def found(images: BoxedImages) -> Detections:
    corners = torch.tensor([[4.0, 6, 24, 22], [34, 20, 58, 42], [0, 0, 9, 9]]).expand(4, 3, 4)
    scores = torch.tensor([0.9, 0.6, 0.4]).expand(4, 3)
    return Detections(torch.arange(4), corners, torch.tensor([0, 1, 1]).expand(4, 3), scores)


def test_boxes_are_drawn_at_their_objects(images: BoxedImages, found: Detections) -> None:
    figure = boxes_page(range(4), images, found, title="what").draw()
    there, predicted = figure.subfigs[0].axes
    for axes, count in ((there, 2), (predicted, 2)):  # boxes of low confidence are not drawn
        drawn = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert len(drawn) == count
        assert {(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in drawn} == {
            (3.5, 5.5, 20, 16),
            (33.5, 19.5, 24, 22),
        }
    assert [text.get_text() for text in predicted.texts] == ["green 60 %", "red 90 %"]
    assert {patch.get_edgecolor() for patch in there.patches} == {patch.get_edgecolor() for patch in predicted.patches}


def test_titles_and_legend_describe_the_boxes(images: BoxedImages, found: Detections) -> None:
    figure = boxes_page([0, 2], images, found, title="what").draw()
    assert [row.get_suptitle() for row in figure.subfigs] == [
        "0.png: 2 objects, 2 found",
        "2.png: 0 objects, 2 found",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["red", "green"]


def test_pictures_are_split_into_files(images: BoxedImages, found: Detections, tmp_path: Path) -> None:
    twice = images.subset([*range(4), *range(4)])
    both = Detections(*(torch.cat((part, part)) for part in vars(found).values()))
    page = partial(boxes_page, images=twice, found=both, title="what")
    written = write_pages(tmp_path, "predictions", range(len(twice)), page, number=8)
    assert [path.name for path in written] == ["predictions.png", "predictions-2.png"]
    assert {*written} <= {*tmp_path.iterdir()}
