import numpy as np
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tests.evaluation.test_pictures import a_result

from cribo.evaluation.curves import Curve, plot_curves, varied_values


def test_shares_of_the_memory_grow_to_the_right() -> None:
    assert varied_values([a_result(1), a_result(3)]) == [64, 8, 1]
    rows = [{"learning_rate": rate, "miou": 0.5} for rate in (8e-4, 1e-4, 3e-4)]
    assert varied_values([a_result(varies="learning_rate", results=rows)]) == [8e-4, 1e-4, 3e-4]
    some = [
        a_result(varies="neighbours", results=[{**rows[0], "neighbours": k} for k in ks]) for ks in ((10, 20), (5,))
    ]
    assert varied_values(some) == [5, 10, 20]


def test_curves_are_drawn_at_their_values() -> None:
    curves = [
        Curve("one", {1: {"miou": 0.5, "miou_std": None}, 8: {"miou": 0.4, "miou_std": 0.01}}),
        Curve("two", {1: {"miou": 0.3}, 64: {"miou": None}}, published=True),
    ]
    axes = Figure().subplots()
    plot_curves(axes, curves, metric="miou", varies="ratio", values=[64, 8, 1])
    drawn = [bars.lines[0].get_xydata() for bars in axes.containers if isinstance(bars, ErrorbarContainer)]
    np.testing.assert_allclose(np.asarray(drawn[0]), [[1, 40], [2, 50]])
    np.testing.assert_allclose(np.asarray(drawn[1]), [[2, 30]])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1/64", "1/8", "1/1"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


def test_names_are_not_joined_by_lines() -> None:
    axes = Figure().subplots()
    curves = [
        Curve(name, {"lost": {"corloc": 0.2}, "tokencut": {"corloc": score}})
        for name, score in (("mine", 0.4), ("theirs", 0.3))
    ]
    plot_curves(axes, curves, metric="corloc", varies="method", values=["lost", "tokencut"])
    assert {line.get_linestyle() for line in axes.lines} == {"None"}
    drawn = [bars.lines[0].get_xydata() for bars in axes.containers if isinstance(bars, ErrorbarContainer)]
    mine, theirs = map(np.asarray, drawn)
    assert mine[0, 0] < theirs[0, 0]  # equal values do not hide each other


def test_one_value_is_drawn_as_bars() -> None:
    curves = [
        Curve("one", {1: {"miou": 0.5}}),
        Curve("two", {1: {"miou": 0.3}}, published=True),
        Curve("three", {}),
    ]
    axes = Figure().subplots()
    plot_curves(axes, curves, metric="miou", varies="ratio", values=[1])
    assert [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] == [50, 30, 0]
    assert [text.get_text() for text in axes.texts] == ["50.0", "30.0", "-"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two", "three"]
