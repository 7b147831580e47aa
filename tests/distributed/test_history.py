"""A history shared by processes is that of one: each keeps a part, measured together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.compare import assert_same_numbers
from tests.distributed.processes import Failed, run_alone
from tests.distributed.recording import EQUAL, STEPS, on_disk


@pytest.mark.parametrize("name", EQUAL)
def test_processes_give_the_numbers_of_one(outcomes: list[dict[str, Any]], name: str) -> None:
    assert not isinstance(outcomes[0][name], Failed), outcomes[0][name]
    assert_same_numbers(outcomes[0][name], run_alone(EQUAL[name]))
    assert all(outcome[name] == outcomes[0][name] for outcome in outcomes)


def test_records_of_all_processes_can_be_read_by_any_number(outcomes: list[dict[str, Any]]) -> None:
    expected = run_alone(on_disk)
    for ours, theirs in zip(outcomes[0]["history on disk"], expected, strict=True):
        assert_same_numbers(ours, theirs)


def test_each_process_keeps_its_share(outcomes: list[dict[str, Any]]) -> None:
    kept = [outcome["history, shares"][0] for outcome in outcomes]
    assert sum(kept) == 8 * STEPS == outcomes[0]["history, shares"][1]
    assert max(kept) - min(kept) <= 3


def test_all_processes_thin_alike(outcomes: list[dict[str, Any]]) -> None:
    steps, every, _ = outcomes[0]["history, little space"]
    assert every > 1
    assert steps == tuple(range(1, 4 * STEPS + 1, every))
    assert all(outcome["history, little space"][:2] == (steps, every) for outcome in outcomes)
    assert all(outcome["history, little space"][2] <= 4 for outcome in outcomes)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("history, not averaged", "DistributedError", "gradients of 'weight' differ between processes"),
        ("history, other number", "DataError", "was recorded by 1 process(es)"),
    ],
)
def test_what_fails_on_one_fails_on_all(outcomes: list[dict[str, Any]], name: str, kind: str, says: str) -> None:
    for outcome in outcomes:
        assert isinstance(outcome[name], Failed), outcome[name]
        assert outcome[name].kind == kind
        assert says in outcome[name].text


def test_a_state_of_another_process_is_refused(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes[1:]:
        assert outcome["history, foreign state"].kind == "DataError"
        assert "every process saves and loads a state of its own" in outcome["history, foreign state"].text
