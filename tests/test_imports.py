"""Imports point down the house, those inside functions and for type checking too, and form no circle."""

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src"

HOUSE = """
    __main__
    cli
    __init__
    explorer  studies  doctor
    segmentation  object_search  embedding  adaptation  export  figures  benchmark
    probes
    pretraining
    objectives
    evaluation
    training
    cluster
    retrieval
    data
    models
    method
"""
"""Packages of cribo by floor; those on one floor know nothing of each other. All other modules are on the ground."""

FLOORS = {package: floor for floor, packages in enumerate(HOUSE.split("\n")) for package in packages.split()}
GROUND = max(FLOORS.values()) + 1


class Import(NamedTuple):
    """An import of a name from a module, or of a module if there is no name; `typing` if it never runs."""

    module: str
    name: str
    line: int
    typing: bool


def module_name(path: Path) -> str:
    """Return the dotted name of a source file, without `__init__`."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(SOURCE.glob("cribo/**/*.py"))}


def imports(text: str, package: str) -> Iterator[Import]:
    """Yield the imports of cribo's modules in the source text of a module of a package."""

    def walk(nodes: Iterable[ast.AST], typing: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, "", node.lineno, typing) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                module = ".".join([*parents, *([node.module] if node.module else [])])
                yield from (Import(module, alias.name, node.lineno, typing) for alias in node.names)
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                yield from walk(node.body, True)
                yield from walk(node.orelse, typing)
            else:
                yield from walk(ast.iter_child_nodes(node), typing)

    return (found for found in walk([ast.parse(text)], False) if found.module.partition(".")[0] == "cribo")


def imports_of(module: str) -> list[Import]:
    """Return the imports of a module of cribo."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(imports(path.read_text(encoding="utf-8"), package))


def is_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def place(module: str) -> str:
    """Return the part of the house to which a module belongs: a package of cribo, or the ground."""
    parts = module.split(".")
    top = parts[1] if len(parts) > 1 else "__init__"
    return top if top in FLOORS else "the ground"


def floor(module: str) -> int:
    return FLOORS.get(place(module), GROUND)


def target(found: Import) -> str:
    """Return the module that an import names."""
    whole = f"{found.module}.{found.name}"
    return whole if whole in MODULES else found.module


def definition(found: Import) -> str:
    """Return the module that an import loads: that of `name` if a package exports it lazily."""
    module = target(found)
    if found.name and module == found.module and is_package(module):
        for exported in imports_of(module):
            if exported.name == found.name:
                return definition(exported)
    return module


def test_all_kinds_of_imports_are_found() -> None:
    text = """
from typing import TYPE_CHECKING
import numpy, cribo.files
if TYPE_CHECKING:
    from cribo.models import Backbone
else:
    from cribo.data import Images
def load():
    from . import sets
    class Inner:
        from ..colours import colour_map
"""
    assert list(imports(text, "cribo.data")) == [
        Import("cribo.files", "", 3, False),
        Import("cribo.models", "Backbone", 5, True),
        Import("cribo.data", "Images", 7, False),
        Import("cribo.data", "sets", 9, False),
        Import("cribo.colours", "colour_map", 11, False),
    ]
    assert definition(Import("cribo", "adapt", 1, False)) == "cribo.adaptation.run"


def test_every_package_has_a_floor() -> None:
    packages = {path.parent.name for path in SOURCE.glob("cribo/*/__init__.py")}
    assert packages <= set(FLOORS)
    assert set(FLOORS) <= packages | {path.stem for path in SOURCE.glob("cribo/*.py")}


@pytest.mark.parametrize("package", [*FLOORS, "the ground"])
def test_imports_point_down(package: str) -> None:
    up = [
        f"{module}:{found.line} imports {target(found)}"
        for module in MODULES
        if place(module) == package
        for found in imports_of(module)
        if place(target(found)) != package and floor(target(found)) <= floor(module)
    ]
    assert not up


def test_no_import_inside_a_function_hides_a_circle() -> None:
    loaded = {
        module: {definition(found) for found in imports_of(module) if not found.typing} - {module} for module in MODULES
    }
    circle: list[str] = []
    try:
        TopologicalSorter(loaded).prepare()
    except ValueError as error:  # CycleError
        circle = [f"{first} is imported by {second}" for first, second in pairwise(error.args[1])]
    assert not circle
