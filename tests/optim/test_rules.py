"""A family is one file: a rule and an optimizer defined here work like those of the library."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor

from kronscope.errors import StateError
from kronscope.kron.operators import KroneckerProduct
from kronscope.optim import SOAP, KLShampoo, Shampoo
from kronscope.optim.base import KroneckerOptimizer
from kronscope.optim.block_math import add_gram
from kronscope.optim.block_state import Tensors
from kronscope.optim.config import Hyper
from kronscope.optim.reference import reference_update
from kronscope.optim.rules import register
from kronscope.optim.rules.roots import RootRule
from kronscope.optim.stacks import block_key
from tests.optim.tools import copies, gradients, parameters, train


@register
@final
@dataclass(frozen=True)
class SignRule(RootRule):
    """Shampoo with factors of the gradients' signs."""

    name = "sign"
    title = "Sign-Shampoo"
    class_name = "SignShampoo"
    is_plain_product = False

    def passes(self, hyper: Hyper) -> tuple[int, int]:
        return 1, 1

    def add_to_factors(
        self, state: Tensors, grads: Tensor, moved: Tensor, modes: Sequence[int], hyper: Hyper, step: int
    ) -> None:
        for mode in modes:
            add_gram(state[f"factor{mode}"], grads.sign(), mode, hyper.beta2, hyper.gain())

    def reference_grams(
        self, state: Tensors, grad: Tensor, modes: Sequence[int], factors: Mapping[int, Tensor] | None
    ) -> dict[int, Tensor]:
        signs = grad.sign()
        return {0: signs @ signs.T, 1: signs.T @ signs}


@final
class SignShampoo(KroneckerOptimizer):
    rule = SignRule()

    def __init__(self, params: Any, **options: Any) -> None:
        known = inspect.signature(Shampoo).parameters.values()
        super().__init__(params, {**{p.name: p.default for p in known if p.name != "params"}, **options})

    # it has Shampoo's options and defaults
    __init__.__signature__ = inspect.signature(Shampoo.__init__)  # type: ignore[attr-defined]


def test_a_new_family_trains_and_can_be_looked_at():
    params = parameters((6, 5), (6, 5), (4,))
    optimizer = SignShampoo(params, lr=0.01, scale="trace")
    grads = [gradients(tuple(param.shape), 4, seed=i) for i, param in enumerate(params)]
    train(optimizer, params, grads)
    assert "Sign-Shampoo (whole)" in str(optimizer.explain())
    assert all(row.update_ratio is not None and row.update_ratio > 0 for row in optimizer.diagnostics().rows)
    weights = [0.05 * 0.95 ** (3 - t) / (1 - 0.95**4) for t in range(4)]
    left = sum(w * g.sign() @ g.sign().T for w, g in zip(weights, grads[0], strict=True))
    operator = optimizer.operator(params[0])
    assert isinstance(operator, KroneckerProduct)
    assert operator.trace() == pytest.approx(float(torch.trace(torch.as_tensor(left))))


def test_a_new_family_equals_its_own_reference():
    params, twin = parameters((6, 5)), copies(parameters((6, 5)))
    history = gradients((6, 5), 5)
    optimizer = SignShampoo(params, lr=0.01, refresh=1)
    train(optimizer, params, [history])
    fresh = SignShampoo(twin, lr=0.01, refresh=1)
    train(fresh, twin, [history[:1]])
    state = {
        name.removeprefix(block_key(0, "")): tensor[0].clone()
        for name, tensor in fresh.state[twin[0]].items()
        if name.startswith("tile0.")
    }
    for step, grad in enumerate(history[1:], 2):
        hyper = fresh._hyper(fresh.param_groups[0])
        update = reference_update(state, grad, (0, 1), hyper, step, (True, True))
        twin[0].data.sub_(0.01 * update)
    torch.testing.assert_close(params[0], twin[0], rtol=1e-9, atol=1e-11)


def test_a_new_family_resumes_and_other_families_refuse_its_state():
    params = parameters((6, 5))
    history = gradients((6, 5), 6)
    optimizer = SignShampoo(params, lr=0.01)
    train(optimizer, params, [history[:3]])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other = copies(params)
    resumed = SignShampoo(other, lr=0.01)
    resumed.load_state_dict(saved)
    train(optimizer, params, [history[3:]])
    train(resumed, other, [history[3:]])
    assert torch.equal(params[0], other[0])
    for kind in (Shampoo, KLShampoo, SOAP):
        with pytest.raises(StateError, match=f"saved by SignShampoo; this optimizer is {kind.__name__}"):
            kind(parameters((6, 5))).load_state_dict(saved)
