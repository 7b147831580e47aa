"""Watching a run of several processes: training is the same to the bit, and the records are those of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.distributed.processes import Failed, run_alone
from tests.distributed.watching import ALONE_ELSEWHERE, CASES


@pytest.mark.parametrize("name", CASES)
def test_processes_record_what_one_records(outcomes: list[dict[str, Any]], name: str) -> None:
    alone = run_alone(CASES[name])
    for outcome in outcomes:
        found = outcome[name]
        assert not isinstance(found, Failed), found
        assert found["same"]
        assert found["steps"] == alone["steps"] == [2, 4]
        assert [len(rows) for rows in found["cosines"]] == [6, 6]
        if name == ALONE_ELSEWHERE:
            continue
        for ours, theirs in zip(found["layers"], alone["layers"], strict=True):
            assert ours.keys() == theirs.keys()
            for number, values in theirs.items():
                assert ours[number] == pytest.approx(values, rel=1e-5, abs=1e-7), number
        for ours, theirs in zip(found["cosines"], alone["cosines"], strict=True):
            assert [row[:2] for row in ours] == [row[:2] for row in theirs]
            assert all(math.isclose(a[2], b[2], rel_tol=1e-6) for a, b in zip(ours, theirs, strict=True))
