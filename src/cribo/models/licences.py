"""Licences of weights: read beside them, stored with every backbone made from them, and shown to users."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urljoin

import yaml

from cribo.base.errors import InputError
from cribo.base.files import parse_yaml, read_text
from cribo.models.hub.download import address, hub_name, source_name

README = "README.md"
"""The file in whose header the Hugging Face hub stores the licence."""

SEE_CARD = "see-model-card"
"""Name in the header of model cards that list several licences."""

Commercial = Literal["yes", "no", "own terms", "unknown"]
"""Whether a licence allows commercial use; `own terms` for licences with conditions of their own."""

_COMMERCIAL: Mapping[str, Commercial] = {
    **dict.fromkeys(("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "isc", "unlicense", "cc0-1.0"), "yes"),
    **dict.fromkeys(("cc-by-4.0", "cc-by-sa-4.0", "cc-by-3.0", "cc-by-2.0"), "yes"),
    **dict.fromkeys(("gpl-2.0", "gpl-3.0", "agpl-3.0", "lgpl-2.1", "lgpl-3.0", "mpl-2.0"), "yes"),
    **dict.fromkeys(("fair-noncommercial-research-license", "apple-amlr"), "no"),
    **dict.fromkeys(("dinov3-license", "gemma", "nvidia-open-model-license", "apple-ascl", "openrail"), "own terms"),
    **dict.fromkeys(("llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "creativeml-openrail-m"), "own terms"),
}
"""Known licences, by their SPDX identifier or the name that the Hugging Face hub or timm uses."""


@dataclass(frozen=True)
class Licence:
    """Licence of the weights from which a backbone was made.

    Attributes:
        source: public name of the weights: a timm name, hf://owner/name, or the name of a file or run.
        name: SPDX identifier, or name on the Hugging Face hub; None if it is not recorded.
        link: address of its text, if recorded.
        role: `weights`, or `teacher` for a network whose features were learnt.
        hub: owner/name of the weights on the Hugging Face hub, if they were loaded from there.
        listed: whether a repository on the hub has the name as its `license`, which may only be one that the hub lists.
    """

    source: str
    name: str | None = None
    link: str | None = None
    role: Literal["weights", "teacher"] = "weights"
    hub: str | None = None
    listed: bool = False

    @property
    def commercial(self) -> Commercial:
        """Whether the licence allows commercial use."""
        name = self.name or ""
        return "no" if name.startswith("cc-") and "-nc" in name else _COMMERCIAL.get(name, "unknown")

    def __str__(self) -> str:
        """The licence, with what it means for commercial use.

        Example:
            >>> print(Licence("mae.pth", "cc-by-nc-4.0"))
            licence cc-by-nc-4.0 (non-commercial)
            >>> print(Licence("vits16.pth"))
            licence not recorded, look it up at its source
        """
        if self.name is None:
            return "licence not recorded, look it up at its source"
        notes = {
            "yes": "",
            "no": "non-commercial",
            "own terms": "own terms, read them before commercial use",
            "unknown": "not known to cribo, read its terms",
        }
        details = ", ".join(filter(None, (notes[self.commercial], self.link)))
        return f"licence {self.name}" + (f" ({details})" if details else "")


_logger = logging.getLogger("cribo")
_logged: set[tuple[str, str | None, str | None]] = set()


def log_licences(licences: Iterable[Licence]) -> None:
    """Log each licence on a line of its own, once in a process: copies of weights keep the licence of the original."""
    for each in licences:
        key = (each.source, each.name, each.link)
        if key not in _logged:
            _logged.add(key)
            _logger.info("%s: %s", each.source, each)


def with_teacher(licences: Iterable[Licence], teacher: Iterable[Licence]) -> tuple[Licence, ...]:
    """Return the licences of a student, with those of its teacher."""
    return tuple(dict.fromkeys((*licences, *(replace(each, role="teacher") for each in teacher))))


def describe_licences(licences: Iterable[Licence]) -> list[dict[str, Any]]:
    """Return licences as JSON types, for `licences_of`."""
    return [asdict(licence) for licence in licences]


def licences_of(about: Mapping[str, Any], stated: Licence, file: Path) -> tuple[Licence, ...]:
    """Return the licences in a description of a backbone, and the stated one if the description lacks it.

    Args:
        about: the description; those of earlier versions have no licences recorded.
        stated: licence in the header of the README.md beside the description (`read_licence`); without a name, it is
            added to an empty description if the weights are on the hub.
        file: the file with the description.

    Raises:
        InputError: the licences are malformed; unknown entries of later versions are ignored.
    """
    if "licences" not in about:
        return (stated,)
    entries = about["licences"]
    if not isinstance(entries, list | tuple) or not all(map(_is_licence, entries)):
        raise InputError(
            f"{file} has malformed licences, {entries!s:.200}: each must have a source, a name and a link; copy the "
            "file again"
        )
    known = [field.name for field in fields(Licence)]
    described = tuple(Licence(**{key: entry[key] for key in known if key in entry}) for entry in entries)
    is_new = stated.name not in (None, SEE_CARD, *(each.name for each in described))
    # Weights on the hub have a publisher, who decides on their licence even if none is stated.
    is_unstated = not described and stated.hub is not None
    return (*described, stated) if is_new or is_unstated else described


def _is_licence(entry: Any) -> bool:
    """Whether an entry of a description has the types of a licence."""
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("source"), str)
        and all(isinstance(entry.get(key), str | None) for key in ("name", "link", "hub"))
        and entry.get("role", "weights") in ("weights", "teacher")
        and isinstance(entry.get("listed", False), bool)
    )


def timm_licence(name: str, licence: str | None, hub: str | None = None) -> Licence:
    """Return the licence of timm's weights, as named in its registry; `hub` is their repository."""
    return Licence(name, None if licence in (None, "unknown", "other") else licence.lower(), hub=hub)


def read_licence(readmes: Iterable[Path], source: str, commit: str | None = None) -> Licence:
    """Read the licence in the header of the first of these README.md files that has one.

    Args:
        readmes: the files; those of a repository are in a folder with the name of its commit, as in the hub's cache.
        source: name of the weights.
        commit: commit of the repository, for complete links to the text of the licence.
    """
    repository = hub_name(source)
    found = Licence(source_name(source), hub=None if repository is None else repository.repo)
    for path in readmes:
        header = read_header(path)
        names = header.get("license") or []
        name = (names if isinstance(names, str) else ", ".join(map(str, names))).lower()
        link = str(header.get("license_link") or "")
        is_listed = isinstance(names, str) and name != "other" and repository is not None
        if name == "other":
            name = str(header.get("license_name") or (name if link else "")).lower()
        if name and name != "unknown":
            if link and commit and repository is not None:
                folder = path.parts[path.parts.index(commit) : -1]
                link = urljoin(f"{address(repository.repo)}/blob/{'/'.join(folder)}/", link)
            return replace(found, name=name, link=link or None, listed=is_listed)
    return found


def read_header(path: Path) -> dict[str, Any]:
    """Read the YAML between `---` at the start of a Markdown file; empty without a valid one."""
    try:
        header = parse_yaml(split_header(read_text(path, errors="replace"))[0])
    except (OSError, InputError, yaml.YAMLError):
        return {}
    return header if isinstance(header, dict) else {}


def split_header(text: str) -> tuple[str, str]:
    """Split Markdown into the header between `---` at its start, which may be empty, and the text after it.

    Example:
        >>> split_header("---\\nlicense: mit\\n---\\n# Title")
        ('license: mit', '# Title')
    """
    lines = text.replace("\r\n", "\n").lstrip("\ufeff\n").split("\n")
    if lines[0].rstrip() != "---" or "---" not in (rest := [line.rstrip() for line in lines[1:]]):
        return "", text
    end = rest.index("---")
    return "\n".join(lines[1 : end + 1]), "\n".join(lines[end + 2 :])
