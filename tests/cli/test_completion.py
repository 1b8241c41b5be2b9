"""Shell completion: suggestions for the words before the cursor."""

import subprocess
import sys

import pytest

LINES = {
    "cribo se": {"segment", "search", "serve"},
    "cribo evaluate over": {"overclustering "},
    "cribo segment --images X --he": {"--help", "--head"},
    "cribo segment --head ": {"knn", "ridge", "both"},
    "cribo evaluate linear --schedule p": {"paper "},
    "cribo pretrain --config camvid --optim.epo": {"--optim.epochs "},
    "cribo index --images pho": {"photographs/"},
}
# Argcomplete ends its process, so each line has one of its own, which need not import the packages again.
PROGRAM = """
import os, sys
import cribo.base.arguments, cribo.cli.running

for number, line in enumerate(sys.argv[1:]):
    if not (child := os.fork()):
        os.environ |= {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(number)}
        os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
        os._exit(cribo.cli.main([]))
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Complete all lines in a folder that contains a folder."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "photographs").mkdir()
    subprocess.run([sys.executable, "-c", PROGRAM, *LINES], cwd=folder, check=True)
    return {line: set((folder / f"{n}").read_text().split("\n")) for n, line in enumerate(LINES)}


@pytest.mark.parametrize("line", LINES)
def test_words_are_completed(line: str, completed: dict[str, set[str]]) -> None:
    assert completed[line] == LINES[line]
