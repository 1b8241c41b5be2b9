"""What tests of several folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def camvid() -> Path:
    """The CamVid street scenes that lie beside the repository; without them the test is skipped."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "camvid"
    if not folder.is_dir():
        pytest.skip("needs the CamVid data in ../shared/data/camvid")
    return folder
