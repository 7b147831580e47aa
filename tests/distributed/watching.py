"""Cases of watching a run, to be trained on several processes and on one."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

import kronscope as ks
from kronscope.watching import WatchRecords
from tests.distributed.processes import Case, Place

BATCH, STEPS = 12, 4


def watched(place: Place, *, family: str = "shampoo", sharded: bool = False, parallel: str = "auto") -> Any:
    """The records of a run with cosines, read from the folder, and the parameters with and without watching."""
    plain, _ = trained(place, family, sharded=sharded, parallel=parallel, path=None)
    seen, watch = trained(place, family, sharded=sharded, parallel=parallel, path=place.folder / "run")
    if place.size > 1:
        torch.distributed.barrier()
    records = WatchRecords.load(place.folder / "run").records
    same = all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    layers = [record["layers"] for record in records]
    cosines = [[(row["layer"], row["approximation"], row["cosine"]) for row in one["cosines"]] for one in records]
    assert [record["layers"] for record in watch.records] == layers or place.size > 1
    return {"same": same, "steps": [record["step"] for record in records], "layers": layers, "cosines": cosines}


def trained(place: Place, family: str, *, sharded: bool, parallel: str, path: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    wrapped: Any = model
    if place.size > 1 and sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (place.size,))
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        wrapped = fully_shard(model, mesh=mesh)
    elif place.size > 1:
        wrapped = nn.parallel.DistributedDataParallel(model)
    if family == "adamw":
        optimizer: Any = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    else:
        kinds = {"shampoo": ks.Shampoo, "soap": ks.SOAP}
        options = {"method": "kronecker", "parallel": parallel if place.size > 1 else "auto"}
        optimizer = kinds[family](wrapped.named_parameters(), lr=1e-2, **options)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS, BATCH, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (STEPS, BATCH), generator=generator)
    own = slice(place.rank * BATCH // place.size, (place.rank + 1) * BATCH // place.size)
    watch = None
    if path is not None:
        data = [(inputs[0][own], targets[0][own])]
        watch = ks.watch(optimizer, wrapped, 2, nn.CrossEntropyLoss(), data, path=path, budget=math.inf)
    for batch, labels in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(batch[own]), labels[own]).backward()
        optimizer.step()
    if watch is not None:
        watch.detach()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return [weight.detach().clone() for weight in weights], watch


# SOAP's basis is arbitrary where a factor is singular, and so are its numbers on another number of processes.
ALONE_ELSEWHERE = "watch, SOAP fully sharded"
CASES: dict[str, Case] = {
    "watch, data parallel": watched,
    "watch, divided": functools.partial(watched, parallel="divided"),
    "watch, fully sharded": functools.partial(watched, sharded=True),
    ALONE_ELSEWHERE: functools.partial(watched, family="soap", sharded=True),
    "watch, AdamW data parallel": functools.partial(watched, family="adamw"),
    "watch, AdamW fully sharded": functools.partial(watched, family="adamw", sharded=True),
}
TWO_ARE_ENOUGH = {
    "watch, data parallel",
    ALONE_ELSEWHERE,
    "watch, AdamW data parallel",
    "watch, AdamW fully sharded",
}
