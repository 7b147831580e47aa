"""Accelerate: plain, under DDP and under FSDP2, whole runs equal resumed ones."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kronscope.integrations import unwrap
from tests.integrations.launch import launch
from tests.integrations.tiny import FAMILIES, assert_same, network

# accelerate and torch warn of each other's deprecations
pytestmark = pytest.mark.filterwarnings("ignore")
ROUNDING = 1e-9


@pytest.fixture(scope="module", params=["ddp", "fsdp2", "fsdp2 alone"])
def processes(request: pytest.FixtureRequest, accelerate_runs: ModuleType, tmp_path_factory: Any) -> Any:
    """What one or two processes found, and what one process found that resumed from what two had saved."""
    folder = tmp_path_factory.mktemp("accelerate")
    sharded = request.param != "ddp"
    count = 1 if request.param == "fsdp2 alone" else 2
    found = launch(accelerate_runs.together, count, folder / "found.pt", folder=str(folder), sharded=sharded)
    if request.param == "fsdp2":
        # Accelerate loads what FSDP2 saved under FSDP2 only, which needs a process group
        return found, launch(accelerate_runs.again, 1, folder / "again.pt", folder=str(folder))
    if request.param == "ddp":
        return found, {name: accelerate_runs.train(str(folder / name), name, resume=True) for name in FAMILIES}
    return found, None


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_on_one_process_changes_no_bit(
    accelerate_runs: ModuleType, tmp_path: Path, family: str, accumulate: int
) -> None:
    whole = accelerate_runs.train(str(tmp_path), family, accumulate=accumulate)
    assert_same(accelerate_runs.train(str(tmp_path), family, resume=True, accumulate=accumulate), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_as_one(accelerate_runs: ModuleType, processes: Any, tmp_path: Path, family: str) -> None:
    assert_same(processes[0][family]["whole"], accelerate_runs.train(str(tmp_path), family), ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_processes_resume_what_they_saved(processes: Any, family: str) -> None:
    found = processes[0][family]
    assert_same(found["resumed"], found["whole"], ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("processes", ["ddp", "fsdp2"], indirect=True)
def test_one_process_resumes_what_two_saved(processes: Any, family: str) -> None:
    found, resumed = processes
    assert_same(resumed[family], found[family]["whole"], ROUNDING)


def test_unwrap_reaches_through_prepare(accelerate_runs: ModuleType) -> None:
    ours = FAMILIES["kl"](network().named_parameters(), lr=1e-3)
    wrapped = accelerate_runs.accelerator().prepare(ours)
    assert wrapped is not ours
    assert not hasattr(wrapped, "explain")
    assert unwrap(wrapped) is ours
