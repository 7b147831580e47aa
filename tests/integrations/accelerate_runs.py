"""Training with Accelerate, plainly, under DDP and under FSDP2; started by the tests, and by torchrun for them."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import kronscope as ks
from tests.integrations.tiny import FAMILIES, network, points, weights

BATCH, STEPS, SAVED = 8, 6, 3


def accelerator(sharded: bool = False, **options: Any) -> Accelerator:
    """An Accelerator on the CPU."""
    if not sharded:
        return Accelerator(cpu=True, **options)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    made = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    # Accelerate takes a plugin on a CPU and then leaves it aside, but its code for FSDP2 runs there all the same
    PartialState().distributed_type = made.state.distributed_type = DistributedType.FSDP
    made.state.fsdp_plugin = plugin
    return made


def train(
    folder: str,
    family: str,
    processes: int = 1,
    resume: bool = False,
    sharded: bool = False,
    accumulate: int = 1,
) -> dict[str, Tensor]:
    """Train from the start, saving half-way, or from there; return the weights."""
    running = accelerator(sharded, gradient_accumulation_steps=accumulate)
    model: Any = network()
    optimizer: Any = FAMILIES[family](ks.param_groups(model), lr=1e-2, weight_decay=0.01)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    batches: Any = DataLoader(points(BATCH * STEPS), BATCH // processes // accumulate)
    model, optimizer, batches = running.prepare(model, optimizer, batches)
    running.register_for_checkpointing(schedule)
    steps = 0
    if resume:
        running.load_state(folder)
        steps = SAVED
        batches = running.skip_first_batches(batches, SAVED * accumulate)
    for inputs, targets in batches:
        with running.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            running.backward(loss)
            if running.sync_gradients:
                running.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if running.sync_gradients:
            schedule.step()
            steps += 1
            if steps == SAVED and not resume:
                running.save_state(folder)
    assert steps == STEPS
    return weights(model)


def together(folder: str, sharded: bool = False) -> dict[str, dict[str, Any]]:
    """A whole run that saves half-way, and one that resumes from there."""
    processes = int(os.environ["WORLD_SIZE"])
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        whole = train(f"{folder}/{family}", family, processes, sharded=sharded)
        resumed = train(f"{folder}/{family}", family, processes, resume=True, sharded=sharded)
        found[family] = {"whole": whole, "resumed": resumed}
    return found


def again(folder: str) -> dict[str, dict[str, Tensor]]:
    """Resume what FSDP2 saved on another number of processes."""
    processes = int(os.environ["WORLD_SIZE"])
    return {family: train(f"{folder}/{family}", family, processes, resume=True, sharded=True) for family in FAMILIES}


class Branches(nn.Module):
    """Two bodies, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        hidden = self.first(inputs)
        return self.out(torch.tanh(hidden + self.second(inputs) if both else hidden))  # type: ignore[no-any-return]


def unused() -> dict[str, Any]:
    """Train a model of which half is left out in the second of three steps."""
    running = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model: Any = Branches().double()
    branch = model.second.weight
    model, optimizer = running.prepare(model, ks.KLShampoo(ks.param_groups(model), lr=1e-2))
    inputs, targets = points(16).tensors
    mine = slice(running.process_index, None, running.num_processes)
    moved = []
    for both in (True, False, True):
        before = branch.detach().clone()
        optimizer.zero_grad()
        running.backward(nn.functional.cross_entropy(model(inputs[mine], both), targets[mine]))
        optimizer.step()
        moved.append(bool((branch != before).any()))
    return {"after": weights(model), "moved": moved}
