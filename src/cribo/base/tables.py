"""Tables of text, with one writer for each format: terminal, Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as Grid
from rich.text import Text

_LEAST_WIDTH = 14  # minimum width in characters of a column of text in narrow terminals
_LATEX = str.maketrans(
    {letter: rf"\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    | {"±": r"$\pm$", "δ": r"$\delta$"}
)


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its heading.
        is_number: whether its cells are numbers: aligned at the right, and never wrapped.
    """

    title: str
    is_number: bool = False


def texts(*titles: str) -> list[Column]:
    """Return columns of text, aligned at the left."""
    return [Column(title) for title in titles]


def numbers(*titles: str) -> list[Column]:
    """Return columns of numbers, aligned at the right."""
    return [Column(title, is_number=True) for title in titles]


@dataclass(frozen=True)
class Table:
    """A table of text with a title and notes; rich prints it.

    Attributes:
        columns: the columns.
        blocks: groups of rows, which a terminal separates by lines; each row has one cell per column.
        title: title above the table; empty for none.
        notes: sentences below the table.

    Example:
        >>> table = Table([*texts("row"), *numbers("mIoU [%]")], [[["a_b", "44.1 ± 0.3"]]])
        >>> print(table.markdown())
        | row | mIoU [%] |
        | :-- | --: |
        | a_b | 44.1 ± 0.3 |
        <BLANKLINE>
        >>> print(table.csv())
        row,mIoU [%]
        a_b,44.1 ± 0.3
        <BLANKLINE>
    """

    columns: Sequence[Column]
    blocks: Sequence[Sequence[Sequence[str]]]
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[Sequence[str]]:
        """The rows of all blocks."""
        return [row for block in self.blocks for row in block]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.title:
            yield Text(self.title, style="bold")  # rich would wrap a title to the width of the table
        grid = Grid()
        for place, column in enumerate(self.columns):
            longest = max((len(row[place]) for row in self.rows), default=0)
            # In narrow terminals, headings and text are wrapped, but numbers are not.
            grid.add_column(
                Text(column.title),
                justify="right" if column.is_number else "left",
                overflow="fold",
                min_width=longest if column.is_number else min(longest, _LEAST_WIDTH),
            )
        for block in self.blocks:
            grid.add_section()
            for row in block:
                grid.add_row(*map(Text, row))
        yield grid
        yield from (Text(note) for note in (*self.notes, ""))

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ["--:" if column.is_number else ":--" for column in self.columns]
        lines = [f"**{self.title}**", ""] if self.title else []
        for row in ([column.title for column in self.columns], rule, *self.rows):
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |")
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes)])

    def latex(self) -> str:
        """Return the table for LaTeX with the package booktabs; title and notes are a comment."""
        head, *rows = (
            " & ".join(cell.translate(_LATEX) for cell in row) + r" \\"
            for row in ([column.title for column in self.columns], *self.rows)
        )
        about = " ".join([*([f"{self.title}."] if self.title else []), *self.notes])
        lines = [
            *(f"% {line}" for line in about.splitlines()),
            rf"\begin{{tabular}}{{{''.join('c' if column.is_number else 'l' for column in self.columns)}}}",
            *(r"\toprule", head, r"\midrule", *rows, r"\bottomrule"),
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return headings and rows as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[column.title for column in self.columns], *self.rows])
        return text.getvalue()
