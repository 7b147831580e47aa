"""Which products of a step may be TF32: none, unless asked for; roots never."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kronscope.kron.roots import Eigh, Roots
from kronscope.optim import Shampoo
from kronscope.optim.rules import Moments
from kronscope.optim.rules.shampoo import ShampooRule
from tests.optim.tools import gradients, parameters, train


@pytest.fixture(autouse=True)
def _tf32_allowed() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.filterwarnings("ignore:.*parameters without names.*:UserWarning")
def test_gram_matrices_and_updates_may_be_fast_and_roots_are_exact(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {"accumulate": set(), "direction": set(), "solve": set()}
    accumulate, direction, solve = ShampooRule.accumulate, ShampooRule.direction, Eigh.solve

    def note(name: str) -> None:
        seen[name].add(torch.get_float32_matmul_precision())

    def accumulating(*args: Any, **kwargs: Any) -> Moments:
        note("accumulate")
        return accumulate(*args, **kwargs)

    def directing(*args: Any, **kwargs: Any) -> Tensor:
        note("direction")
        return direction(*args, **kwargs)

    def solving(*args: Any, **kwargs: Any) -> Roots:
        note("solve")
        return solve(*args, **kwargs)

    monkeypatch.setattr(ShampooRule, "accumulate", accumulating)
    monkeypatch.setattr(ShampooRule, "direction", directing)
    monkeypatch.setattr(Eigh, "solve", solving)
    params = parameters((6, 5))
    optimizer = Shampoo(params, 0.01)
    optimizer.fast_products = fast
    train(optimizer, params, [gradients((6, 5), 2)])
    products = {"high"} if fast else {"highest"}
    assert seen == {"accumulate": products, "direction": products, "solve": {"highest"}}
    assert torch.get_float32_matmul_precision() == "high"
