"""Imports point down the house, those inside functions and for type checking too, and form no circle."""

import ast
import functools
import subprocess
import sys
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
    explorer
    apps
    pretraining
    evaluation
    objectives
    features
    training  models  data
    method
    base
"""
"""Rooms of cribo by floor; those on one floor know nothing of each other, nor do the applications in `apps`."""

FLOORS = {room: floor for floor, rooms in enumerate(HOUSE.split("\n")) for room in rooms.split()}


class Import(NamedTuple):
    """An import of a name from a module, or of a module if there is no name."""

    module: str
    name: str
    line: int


def module_name(path: Path) -> str:
    """Return the dotted name of a source file, without `__init__`."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(SOURCE.glob("cribo/**/*.py"))}


def imports(text: str, package: str) -> Iterator[Import]:
    """Yield the imports of cribo's modules in the source text of a module of a package."""

    for node in ast.walk(ast.parse(text)):
        found: Iterable[Import] = ()
        if isinstance(node, ast.Import):
            found = (Import(alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found = (Import(module, alias.name, node.lineno) for alias in node.names)
        yield from (each for each in found if each.module.partition(".")[0] == "cribo")


@functools.cache
def imports_of(module: str) -> list[Import]:
    """Return the imports of a module of cribo."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(imports(path.read_text(encoding="utf-8"), package))


def is_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def room(module: str) -> str:
    """Return the room of a module; the application, for one in `apps`."""
    parts = module.split(".")
    if parts[1:2] == ["apps"]:
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 1 else "__init__"


def floor(module: str) -> int:
    return FLOORS[room(module).partition(".")[0]]


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
import numpy, cribo.base.files
if TYPE_CHECKING:
    from cribo.models import Backbone
else:
    from cribo.data import Images
def load():
    from . import sets
    class Inner:
        from ..base.colours import colour_map
"""
    assert sorted(imports(text, "cribo.data"), key=lambda found: found.line) == [
        Import("cribo.base.files", "", 3),
        Import("cribo.models", "Backbone", 5),
        Import("cribo.data", "Images", 7),
        Import("cribo.data", "sets", 9),
        Import("cribo.base.colours", "colour_map", 11),
    ]
    assert definition(Import("cribo", "adapt", 1)) == "cribo.apps.adapt.run"


def test_every_module_is_in_a_room() -> None:
    found = {path.relative_to(SOURCE / "cribo").parts[0].removesuffix(".py") for path in MODULES.values()}
    assert found == set(FLOORS)


@pytest.mark.parametrize("name", FLOORS)
def test_imports_point_down(name: str) -> None:
    up = [
        f"{module}:{found.line} imports {target(found)}"
        for module in MODULES
        if room(module).partition(".")[0] == name
        for found in imports_of(module)
        if room(target(found)) != room(module) and floor(target(found)) <= floor(module)
    ]
    assert not up


def test_no_import_inside_a_function_or_for_type_checking_hides_a_circle() -> None:
    loaded = {module: {definition(found) for found in imports_of(module)} - {module} for module in MODULES}
    circle: list[str] = []
    try:
        TopologicalSorter(loaded).prepare()
    except ValueError as error:  # CycleError
        circle = [f"{first} is imported by {second}" for first, second in pairwise(error.args[1])]
    assert not circle


def test_settings_do_not_import_torch() -> None:
    settings = [module for module in MODULES if module.endswith(".config")]
    program = f"import {', '.join(settings)}, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
