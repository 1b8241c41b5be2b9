import warnings
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cribo.base.drawing import number_regions, write_figure


def test_a_region_is_numbered_inside_and_small_ones_are_not() -> None:
    labels = np.zeros((40, 60), dtype=int)
    labels[10:30, 30:55] = 7
    labels[0, 0] = 3
    axes = Figure().subplots()
    number_regions(axes, labels, {7: 1, 3: 2}, smallest=0.05)
    (text,) = axes.texts
    column, row = text.get_position()
    assert (text.get_text(), int(labels[round(row), round(column)])) == ("1", 7)


def test_names_in_scripts_that_the_font_lacks_are_drawn_without_warnings(tmp_path: Path) -> None:
    figure = Figure()
    figure.suptitle("漢字.jpg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert write_figure(tmp_path / "figure.png", figure).stat().st_size > 0
