"""Measuring over processes gives one process's numbers on the concatenated data, and fails on all or on none."""

from __future__ import annotations

from typing import Any

import pytest

import kronscope as ks
from tests.distributed.compare import assert_same_numbers
from tests.distributed.measuring import EQUAL, batch_norm, measured
from tests.distributed.processes import Failed, Place, run_alone


@pytest.mark.parametrize("name", EQUAL)
def test_processes_give_the_numbers_of_one(outcomes: list[dict[str, Any]], name: str) -> None:
    assert_same_numbers(outcomes[0][name], run_alone(EQUAL[name]))


@pytest.mark.parametrize("name", [name for name in EQUAL if name not in ("alone", "group")])
def test_all_processes_get_the_same_results(outcomes: list[dict[str, Any]], name: str) -> None:
    assert all(outcome[name] == outcomes[0][name] for outcome in outcomes)


def test_the_first_process_lends_its_running_statistics(outcomes: list[dict[str, Any]]) -> None:
    results, _ = outcomes[0]["batch norm"]
    assert_same_numbers(results, run_alone(batch_norm)[0])
    assert all(outcome["batch norm"][1] for outcome in outcomes), "buffers were not put back"


def test_max_samples_is_divided(outcomes: list[dict[str, Any]]) -> None:
    assert outcomes[0]["limited"].rows[0].samples == 7


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("empty share", "DataError", "The data is empty"),
        ("not a number", "NonFiniteError", "NaN or infinity"),
        ("other options", "DistributedError", "truth is gauss_newton on process 0 and empirical_fisher on process 1"),
        ("other options", "DistributedError", "seed is 0 on process 0 and 1 on process 1"),
        ("other parameters", "DistributedError", "parameter 2.weight is of shape (3, 4), checksum"),
        ("too few", "OptionError", "max_samples=1 is divided over"),
    ],
)
def test_what_fails_on_one_fails_on_all(outcomes: list[dict[str, Any]], name: str, kind: str, says: str) -> None:
    for outcome in outcomes:
        assert isinstance(outcome[name], Failed)
        assert outcome[name].kind == kind
        assert says in outcome[name].text


def test_a_process_that_does_not_come_is_named(outcomes: list[dict[str, Any]]) -> None:
    failed = outcomes[0]["first only"]
    missing = ", ".join(map(str, range(1, len(outcomes))))
    assert failed.kind == "DistributedError"
    assert f"not on process {missing}." in failed.text
    assert "distributed=False" in failed.text


def test_several_processes_cannot_be_had_without_torch_distributed() -> None:
    with pytest.raises(ks.errors.OptionError, match="not initialised"):
        measured(Place(0, 1, run_alone(lambda place: place.folder)), distributed=True)
