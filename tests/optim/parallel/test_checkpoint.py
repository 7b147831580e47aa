"""A checkpoint of any number of processes, in any mode, continues on any other with the same numbers."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from kronscope.errors import StateError
from tests.optim.parallel.model import made, train, values, wrapped
from tests.optim.parallel.pool import Pool

# on both sides of the checkpoint a batch of two parts, and roots are taken anew (every third step)
HALF, STEPS = 4, 7
TOLERANCE = 1e-9


def options(kind: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=kind == "flat")


def state_of(model: nn.Module, optimizer: Optimizer, kind: str) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options(kind)),
    }


def save(mode: str, name: str, folder: str, kind: str = "nested") -> None:
    model = wrapped(mode, "square" in name)
    optimizer = made(mode, name, model.named_parameters())
    train(model, optimizer, range(HALF))
    state = state_of(model, optimizer, kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        dcp_save(state, checkpoint_id=folder)


def resume(mode: str, name: str, folder: str, kind: str = "nested") -> dict[str, Tensor]:
    model = wrapped(mode, "square" in name)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    optimizer = made(mode, name, model.named_parameters())
    state = state_of(model, optimizer, kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        dcp_load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options(kind))
    train(model, optimizer, range(HALF, STEPS))
    return values(model)


@cache
def undisturbed(name: str) -> dict[str, Tensor]:
    model = wrapped("single", "square" in name)
    optimizer = made("single", name, model.named_parameters())
    train(model, optimizer, range(STEPS))
    return values(model)


def check(found: list[dict[str, Any]], name: str) -> None:
    for one in found:
        for key, value in undisturbed(name).items():
            assert float((one[key] - value).abs().max()) < TOLERANCE * float(value.abs().max()), key


@pytest.mark.parametrize(
    ("name", "kind", "source", "targets"),
    [
        ("shampoo", "nested", ("divided", 4), [("ddp", 1), ("divided", 2), ("fsdp2", 3), ("single", 0)]),
        ("shampoo", "nested", ("ddp", 2), [("ddp", 3), ("divided", 2), ("fsdp2", 3), ("single", 0)]),
        ("shampoo", "flat", ("fsdp2", 3), [("ddp", 2), ("divided", 2), ("fsdp2", 2), ("hsdp", 4), ("single", 0)]),
        ("soap, square", "nested", ("hsdp", 4), [("fsdp2", 2), ("ddp", 2), ("divided", 3)]),
        ("kl", "flat", ("single", 0), [("ddp", 2), ("divided", 3), ("fsdp2", 2)]),
    ],
)
def test_a_checkpoint_continues_elsewhere(
    pool: Pool, tmp_path: Path, name: str, kind: str, source: tuple[str, int], targets: list[tuple[str, int]]
) -> None:
    arguments = {"name": name, "folder": str(tmp_path / "checkpoint"), "kind": kind}
    if source[1]:
        pool.run(save, source[1], mode=source[0], **arguments)
    else:
        save(source[0], **arguments)
    for mode, size in targets:
        found = pool.run(resume, size, mode=mode, **arguments) if size else [resume(mode, **arguments)]
        check(found, name)


def full_state(mode: str, name: str) -> dict[str, Any]:
    """The whole state on rank 0, as one process would have it."""
    model = wrapped(mode, "square" in name)
    optimizer = made(mode, name, model.named_parameters())
    train(model, optimizer, range(HALF))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(model, options=whole)
    return {"model": model_state, "optimizer": get_optimizer_state_dict(model, optimizer, options=whole)}


def resume_full(mode: str, name: str, folder: str, broadcast: bool) -> dict[str, Tensor]:
    """Continue from one file that holds everything, read by all processes or by one."""
    model = wrapped(mode, "square" in name)
    optimizer = made(mode, name, model.named_parameters())
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    if not broadcast or dist.get_rank() == 0:
        state = torch.load(Path(folder) / "state.pt", weights_only=True)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, state["model"], options=whole)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=whole)
    train(model, optimizer, range(HALF, STEPS))
    return values(model)


# All of these states are that of one process: that it continues in every mode need be seen once for each optimizer.
@pytest.mark.parametrize(
    ("mode", "size", "name", "targets"),
    [
        ("ddp", 3, "kl", [("ddp", 2, False), ("fsdp2", 2, True)]),
        ("divided", 3, "kl", [("divided", 2, True), ("fsdp2", 3, False)]),
        ("hsdp", 4, "shampoo", [("ddp", 2, False), ("divided", 3, True), ("fsdp2", 2, True)]),
    ],
)
def test_the_full_state_of_several_processes_is_that_of_one(
    pool: Pool, tmp_path: Path, mode: str, size: int, name: str, targets: list[tuple[str, int, bool]]
) -> None:
    found = pool.run(full_state, size, mode=mode, name=name)[0]
    expected = full_state("single", name)
    assert found["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for key, tensors in expected["optimizer"]["state"].items():
        assert found["optimizer"]["state"][key].keys() == tensors.keys()
        for part, tensor in tensors.items():
            other = found["optimizer"]["state"][key][part]
            assert type(other) is Tensor
            assert torch.allclose(other, tensor, rtol=1e-6, atol=1e-9), (key, part)
    torch.save(found, tmp_path / "state.pt")
    for other, count, broadcast in targets:
        check(pool.run(resume_full, count, mode=other, name=name, folder=str(tmp_path), broadcast=broadcast), name)


def resume_plain(mode: str, name: str, folder: str) -> dict[str, Tensor]:
    """Continue from what ``torch.save(optimizer.state_dict())`` of one process wrote."""
    state = torch.load(Path(folder) / "plain.pt", weights_only=True)
    model = wrapped(mode, "square" in name)
    set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
    optimizer = made(mode, name, model.named_parameters())
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, range(HALF, STEPS))
    return values(model)


@pytest.mark.parametrize(("mode", "size"), [("ddp", 3), ("divided", 3), ("fsdp2", 3)])
def test_a_plain_file_of_one_process_continues_on_several(pool: Pool, tmp_path: Path, mode: str, size: int) -> None:
    name = "shampoo"
    model = wrapped("single")
    optimizer = made("single", name, model.named_parameters())
    train(model, optimizer, range(HALF))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    check(pool.run(resume_plain, size, mode=mode, name=name, folder=str(tmp_path)), name)


def own_files(mode: str, folder: str) -> list[str]:
    """Each process writes a file of its own, reads it, and goes on; another's file is refused; copies go on too."""
    file = Path(folder) / f"{dist.get_rank()}.pt"
    model = wrapped(mode)
    optimizer = made(mode, "shampoo", model.named_parameters())
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(part=True)}, file)
    dist.barrier()
    twin = wrapped(mode)
    saved = torch.load(file, weights_only=True) if mode == "divided" else torch.load(file, weights_only=False)
    twin.load_state_dict(saved["model"])
    resumed = made(mode, "shampoo", twin.named_parameters())
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(3, 6))
    train(twin, resumed, range(3, 6))
    for key, value in values(model).items():
        assert torch.equal(values(twin)[key], value), key
    other = torch.load(Path(folder) / f"{1 - dist.get_rank()}.pt", weights_only=mode == "divided")
    try:
        resumed.load_state_dict(other["optimizer"])
    except StateError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("mode", ["divided", "fsdp2"])
def test_files_of_each_process_are_read_by_the_same_process(pool: Pool, tmp_path: Path, mode: str) -> None:
    for found in pool.run(own_files, 2, mode=mode, folder=str(tmp_path)):
        assert found, "another process's state was loaded"
        assert "torch.distributed.checkpoint" in found[0]


def copied(mode: str) -> None:
    model = wrapped(mode)
    optimizer = made(mode, "shampoo", model.named_parameters())
    train(model, optimizer, range(3))
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    for key, value in values(model).items():
        assert torch.equal(values(twin)[key], value), key


@pytest.mark.parametrize("mode", ["ddp", "divided"])
def test_a_copied_run_goes_on_alike(pool: Pool, mode: str) -> None:
    pool.run(copied, 2, mode=mode)


def save_in_the_background(mode: str, name: str, folder: str) -> None:
    model = wrapped(mode)
    optimizer = made(mode, name, model.named_parameters())
    train(model, optimizer, range(HALF))
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    # a group of its own: the writing must not get between the collectives of the training
    group = dist.new_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written: Any = async_save(state, checkpoint_id=folder, process_group=group)
    # the optimizer goes on while the checkpoint is written
    train(model, optimizer, range(HALF, STEPS))
    written.result()


@pytest.mark.parametrize("mode", ["ddp", "divided"])
def test_a_checkpoint_written_in_the_background_is_of_the_step_it_was_begun(
    pool: Pool, tmp_path: Path, mode: str
) -> None:
    arguments = {"name": "shampoo", "folder": str(tmp_path / "checkpoint")}
    pool.run(save_in_the_background, 2, mode=mode, **arguments)
    check(pool.run(resume, 3, mode="ddp", **arguments), "shampoo")
