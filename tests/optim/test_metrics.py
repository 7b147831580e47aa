"""A few numbers about the last step: right, flat, and taken without changing anything."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from kronscope.kron.roots import Eigh, Ridge, Roots
from kronscope.optim import SOAP, KLShampoo, Shampoo
from tests.optim.tools import copies, gradients, parameters, train

SHAPES = ((6, 4), (6, 4), (5, 3), (7,))
KINDS: dict[str, Any] = {
    "shampoo": lambda p, **more: Shampoo(p, 0.1, refresh=3, **more),
    "blocks": lambda p, **more: Shampoo(p, 0.1, refresh=3, block_size=2, momentum=0.5, **more),
    "no mean": lambda p, **more: Shampoo(p, 0.1, betas=(0.0, 0.9), **more),
    "soap": lambda p, **more: SOAP(p, 0.1, refresh=3, **more),
    "kl": lambda p, **more: KLShampoo(p, 0.1, refresh=3, **more),
}


def history(steps: int) -> list[list[torch.Tensor]]:
    return [gradients(shape, steps, seed=i) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("kind", KINDS)
def test_update_and_gradient_are_compared_as_they_are(kind: str) -> None:
    params = parameters(*SHAPES)
    optimizer = KINDS[kind]([(f"layer{i}", param) for i, param in enumerate(params)])
    optimizer.metrics_every = 1
    for step in range(1, 5):
        grads = [one[step - 1] for one in history(4)]
        before = [param.detach().clone() for param in params]
        train(optimizer, params, [[grad] for grad in grads])
        # the learning rate is 0.1 and there is no decay; the last parameter gets AdamW
        updates = [(old - new.detach()) / 0.1 for old, new in zip(before[:3], params[:3], strict=True)]
        flat, down = torch.cat([u.flatten() for u in updates]), torch.cat([g.flatten() for g in grads[:3]])
        pairs = zip(updates, grads[:3], strict=True)
        cosines = [float(torch.cosine_similarity(u.flatten(), g.flatten(), 0)) for u, g in pairs]
        found = optimizer.metrics()
        assert found["step"] == found["measured_step"] == step
        assert found["update_rms"] == pytest.approx(float(flat.square().mean().sqrt()), rel=1e-9)
        assert found["cosine"] == pytest.approx(float(torch.cosine_similarity(flat, down, 0)), rel=1e-9)
        assert found["worst_cosine"] == pytest.approx(min(cosines), rel=1e-9)
        assert optimizer.worst_layer == f"layer{cosines.index(min(cosines))}"


def test_numbers_are_flat_floats_and_count_what_happened() -> None:
    params = parameters(*SHAPES)
    optimizer = Shampoo(params, 0.1, refresh=2)
    before = optimizer.metrics()
    counted = ("skipped_steps", "lost_roots", "step", "milliseconds", "roots", "fallbacks", "measured_step")
    assert all(before[name] == 0.0 for name in counted)
    assert all(math.isnan(before[name]) for name in before.keys() - set(counted))
    assert optimizer.worst_layer == ""
    train(optimizer, params, history(1))
    found = optimizer.metrics()
    assert found.keys() == before.keys()
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert (found["roots"], found["fallbacks"]) == (6, 0)
    assert found["milliseconds"] > 0
    later = 0.0
    for _ in range(2):
        train(optimizer, params, history(1))
        later += optimizer.metrics()["roots"]
    assert later == 6
    params[0].grad = torch.full_like(params[0], math.nan)
    with pytest.warns(RuntimeWarning, match="is skipped"):
        optimizer.step()
    found = optimizer.metrics()
    assert (found["skipped_steps"], found["step"]) == (1, 3)


def test_updates_are_looked_at_now_and_then() -> None:
    params = parameters(*SHAPES)
    optimizer = Shampoo(params, 0.1)
    seen = []
    for grads in zip(*history(21), strict=True):
        train(optimizer, params, [[grad] for grad in grads])
        seen.append(optimizer.metrics()["measured_step"])
    assert seen == [1] * 9 + [10] * 10 + [20] * 2
    never = Shampoo(parameters(*SHAPES), 0.1)
    never.metrics_every = 0
    train(never, never.param_groups[0]["params"], history(1))
    found = never.metrics()
    assert (found["step"], found["measured_step"]) == (1, 0)
    assert math.isnan(found["cosine"])


def test_names_are_the_same_after_resuming_and_the_next_step_is_looked_at() -> None:
    params = parameters(*SHAPES)
    optimizer = Shampoo(params, 0.1)
    train(optimizer, params, history(3))
    resumed = Shampoo(copies(params), 0.1)
    resumed.load_state_dict(optimizer.state_dict())
    found = resumed.metrics()
    assert found.keys() == optimizer.metrics().keys()
    assert (found["step"], found["roots"], found["measured_step"]) == (3, 0, 0)
    train(resumed, resumed.param_groups[0]["params"], history(1))
    found = resumed.metrics()
    assert (found["step"], found["measured_step"]) == (4, 4)
    assert all(math.isfinite(value) for value in found.values())
    # where nothing has factors there is nothing to look at, and the names stay
    vectors = Shampoo(parameters((5,)), 0.1)
    train(vectors, vectors.param_groups[0]["params"], [gradients((5,), 1)])
    assert vectors.metrics().keys() == found.keys()


class Failing(Eigh):
    """Fails on every factor but the smallest."""

    def solve(self, factors: torch.Tensor, exponent: float, ridge: Ridge, warm: torch.Tensor | None = None) -> Roots:
        found = super().solve(factors, exponent, ridge, warm)
        return found if factors.shape[-1] == 3 else replace(found, residuals=torch.full_like(found.residuals, 9.0))


def test_roots_that_the_solver_fails_to_take_are_counted() -> None:
    params = parameters(*SHAPES)
    optimizer = Shampoo(params, 0.1, solver=Failing(), refresh=1)
    with pytest.warns(RuntimeWarning, match="second attempt"):
        train(optimizer, params, history(1))
    assert (optimizer.metrics()["roots"], optimizer.metrics()["fallbacks"]) == (6, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_looking_changes_nothing(kind: str) -> None:
    params = parameters(*SHAPES)
    others = copies(params)
    watched, plain = KINDS[kind](params), KINDS[kind](others)
    watched.metrics_every, plain.metrics_every = 1, 0
    train(watched, params, history(5))
    train(plain, others, history(5))
    for one, other in zip(params, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_the_update_ratio_is_that_of_the_last_step_whatever_a_scheduler_did_since(lr: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = Shampoo(model, lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        before = [row.update_ratio for row in optimizer.diagnostics().rows]
        scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.0
    assert [row.update_ratio for row in optimizer.diagnostics().rows] == before
    assert all(before)
