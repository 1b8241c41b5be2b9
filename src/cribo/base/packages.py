"""Optional packages: checks, imports, and the command that installs them."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cribo.base.errors import MissingPackage

if TYPE_CHECKING:
    from importlib.metadata import Distribution

PACKAGE = "cribo-ssl"
"""Name of this package's distribution."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package, from where the package itself was installed.

    Args:
        extra: name of the extra, such as `search`.

    Example:
        >>> "pylance" in install_command("search") or "[search]" in install_command("search")
        True
    """
    from importlib.metadata import distribution  # slow to import, and only errors need it

    return command_for(distribution(PACKAGE), extra)


def require_packages(purpose: str, *packages: str, extra: str, otherwise: str = "") -> None:
    """Check that optional packages are installed, without importing them.

    Args:
        purpose: feature that needs them, for the error message.
        packages: import names.
        extra: extra of this package that installs them.
        otherwise: alternative to installing them, appended to the error message.

    Raises:
        MissingPackage: a package is not installed.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise MissingPackage(f"{purpose} needs {', '.join(missing)}: {install_command(extra)}{otherwise}")


def load_lance(purpose: str) -> Any:
    """Import Lance.

    Raises:
        MissingPackage: it is not installed; the message begins with `purpose`.
    """
    os.environ.setdefault("LANCE_LOG", "error")  # read at import; it warns about every table that it creates
    try:
        import lance
    except ModuleNotFoundError as error:
        raise MissingPackage(f"{purpose} needs Lance: {install_command('search')}") from error
    return lance


def command_for(installed: "Distribution", extra: str) -> str:
    """Return the command that installs an extra of a distribution, according to its metadata (PEP 610).

    The command never takes the distribution from a package index, where anyone could have registered its name: without
    a record of a source that still exists, it installs the packages of the extra themselves.
    """
    installer = (installed.read_text("INSTALLER") or "").strip()
    pip = _uv() if installer == "uv" and shutil.which("uv") else "pip install"
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    url = source.get("url", "")
    is_gone = url.startswith("file:") and not _path(url).exists()  # such as in a container
    if not source or is_gone:
        return " ".join([pip, *(f'"{requirement}"' for requirement in _requirements(installed, extra))])
    if source.get("dir_info", {}).get("editable"):
        return f'{pip} -e "{_path(url)}[{extra}]"'
    if about := source.get("vcs_info"):
        url = f"{about['vcs']}+{url}@{about.get('requested_revision') or about['commit_id']}"
    if folder := source.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f'{pip} "{PACKAGE}[{extra}] @ {url}"'


def _requirements(installed: "Distribution", extra: str) -> list[str]:
    """Return the requirements that an extra adds."""
    from packaging.requirements import Requirement

    requirements = map(Requirement, installed.requires or ())
    return [
        f"{requirement.name}{''.join(f'[{name}]' for name in requirement.extras)}{requirement.specifier}"
        for requirement in requirements
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and not requirement.marker.evaluate({"extra": ""})
    ]


def _uv() -> str:
    """Return the command of uv, which finds the environment of this process only if it is activated."""
    is_active = os.environ.get("VIRTUAL_ENV") == sys.prefix
    return "uv pip install" if is_active else f"uv pip install --python {sys.executable}"


def _path(url: str) -> Path:
    """Return the path of a file URL."""
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    return Path(url2pathname(urlsplit(url).path))
