from collections.abc import Iterator

import pytest
from tests.features.spread.toy import running_cluster


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """The address of a cluster, which takes longer to start than a test."""
    with running_cluster() as address:
        yield address
