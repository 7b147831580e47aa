"""Gradients that are left out of the factors: what the others weigh, what is saved, and what it costs."""

from __future__ import annotations

import io
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.triangles import unpack
from kronscope.optim import SOAP, KLShampoo, Shampoo
from kronscope.optim.config import EARLY_STEPS
from tests.optim.tools import copies, gradients, parameters, train

KINDS: dict[str, Any] = {"shampoo": Shampoo, "kl": KLShampoo, "soap": SOAP}
STEPS = EARLY_STEPS + 9


def is_taken(step: int, every: int) -> bool:
    """Whether the factors take a step's gradient: one of each run, by multiples of the golden ratio with skips."""
    if step <= EARLY_STEPS:
        return True
    run, place = divmod(step - EARLY_STEPS - 1, every)
    skips = run // 21
    return place == math.floor((run + skips * (skips + 1)) * 0.6180267333984375 % 1 * every)


def factor(optimizer: Any, param: Tensor, mode: int) -> Tensor:
    """One factor of a parameter of one block, as it is kept."""
    return unpack(optimizer.state[param][f"tile0.factor{mode}"])[0]


@pytest.mark.parametrize("kind", ["shampoo", "soap"])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("beta2", [0.9, 1.0])
def test_factors_are_the_weighted_sum_of_the_gradients_they_take(kind, every, beta2):
    (param,) = parameters((5, 4))
    history = gradients((5, 4), STEPS)
    optimizer = KINDS[kind]([param], 1e-3, betas=(0.9, beta2), statistics=every)
    wanted = torch.zeros(5, 5, dtype=torch.float64)
    for step, grad in enumerate(history, 1):
        train(optimizer, [param], [[grad]])
        if is_taken(step, every):
            times = every if step > EARLY_STEPS else 1
            wanted = beta2**times * wanted + (times if beta2 == 1 else 1 - beta2**times) * grad @ grad.T
        assert torch.allclose(factor(optimizer, param, 0), wanted, rtol=1e-12), step


@pytest.mark.parametrize("kind", ["shampoo", "soap"])
@pytest.mark.parametrize("every", [2, 3])
def test_the_mean_of_equal_gradients_is_that_gradient_at_every_step(kind, every):
    """What is left out does not change what the factors, or SOAP's second moment, are divided by."""
    (param,) = parameters((4, 4))
    (grad,) = gradients((4, 4), 1)
    optimizer = KINDS[kind]([param], 1e-3, betas=(0.9, 0.8), statistics=every, refresh=1)
    for step in range(1, STEPS + 1):
        train(optimizer, [param], [[grad]])
        if kind == "shampoo":
            wanted = torch.kron(grad @ grad.T, grad.T @ grad) / grad.square().sum()
            assert torch.allclose(optimizer.operator(param).to_dense(), wanted, rtol=1e-9), step
        if kind == "soap":
            hyper = optimizer._hyper(optimizer.param_groups[0])
            second = optimizer.state[param]["tile0.exp_avg_sq"][0] / hyper.correction2(step)
            # the columns are given their sums last
            basis = optimizer.state[param]["tile0.basis1"][0]
            sums = (basis.T @ grad.T @ grad @ basis).diag()
            assert torch.allclose(second.sum(0), sums, rtol=1e-6, atol=1e-6 * float(sums.max())), step


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stops_between_two_gradients_goes_on_to_the_last_bit(kind):
    params = parameters((12, 9), (6,), dtype=torch.float32)
    history = [gradients(param.shape, STEPS, seed=place, dtype=torch.float32) for place, param in enumerate(params)]
    whole, begun = copies(params), copies(params)
    train(KINDS[kind](whole, 1e-2, statistics=3), whole, history)
    first = KINDS[kind](begun, 1e-2, statistics=3)
    train(first, begun, [grads[: EARLY_STEPS + 4] for grads in history])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = copies(begun)
    second = KINDS[kind](resumed, 1e-2)
    second.load_state_dict(torch.load(file))
    assert second.param_groups[0]["statistics"] == 3
    train(second, resumed, [grads[EARLY_STEPS + 4 :] for grads in history])
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_without_the_option_took_every_gradient_and_goes_on_so(kind):
    (param,) = parameters((5, 4))
    optimizer = KINDS[kind]([param], 1e-2)
    train(optimizer, [param], [gradients((5, 4), 2)])
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["statistics"]
    resumed = KINDS[kind](copies([param]), 1e-2)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["statistics"] == 1


@pytest.mark.parametrize(
    ("make", "every"),
    [
        (Shampoo, 1),
        (SOAP, 2),
        (partial(SOAP, scale="norm"), 2),
        (partial(SOAP, betas=(0.9, 1.0)), 1),
        (partial(SOAP, refresh=1), 1),
        (partial(SOAP, reference=True), 1),
        (KLShampoo, 2),
        (partial(KLShampoo, scale="norm"), 2),
        (partial(KLShampoo, refresh="auto"), 2),
        # its factors decide how long steps are
        (partial(KLShampoo, scale="trace"), 1),
        (partial(KLShampoo, scale=None), 1),
        # a root at every step is one of new factors
        (partial(KLShampoo, refresh=1), 1),
    ],
)
def test_which_optimizers_leave_gradients_out_by_default(make, every):
    assert make(parameters((5, 4)), 1e-2).param_groups[0]["statistics"] == every


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("kinds", [2, 3, 4, 5, 6, 10])
def test_factors_see_all_kinds_of_data_that_take_turns(every, kinds):
    """With every k-th gradient they would see one kind only, where there are k of them."""
    (param,) = parameters((kinds, 4))
    history = [torch.zeros(kinds, 4, dtype=torch.float64) for _ in range(EARLY_STEPS + 60 * every)]
    for step, grad in enumerate(history):
        grad[step % kinds] = 1.0
    # sums count each kind
    optimizer = Shampoo([param], 1e-3, betas=(0.9, 1.0), statistics=every, refresh=100)
    train(optimizer, [param], [history])
    seen = factor(optimizer, param, 0).diag() / 4
    share = len(history) / kinds
    assert seen.min() > 0.7 * share
    assert seen.max() < 1.3 * share


@pytest.mark.parametrize(("every", "turns"), [(2, 18), (3, 34), (5, 59)])
def test_no_kind_of_data_waits_long_whatever_the_number_of_kinds(every, turns):
    """Bare multiples of the golden ratio let one of 55 kinds wait for 75 turns, with one gradient in two."""
    optimizer = Shampoo(parameters((3, 2)), statistics=every)
    hyper, first = optimizer._hyper(optimizer.param_groups[0]), EARLY_STEPS + 1
    taken = torch.tensor([hyper.gathers(step) for step in range(first, first + 8000)])
    for kinds in range(2, 65):
        for kind in range(kinds):
            # turns between two that were taken; the first and the last wait count too
            seen = torch.nn.functional.pad(taken[kind::kinds], (1, 1), value=True).nonzero().diff(dim=0)
            assert seen.max() <= turns, (kinds, kind)


PATTERNS: dict[str, Any] = {
    "one row once": lambda step, grad: torch.cat([grad[:1] * (step == EARLY_STEPS + 15), grad[1:]]),
    "a spike": lambda step, grad: grad * (100.0 if step == EARLY_STEPS + 15 else 1.0),
    "odd steps larger": lambda step, grad: grad * (10.0 if step % 2 else 1.0),
    "rows take turns": lambda step, grad: grad * (torch.arange(16)[:, None] % 2 == step % 2),
    "rows are rare": lambda step, grad: grad * (torch.arange(16)[:, None] == step % 16),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_that_the_factors_have_not_seen_are_not_blown_up(kind, pattern):
    """SOAP's steps were 150 times too long where factors without a gradient had the last word on its second moment."""
    generator = torch.Generator().manual_seed(0)
    history = [torch.randn(16, 16, generator=generator, dtype=torch.float64) for _ in range(EARLY_STEPS + 24)]
    largest = {}
    for statistics in (1, 2):
        param = torch.nn.Parameter(torch.zeros(16, 16, dtype=torch.float64))
        optimizer, found = KINDS[kind]([param], 1.0, statistics=statistics), []
        for step, grad in enumerate(history, 1):
            before = param.detach().clone()
            train(optimizer, [param], [[PATTERNS[pattern](step, grad)]])
            found.append(float((param.detach() - before).abs().max()))
        largest[statistics] = max(found[EARLY_STEPS:])
    assert largest[2] < 1.5 * max(largest[1], 1.0)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "2"])
def test_a_number_of_steps_is_asked_for_in_words(bad):
    with pytest.raises(OptionError, match="statistics must be a whole number of steps"):
        Shampoo(parameters((5, 4)), statistics=bad)


def test_the_published_soap_takes_all_gradients():
    with pytest.raises(OptionError, match="'statistics'"):
        SOAP(parameters((5, 4)), reference=True, statistics=2)


@pytest.mark.parametrize("kind", KINDS)
def test_explain_counts_what_is_left_out_and_says_so(kind):
    dense, sparse = (KINDS[kind](parameters((300, 280)), statistics=every).explain() for every in (1, 4))
    assert sparse.rows[0].flops < dense.rows[0].flops
    # the later ones of the first 20 steps leave gradients out too
    assert sparse.rows[0].cost - dense.rows[0].cost < sparse.rows[0].first_cost - dense.rows[0].first_cost < 0
    assert "factors take one gradient in 4" in str(sparse)
    assert "factors take" not in str(dense)
