"""The plan in words: a summary by shape beside AdamW, rows on request, and quickly for thousands of parameters."""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.optim import SOAP, Every, KLShampoo, Shampoo, Warmup, explain
from kronscope.optim.config import DEFAULT_REFRESH
from kronscope.optim.stacks import initial_state
from tests.optim.tools import gradients, parameters, train


def blocks(count: int, device: str = "cpu") -> list[tuple[str, nn.Parameter]]:
    shapes = {"fc1": (16, 8), "fc2": (8, 16), "norm": (8,)}
    return [
        (f"blocks.{index}.{name}.weight", nn.Parameter(torch.zeros(shape, device=device)))
        for index in range(count)
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_the_summary_has_a_line_for_each_shape_and_what_adamw_needs(kind):
    named = blocks(5)
    named[-1][1].requires_grad_(False)
    plan = kind(named, refresh=Warmup(10, 10)).explain()
    lines = str(plan).splitlines()
    assert len(lines) < 14
    numbers = 5 * 2 * 128 + 4 * 8
    assert plan.adamw_bytes == 2 * 4 * numbers
    assert any("state:" in line and "AdamW's:" in line and "MiB" in line for line in lines)
    assert any("a step:" in line and "fused AdamW's:" in line and line.count(" ms") == 2 for line in lines)
    assert any(line.startswith("the first 10 steps") for line in lines)
    assert any(re.match(r"5 +16x8 .*16\+8", line) for line in lines)
    assert any(re.match(r"4 +8 +AdamW \(1-D\)", line) for line in lines)
    assert "frozen: 1 parameters" in lines
    assert sum("blocks." in line for line in lines) == 0
    rows = str(kind(named).explain(rows=True))
    assert all(name in rows for name, _ in named)


def test_a_stack_of_matrices_that_no_name_tells_of_is_pointed_at():
    """Experts that are not called so are flattened into one matrix, which does next to nothing for them."""

    def hints(name: str, *shape: int, **options: Any) -> list[str]:
        named = [(name, nn.Parameter(torch.zeros(shape))), ("head.weight", nn.Parameter(torch.zeros(4, 64)))]
        optimizer = Shampoo(named, **options)
        texts = [str(optimizer.explain(rows=rows)) for rows in (False, True)]
        found, in_rows = ([line for line in text.splitlines() if "view='experts'" in line] for text in texts)
        assert found == in_rows
        return found

    (line,) = hints("moe.w1", 4, 32, 48)
    assert "moe.w1 of 4x32x48" in line
    assert "4 matrices of 32x48" in line
    assert hints("moe.w1", 4, 256, 48)
    assert not hints("moe.w1", 4, 32, 48, view="experts")
    assert not hints("moe.w1", 4, 32, 48, view="modes")
    assert not hints("moe.experts.w1", 4, 32, 48)
    assert not hints("conv.weight", 64, 32, 9)
    assert not hints("conv.weight", 64, 512, 9)


def test_first_steps_cost_more_than_later_ones_and_a_long_period_costs_less():
    def costs(**options: object) -> tuple[float, float]:
        rows = Shampoo(parameters((64, 64)), **options).explain().rows  # type: ignore[arg-type]
        return sum(row.first_cost for row in rows), sum(row.cost for row in rows)

    first, later = costs(refresh=10)
    assert first > 2 * later
    assert costs(refresh=100)[1] < later
    assert costs(refresh=100)[0] == first
    assert "the first step, which takes every root" in str(Shampoo(parameters((6, 4)), refresh=Every(5)).explain())


def test_equal_parameters_are_worked_out_once(monkeypatch):
    """A model of 5,000 parameters was explained in ten seconds; time is the same for any number of equal ones."""
    optimizer = Shampoo(blocks(400, device="meta"))
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return initial_state(*args)

    monkeypatch.setattr(explain, "initial_state", counted)
    plan = optimizer.explain()
    assert len(plan.rows) == 1200
    assert len(calls) == 2


def test_diagnostics_leave_out_what_does_not_exist():
    named = [("fc.weight", parameters((4, 3))[0]), ("fc.bias", parameters((4,))[0])]
    optimizer = Shampoo(named, 0.01)
    train(optimizer, [p for _, p in named], [gradients((4, 3), 3), gradients((4,), 3)])
    matrix, vector = optimizer.diagnostics().rows
    assert matrix.condition is not None
    assert matrix.residual is not None
    assert (vector.condition, vector.effective_rank, vector.residual) == (None, None, None)
    assert vector.update_ratio is not None
    assert "nan" not in str(optimizer.diagnostics())


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_the_condition_is_the_factors_own_whatever_the_damping(kind):
    """With the ridge included every factor of KL-Shampoo read 1/damping."""
    params = parameters((4, 3), (6, 5))
    options = {} if kind is SOAP else {"damping": 0.1}
    optimizer = kind(params, 0.01, refresh=1, **options)
    weak = [torch.logspace(0, -2, param.shape[0], dtype=torch.float64).unsqueeze(1) for param in params]
    train(optimizer, params, [[w * g for g in gradients(p.shape, 12)] for p, w in zip(params, weak, strict=True)])
    for param, row in zip(params, optimizer.diagnostics().rows, strict=True):
        factors = [optimizer.state[param][f"tile0.factor{mode}"][0] for mode in (0, 1)]
        wanted = max(float(values[-1] / values[0]) for values in map(torch.linalg.eigvalsh, factors))
        assert wanted > 15
        assert row.condition == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_quick_diagnostics_bound_the_condition_and_leave_out_the_step(kind):
    params = parameters((5, 3))
    optimizer = kind(params, 0.01)
    train(optimizer, params, [gradients((5, 3), 12)])
    (slow,), (quick,) = optimizer.diagnostics().rows, optimizer.diagnostics(quick=True).rows
    assert 1 < quick.condition <= slow.condition * (1 + 1e-9)
    assert quick.update_ratio is None
    assert (quick.residual, quick.effective_rank) == (slow.residual, slow.effective_rank)


def test_the_condition_of_a_singular_factor_is_a_number():
    (param,) = parameters((6, 4), dtype=torch.float32)
    optimizer = KLShampoo([param], 0.01)
    train(optimizer, [param], [[torch.outer(torch.arange(6.0), torch.arange(4.0))]])
    condition = optimizer.diagnostics().rows[0].condition
    assert condition is not None
    assert 1e5 < condition < 1e8


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
@pytest.mark.parametrize("shapes", [[(16, 8)] * 40, [(8 + i, 6 + i) for i in range(12)], [(32,)] * 60])
def test_the_time_of_small_layers_counts_what_calls_cost(kind: Any, shapes: Any) -> None:
    """It was a hundredth of what a step took: of small layers calls cost more than what they do."""
    params = parameters(*shapes, dtype=torch.float32)
    optimizer = kind(params, 1e-3)
    plan = optimizer.explain()
    history = [gradients(shape, 20, dtype=torch.float32) for shape in shapes]
    train(optimizer, params, history)
    taken = []
    for _ in range(5):
        start = time.process_time()
        train(optimizer, params, [[grads[0]] * 10 for grads in history])
        taken.append(1e3 * (time.process_time() - start) / 10)
    assert min(taken) / 6 < plan.milliseconds() < 6 * min(taken)
    assert plan.milliseconds(first=True) >= plan.milliseconds()
    assert f"a step: {plan.milliseconds():.2g} ms" in str(plan) or plan.milliseconds() >= 10


def test_layers_treated_together_share_what_calls_cost() -> None:
    def calls(shapes: Any) -> float:
        return sum(row.calls.later for row in Shampoo(parameters(*shapes)).explain().rows)

    together, apart = calls([(16, 8)] * 10), calls([(16 + i, 8) for i in range(10)])
    assert apart > 2 * together
    assert calls([(16, 8)]) < together < 10 * calls([(16, 8)])


# --- what loading replaces ------------------------------------------------------------------------------------------


def test_a_loaded_option_that_replaces_one_given_in_code_is_named():
    params = parameters((4, 3))
    saver = Shampoo(params, 0.1)
    train(saver, params, [gradients((4, 3), 2)])
    loader = Shampoo(params, 0.5, weight_decay=0.1, refresh=20, damping=1e-3)
    with pytest.warns(UserWarning, match=r"damping: 0.001 by 0.0001; refresh: Every\(steps=20.*by Warmup\("):
        loader.load_state_dict(saver.state_dict())
    assert loader.param_groups[0]["refresh"] == DEFAULT_REFRESH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # rates are what schedulers change, so they are not worth a word
        Shampoo(params, 0.5, betas=(0.5, 0.95), weight_decay=0.1).load_state_dict(saver.state_dict())


def test_schedules_and_scales_are_public_names():
    assert ks.Warmup is Warmup
    assert all(hasattr(ks, name) for name in ("Adaptive", "Every", "Graft", "Norm", "Trace"))


def test_a_plan_without_anything_to_train_says_so():
    """It spoke of a step several times as long as AdamW's, and of roots."""
    optimizer = Shampoo(nn.Linear(3, 3).requires_grad_(False), 1e-3)
    assert str(optimizer.explain()) == "nothing to train: 2 parameters, all frozen"
