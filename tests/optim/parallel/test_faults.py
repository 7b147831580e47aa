"""A process that dies or hangs is an error on the others, in time; a run that starts again ends where it would have."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from kronscope.errors import DistributedError, StateError
from kronscope.optim import Shampoo
from kronscope.optim.parallel import replicated, sharded, shared_roots
from tests.forked import forking
from tests.optim.parallel.model import made, train, values, wrapped
from tests.optim.parallel.pool import Pool
from tests.optim.tools import parameters

SIZE, STEPS, EVERY, PATIENCE = 4, 10, 3, 40.0


def train_with_checkpoints(mode: str, folder: str, dies: tuple[int, int] | None = None) -> dict[str, Any]:
    """Train from the last complete checkpoint, with one every few steps; ``dies``: at which rank and step."""
    warnings.simplefilter("ignore")
    model = wrapped(mode)
    optimizer = made(mode, "shampoo", model.named_parameters())
    begin = 0
    # the file that DCP writes last, once everything else is there
    done = sorted(Path(folder).glob("step*/.metadata"))
    if done:
        begin = int(done[-1].parent.name.removeprefix("step"))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp_load(state, checkpoint_id=done[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(begin, STEPS):
        if dies == (dist.get_rank(), step):
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            train(model, optimizer, [step])
        except RuntimeError as error:
            return {"error": str(error), "seconds": time.monotonic() - started}
        if (step + 1) % EVERY == 0:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp_save(state, checkpoint_id=Path(folder) / f"step{step + 1:03d}")
    return {"begin": begin, "values": values(model)}


def mortal(rank: int, mode: str, folder: str, dies: tuple[int, int], paths: list[str]) -> None:
    sys.path[:] = paths
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE, timeout=timeout)
    report = train_with_checkpoints(mode, folder, dies)
    (Path(folder) / f"report{rank}").write_bytes(pickle.dumps(report))
    os._exit(0)  # a group with a dead member cannot be left in order


def undisturbed() -> dict[str, Tensor]:
    model = wrapped("single")
    train(model, made("single", "shampoo", model.named_parameters()), range(STEPS))
    return values(model)


def test_a_killed_process_is_an_error_on_the_others_and_a_restart_ends_where_the_run_would_have(
    pool: Pool, tmp_path: Path
) -> None:
    rank, step = random.Random(0).choice([(r, s) for r in range(SIZE) for s in range(EVERY, STEPS)])
    context = forking()
    arguments = ("fsdp2", str(tmp_path), (rank, step), list(sys.path))
    processes = [context.Process(target=mortal, args=(r, *arguments)) for r in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL if r == rank else 0 for r in range(SIZE)]
    for other in set(range(SIZE)) - {rank}:
        report = pickle.loads((tmp_path / f"report{other}").read_bytes())
        assert "error" in report, (rank, step)
        assert report["seconds"] < PATIENCE + 10
    # on fewer processes than before, and otherwise: the dead one's machine may be gone
    expected = undisturbed()
    for report in pool.run(train_with_checkpoints, 2, mode="ddp", folder=str(tmp_path)):
        assert report["begin"] == step // EVERY * EVERY
        for name, value in expected.items():
            assert torch.allclose(report["values"][name], value, rtol=1e-9, atol=1e-11), (rank, step, name)


def hangs() -> dict[str, Any]:
    """One process does not come to the second step."""
    patience = 3.0
    params = parameters((4, 3), (4, 3), (5,))
    for param in params:
        param.grad = torch.ones_like(param)
    # the first step of a process takes long, and not equally long; it must not be taken for hanging
    Shampoo(params, 0.1).step()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=patience))
    optimizer = Shampoo(params, 0.1, process_group=group)
    for step in range(2):
        if step and dist.get_rank() == 1:
            dist.barrier()
            return {}
        before, started = [param.clone() for param in params], time.monotonic()
        try:
            optimizer.step()
        except DistributedError as error:
            seconds = time.monotonic() - started
            unchanged = all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
            # in another group: only now the other process may go on
            dist.barrier()
            return {"error": str(error), "seconds": seconds, "unchanged": unchanged}
    return {}


def test_a_process_that_hangs_is_an_error_on_the_others_and_changes_no_parameter(pool: Pool) -> None:
    report = pool.run(hangs, 2)[0]
    assert "last checkpoint" in report["error"]
    assert 2 < report["seconds"] < 15
    assert report["unchanged"]


def fails_half_way(mode: str) -> dict[str, Any]:
    """The exchange of the third step fails on all processes; then all go on from what was saved before."""
    model = wrapped(mode)
    # some matrices have roots that are due then, and some have none
    optimizer = made(mode, "shampoo, whole", model.named_parameters())
    train(model, optimizer, range(2))
    before = values(model)
    saved = copy.deepcopy(optimizer.state_dict(part=True))
    module, call = {
        "ddp": (shared_roots, "gather_flat"),
        "divided": (replicated, "gather_flat"),
        "fsdp2": (sharded, "all_to_all"),
    }[mode]
    kept = getattr(module, call)

    def broken(*args: Any, **kwargs: Any) -> Any:
        # gradients still arrive where parameters are sharded
        if "sending gradients to the owners of blocks" in args:
            return kept(*args, **kwargs)
        raise DistributedError("the connection was reset.")

    setattr(module, call, broken)
    found: dict[str, Any] = {"errors": []}
    try:
        train(model, optimizer, [2])
    except DistributedError as error:
        found["errors"].append(str(error))
    finally:
        setattr(module, call, kept)
    found["unchanged"] = all(torch.equal(value, before[name]) for name, value in values(model).items())
    try:
        train(model, optimizer, [2])
    except StateError as error:
        found["errors"].append(str(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.state_dict(part=True)
    found["warned"] = [str(warning.message) for warning in caught]
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 5))
    return {**found, "values": values(model)}


@pytest.mark.parametrize("mode", ["ddp", "divided", "fsdp2"])
def test_a_step_that_fails_half_way_changes_no_parameter_and_is_not_gone_on_from(pool: Pool, mode: str) -> None:
    model = wrapped("single")
    train(model, made("single", "shampoo, whole", model.named_parameters()), range(5))
    wanted = values(model)
    for report in pool.run(fails_half_way, 2, mode=mode):
        assert report["errors"][0] == "the connection was reset."
        assert "failed half-way" in report["errors"][1]
        assert "Load a checkpoint" in report["errors"][1]
        assert report["unchanged"]
        assert any("neither that before it nor that after" in text for text in report["warned"])
        for name, value in report["values"].items():
            assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-11), name
