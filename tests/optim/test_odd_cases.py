"""Random cases, gradients of any size, two optimizers at once, and many parameters."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import kronscope as ks
from benchmarks.optimizer_soak import BAD, fuzz_case
from kronscope.kron.bases import decomposition_residuals


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_cases_have_no_nan_and_no_parameter_that_stays(first: int) -> None:
    for seed in range(first, first + 20):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = fuzz_case(seed)
        assert not any(found[name] for name in BAD), (seed, found)


@pytest.mark.parametrize("power", [-22, -20, 15, 18])
@pytest.mark.parametrize("scale", ["trace", None])
def test_gradients_near_underflow_and_overflow_leave_no_nan(power: int, scale: str | None) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = ks.Shampoo([param], 0.1, scale=scale)
    for _ in range(4):
        param.grad = torch.randn(6, 4) * 10.0**power
        optimizer.step()
    assert not torch.isnan(param).any()
    assert optimizer.diagnostics().fallbacks == 0


@pytest.mark.parametrize("size", [1e-38, 1.0, 1e30, 1e37])
def test_a_right_decomposition_passes_its_check_at_any_scale(size: float) -> None:
    rows = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    factors = rows @ rows.mT / 32 * size
    values, vectors = torch.linalg.eigh(factors)
    assert (decomposition_residuals(factors, values, vectors) < 1e-4).all()
    assert (decomposition_residuals(factors, values, vectors.flip(-1)) > 1e-3).all()


@pytest.mark.parametrize("kind", [ks.Shampoo, ks.KLShampoo, ks.SOAP])
def test_two_optimizers_in_two_threads_give_the_numbers_of_one_after_the_other(kind: Any) -> None:
    def run(seed: int, into: dict[int, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        param = nn.Parameter(torch.randn(12, 9, generator=generator))
        optimizer = kind([param], 0.01, refresh=2)
        for _ in range(10):
            param.grad = torch.randn(12, 9, generator=generator)
            optimizer.step()
        into[seed] = param.detach()

    apart: dict[int, torch.Tensor] = {}
    together: dict[int, torch.Tensor] = {}
    for seed in (0, 1):
        run(seed, apart)
    threads = [threading.Thread(target=run, args=(seed, together)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(apart[seed], together[seed]) for seed in (0, 1))


def test_the_plan_of_many_different_shapes_is_explained_quickly() -> None:
    """It was three milliseconds for each: torch.eye without numbers is slow."""
    params = [(f"layers.{i}.weight", nn.Parameter(torch.empty(2 + i % 20, 2 + i // 20))) for i in range(300)]
    optimizer = ks.Shampoo(params, 1e-3)
    took = []
    for _ in range(3):  # one of them may meet a collection of garbage
        began = time.process_time()
        optimizer.explain()
        took.append(time.process_time() - began)
    assert min(took) < 0.5
