"""Root solvers: the same root by every solver, right ranks, and a safety net that holds."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from kronscope.errors import OptionError
from kronscope.kron.powers import psd_power
from kronscope.kron.roots import (
    CoupledNewton,
    Eigh,
    Ridge,
    Roots,
    WarmQR,
    eigenbases,
    orthogonal_iteration,
    root_residual,
    solve_roots,
)


def factors(count: int, size: int, *, rank: int | None = None, seed: int = 0, dtype=torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, size, rank or 2 * size, generator=generator, dtype=torch.float64)
    return (rows @ rows.mT).to(dtype)


def expected(matrix: Tensor, exponent: float, ridge: Ridge) -> Tensor:
    eye = torch.eye(matrix.shape[0], dtype=matrix.dtype)
    shifted = matrix + (ridge.eps + ridge.damping * torch.linalg.eigvalsh(matrix)[-1]) * eye
    return psd_power(shifted / (matrix + ridge.eps * eye).trace(), exponent)


@given(
    size=st.integers(1, 9),
    exponent=st.sampled_from([-1.0, -0.5, -1 / 3, -0.25, -0.7, 0.5]),
    ridge=st.sampled_from([Ridge(damping=1e-3), Ridge(eps=0.1), Ridge(eps=0.01, damping=0.01)]),
)
def test_every_solver_takes_the_same_root(size, exponent, ridge):
    stack = factors(3, size)
    wanted = torch.stack([expected(matrix, exponent, ridge) for matrix in stack])
    found = Eigh().solve(stack, exponent, ridge)
    assert torch.allclose(found.matrices, wanted, rtol=1e-9)
    warm = WarmQR(rounds=200).solve(stack, exponent, ridge, warm=found.vectors)
    assert torch.allclose(warm.matrices, wanted, rtol=1e-6, atol=1e-8)
    if exponent in (-1.0, -0.5, -1 / 3, -0.25):
        assert torch.allclose(CoupledNewton().solve(stack, exponent, ridge).matrices, wanted, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_ridge_the_root_is_a_pseudo_inverse_of_the_right_rank(dtype):
    stack = factors(2, 12, rank=5, dtype=dtype)
    found = Eigh().solve(stack, -0.5, Ridge())
    assert torch.linalg.matrix_rank(found.matrices.double(), rtol=1e-4).tolist() == [5, 5]
    projector = found.matrices @ found.matrices @ stack / stack.diagonal(dim1=-2, dim2=-1).sum(-1).view(-1, 1, 1)
    assert torch.allclose(projector @ projector, projector, atol=1e-4)


def test_a_ridge_that_is_lost_in_rounding_does_not_amplify_the_null_space():
    stack = factors(2, 12, rank=5, dtype=torch.float32)
    tiny, none = (Eigh().solve(stack, -0.5, ridge).matrices for ridge in (Ridge(eps=1e-8), Ridge()))
    assert torch.allclose(tiny, none, rtol=1e-4, atol=1e-5)
    kept = Eigh().solve(stack, -0.5, Ridge(eps=1.0)).matrices
    assert torch.linalg.matrix_rank(kept).tolist() == [12, 12]


def test_roots_do_not_depend_on_the_scale_of_the_factors():
    stack = factors(2, 6)
    ridge = Ridge(damping=1e-4)
    for scale in (1e-30, 1e20):
        one, other = Eigh().solve(stack, -0.5, ridge), Eigh().solve(scale * stack, -0.5, ridge)
        assert torch.allclose(one.matrices, other.matrices, rtol=1e-9)


def test_the_root_of_zero_is_that_of_the_identity():
    root = Eigh().solve(torch.zeros(1, 4, 4), -0.5, Ridge()).matrices[0]
    assert torch.allclose(root, 2 * torch.eye(4))


def test_newton_refuses_what_it_cannot_do():
    for exponent, ridge in ((-0.3, Ridge(damping=0.1)), (0.5, Ridge(damping=0.1)), (-0.5, Ridge())):
        with pytest.raises(OptionError, match="Eigh"):
            CoupledNewton().solve(factors(1, 3), exponent, ridge)
    with pytest.raises(OptionError):
        Ridge(eps=-1.0)


class Broken:
    tolerance, is_warm, is_thread_safe = 1e-3, False, True

    def __init__(self, how: str) -> None:
        self.how = how

    def check(self, exponent: float, ridge: Ridge) -> None:
        """Take everything."""

    def solve(self, factors: Tensor, exponent: float, ridge: Ridge, warm: Tensor | None = None) -> Roots:
        if self.how == "raises":
            raise LinAlgError("no convergence")
        good = Eigh().solve(factors, exponent, ridge)
        bad = torch.zeros(factors.shape[0], dtype=torch.bool)
        bad[0] = True
        matrices = torch.where(bad.view(-1, 1, 1), float("nan"), good.matrices)
        residuals = torch.where(bad, 0.5, good.residuals)
        return Roots(matrices if self.how == "nan" else good.matrices, residuals, good.extremes, good.vectors)


@pytest.mark.parametrize("how", ["raises", "nan", "residual"])
def test_a_failing_solver_is_rescued_in_float64(how):
    stack, ridge = factors(3, 4), Ridge(damping=1e-3)
    found = solve_roots(stack, -0.5, ridge, Broken(how))
    assert torch.allclose(found.matrices, Eigh().solve(stack, -0.5, ridge).matrices, rtol=1e-9)
    assert (found.residuals < 1e-6).all()


def test_a_hopeless_factor_keeps_its_previous_root_and_the_others_are_solved():
    stack, ridge = factors(2, 4), Ridge(damping=1e-3)
    previous = Eigh().solve(stack, -0.5, ridge).matrices
    stack[0, 0, 0] = float("inf")
    found = solve_roots(stack, -0.5, ridge, Eigh(), previous=previous)
    assert torch.equal(found.matrices[0], previous[0])
    assert torch.allclose(found.matrices[1], previous[1])


def test_a_hopeless_factor_without_a_previous_root_gets_the_identity_with_a_warning():
    stack = factors(2, 4)
    stack[0, 0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="identity"):
        found = solve_roots(stack, -0.5, Ridge(damping=1e-3), Eigh())
    assert torch.allclose(found.matrices[0], 2 * torch.eye(4, dtype=torch.float64))
    assert torch.isfinite(found.matrices).all()


def test_float32_roots_of_ill_conditioned_factors_are_taken_in_float64():
    values = torch.logspace(0, -5.3, 32, dtype=torch.float64)
    Q = torch.linalg.qr(factors(1, 32)[0]).Q
    matrix = ((Q * values) @ Q.T).float().unsqueeze(0)
    wanted = expected(matrix[0].double(), -0.5, Ridge(eps=0.0))
    good = Eigh().solve(matrix, -0.5, Ridge(eps=1e-30)).matrices[0].double()
    poor = Eigh(float64=False).solve(matrix, -0.5, Ridge(eps=1e-30)).matrices[0].double()
    assert (good - wanted).norm() < 1e-3 * wanted.norm()
    assert (poor - wanted).norm() > 1e-3 * wanted.norm()


@pytest.mark.parametrize("exponent", [-0.5, -0.25, -0.4])
def test_the_residual_is_zero_for_the_factor_s_own_root_and_grows_as_the_factor_moves(exponent):
    stack, ridge = factors(2, 8), Ridge(damping=1e-3)
    found = Eigh().solve(stack, exponent, ridge)
    largest = found.extremes[:, 0] / (1 + ridge.damping)
    residuals = []
    for amount in (0.0, 0.01, 0.3):
        moved = (1 - amount) * stack + amount * factors(2, 8, seed=3, rank=1)
        residuals.append(root_residual(moved, found.matrices, exponent, ridge, largest).max().item())
    assert residuals[0] < 1e-10
    assert residuals[0] < residuals[1] < residuals[2]


def test_orthogonal_iteration_converges_to_the_eigenvectors():
    stack = factors(2, 5)
    vectors, values = orthogonal_iteration(stack, torch.eye(5, dtype=torch.float64).repeat(2, 1, 1), 300)
    assert torch.allclose(values, torch.linalg.eigvalsh(stack).flip(-1), rtol=1e-8)
    assert torch.allclose(vectors.mT @ vectors, torch.eye(5, dtype=torch.float64).expand(2, 5, 5), atol=1e-12)


def test_eigenbases_fall_back_to_the_previous_basis():
    stack = factors(2, 3)
    previous = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    stack[1, 0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = eigenbases(stack, previous)
    inside = found[0].T @ stack[0] @ found[0]
    assert (inside - inside.diagonal().diag()).norm() < 1e-10
    assert torch.equal(found[1], previous[1])
