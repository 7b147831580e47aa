"""A checkpoint of any number of processes, in any mode, continues on any other with the same numbers."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.optim.parallel.model import MAKERS, train, values, wrapped
from tests.optim.parallel.pool import Pool

HALF, STEPS = 8, 16
TOLERANCE = 1e-9


def options(kind: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=kind == "flat")


def save(mode: str, name: str, folder: str, kind: str = "nested") -> None:
    model = wrapped(mode, "square" in name)
    optimizer = MAKERS[name](model.named_parameters())
    train(model, optimizer, range(HALF))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options(kind)),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        dcp.save(state, checkpoint_id=folder)


def resume(mode: str, name: str, folder: str, kind: str = "nested") -> dict[str, Tensor]:
    model = wrapped(mode, "square" in name)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    optimizer = MAKERS[name](model.named_parameters())
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options(kind)),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options(kind))
    train(model, optimizer, range(HALF, STEPS))
    return values(model)


@cache
def undisturbed(name: str) -> dict[str, Tensor]:
    model = wrapped("single", "square" in name)
    optimizer = MAKERS[name](model.named_parameters())
    train(model, optimizer, range(STEPS))
    return values(model)


def check(found: list[dict[str, Any]], name: str) -> None:
    for one in found:
        for key, value in undisturbed(name).items():
            assert float((one[key] - value).abs().max()) < TOLERANCE * float(value.abs().max()), key


@pytest.mark.parametrize(
    ("name", "kind", "source", "targets"),
    [
        ("shampoo", "nested", ("ddp", 4), [("ddp", 1), ("ddp", 2), ("fsdp2", 3), ("single", 0)]),
        ("shampoo", "flat", ("fsdp2", 4), [("ddp", 3), ("fsdp2", 2), ("hsdp", 4), ("single", 0)]),
        ("soap, square", "nested", ("hsdp", 4), [("fsdp2", 2), ("ddp", 3)]),
        ("kl", "flat", ("single", 0), [("ddp", 3), ("fsdp2", 2)]),
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
