"""Cases of measuring, to be run on several processes and on one."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kronscope as ks
from kronscope.measures import Results
from kronscope.support import processes
from tests.distributed.processes import Case, Place

FEW = ("optimal", "shampoo2", "kfac-reduce", "diagonal")


class Sequence(nn.Module):
    """Weights shared over positions: contractions are of whole gradients or over positions, K-FAC has two variants."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.outer(self.inner(x).tanh()).mean(1)


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def plain_data(place: Place) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (30,), generator=generator)
    # batches differ in size too
    return list(zip(place.share(inputs).split(7), place.share(targets).split(7), strict=True))


def measured(place: Place, **options: Any) -> Results:
    chosen = {"layers": ["0.weight"], "approximations": FEW, "progress": False, **options}
    return ks.measure(plain_model(), nn.CrossEntropyLoss(), plain_data(place), **chosen)


def sequences(place: Place, **options: Any) -> Results:
    torch.manual_seed(0)
    model = Sequence().double()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(14, 3, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (14,), generator=generator)
    batches = [(place.share(inputs), place.share(targets))]
    return ks.measure(model, nn.CrossEntropyLoss(), batches, ["inner.weight"], progress=False, **options)


def batch_norm(place: Place) -> tuple[Results, bool]:
    """A wrapped model whose running statistics differ, as data-parallel training leaves them."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    wrapped = nn.parallel.DistributedDataParallel(model) if place.size > 1 else model
    mean = model.get_buffer("1.running_mean")
    mean += place.rank
    own = mean.clone()
    results = ks.measure(wrapped, nn.CrossEntropyLoss(), plain_data(place), ["0.weight"], progress=False)
    return results, torch.equal(model.get_buffer("1.running_mean"), own)


def alone(place: Place) -> Results:
    """One process measures everything while the others go on."""
    if place.rank:
        return Results([])
    return measured(Place(0, 1, place.folder), distributed=False)


def group(place: Place) -> Results:
    """Two of the processes, in a group of their own."""
    if place.size < 3:
        return measured(place)
    some = dist.new_group([0, 2])
    if place.rank == 1:
        return Results([])
    return measured(Place(place.rank // 2, 2, place.folder), distributed=some)


EQUAL: dict[str, Case] = {
    "everything, exact labels": functools.partial(measured, layers=None, approximations=ks.approx.names()),
    "everything, real labels in batches": functools.partial(
        measured, labels="real", batch_size=8, approximations=ks.approx.names()
    ),
    "without replacement": functools.partial(measured, labels="real", batch_size=8, replacement=False),
    "empirical Fisher": functools.partial(measured, truth="empirical_fisher"),
    "sampled labels": functools.partial(measured, labels="sampled", draws=2, seed=3),
    "sampled labels, many draws": functools.partial(
        measured, labels="sampled", draws=6, batch_size=2, approximations=["shampoo"]
    ),
    "truth from draws": functools.partial(measured, max_columns=1, approximations=["shampoo2"]),
    "population": functools.partial(measured, population=True, approximations=["shampoo2", "kfac-reduce"]),
    "probes": functools.partial(measured, estimator="probes"),
    "captured again for each pass": functools.partial(measured, memory_budget=12000),
    "curves": functools.partial(
        measured, labels="real", approximations=["shampoo2"], details=["spectrum", "exponents", "batch_sizes"]
    ),
    "positions": functools.partial(sequences, approximations=ks.approx.names()),
    "positions, population": functools.partial(sequences, approximations=["shampoo2", "ekfac"], population=True),
    "group": group,
    "alone": alone,
    "after all that": measured,
}
TWO_ARE_ENOUGH = {
    "empirical Fisher",
    "sampled labels, many draws",
    "truth from draws",
    "population",
    "captured again for each pass",
    "curves",
    "positions, population",
}


def empty_share(place: Place) -> Results:
    data = plain_data(place) if place.rank != 1 else []
    return ks.measure(plain_model(), nn.CrossEntropyLoss(), data, progress=False)


def not_a_number(place: Place) -> Results:
    data = plain_data(place)
    if place.rank == 1:
        data[0][0][0, 0] = math.nan
    return ks.measure(plain_model(), nn.CrossEntropyLoss(), data, progress=False)


def other_options(place: Place) -> Results:
    return measured(place, seed=place.rank, truth=["gauss_newton", "empirical_fisher", "gauss_newton"][place.rank])


def other_parameters(place: Place) -> Results:
    model = plain_model()
    with torch.no_grad():
        model.get_parameter("2.weight")[0, 0] += place.rank
    return ks.measure(model, nn.CrossEntropyLoss(), plain_data(place), progress=False)


def first_only(place: Place) -> Results:
    if place.rank:
        return Results([])
    before, processes.BARRIER_SECONDS = processes.BARRIER_SECONDS, 0.5
    try:
        return measured(place)
    finally:
        processes.BARRIER_SECONDS = before


def too_few(place: Place) -> Results:
    return measured(place, max_samples=1)


def limited(place: Place) -> Results:
    return measured(place, max_samples=7, approximations=["shampoo2"])


FAILING: dict[str, Case] = {
    "empty share": empty_share,
    "not a number": not_a_number,
    "other options": other_options,
    "other parameters": other_parameters,
    "first only": first_only,
    "too few": too_few,
}
CASES: dict[str, Case] = {**FAILING, "limited": limited, "batch norm": batch_norm, **EQUAL}
