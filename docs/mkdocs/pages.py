"""Pages of the documentation site that lie outside docs/: everything that a page links to (a hook of MkDocs).

The Markdown files are written for a code host, where links such as `../examples/plain_loop.py` work. On the site, a
linked Markdown file or picture is included, a Python file becomes a page with its source, and the modules that
docs/reference.md lists become pages of the reference, which mkdocstrings writes.
"""

import ast
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
HOME = ROOT / "README.md"
REFERENCE = ROOT / "docs" / "reference.md"
ENTRANCES = (HOME, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")

log = logging.getLogger("mkdocs.hooks.reference")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and those that they link to in turn."""
    todo = [Path(str(file.abs_src_path)) for file in files.documentation_pages()] + list(ENTRANCES)
    seen = set(todo)
    while todo:
        path = todo.pop()
        if not path.is_relative_to(config.docs_dir):
            files.append(_file(path, config))
        new = set(_targets(path)) - seen if path.suffix == ".md" else set()
        seen |= new
        todo += new
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to the site's pages; links to missing files stay, and MkDocs warns of them."""
    if page.file.abs_src_path is None:  # written by this hook
        return markdown
    folder = Path(page.file.abs_src_path).parent

    def link(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        return os.path.relpath(_address(target), page.file.src_uri + "/..") if target.is_file() else found[1]

    return LINK.sub(link, markdown)


def on_page_content(html: str, page: Page, **kwargs: object) -> None:
    """Warn of public names that a page of the reference lacks: those without a docstring."""
    if page.file.src_uri.startswith("reference/"):
        module = page.file.src_uri.removeprefix("reference/").removesuffix(".md")
        for name in _exports(ROOT / "src" / module.replace(".", "/") / "__init__.py"):
            if f'id="{module}.{name}"' not in html:
                log.warning("%s has no entry for %s.%s: write its docstring", page.file.src_uri, module, name)


def _exports(package: Path) -> Iterator[str]:
    """Yield the names that a package exports: those imported under `TYPE_CHECKING` (cribo/lazy.py)."""
    for block in ast.parse(package.read_text(encoding="utf-8")).body if package.is_file() else ():
        if isinstance(block, ast.If):
            for node in block.body:
                yield from (alias.name for alias in node.names) if isinstance(node, ast.ImportFrom) else ()


def _targets(path: Path) -> Iterator[Path]:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        linked = (path.parent / target).resolve()
        if linked.is_file() and linked.is_relative_to(ROOT):
            yield linked


def _address(path: Path) -> str:
    """The place of a file of the repository among the site's sources."""
    if path == HOME:
        return "index.md"
    place = PurePosixPath(path.relative_to(ROOT))
    if place.parts[0] == "docs":
        return str(place.relative_to("docs"))
    if path in _targets(REFERENCE):
        return f"reference/{_module(place)}.md"
    return str(place.with_suffix(".md") if place.suffix == ".py" else place)


def _module(place: PurePosixPath) -> str:
    return ".".join(place.relative_to("src").with_suffix("").parts).removesuffix(".__init__")


def _file(path: Path, config: MkDocsConfig) -> File:
    place = PurePosixPath(path.relative_to(ROOT))
    if path.suffix != ".py":
        return File.generated(config, _address(path), abs_src_path=str(path))
    if path in _targets(REFERENCE):
        return File.generated(config, _address(path), content=f"# {_module(place)}\n\n::: {_module(place)}\n")
    code = path.read_text(encoding="utf-8")
    hidden = "---\nsearch: {exclude: true}\n---\n"  # searches should find the documentation, not its code
    return File.generated(config, _address(path), content=f"{hidden}# {place}\n\n````python\n{code}````\n")
