"""KL-Shampoo against its fixed-point equations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kronscope.errors import OptionError
from kronscope.optim import KLShampoo, Trace
from tests.optim.tools import gradients, parameters, train


def test_the_factors_reach_the_fixed_point_of_their_equations():
    """The same gradients over and over: L = E[G R⁻¹ Gᵀ]/n and R = E[Gᵀ L⁻¹ G]/m must hold."""
    cycle = gradients((4, 3), 6)
    (param,) = parameters((4, 3))
    beta = 0.985
    optimizer = KLShampoo([param], 0.0, betas=(0.0, beta), damping=0.0, refresh=1, statistics=1)
    for _ in range(80):
        train(optimizer, [param], [cycle])
    weights = [beta ** (5 - i) * (1 - beta) / (1 - beta**6) for i in range(6)]
    state = optimizer.state[param]
    left, right = state["tile0.factor0"][0], state["tile0.factor1"][0]
    mean_left = sum(w * G @ torch.linalg.inv(right) @ G.T for w, G in zip(weights, cycle, strict=True)) / 3
    mean_right = sum(w * G.T @ torch.linalg.inv(left) @ G for w, G in zip(weights, cycle, strict=True)) / 4
    # within a cycle the factors themselves move by about 1 - beta
    assert (left - mean_left).norm() < 0.02 * left.norm()
    assert (right - mean_right).norm() < 0.02 * right.norm()


def test_one_step_of_the_recursion_is_the_equation_with_the_roots_of_before():
    grads = gradients((4, 3), 9)
    (param,) = parameters((4, 3))
    optimizer = KLShampoo([param], 0.01, betas=(0.9, 0.9), damping=0.0, refresh=1)
    train(optimizer, [param], [grads[:-1]])
    old = {mode: optimizer.state[param][f"tile0.factor{mode}"][0].clone() for mode in (0, 1)}
    train(optimizer, [param], [grads[-1:]])
    G, weight = grads[-1], 1 - 0.9**8
    left = 0.9 * old[0] + 0.1 * G @ torch.linalg.inv(old[1] / weight) @ G.T / 3
    right = 0.9 * old[1] + 0.1 * G.T @ torch.linalg.inv(old[0] / weight) @ G / 4
    assert torch.allclose(optimizer.state[param]["tile0.factor0"][0], left, rtol=1e-9)
    assert torch.allclose(optimizer.state[param]["tile0.factor1"][0], right, rtol=1e-9)


def test_the_update_is_the_inverse_square_root_of_the_live_operator():
    grads = gradients((4, 3), 9)
    (param,) = parameters((4, 3))
    optimizer = KLShampoo([param], 1.0, betas=(0.0, 0.9), damping=0.0, refresh=1, scale=None)
    train(optimizer, [param], [grads[:-1]])
    before = param.detach().clone()
    train(optimizer, [param], [grads[-1:]])
    wanted = optimizer.operator(param).power(-0.5).apply(grads[-1])
    assert torch.allclose(before - param.detach(), wanted, rtol=1e-8)


def test_the_first_estimate_has_the_gradient_s_own_size():
    for size in (1e-3, 1.0, 1e3):
        (param,) = parameters((4, 3))
        (grad,) = gradients((4, 3), 1)
        optimizer = KLShampoo([param], 0.1)
        train(optimizer, [param], [[size * grad]])
        assert optimizer.operator(param).trace() == pytest.approx((size * grad).square().sum().item(), rel=1e-9)


def test_trace_and_none_are_the_same_scale_and_a_bound_bounds():
    moves = []
    for scale in (None, "trace", Trace(bound=0.1)):
        param = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
        train(KLShampoo([param], 1.0, scale=scale, refresh=1), [param], [gradients((4, 3), 1)])
        moves.append(param.detach())
    assert torch.allclose(moves[0], moves[1], rtol=1e-10)
    assert moves[2].square().mean().sqrt().item() == pytest.approx(0.1)


def test_sums_are_refused():
    with pytest.raises(OptionError, match="means"):
        KLShampoo(parameters((2, 2)), betas=(0.9, 1.0))
