"""How this package was installed, and the command that adds its optional packages."""

import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution
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
    try:
        installed = distribution(PACKAGE)
    except PackageNotFoundError:  # the source code on PYTHONPATH
        return f'pip install "{PACKAGE}[{extra}]"'
    return command_for(installed, extra)


def command_for(installed: Distribution, extra: str) -> str:
    """Return the command that installs an extra of a distribution, according to its metadata (PEP 610)."""
    installer = (installed.read_text("INSTALLER") or "").strip()
    pip = "uv pip install" if installer == "uv" else "pip install"
    wanted = f"{PACKAGE}[{extra}]"
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if not source:  # from a package index
        return f'{pip} "{wanted}"'
    url = source["url"]
    if source.get("dir_info", {}).get("editable"):
        return f'{pip} -e "{_path(url)}[{extra}]"'
    if about := source.get("vcs_info"):
        url = f"{about['vcs']}+{url}@{about.get('requested_revision') or about['commit_id']}"
    if folder := source.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f'{pip} "{wanted} @ {url}"'


def _path(url: str) -> Path:
    """Return the path of a file URL."""
    return Path(url2pathname(urlsplit(url).path))
