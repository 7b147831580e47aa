"""SIGKILL at any moment: the records stay readable, the page works, and a resumed run goes on in the same folder."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from kronscope.errors import RunError
from kronscope.watching import WatchRecords
from kronscope.watching.server import LiveServer
from tests.paper.killing import Killer
from tests.watching import killable
from tests.watching.killable import EVERY, STEPS

pytestmark = pytest.mark.slow
KILLS = 5


@pytest.fixture
def killer() -> Killer:
    return Killer(killable.work)


def steps(records: WatchRecords) -> list[int]:
    return [record["step"] for record in records.records]


def served(folder: Path) -> list[dict[str, Any]]:
    """The lines that the page gets."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with LiveServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with direct.open(server.url) as answer:
            assert b"kronscope watch" in answer.read()
        with direct.open(f"{server.url}records?from=0") as answer:
            lines: list[dict[str, Any]] = json.load(answer)["lines"]
        server.shutdown()
    return lines


def assert_same(killed: Path, whole: Path) -> None:
    """Compare all that does not depend on the clock with the run that was left alone."""
    ours, theirs = (WatchRecords.load(folder / "watch") for folder in (killed, whole))
    assert steps(ours) == steps(theirs) == list(range(EVERY, STEPS + 1, EVERY))
    for one, other in zip(ours.records, theirs.records, strict=True):
        assert one["layers"] == other["layers"]
        assert [row["cosine"] for row in one["cosines"]] == [row["cosine"] for row in other["cosines"]]
    saved = [torch.load(folder / "checkpoint.pt", weights_only=True)["model"] for folder in (killed, whole)]
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=0)


def test_killed_five_times_it_goes_on(killer: Killer, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    began = time.monotonic()
    assert killer.run(whole) == 0
    duration = time.monotonic() - began
    moments, kills = random.Random(0), 0
    # a machine that has become faster ends a run before its fifth kill: then another one takes the rest of them
    for attempt in range(KILLS):
        killed = tmp_path / f"killed{attempt}"
        killed.mkdir()
        while kills < KILLS and not (killed / "done.json").exists():
            kills += killer.run(killed, kill_after=moments.uniform(0, duration / 3)) == -signal.SIGKILL
            try:
                records = WatchRecords.load(killed / "watch")
            except RunError:  # killed before there was a run
                assert not (killed / "watch" / "config.json").exists()
                continue
            assert steps(records) == list(range(EVERY, EVERY * len(records.records) + 1, EVERY))
            assert WatchRecords(records.layers, served(killed / "watch")).records == records.records
        if not (killed / "done.json").exists():
            assert killer.run(killed) == 0
        assert_same(killed, whole)
        if kills == KILLS:
            break
    assert kills == KILLS
