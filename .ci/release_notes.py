"""Check that a tag can be released, and print the release's section of CHANGELOG.md.

    uv run --no-project .ci/release_notes.py v0.2.0

The tag must name the version in pyproject.toml and in CITATION.cff, and CHANGELOG.md must have a section with this
version and the date in CITATION.cff.
"""

import re
import sys
import tomllib
from pathlib import Path


def release_notes(tag: str, repository: Path) -> str:
    """Return the section of CHANGELOG.md for a tag, with one line per entry.

    Raises:
        ValueError: the tag and the files disagree.
    """
    version = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but the version in pyproject.toml is {version}: tag v{version}")

    changelog = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(
        rf"^## \[{re.escape(version)}\] - (?P<date>\d{{4}}-\d\d-\d\d)$(?P<text>.*?)(?=^## |^\[[^\]]+\]: |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if section is None or not section["text"].strip():
        raise ValueError(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD` with text: add it")

    citation = (repository / "CITATION.cff").read_text(encoding="utf-8")
    for key, expected in (("version", version), ("date-released", section["date"])):
        found = re.search(rf"""^{key}: ["']?(.*?)["']?$""", citation, re.MULTILINE)
        if found is None or found[1] != expected:
            raise ValueError(f"{key} in CITATION.cff is {found[1] if found else 'missing'}, expected {expected}")
    # GitHub shows line breaks of a release's text: join the lines of each entry.
    return re.sub(r"\n +(?![-*] )(?=\S)", " ", section["text"].strip()) + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(release_notes(sys.argv[1], Path(__file__).parents[1]))
    except ValueError as error:
        sys.exit(f"release: {error}")
