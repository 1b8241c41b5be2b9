"""Shell completion: suggestions for the words before the cursor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cribo se", {"segment", "search"}),
        ("cribo evaluate over", {"overclustering "}),
        ("cribo segment --images X --he", {"--help", "--head"}),
        ("cribo segment --head ", {"knn", "ridge", "both"}),
        ("cribo evaluate linear --schedule p", {"paper "}),
        ("cribo pretrain --config camvid --optim.epo", {"--optim.epochs "}),
        ("cribo index --images pho", {"photographs/"}),
    ],
)
def test_words_are_completed(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "photographs").mkdir()
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    point = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    subprocess.run([sys.executable, "-m", "cribo"], cwd=tmp_path, env=os.environ | asked | point, check=True)
    assert set(answer.read_text().split("\n")) == expected
