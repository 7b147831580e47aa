from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.optim.parallel.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes, shared by all tests: they take longer to start than to do their work."""
    found = Pool(4)
    yield found
    found.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep these tests on one worker of a parallel run, so that only one pool is started."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("processes"))
