"""Write the table of supported checkpoints in docs/checkpoints.md, with deviations from the original features.

    uv run python -m benchmarks.checkpoints

Runs the cases of tests/models/formats. Each loads a small file in the layout of a project and compares the features, at
three image sizes, with a reference implementation of the project's network. Writes one line per row of the formats.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from tests.models.formats.cases import Case, epsilon, load_cases, measure
from torch import Tensor

from cribo.models import Backbone
from cribo.models.formats.table import NAMINGS, PROJECTS, Naming, Project

PAGE = Path(__file__).parents[1] / "docs/checkpoints.md"
BEGIN, END = "<!-- table: python -m benchmarks.checkpoints -->", "<!-- end of the table -->"
HEADER = ("format", "source", "networks", "mean; deviation", "epsilon", "positions", "largest difference")


def rows() -> list[Project | Naming]:
    """Return the rows of the table of formats, without duplicate names."""
    return list({row.name: row for row in (*PROJECTS, *NAMINGS)}.values())


def cells(row: Project | Naming, measured: Iterable[tuple[Backbone, float]]) -> tuple[str, ...]:
    """Return the cells of one row; all values are read from loaded backbones."""
    backbones, differences = zip(*measured, strict=True)
    networks = "teacher, student" if isinstance(row, Project) and row.student is not None else "one"
    images = {f"{numbers(backbone.mean)}; {numbers(backbone.std)}" for backbone in backbones}
    epsilons = {exponent(value) for backbone in backbones if (value := epsilon(backbone)) is not None}
    positions = {
        backbone.numerics.positions
        for backbone in backbones
        if isinstance(getattr(backbone.model, "pos_embed", None), Tensor)
    }
    source = row.source.replace("github.com/", "")
    lists = (" or ".join(sorted(values)) or "none" for values in (images, epsilons, positions))
    return (row.name, source, networks, *lists, exponent(max(differences)))


def exponent(value: float) -> str:
    """Format with one digit, such as 2e-6."""
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def numbers(values: Iterable[float]) -> str:
    """Format the values of three channels, or a single value if they are equal."""
    return " ".join(dict.fromkeys(f"{value:.3f}".lstrip("0") for value in values))


def table(cases: Iterable[Case], console: Console) -> str:
    """Render all rows as Markdown."""
    measured: dict[str, list[tuple[Backbone, float]]] = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            backbone, largest = measure(case, Path(folder))
        measured.setdefault(case.row, []).append((backbone, largest))
        console.print(f"{largest:.1e}  {case.name}")
    lines = [HEADER, ("---",) * len(HEADER), *(cells(row, measured[row.name]) for row in rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure all cases and replace the table in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    content = table(load_cases(), Console())
    PAGE.write_text(f"{before}{BEGIN}\n\n{content}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
