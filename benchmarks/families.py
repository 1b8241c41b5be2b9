"""Write the table of docs/families.md: one small network of each family of timm, encoded and exported.

    uv run nice -n 15 python -m benchmarks.families --state families.json

The smallest network of each module of timm.models gets random weights, encodes images of two sizes and is exported to
ONNX. Results are printed and saved after each family; the same command continues where it stopped. Each family runs in
a process of its own, which is stopped after --minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import timm
from rich.console import Console

from cribo.base.files import write_json

PAGE = Path(__file__).parents[1] / "docs/families.md"
BEGIN, END = "<!-- table: python -m benchmarks.families -->", "<!-- end of the table -->"
HEADER = ("family", "network", "encoded", "ONNX")

Result = Mapping[str, str]


def families() -> list[str]:
    """Return the modules of timm.models that list networks."""
    return [name for name in timm.list_modules() if timm.list_models(module=name)]


def smallest(family: str) -> str:
    """Return the network of a family with the fewest parameters."""
    import torch

    def size(name: str) -> int:
        with torch.device("meta"):
            return sum(each.numel() for each in timm.create_model(name).parameters())

    return min(timm.list_models(module=family), key=size)


def attempt(family: str) -> Result:
    """Encode and export the smallest network of a family."""
    import torch

    from cribo.apps.export import export_backbone
    from cribo.models import build_backbone

    name = smallest(family)
    try:
        own = timm.get_pretrained_cfg(name)
        side = own.input_size[-1] if own is not None else 64
        backbone = build_backbone(name, image_size=side).eval()
        sizes = [(side, side)]
        if backbone.takes_any_size:
            sizes.append((2 * side, side))
        grids = [backbone.encode(torch.rand(1, 3, *size)).grid for size in sizes]
    except Exception as error:  # the table states it
        return {"network": name, "encoded": first_line(error), "onnx": "-"}
    encoded = ", ".join(f"{size[0]}x{size[1]} ({grid[0]}x{grid[1]})" for size, grid in zip(sizes, grids, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        try:
            fixed_size = None if backbone.takes_any_size else (side, side)
            report = export_backbone(backbone, "onnx", Path(folder) / "out", fixed_size=fixed_size)
            exported = f"{'any size' if fixed_size is None else 'fixed size'}, {report.difference:.0e}"
        except Exception as error:  # the table states it
            exported = first_line(error)
    return {"network": name, "encoded": encoded, "onnx": exported}


def first_line(error: Exception) -> str:
    """Return the reason of a failure as the text of a cell."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__).replace("|", "\\|")


def table(results: Mapping[str, Result]) -> str:
    """Render the results as a Markdown table, followed by the names of untested families."""
    rows = [HEADER, ("---",) * len(HEADER)]
    rows += [(family, each["network"], each["encoded"], each["onnx"]) for family, each in sorted(results.items())]
    others = [family for family in families() if family not in results]
    untried = f"\n\nNot tried yet: {', '.join(others)}." if others else ""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + untried


def main() -> None:
    """Try the families that the state does not hold yet, and replace the table in the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("families.json"), help="file of the results so far")
    parser.add_argument("--only", nargs="*", help="families to try; by default all")
    parser.add_argument("--minutes", type=float, default=10, help="limit of each family")
    parser.add_argument("--attempt", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attempt:
        print(json.dumps(attempt(given.attempt)))
        return
    console = Console()
    results = json.loads(given.state.read_text(encoding="utf-8")) if given.state.is_file() else {}
    for family in families() if given.only is None else given.only:
        if family in results:
            continue
        command = [sys.executable, "-m", "benchmarks.families", "--attempt", family]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60 * given.minutes, check=True)
            results[family] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            results[family] = {"network": "", "encoded": f"not finished in {given.minutes:g} minutes", "onnx": "-"}
        except subprocess.CalledProcessError as error:
            results[family] = {"network": "", "encoded": f"the process ended with {error.returncode}", "onnx": "-"}
        write_json(given.state, results)
        console.print(f"{family}: {' · '.join(results[family].values())}", markup=False, soft_wrap=True)
        write_page(results)
    write_page(results)


def write_page(results: Mapping[str, Result]) -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
