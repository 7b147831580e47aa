"""Decompositions that raise, or return NaN or nonsense: the run goes on, says so once, and counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from tests.optim.failing import failing

FAMILIES: dict[str, Callable[[nn.Module], Any]] = {
    "Shampoo": lambda model: ks.Shampoo(model, 0.02, refresh=3),
    "Shampoo, warm": lambda model: ks.Shampoo(model, 0.02, refresh=3, solver=ks.optim.WarmQR()),
    "Shampoo, unscaled": lambda model: ks.Shampoo(model, 0.02, refresh=3, scale=None),
    "Shampoo, adaptive": lambda model: ks.Shampoo(model, 0.02, refresh=ks.Adaptive(0.1)),
    "KLShampoo": lambda model: ks.KLShampoo(model, 0.02, refresh=3),
    "SOAP": lambda model: ks.SOAP(model, 0.02, refresh=3),
    "SOAP, decomposing": lambda model: ks.SOAP(model, 0.02, refresh=3, solver=ks.optim.Eigh()),
    "SOAP, published": lambda model: ks.SOAP(model, 0.02, refresh=3, reference=True),
}
STEPS = 12
WHEN: dict[str, Callable[[int, Tensor], bool]] = {
    "at the first step": lambda number, matrix: number < 8,
    "often": lambda number, matrix: number % 3 == 1,
    "in float32": lambda number, matrix: matrix.dtype == torch.float32,
    "always": lambda number, matrix: True,
}


def run(
    family: str, sizes: tuple[int, int, int] = (6, 12, 4)
) -> tuple[list[float], Any, list[warnings.WarningMessage]]:
    torch.manual_seed(0)
    first, hidden, last = sizes
    model = nn.Sequential(
        nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, last)
    )
    x, y = torch.randn(64, first), torch.randint(0, last, (64,))
    optimizer = FAMILIES[family](model)
    losses = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(STEPS if hidden < 64 else 4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert all(torch.isfinite(param).all() for param in model.parameters())
    return losses, optimizer, [one for one in told if issubclass(one.category, RuntimeWarning)]


@cache
def undisturbed(family: str) -> float:
    return run(family)[0][-1]


def check(family: str, kind: str, when: str, sizes: tuple[int, int, int] = (6, 12, 4)) -> None:
    with failing(kind, WHEN[when]) as failures:
        losses, optimizer, told = run(family, sizes)
    assert failures.hits
    assert losses[-1] < losses[0]
    if sizes == (6, 12, 4) and family != "Shampoo, unscaled":
        # without a scale, the identity has another length
        assert abs(losses[-1] - undisturbed(family)) < 0.1 * losses[0]
    found = optimizer.diagnostics()
    assert optimizer.metrics()["lost_roots"] == found.lost_roots <= found.fallbacks
    texts = [str(one.message) for one in told]
    assert all("only counted" in text for text in texts)
    if found.lost_roots:
        assert 1 <= len(texts) <= 3
        assert f"lost: {found.lost_roots}" in str(found)
    if when == "always":
        assert found.lost_roots


# every family with every kind of failure, and either of them at both times
_KINDS = ("LinAlgError", "RuntimeError", "NaN", "garbage")
_CASES = [
    (family, kind, ("at the first step", "always")[(i + j) % 2])
    for i, family in enumerate(FAMILIES)
    for j, kind in enumerate(_KINDS)
]


@pytest.mark.parametrize(("family", "kind", "when"), _CASES)
def test_a_run_goes_on_says_so_once_and_counts(family: str, kind: str, when: str) -> None:
    check(family, kind, when)


@pytest.mark.parametrize("kind", ["skewed", "turned", "values"])
@pytest.mark.parametrize("family", ["Shampoo", "KLShampoo", "SOAP, decomposing", "SOAP, published"])
def test_a_wrong_answer_is_found_out(family: str, kind: str) -> None:
    check(family, kind, "often")


@pytest.mark.parametrize("family", ["Shampoo", "KLShampoo", "SOAP, decomposing"])
def test_what_float64_can_mend_changes_nothing(family: str) -> None:
    check(family, "LinAlgError", "in float32")
    assert abs(run(family)[0][-1] - undisturbed(family)) < 1e-4


@pytest.mark.parametrize("kind", ["RuntimeError", "NaN"])
@pytest.mark.parametrize("family", ["Shampoo", "SOAP"])
def test_it_holds_in_threads_too(family: str, kind: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(family, kind, "always", (65, 70, 4))
    finally:
        torch.set_num_threads(before)


def test_a_root_that_stays_keeps_the_trace_it_was_divided_by() -> None:
    """Where a root is used with its trace, as KL-Shampoo's whitening does, they must be of the same step."""
    (param,) = [nn.Parameter(torch.ones(3, 4))]
    optimizer = ks.Shampoo([param], 0.01, refresh=1, scale=None)
    param.grad = torch.randn(3, 4)
    optimizer.step()
    root, spectrum = (optimizer.state[param][f"tile0.{name}"].clone() for name in ("root0", "spectrum"))
    param.grad = 100 * torch.randn(3, 4)
    with failing("NaN"), pytest.warns(RuntimeWarning, match="the one before stays"):
        optimizer.step()
    assert torch.equal(optimizer.state[param]["tile0.root0"], root)
    assert torch.equal(optimizer.state[param]["tile0.spectrum"], spectrum)


ONCE_A_STEP: dict[str, Callable[..., Any]] = {
    "Shampoo": ks.Shampoo,
    "Shampoo, warm": lambda params, lr, refresh: ks.Shampoo(params, lr, refresh=refresh, solver=ks.optim.WarmQR()),
    "KLShampoo": ks.KLShampoo,
    "SOAP": ks.SOAP,
    "SOAP, decomposing": lambda params, lr, refresh: ks.SOAP(params, lr, refresh=refresh, solver=ks.optim.Eigh()),
    "SOAP, published": lambda params, lr, refresh: ks.SOAP(params, lr, refresh=refresh, reference=True),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ONCE_A_STEP)
def test_a_root_that_stays_grows_older(family: str, threads: int) -> None:
    torch.manual_seed(0)
    # from size 64 on threads take roots one by one
    shape = (3, 4) if threads == 1 else (65, 70)
    params = [nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))]
    optimizer = ONCE_A_STEP[family]([(f"a.{i}.w", param) for i, param in enumerate(params)], 0.01, refresh=1)

    def step() -> list[int]:
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        return [row.staleness for row in optimizer.diagnostics().rows]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert [step(), step()] == [[0, 0], [0, 0]]
        with failing("RuntimeError"), pytest.warns(RuntimeWarning, match="the one before stays"):
            assert [step(), step()] == [[1, 1], [2, 2]]
        assert step() == [0, 0]
    finally:
        torch.set_num_threads(before)


def test_only_the_block_whose_root_stays_grows_older() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))]
    optimizer = ks.Shampoo([(f"a.{i}.w", param) for i, param in enumerate(params)], 0.01, refresh=1)
    for param in params:
        param.grad = torch.randn(3, 4)
    optimizer.step()
    params[1].grad = 1e3 * torch.randn(3, 4)
    large = lambda _, matrix: float(matrix.diagonal(dim1=-2, dim2=-1).sum(-1).amax()) > 1e3  # noqa: E731
    with failing("NaN", large), pytest.warns(RuntimeWarning) as told:
        optimizer.step()
    assert ["the one before stays" in str(one.message) for one in told] == [False, True]
    assert [row.staleness for row in optimizer.diagnostics().rows] == [0, 1]


def test_a_mistake_in_a_solver_s_code_is_not_hidden() -> None:
    class Mistaken(ks.optim.Eigh):
        def solve(self, *args: Any, **options: Any) -> Any:
            raise AttributeError("no such thing")

    param = nn.Parameter(torch.ones(3, 4))
    optimizer = ks.Shampoo([param], 0.01, solver=Mistaken())
    param.grad = torch.randn(3, 4)
    with pytest.raises(AttributeError):
        optimizer.step()
    assert not optimizer.state
