"""What tests of several folders share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

REPOSITORY = Path(__file__).parents[1]

# The plain versions of the formulas live in benchmarks/, which is no part of the package.
sys.path.insert(0, str(REPOSITORY))

# Check the shapes in the signatures of the method while the tests run; this has to come before its import.
jaxtyping.install_import_hook("cribo.method", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Signatures are not checked, as in the installed package: wrong shapes reach the method's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def camvid() -> Path:
    """The CamVid street scenes that lie beside the repository; without them the test is skipped."""
    folder = REPOSITORY.parent / "shared" / "data" / "camvid"
    if not folder.is_dir():
        pytest.skip("needs the CamVid data in ../shared/data/camvid")
    return folder
