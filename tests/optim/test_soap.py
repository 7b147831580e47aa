"""SOAP against an independent transcription of the published algorithm, and what our form of it promises."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn

from kronscope.errors import OptionError
from kronscope.kron.operators import EigenbasisDiagonal
from kronscope.optim import SOAP, Eigh, Every, Shampoo, Warmup
from tests.optim.tools import copies, gradients, parameters, train


class Transcription:
    """The published SOAP, one parameter, from its paper and code: written for tests, tensor by tensor."""

    def __init__(self, weight: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float, every: int):
        self.weight, self.lr, self.betas, self.eps, self.decay, self.every = weight, lr, betas, eps, decay, every
        self.mean = torch.zeros_like(weight)  # of gradients in the original coordinates
        self.second = torch.zeros_like(weight)
        self.factors = [torch.zeros(size, size, dtype=weight.dtype) for size in weight.shape]
        self.bases: list[Tensor] | None = None
        self.steps = 0

    def turn(self, tensor: Tensor, inverse: bool = False) -> Tensor:
        if self.weight.ndim < 2:
            return tensor
        for mode, basis in enumerate(self.bases or []):
            tensor = torch.tensordot(basis if inverse else basis.T, tensor, dims=([1], [mode])).movedim(0, mode)
        return tensor

    def absorb(self, grad: Tensor) -> None:
        if grad.ndim < 2:
            return
        for mode in range(grad.ndim):
            # in this order of operations: where a factor has a null space, rounding decides its basis
            others = [axis for axis in range(grad.ndim) if axis != mode]
            self.factors[mode].lerp_(torch.tensordot(grad, grad, dims=[others, others]), 1 - self.betas[1])

    def step(self, grad: Tensor) -> None:
        beta1, beta2 = self.betas
        if self.bases is None:
            self.absorb(grad)
            self.bases = [torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in self.factors]
            return
        self.steps += 1
        inside = self.turn(grad)
        self.mean = beta1 * self.mean + (1 - beta1) * grad
        self.second = beta2 * self.second + (1 - beta2) * inside**2
        size = self.lr * (1 - beta2**self.steps) ** 0.5 / (1 - beta1**self.steps)
        self.weight -= size * self.turn(self.turn(self.mean) / (self.second.sqrt() + self.eps), inverse=True)
        self.weight -= self.lr * self.decay * self.weight
        self.absorb(grad)
        if self.steps % self.every == 0 and grad.ndim > 1:
            for mode, (factor, basis) in enumerate(zip(self.factors, self.bases, strict=True)):
                order = (basis.T @ factor @ basis).diagonal().argsort(descending=True)
                self.second = self.second.index_select(mode, order)
                self.bases[mode] = torch.linalg.qr(factor @ basis[:, order]).Q


@pytest.mark.parametrize("shape", [(6, 4), (5, 5), (3, 4, 2), (4, 1, 3, 3), (7,), ()])
def test_reference_mode_equals_the_published_algorithm(shape):
    (param,) = parameters(shape)
    other = Transcription(param.detach().clone(), 0.01, (0.95, 0.95), 1e-8, 0.01, every=4)
    optimizer = SOAP([param], 0.01, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01, refresh=4, reference=True)
    for step, grad in enumerate(gradients(shape, 25), 1):
        train(optimizer, [param], [[grad]])
        other.step(grad)
        assert torch.allclose(param, other.weight, rtol=1e-9, atol=1e-10), step


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_in_reference_mode_takes_more_groups(duplicate):
    optimizer = duplicate(SOAP(parameters((3, 2)), reference=True))
    optimizer.add_param_group({"params": parameters((4, 2))})
    assert [group["refresh"] for group in optimizer.param_groups] == [Every(10), Every(10)]


def test_the_schedule_of_another_optimizer_is_taken_as_it_is():
    shown = inspect.signature(Shampoo).parameters["refresh"].default
    assert SOAP(parameters((3, 2)), refresh=shown).param_groups[0]["refresh"] == shown


def test_reference_mode_has_the_published_schedule_unless_told_otherwise():
    assert SOAP(parameters((3, 2))).param_groups[0]["refresh"] == Warmup(20, 10, within=(4, 4, 12))
    assert SOAP(parameters((3, 2)), reference=True).param_groups[0]["refresh"] == Every(10)
    with pytest.raises(OptionError, match="every k steps"):
        SOAP(parameters((3, 2)), reference=True, refresh=Warmup(5, 10))


def test_the_first_step_is_adam_s_and_not_skipped():
    (param,) = parameters((5, 4))
    (twin,) = copies([param])
    history = [gradients((5, 4), 1)]
    train(SOAP([param], 0.1), [param], history)
    train(torch.optim.Adam([twin], 0.1, betas=(0.9, 0.95)), [twin], history)
    assert torch.allclose(param, twin, rtol=1e-12)


@pytest.mark.parametrize("solver", ["auto", Eigh()])
def test_the_second_moment_keeps_its_trace_through_basis_changes(solver):
    """Squared entries of an orthogonal matrix are doubly stochastic: what is carried is neither lost nor made."""
    (param,) = parameters((5, 4))
    grads = gradients((5, 4), 12)
    optimizer = SOAP([param], 0.1, betas=(0.9, 0.8), refresh=3, solver=solver)
    train(optimizer, [param], [grads])
    weights = [0.2 * 0.8 ** (12 - t) / (1 - 0.8**12) for t in range(1, 13)]
    trace = sum(w * grad.square().sum().item() for w, grad in zip(weights, grads, strict=True))
    live = optimizer.operator(param)
    assert isinstance(live, EigenbasisDiagonal)
    assert live.trace() == pytest.approx(trace, rel=1e-10)


def test_refreshed_every_step_with_full_decompositions_the_bases_diagonalise_the_factors():
    (param,) = parameters((5, 4))
    optimizer = SOAP([param], 0.1, refresh=1, solver="auto")
    train(optimizer, [param], [gradients((5, 4), 9)])
    state = optimizer.state[param]
    for mode in (0, 1):
        factor, basis = state[f"tile0.factor{mode}"][0], state[f"tile0.basis{mode}"][0]
        inside = basis.T @ factor @ basis
        assert (inside - inside.diagonal().diag()).norm() < 1e-12 * factor.norm()
    residual = optimizer.diagnostics().rows[0].residual
    assert residual is not None
    assert residual < 1e-10


def test_with_identity_bases_it_is_adam():
    """One by one blocks have nothing to turn."""
    (param,) = parameters((5, 4))
    (twin,) = copies([param])
    history = [gradients((5, 4), 10)]
    train(SOAP([param], 0.1, block_size=1, weight_decay=0.1), [param], history)
    train(torch.optim.AdamW([twin], 0.1, betas=(0.9, 0.95), weight_decay=0.1), [twin], history)
    assert torch.allclose(param, twin, rtol=1e-10)


@pytest.mark.parametrize("reference", [False, True])
def test_rounding_in_the_null_space_of_the_gradients_is_not_blown_up_to_full_steps(reference):
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(24, 1, generator=generator), torch.randn(1, 20, generator=generator)
    weight = nn.Parameter(torch.zeros(24, 20))
    optimizer = SOAP([weight], 1.0, refresh=1, reference=reference)
    train(optimizer, [weight], [[(1 + 0.1 * t) * u @ v for t in range(3)]])
    before = weight.detach().clone()
    train(optimizer, [weight], [[1.4 * u @ v]])
    move = weight.detach() - before
    inside = u @ (u.T @ move @ v.T) @ v / (u.square().sum() * v.square().sum())
    outside = (move - inside).norm() / move.norm()
    assert outside > 0.5 if reference else outside < 0.05


def test_the_second_moment_has_the_factors_sums_after_a_refresh():
    """Turned by squared entries alone it was too even, and large directions got too long steps for twenty steps."""
    (param,) = parameters((6, 4))
    strong = torch.logspace(0, -2, 6, dtype=torch.float64).unsqueeze(1)
    turned = torch.linalg.qr(gradients((6, 6), 1, seed=9)[0]).Q
    # both bases change at the fourth step, the columns' after the rows'
    optimizer = SOAP([param], 0.01, refresh=Warmup(1, 3, spread=False))
    train(optimizer, [param], [[turned @ (strong * grad) for grad in gradients((6, 4), 4)]])
    state = optimizer.state[param]
    basis, factor = state["tile0.basis1"][0], state["tile0.factor1"][0]
    wanted = (basis.T @ factor @ basis).diagonal()
    assert torch.allclose(state["tile0.exp_avg_sq"][0].sum(0), wanted, rtol=1e-10)
