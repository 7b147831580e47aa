"""Shampoo against what it must equal: its own definition, torch.optim, symmetries, and the measuring half.

- The original Shampoo is `W ← W − η L^{-¼} G R^{-¼}` with factors that start at ε I.
- Blocks of one entry are Adagrad.
- Preconditioning that never starts is the grafted optimizer.
- The update turns with the gradient, and under sums does not change with its scale.
- The live operator is Shampoo² fitted on the gradients seen.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronscope import approx
from kronscope.gradients.stream import GradientStream
from kronscope.optim import Graft, Norm, Shampoo, Trace, Warmup
from tests.optim.tools import copies, gradients, parameters, train


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values**exponent) @ vectors.T
    return root


def original_shampoo(weight: Tensor, grads: list[Tensor], lr: float, eps: float) -> list[Tensor]:
    m, n = weight.shape
    left, right = eps * torch.eye(m, dtype=weight.dtype), eps * torch.eye(n, dtype=weight.dtype)
    path = []
    for grad in grads:
        left = left + grad @ grad.T
        right = right + grad.T @ grad
        weight = weight - lr * power(left, -0.25) @ grad @ power(right, -0.25)
        path.append(weight)
    return path


@pytest.mark.parametrize("shape", [(6, 4), (3, 9), (5, 5), (1, 7)])
def test_original_shampoo_equals_its_definition_at_steps_1_to_50(shape):
    (param,) = parameters(shape)
    grads = gradients(shape, 50)
    expected = original_shampoo(param.detach().clone(), grads, lr=0.1, eps=1e-4)
    optimizer = Shampoo([param], 0.1, betas=(0.0, 1.0), eps=1e-4, exponent=-0.25, scale=None, refresh=1)
    for grad, wanted in zip(grads, expected, strict=True):
        train(optimizer, [param], [[grad]])
        assert (param - wanted).abs().max() < 1e-10


def test_shampoo_squared_with_trace_scale_equals_its_definition():
    (param,) = parameters((6, 4))
    grads = gradients((6, 4), 20)
    optimizer = Shampoo([param], 0.1, betas=(0.0, 0.9), damping=0.0, exponent=-0.5, scale="trace", refresh=1)
    left = right = torch.zeros((), dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        before = param.detach().clone()
        train(optimizer, [param], [[grad]])
        left, right = 0.9 * left + 0.1 * grad @ grad.T, 0.9 * right + 0.1 * grad.T @ grad
        L, R = left / (1 - 0.9**step), right / (1 - 0.9**step)
        if step > 5:  # both factors have full rank by then
            wanted = L.trace().sqrt() * power(L, -0.5) @ grad @ power(R, -0.5)
            assert torch.allclose(before - param.detach(), 0.1 * wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("exponent", [-0.25, -0.5, -0.37])
def test_trace_scale_multiplies_by_the_stated_power_of_the_trace(exponent):
    grads = gradients((4, 4), 6)
    moves = []
    for scale in (None, "trace"):
        (param,) = parameters((4, 4))
        optimizer = Shampoo([param], 1.0, betas=(0.0, 0.9), exponent=exponent, scale=scale, refresh=1)
        train(optimizer, [param], [grads[:-1]])
        before = param.detach().clone()
        train(optimizer, [param], [grads[-1:]])
        moves.append(before - param.detach())
    weights = torch.tensor([0.1 * 0.9 ** (6 - t) for t in range(1, 7)], dtype=torch.float64) / (1 - 0.9**6)
    trace = sum(w * grad.square().sum() for w, grad in zip(weights, grads, strict=True))
    assert torch.allclose(moves[1], moves[0] * trace ** -(0.5 + 2 * exponent), rtol=1e-10)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2)])
def test_blocks_of_one_entry_are_adagrad(shape):
    (param,) = parameters(shape)
    (twin,) = copies([param])
    ours = Shampoo([param], 0.1, betas=(0.0, 1.0), eps=1e-3, exponent=-0.25, scale=None, block_size=1, refresh=1)
    theirs = torch.optim.Adagrad([twin], 0.1, initial_accumulator_value=1e-3, eps=0.0)
    history = [gradients(shape, 20)]
    train(ours, [param], history)
    train(theirs, [twin], history)
    assert torch.allclose(param, twin, rtol=1e-12, atol=1e-12)


TORCH_OPTIMIZERS: dict[str, Any] = {
    "sgd": ({"scale": "sgd", "betas": (0.0, 0.9)}, lambda p: torch.optim.SGD(p, 0.1)),
    "sgd, momentum": (
        {"scale": "sgd", "betas": (0.0, 0.9), "momentum": 0.8},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8),
    ),
    "sgd, nesterov": (
        {"scale": "sgd", "betas": (0.0, 0.9), "momentum": 0.8, "nesterov": True},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
    ),
    "sgd, coupled decay": (
        {"scale": "sgd", "betas": (0.0, 0.9), "decay": "coupled", "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    ),
    "adagrad": ({"scale": "adagrad", "betas": (0.0, 0.9), "eps": 1e-10}, lambda p: torch.optim.Adagrad(p, 0.1)),
    "adagrad of sums": ({"scale": "adagrad", "betas": (0.0, 1.0), "eps": 1e-10}, lambda p: torch.optim.Adagrad(p, 0.1)),
    "rmsprop": ({"scale": "rmsprop", "betas": (0.0, 0.99)}, lambda p: torch.optim.RMSprop(p, 0.1)),
    "rmsprop, momentum": (
        {"scale": "rmsprop", "betas": (0.0, 0.99), "momentum": 0.5},
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5),
    ),
    "adam": ({"scale": "adam", "betas": (0.9, 0.99)}, lambda p: torch.optim.Adam(p, 0.1, betas=(0.9, 0.99))),
    "adam, coupled decay": (
        {"scale": "adam", "betas": (0.9, 0.99), "decay": "coupled", "weight_decay": 0.1},
        lambda p: torch.optim.Adam(p, 0.1, betas=(0.9, 0.99), weight_decay=0.1),
    ),
    "adam, maximize": (
        {"scale": "adam", "betas": (0.9, 0.99), "maximize": True},
        lambda p: torch.optim.Adam(p, 0.1, betas=(0.9, 0.99), maximize=True),
    ),
    "adamw": (
        {"scale": "adam", "betas": (0.9, 0.99), "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, 0.1, betas=(0.9, 0.99), weight_decay=0.1),
    ),
    "graft with its own numbers": (
        {"scale": Graft("adam", beta2=0.99, eps=1e-6), "betas": (0.9, 0.5)},
        lambda p: torch.optim.Adam(p, 0.1, betas=(0.9, 0.99), eps=1e-6),
    ),
}


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("block_size", [None, 2])
def test_preconditioning_that_never_starts_is_the_grafted_optimizer(name, block_size):
    options, other = TORCH_OPTIMIZERS[name]
    params = parameters((5, 3), (2, 4, 3))
    twins = copies(params)
    history = [gradients(param.shape, 15, seed=i) for i, param in enumerate(params)]
    train(Shampoo(params, 0.1, start=math.inf, block_size=block_size, **options), params, history)
    train(other(twins), twins, history)
    for param, twin in zip(params, twins, strict=True):
        assert torch.allclose(param, twin, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("decay", ["decoupled", "coupled"])
def test_vectors_get_adamw(decay):
    params = parameters((5,), ())
    twins = copies(params)
    history = [gradients(param.shape, 15) for param in params]
    ours = Shampoo(params, 0.1, betas=(0.9, 0.95), weight_decay=0.1, decay=decay)
    kind = torch.optim.AdamW if decay == "decoupled" else torch.optim.Adam
    train(ours, params, history)
    train(kind(twins, 0.1, betas=(0.9, 0.95), weight_decay=0.1), twins, history)
    for param, twin in zip(params, twins, strict=True):
        assert torch.allclose(param, twin, rtol=1e-11)


def test_vectors_get_diagonal_adagrad_under_sums():
    params = parameters((5,), ())
    twins = copies(params)
    history = [gradients(param.shape, 15) for param in params]
    train(Shampoo(params, 0.1, betas=(0.0, 1.0), eps=1e-3), params, history)
    train(torch.optim.Adagrad(twins, 0.1, initial_accumulator_value=1e-3, eps=0.0), twins, history)
    for param, twin in zip(params, twins, strict=True):
        assert torch.allclose(param, twin, rtol=1e-12)


def orthogonal(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return basis


@pytest.mark.parametrize(
    "options",
    [
        {"betas": (0.0, 1.0), "eps": 1e-3, "exponent": -0.25, "scale": None},
        {"betas": (0.9, 0.95), "exponent": -0.5, "scale": "trace"},
        {"betas": (0.9, 0.95), "scale": Trace(bound=0.5)},
        {"betas": (0.9, 0.95), "scale": "norm", "momentum": 0.5},
        {"betas": (0.9, 0.95), "scale": "sgd", "refresh": 3},
    ],
)
def test_the_update_turns_with_the_gradient(options):
    P, Q = orthogonal(5, 1), orthogonal(4, 2)
    grads = gradients((5, 4), 12)
    (plain,) = parameters((5, 4))
    turned = nn.Parameter(P @ plain.detach() @ Q)
    train(Shampoo([plain], 0.1, **options), [plain], [grads])
    train(Shampoo([turned], 0.1, **options), [turned], [[P @ grad @ Q for grad in grads]])
    assert torch.allclose(turned, P @ plain @ Q, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("options", [{"exponent": -0.25, "scale": None}, {"exponent": -0.5, "scale": "trace"}])
@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_under_sums_the_update_does_not_change_with_the_gradient_s_scale(options, factor):
    grads = gradients((5, 4), 12)
    (plain,) = parameters((5, 4))
    (scaled,) = copies([plain])
    train(Shampoo([plain], 0.1, betas=(0.0, 1.0), eps=0.0, refresh=1, **options), [plain], [grads])
    train(
        Shampoo([scaled], 0.1, betas=(0.0, 1.0), eps=0.0, refresh=1, **options),
        [scaled],
        [[factor * grad for grad in grads]],
    )
    assert torch.allclose(scaled, plain, rtol=1e-7, atol=1e-8)


def test_the_first_step_of_the_original_is_the_polar_factor_whatever_the_spectrum():
    (param,) = parameters((4, 4))
    (grad,) = gradients((4, 4), 1)
    before = param.detach().clone()
    original = Shampoo([param], 1.0, betas=(0.0, 1.0), eps=0.0, exponent=-0.25, scale=None, refresh=1)
    train(original, [param], [[grad]])
    U, _, Vh = torch.linalg.svd(grad)
    assert torch.allclose(before - param.detach(), U @ Vh, rtol=1e-8)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 1.0)])
@pytest.mark.parametrize("exponent", [-0.5, -0.25])
@pytest.mark.parametrize("refresh", [1, 7])
def test_the_live_operator_is_shampoo2_fitted_on_the_gradients_seen(betas, exponent, refresh):
    (param,) = parameters((5, 4))
    T = 12
    grads = gradients((5, 4), T)
    optimizer = Shampoo([param], 0.01, betas=betas, eps=1e-3, exponent=exponent, refresh=refresh)
    train(optimizer, [param], [grads])
    beta = betas[1]
    ages = torch.arange(T - 1, -1, -1, dtype=torch.float64)
    weights = torch.ones(T, dtype=torch.float64) if beta == 1 else (1 - beta) * beta**ages / (1 - beta**T)
    fitted = approx.get("shampoo2").fit(GradientStream.from_tensors(torch.stack(grads), weights))
    live = optimizer.operator(param)
    assert live.shape == fitted.shape
    assert (live.to_dense() - fitted.to_dense()).norm() < 1e-10 * fitted.norm()


@pytest.mark.parametrize("exponent", [-0.25, -0.5])
def test_rank_deficient_gradients_in_float32_match_the_float64_pseudo_inverse(exponent):
    """A tiny absolute epsilon amplifies rounding in the null space, to errors of 1e-2; a relative cutoff does not."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(48, 6, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(40, 6, generator=generator, dtype=torch.float64)).Q
    grads = [left @ torch.randn(6, 6, generator=generator, dtype=torch.float64) @ right.T for _ in range(8)]
    param = nn.Parameter(torch.zeros(48, 40))
    options = {"betas": (0.0, 1.0), "eps": 0.0, "exponent": exponent, "scale": None, "refresh": 1}
    optimizer = Shampoo([param], 1.0, **options)
    L = R = torch.zeros((), dtype=torch.float64)
    for grad in grads:
        before = param.detach().clone()
        train(optimizer, [param], [[grad.float()]])
        L, R = L + grad @ grad.T, R + grad.T @ grad
        roots = []
        for matrix in (L, R):
            values, vectors = torch.linalg.eigh(matrix)
            inverse = torch.where(values > 1e-10 * values[-1], values.clamp_min(1e-30) ** exponent, 0.0)
            roots.append((vectors * inverse) @ vectors.T)
        wanted = roots[0] @ grad @ roots[1]
        if grad is not grads[0]:  # a single gradient's factors may be as ill-conditioned as its square
            assert ((before - param.detach()).double() - wanted).norm() < 1e-5 * wanted.norm()


def test_a_fixed_norm_is_kept():
    params = parameters((6, 4), (3, 5))
    befores = copies(params)
    optimizer = Shampoo(params, 1.0, scale=Norm(rms=0.3))
    train(optimizer, params, [gradients(param.shape, 1) for param in params])
    for param, before in zip(params, befores, strict=True):
        assert math.isclose((param - before).square().mean().sqrt().item(), 0.3, rel_tol=1e-9)


def test_a_bound_is_kept_and_the_first_step_needs_it():
    for bound in (None, 1.0):
        (param,) = parameters((32, 32))
        (before,) = copies([param])
        optimizer = Shampoo([param], 1.0, scale=Trace(bound=bound), damping=1e-6, refresh=1)
        train(optimizer, [param], [gradients((32, 32), 1)])
        rms = (param - before).square().mean().sqrt().item()
        assert rms > 3 if bound is None else rms <= 1 + 1e-9


def test_more_power_rounds_move_the_operator_towards_the_optimal_one():
    grads = gradients((6, 5), 40)
    grads = [torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64)) @ grad for grad in grads]
    beta, T = 0.9, 40
    weights = (1 - beta) * beta ** torch.arange(T - 1, -1, -1, dtype=torch.float64) / (1 - beta**T)
    stream = GradientStream.from_tensors(torch.stack(grads), weights)
    best = approx.get("optimal").fit(stream)
    dense = torch.einsum("i,ia,ib->ab", weights, torch.stack(grads).flatten(1), torch.stack(grads).flatten(1))
    cosines = []
    for rounds in (1, 2, 3):
        (param,) = parameters((6, 5))
        optimizer = Shampoo([param], 0.01, betas=(0.9, beta), power_rounds=rounds)
        train(optimizer, [param], [grads])
        live = optimizer.operator(param)
        cosines.append(float((dense * live.to_dense()).sum()) / live.norm())
    bound = float((dense * best.to_dense()).sum()) / best.norm()
    assert cosines[0] < cosines[1] <= bound + 1e-12
    assert bound - cosines[1] < 0.8 * (bound - cosines[0])
    assert abs(cosines[2] - cosines[1]) < bound - cosines[0]


def test_a_stale_root_is_the_one_of_its_refresh_and_every_root_is_taken_at_step_1():
    (param,) = parameters((4, 3))
    grads = gradients((4, 3), 12)
    optimizer = Shampoo([param], 0.1, betas=(0.0, 0.9), refresh=5, damping=1e-3)
    roots = []
    for grad in grads:
        train(optimizer, [param], [[grad]])
        roots.append([optimizer.state[param][f"tile0.root{mode}"].clone() for mode in (0, 1)])
    phases = optimizer.state[param]["tile0.phase"][0].tolist()
    assert len(set(phases)) == 2, "two factors of one parameter are staggered"
    for mode, phase in enumerate(phases):
        changed = [t + 1 for t in range(1, 12) if not torch.equal(roots[t][mode], roots[t - 1][mode])]
        assert changed == [t for t in range(2, 13) if (t - 1) % 5 == phase]
    assert not torch.allclose(roots[0][0], torch.eye(4, dtype=torch.float64) * 2.0)


def test_a_warm_up_schedule_refreshes_every_early_step():
    (param,) = parameters((4, 3))
    optimizer = Shampoo([param], 0.1, refresh=Warmup(first=4, every=100))
    train(optimizer, [param], [gradients((4, 3), 6)])
    assert optimizer.diagnostics().rows[0].staleness == 2
