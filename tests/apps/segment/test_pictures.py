import torch
from matplotlib.figure import Figure

from cribo.apps.segment.pictures import SegmentedPanel, draw_overview

CLASSES, PALETTE = ["background", "cell"], [(0, 0, 0), (0, 114, 178)]


def overview(uncalibrated: str) -> Figure:
    labels = torch.zeros(24, 32, dtype=torch.uint8)
    labels[6:18, 8:20] = 1
    panel = SegmentedPanel("a.png", torch.full((3, 24, 32), 90, dtype=torch.uint8), labels, torch.rand(24, 32))
    return draw_overview([panel], CLASSES, PALETTE, {1: 0.5}, uncalibrated)


def test_the_overview_numbers_its_regions_as_in_the_legend() -> None:
    figure = overview("")
    assert [text.get_text() for text in figure.axes[1].texts] == ["0", "1"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["0 background", "1 cell 50%"]


def test_confidence_has_a_scale_that_tells_whether_it_is_calibrated() -> None:
    figure = overview("")
    assert figure.axes[3].get_ylabel() == "confidence: probability of the label"
    assert not figure.get_suptitle()
    figure = overview("there is only one example: label a second image")
    assert figure.axes[3].get_ylabel() == "confidence, not calibrated"
    assert "may be far too high: there is only one example: label a second image" in figure.get_suptitle()
