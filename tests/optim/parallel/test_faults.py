"""A process that dies or hangs is an error on the others, in time; a run that starts again ends where it would have."""

from __future__ import annotations

import multiprocessing
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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from kronscope.errors import ParallelError
from tests.optim.parallel.model import MAKERS, train, values, wrapped

SIZE, STEPS, EVERY, PATIENCE = 4, 10, 3, 15.0


def work(rank: int, size: int, mode: str, folder: str, fault: tuple[str, int, int] | None, paths: list[str]) -> None:
    """Train, with a checkpoint every few steps; continue from the last one that is complete."""
    sys.path[:] = paths
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = Path(folder) / f"store{fault is None}"
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    report: dict[str, Any] = {}
    try:
        model = wrapped(mode)
        optimizer = MAKERS["shampoo"](model.named_parameters())
        begin = 0
        # the file that DCP writes last, once everything else is there
        done = sorted(Path(folder).glob("step*/.metadata"))
        if done:
            begin = int(done[-1].parent.name.removeprefix("step"))
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
            dcp_load(state, checkpoint_id=done[-1].parent)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        report["begin"] = begin
        for step in range(begin, STEPS):
            before = values(model) if mode == "ddp" else {}
            if fault is not None and (rank, step) == fault[1:]:
                if fault[0] == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3 * PATIENCE)
            started = time.monotonic()
            try:
                if fault is not None and fault[0] == "hangs":
                    for param in model.parameters():
                        param.grad = torch.ones_like(param)
                    optimizer.step()
                else:
                    train(model, optimizer, [step])
            except (RuntimeError, ParallelError) as error:
                report["error"], report["seconds"] = f"{type(error).__name__}: {error}", time.monotonic() - started
                report["unchanged"] = (
                    all(torch.equal(before[k], v) for k, v in values(model).items()) if before else None
                )
                break
            if (step + 1) % EVERY == 0:
                model_state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state}
                dcp_save(state, checkpoint_id=Path(folder) / f"step{step + 1:03d}")
        else:
            report["values"] = values(model)
    finally:
        (Path(folder) / f"report{rank}").write_bytes(pickle.dumps(report))
    os._exit(0)  # a group with a dead member cannot be destroyed in order


def run(folder: Path, mode: str, fault: tuple[str, int, int] | None, size: int = SIZE) -> dict[int, dict[str, Any]]:
    for old in folder.glob("report*"):
        old.unlink()
    context = multiprocessing.get_context("spawn")
    arguments = (size, mode, str(folder), fault, list(sys.path))
    processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.is_alive():
            process.kill()
    return {
        rank: pickle.loads((folder / f"report{rank}").read_bytes())
        for rank in range(size)
        if (folder / f"report{rank}").exists()
    }


def undisturbed() -> dict[str, Tensor]:
    model = wrapped("single")
    train(model, (optimizer := MAKERS["shampoo"](model.named_parameters())), range(STEPS))
    del optimizer
    return values(model)


def test_a_killed_process_is_an_error_on_the_others_and_a_restart_ends_where_the_run_would_have(tmp_path: Path) -> None:
    rank, step = random.Random(int(time.time())).choice([(r, s) for r in range(SIZE) for s in range(EVERY, STEPS)])
    reports = run(tmp_path, "fsdp2", ("dies", rank, step))
    assert sorted(reports) == [r for r in range(SIZE) if r != rank]
    for report in reports.values():
        assert "error" in report, (rank, step)
        assert report["seconds"] < PATIENCE + 10
    # on fewer processes than before: the dead one's machine may be gone
    again = run(tmp_path, "ddp", None, size=2)
    expected = undisturbed()
    for report in again.values():
        assert report["begin"] == step // EVERY * EVERY
        for name, value in expected.items():
            assert torch.allclose(report["values"][name], value, rtol=1e-9, atol=1e-11), (rank, step, name)


def test_a_process_that_hangs_is_an_error_on_the_others_and_changes_no_parameter(tmp_path: Path) -> None:
    reports = run(tmp_path, "ddp", ("hangs", 1, 1), size=2)
    report = reports[0]
    assert "ParallelError" in report["error"]
    assert "last checkpoint" in report["error"]
    assert PATIENCE - 2 < report["seconds"] < PATIENCE + 10
    assert report["unchanged"]
