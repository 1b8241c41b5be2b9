"""docs/reference.md lists all public modules, and mkdocs.yml has a page for each."""

import ast
import functools
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
LISTED = dict(
    re.findall(r"^\| \[`([\w.]+)`\]\(\.\./([\w/.]+)\) \|", (REPOSITORY / "docs/reference.md").read_text(), re.M)
)
"""The file of each module of the reference."""
PAGES = [*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md"]
PROGRAMS = [*(REPOSITORY / "examples").glob("*.py"), *(REPOSITORY / "notebooks").glob("*.ipynb")]


def code_of(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    match file.suffix:
        case ".md":
            yield from re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        case ".ipynb":
            cells = ("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
            yield from (re.sub(r"^[%!].*", "", cell, flags=re.M) for cell in cells)
        case _:
            yield text


def test_packages_that_export_names_are_listed() -> None:
    packages = (REPOSITORY / "src").rglob("__init__.py")
    exporting = {file for file in packages if "__all__ = lazy_names(__name__)" in file.read_text()}
    assert exporting
    assert exporting <= {REPOSITORY / file for file in LISTED.values()}


@pytest.mark.parametrize("module", LISTED)
def test_listed_modules_have_a_page(module: str) -> None:
    assert importlib.import_module(module).__file__ == str(REPOSITORY / LISTED[module])
    assert f": reference/{module}.md\n" in (REPOSITORY / "mkdocs.yml").read_text()


@pytest.mark.parametrize("module", LISTED)
def test_public_names_have_a_docstring(module: str) -> None:
    """The site has an entry for names with a docstring only."""
    package = importlib.import_module(module)
    missing = []
    for name in getattr(package, "__all__", ()):
        value = getattr(package, name)
        is_code = inspect.isclass(value) or inspect.isroutine(value)
        described = value.__doc__ if is_code else name in constants_with_docstring()
        if not described and name != "__version__":
            missing.append(name)
    assert missing == []


@functools.cache
def constants_with_docstring() -> set[str]:
    """The constants of the package that a text follows."""
    found = set()
    for file in (REPOSITORY / "src").rglob("*.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        for node, following in itertools.pairwise(body):
            match node, following:
                case (
                    ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str())),
                ):
                    found.add(name)
    return found


@pytest.mark.parametrize("file", [*PAGES, *PROGRAMS], ids=lambda file: file.name)
def test_documented_imports_are_in_the_reference(file: Path) -> None:
    exported = {name for module in LISTED for name in getattr(importlib.import_module(module), "__all__", ())}
    unlisted = []
    for code in code_of(file):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cribo":
                names = [alias.name for alias in node.names if alias.name not in exported]
                unlisted += [] if node.module in LISTED else [f"{node.module}.{name}" for name in names]
    assert unlisted == []
