"""Cases of recording and measuring a training run's gradients, to be run on several processes and on one."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import kronscope as ks
from kronscope.measures import Results
from tests.distributed.processes import Case, Place

FAMILY = tuple(name for name in ks.approx.names() if "kfac" not in name)
STEPS = 13
LAYERS = ["weight"]


class Given:
    """A model whose gradients are given, the same on every process, as after averaging."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 3).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        generator = torch.Generator().manual_seed(0)
        self.grads = torch.randn(STEPS, 3, 4, generator=generator, dtype=torch.float64)

    def attach(self, **options: Any) -> ks.GradientHistory:
        return ks.GradientHistory.attach(self.optimizer, self.model, LAYERS, **options)

    def train(self, start: int = 0, stop: int = STEPS) -> None:
        for grad in self.grads[start:stop]:
            self.model.weight.grad = grad.clone()
            self.optimizer.step()


def recorded(
    place: Place, *, beta: float | None = None, approximations: tuple[str, ...] = FAMILY, **options: Any
) -> Results:
    run = Given()
    history = run.attach(**options)
    run.train()
    history.detach()
    at = [1, 6, STEPS]
    details = ["spectrum", "exponents"]
    return ks.measure_history(history, approximations, at, beta=beta, details=details, progress=False)


def on_disk(place: Place) -> list[Results]:
    """Written by all; read by all, and by one alone."""
    run = Given()
    history = run.attach(path=place.folder / "history")
    run.train()
    history.close()
    if place.size > 1:
        dist.barrier()
    together = ks.GradientHistory.open(place.folder / "history")
    alone = ks.GradientHistory.open(place.folder / "history", distributed=False)
    options: dict[str, Any] = {"at": [4, STEPS], "progress": False}
    return [ks.measure_history(together, **options), ks.measure_history(alone, **options)]


def read_by_more(place: Place) -> Results:
    """Written by one, read by all."""
    if place.rank == 0:
        run = Given()
        history = run.attach(path=place.folder / "history", distributed=False)
        run.train()
        history.close()
    if place.size > 1:
        dist.barrier()
    opened = ks.GradientHistory.open(place.folder / "history")
    return ks.measure_history(opened, at=[4, STEPS], progress=False)


def resumed(place: Place) -> Results:
    """Stopped at different steps, and gone on with from a checkpoint of the first process."""
    run, path = Given(), place.folder / "history"
    history = run.attach(path=path)
    run.train(0, 6)
    state = history.state_dict()
    # the processes are stopped at different moments
    run.train(6, 9 + place.rank)
    history.close()
    if place.size > 1:
        dist.barrier()
        box = [state]
        dist.broadcast_object_list(box, src=0)
        state = box[0]
    again = Given()
    history = again.attach(path=path, resume=True)
    history.load_state_dict(state)
    again.train(6)
    history.close()
    return ks.measure_history(history, at=[6, STEPS], progress=False)


def checkpointed(place: Place) -> Results:
    """In memory every process has its own state."""
    run = Given()
    history = run.attach()
    run.train(0, 6)
    state = history.state_dict()
    again = Given()
    history = again.attach()
    history.load_state_dict(state)
    again.train(6)
    return ks.measure_history(history, at=[6, STEPS], progress=False)


def foreign_state(place: Place) -> Results:
    run = Given()
    history = run.attach()
    run.train(0, 6)
    box = [history.state_dict()]
    dist.broadcast_object_list(box, src=0)
    if place.rank:
        history.load_state_dict(box[0])
    return Results([])


def little_space(place: Place) -> tuple[tuple[int, ...], int, int]:
    run = Given()
    history = run.attach(space=4 * (12 * 2 + 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            run.train()
    return history.steps, history.every, len(history._store.steps)


def shares(place: Place) -> tuple[int, int]:
    run = Given()
    history = run.attach()
    for _ in range(8):
        run.train()
    return len(history._store.steps), len(history)


def trained(place: Place, *, sharded: bool = False) -> Results:
    """Real training: each process on its part of each batch, gradients averaged."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    wrapped: Any = model
    if place.size > 1 and sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (place.size,)))
    elif place.size > 1:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
    history = ks.GradientHistory.attach(optimizer, wrapped, ["0.weight", "2.weight"])
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        inputs = torch.randn(12, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(4, (12,), generator=generator)
        own = slice(place.rank * 12 // place.size, (place.rank + 1) * 12 // place.size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs[own]), targets[own]).backward()
        optimizer.step()
    return ks.measure_history(history, at=[2, 6], progress=False)


def not_averaged(place: Place) -> Results:
    run = Given()
    run.grads = run.grads * (1 + place.rank)
    history = run.attach()
    run.train()
    return ks.measure_history(history, progress=False)


def other_number(place: Place) -> Results:
    """A folder that one process wrote to."""
    if place.rank == 0:
        Given().attach(path=place.folder / "history", distributed=False).close()
    dist.barrier()
    Given().attach(path=place.folder / "history", resume=True)
    return Results([])


EQUAL: dict[str, Case] = {
    "history": recorded,
    "history, exponential mean": functools.partial(recorded, beta=0.7, approximations=("optimal", "shampoo2")),
    "history, every second step": functools.partial(recorded, every=2, approximations=("shampoo2",)),
    "history, read by more": read_by_more,
    "history, resumed": resumed,
    "history, checkpointed": checkpointed,
    "history, data parallel": trained,
    "history, fully sharded": functools.partial(trained, sharded=True),
}
TWO_ARE_ENOUGH = {
    "history, exponential mean",
    "history, every second step",
    "history, checkpointed",
    "history, data parallel",
}
CASES: dict[str, Case] = {
    **EQUAL,
    "history on disk": on_disk,
    "history, shares": shares,
    "history, little space": little_space,
    "history, not averaged": not_averaged,
    "history, other number": other_number,
    "history, foreign state": foreign_state,
}
