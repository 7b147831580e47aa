"""Several processes come to the numbers of one.

The tolerance is 1e-10 relative to the largest entry of a parameter: sums over the batch are taken in another order,
which changes a gradient by 1e-16, and 30 steps through roots of factors whose condition is up to 1e4 amplify that (to
1e-13, when measured). SOAP runs on square blocks of full rank: in the null space of a factor rounding decides its
basis, and steps depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from tests.optim.parallel.model import made, train, values, wrapped
from tests.optim.parallel.pool import Pool

# All there is happens in the first ten: both bad gradients, and refreshes of every factor before and after them.
STEPS, MANY = 10, 30
BAD = ((4, "everywhere"), (6, "one process"))
TOLERANCE = 1e-10


def run(mode: str, name: str, steps: int, bad: Sequence[tuple[int, str]] = BAD) -> dict[str, Any]:
    model = wrapped(mode, "square" in name, scalar=mode in ("single", "ddp", "divided"))
    optimizer = made(mode, name, model.parameters())
    train(model, optimizer, range(steps), bad=bad)
    return {**values(model), "skipped": torch.tensor(optimizer.skipped_steps)}


@cache
def single(name: str, steps: int) -> dict[str, Any]:
    return run("single", name, steps)


# Every optimizer with every way to divide the work, and on every number of processes that divides it; not all of both:
# how work is divided does not ask which optimizer it is for.
CASES = {
    ("ddp", 1): ["shampoo"],
    ("ddp", 2): ["shampoo, whole", "shampoo, sums", "kl"],
    ("ddp", 3): ["soap, square"],
    ("ddp", 4): ["shampoo"],
    ("divided", 2): ["shampoo", "soap, square"],
    ("divided", 3): ["shampoo, sums", "kl"],
    ("divided", 4): ["shampoo, whole"],
    ("fsdp2", 1): ["shampoo"],
    ("fsdp2", 2): ["shampoo, whole", "soap, square"],
    ("fsdp2", 3): ["shampoo", "kl"],
    ("fsdp2", 4): ["shampoo, sums"],
    ("hsdp", 4): ["shampoo", "soap, square", "kl"],
}


@pytest.mark.parametrize(("mode", "size", "name"), [(*place, name) for place, names in CASES.items() for name in names])
def test_parameters_after_many_steps_are_those_of_one_process(pool: Pool, mode: str, size: int, name: str) -> None:
    # every optimizer once, and every way to divide the work once
    steps = MANY if size == 2 and (mode, name) != ("fsdp2", "soap, square") else STEPS
    expected = single(name, steps)
    found = pool.run(run, size, mode=mode, name=name, steps=steps)
    assert int(expected["skipped"]) == len(BAD)
    for rank, one in enumerate(found):
        for key, value in one.items():
            error = float((value - expected[key]).abs().max() / expected[key].abs().max())
            assert error < TOLERANCE, (rank, key, error)
            assert torch.equal(value, found[0][key]), f"{key} differs between rank 0 and rank {rank}"


def test_soap_in_a_null_space_is_as_determined_as_its_basis(pool: Pool) -> None:
    """Whole matrices: the factor of a 9 x 36 layer has a null space until the fourth step."""
    # the bad gradients come when the null space is gone
    options: dict[str, Any] = {"name": "soap, whole", "steps": 16, "bad": ((7, "everywhere"), (13, "one process"))}
    expected = run("single", **options)
    for one in pool.run(run, 2, mode="ddp", **options):
        for key, value in one.items():
            assert float((value - expected[key]).abs().max()) < 0.1 * float(expected[key].abs().max()), key
