from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.optim.parallel.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes, shared by all tests: they take longer to start than to do their work."""
    found = Pool(4)
    yield found
    found.close()
