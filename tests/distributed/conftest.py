"""All cases run once on two processes, and many on three, whatever number of workers pytest has."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import measuring, recording, watching
from tests.distributed.processes import SECONDS, run_everywhere

CASES = {**measuring.CASES, **recording.CASES, **watching.CASES}
# What goes through the sums, shares and offsets of others, which three processes try with those others.
TWO_ARE_ENOUGH = measuring.TWO_ARE_ENOUGH | recording.TWO_ARE_ENOUGH | watching.TWO_ARE_ENOUGH
assert CASES.keys() > TWO_ARE_ENOUGH


@pytest.fixture(scope="session", params=[2, 3], ids=["two", "three"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process returned or raised, by case."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / f"outcomes-{request.param}"
    try:
        folder.mkdir()
    except FileExistsError:  # another worker is at it
        return _waited_for(folder / "done")
    try:
        cases = {name: case for name, case in CASES.items() if request.param == 2 or name not in TWO_ARE_ENOUGH}
        found: Any = run_everywhere(request.param, cases)
    except BaseException as error:
        found = repr(error)
        raise
    finally:
        (folder / "part").write_bytes(pickle.dumps(found))
        (folder / "part").rename(folder / "done")
    return list(found)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ask for no outcome of a case that does not run."""
    items[:] = [item for item in items if not _does_not_run(getattr(item, "callspec", None))]


def _does_not_run(chosen: Any) -> bool:
    return chosen is not None and chosen.params.get("outcomes") == 3 and chosen.params.get("name") in TWO_ARE_ENOUGH


def _waited_for(path: Path) -> list[dict[str, Any]]:
    limit = time.monotonic() + 2 * SECONDS
    while not path.exists():
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.1)
    found: Any = pickle.loads(path.read_bytes())
    assert not isinstance(found, str), found
    return list(found)
