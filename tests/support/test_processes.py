"""One process alone is a group of one, and what fails in a collective call says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kronscope.errors import DistributedError, OptionError
from kronscope.support.processes import ALONE, GroupProcesses, Processes, find_processes


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[GroupProcesses]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield GroupProcesses()
    finally:
        dist.destroy_process_group()


def answers(processes: Processes) -> dict[str, object]:
    """What every method returns."""
    tensor = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)

    def local() -> tuple[Tensor, ...]:
        return tensor, tensor.sum()

    with processes.failing_together():
        processes.barrier("the test")
    processes.check_equal("the test", {"a": 1})
    matrix, total = processes.all_reduce(local, [(2, 3), ()])
    return {
        "rank": processes.rank,
        "world_size": processes.world_size,
        "share": processes.share_of(7),
        "differences": processes.differences({"a": 1, "b": [2]}),
        "gathered": processes.all_gather_object({"a": 1}),
        "broadcast": processes.broadcast_object("text"),
        "made": processes.on_rank_0(lambda: 3),
        "tensor": processes.broadcast(tensor, (2, 3), torch.float64).tolist(),
        "sums": (matrix.tolist(), float(total)),
        "local": processes.local_world_size(),
    }


def test_a_process_alone_gets_the_answers_of_a_group_of_one(group_of_one: GroupProcesses) -> None:
    assert answers(ALONE) == answers(group_of_one)


@pytest.mark.parametrize("call", ["failing_together", "all_reduce", "on_rank_0"])
def test_what_fails_alone_fails_as_in_a_group_of_one(group_of_one: GroupProcesses, call: str) -> None:
    def fails() -> tuple[Tensor, ...]:
        raise OptionError("no")

    def tried(processes: Processes) -> None:
        if call == "failing_together":
            with processes.failing_together():
                fails()
        elif call == "all_reduce":
            processes.all_reduce(fails, [()])
        else:
            processes.on_rank_0(fails)

    for processes in (ALONE, group_of_one):
        with pytest.raises(OptionError, match="no"):
            tried(processes)


def test_a_group_of_one_is_found_to_be_alone(group_of_one: GroupProcesses) -> None:
    for distributed in (None, True, dist.group.WORLD):
        assert find_processes(distributed) is ALONE
    assert find_processes(ALONE.distributed) is ALONE


@pytest.mark.parametrize("call", ["all_gather_object", "broadcast_object", "broadcast", "all_reduce"])
def test_a_call_that_another_process_left_says_what_to_do(
    group_of_one: GroupProcesses, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed by peer")

    for name in ("all_gather_object", "broadcast_object_list", "broadcast", "all_reduce"):
        monkeypatch.setattr(dist, name, closed)
    tensor = torch.ones(2, dtype=torch.float64)
    arguments = {
        "all_gather_object": (1,),
        "broadcast_object": (1,),
        "broadcast": (tensor, (2,), torch.float64),
        "all_reduce": (lambda: (tensor,), [(2,)]),
    }
    with pytest.raises(DistributedError, match=r"closed by peer.*start all processes again"):
        getattr(group_of_one, call)(*arguments[call])
