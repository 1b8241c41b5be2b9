"""How this package was installed, and the command that adds its optional packages."""

import json
import os
import shutil
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

PACKAGE = "cribo-ssl"
"""Name of this package's distribution."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package, from where the package itself was installed.

    Args:
        extra: name of the extra, such as `search`.

    Example:
        >>> install_command("search").endswith('[search]"')  # from a package index, or from this clone
        True
    """
    return command_for(distribution(PACKAGE), extra)


def command_for(installed: Distribution, extra: str) -> str:
    """Return the command that installs an extra of a distribution, according to its metadata (PEP 610)."""
    installer = (installed.read_text("INSTALLER") or "").strip()
    pip = _uv() if installer == "uv" and shutil.which("uv") else "pip install"
    wanted = f"{PACKAGE}[{extra}]"
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    url = source.get("url", "")
    is_gone = url.startswith("file:") and not _path(url).exists()  # such as in a container
    if not source or is_gone:  # from a package index
        return f'{pip} "{wanted}"'
    if source.get("dir_info", {}).get("editable"):
        return f'{pip} -e "{_path(url)}[{extra}]"'
    if about := source.get("vcs_info"):
        url = f"{about['vcs']}+{url}@{about.get('requested_revision') or about['commit_id']}"
    if folder := source.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f'{pip} "{wanted} @ {url}"'


def _uv() -> str:
    """Return the command of uv, which finds the environment of this process only if it is activated."""
    is_active = os.environ.get("VIRTUAL_ENV") == sys.prefix
    return "uv pip install" if is_active else f"uv pip install --python {sys.executable}"


def _path(url: str) -> Path:
    """Return the path of a file URL."""
    return Path(url2pathname(urlsplit(url).path))
