"""One table in all formats."""

import csv
import io

import pytest
from rich.console import Console

from cribo.base.tables import Table, numbers, texts

TABLE = Table(
    [*texts("row & name"), *numbers("mIoU [%]", "δ1")],
    [[["a|b_c", "44.1 ± 0.3", "80.0"]], [['d"e, f', "-", "1.0"], ["a [bold] name", "3.0", ""]]],
    "A title that is longer than the table\nof 100%",
    ["A note."],
)


def printed(table: Table, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_markdown_has_equal_cells_in_all_lines() -> None:
    lines = TABLE.markdown().replace(r"\|", "").splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {4}
    assert "| :-- | --: | --: |" in lines
    assert lines[-1] == "A note."
    assert "**" not in Table(TABLE.columns, TABLE.blocks).markdown()


def test_latex_escapes_what_it_would_interpret() -> None:
    comments, _, rest = TABLE.latex().partition(r"\begin{tabular}{lcc}")
    assert all(line.startswith("%") for line in comments.splitlines())
    assert r"row \& name & mIoU [\%] & $\delta$1 \\" in rest
    assert r"a|b\_c & 44.1 $\pm$ 0.3 & 80.0 \\" in rest
    assert Table(TABLE.columns, TABLE.blocks).latex().startswith(r"\begin")


def test_csv_is_read_back() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows == [["row & name", "mIoU [%]", "δ1"], *map(list, TABLE.rows)]


@pytest.mark.parametrize("width", [30, 80])
def test_a_terminal_wraps_names_but_no_numbers(width: int) -> None:
    text = printed(TABLE, width)
    assert "44.1 ± 0.3" in text
    assert "[bold]" in text  # text is no markup
    assert "…" not in text
    assert ("A title that is longer than the table" in text) is (width == 80)
    assert text.count("├") == 1  # between the groups of rows
    assert printed(Table(TABLE.columns, TABLE.blocks), width).startswith("┏")
