"""Facts: every operator equals its dense matrix in all that it says, and vec is row-major."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kronscope.errors import OptionError, ShapeError
from kronscope.kron import (
    Diagonal,
    EigenbasisDiagonal,
    Identity,
    KroneckerProduct,
    KroneckerSum,
    Operator,
)
from kronscope.testing import check_operator
from kronscope.testing.strategies import psd_matrices, seeds, shapes


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def basis(seed: int, size: int) -> Tensor:
    vectors: Tensor = torch.linalg.qr(normal(seed, size, size)).Q
    return vectors


def table(seed: int, shape: tuple[int, int]) -> Tensor:
    values = normal(seed, *shape).abs() + 0.1
    return values * (normal(seed + 1, *shape) > -0.5)


@given(psd_matrices(5), psd_matrices(5), st.sampled_from([1.0, 1e-8, 3e5, 0.0]))
def test_a_kronecker_product(left: Tensor, right: Tensor, scale: float) -> None:
    op = KroneckerProduct(left, right, scale)
    check_operator(op)
    values = torch.linalg.eigvalsh(op.to_dense())
    found = op.eigenvalues().flatten().sort().values
    torch.testing.assert_close(found, values, rtol=0, atol=1e-12 * max(float(values.abs().max()), 1e-300))


@given(shapes(5), seeds())
def test_a_diagonal_in_a_pair_of_bases(shape: tuple[int, int], seed: int) -> None:
    values = table(seed, shape)
    left, right = basis(seed, shape[0]), basis(seed + 1, shape[1])
    for op in (
        EigenbasisDiagonal(left, right, values),
        EigenbasisDiagonal(None, right, values),
        EigenbasisDiagonal(left, None, values),
        Diagonal(values),
    ):
        check_operator(op)
        assert torch.equal(op.eigenvalues(), values)


@given(shapes(6), st.sampled_from([1.0, 2.5, 1e-12, 0.0]))
def test_a_multiple_of_the_identity(shape: tuple[int, int], scale: float) -> None:
    check_operator(Identity(shape, scale))


@given(shapes(4), seeds(), st.integers(1, 3))
def test_a_kronecker_sum(shape: tuple[int, int], seed: int, count: int) -> None:
    terms = []
    for index in range(count):
        left, right = normal(seed + 2 * index, shape[0], shape[0]), normal(seed + 2 * index + 1, shape[1], shape[1])
        sign = -1.0 if index == 2 else 1.0  # the third term pairs two antisymmetric factors
        terms.append((1.0 / (index + 1), left + sign * left.T, right + sign * right.T))
    check_operator(KroneckerSum(terms), psd=False)


@given(shapes(3), seeds())
def test_powers_of_a_kronecker_sum_are_operators_too(shape: tuple[int, int], seed: int) -> None:
    left, right = normal(seed, shape[0], shape[0]), normal(seed + 1, shape[1], shape[1])
    op = KroneckerSum(
        [(1.0, left @ left.T, torch.eye(shape[1]).double()), (0.5, torch.eye(shape[0]).double(), right @ right.T)]
    )
    check_operator(op.power(0.5), tolerance=1e-7)
    check_operator(op.power(-1).power(-1), tolerance=1e-6)
    torch.testing.assert_close(op.power(0.5).power(2).to_dense(), op.to_dense(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["product", "eigenbasis", "diagonal", "sum"])
def test_float32_operators_meet_float64_ones(kind: str) -> None:
    shape = (2, 3)
    left, right = normal(0, 2, 2).float(), normal(1, 3, 3).float()
    kinds: dict[str, Operator] = {
        "product": KroneckerProduct(left @ left.T, right @ right.T),
        "eigenbasis": EigenbasisDiagonal(basis(0, 2).float(), basis(1, 3).float(), table(0, shape).float()),
        "diagonal": Diagonal(table(0, shape).float()),
        "sum": KroneckerSum([(1.0, left + left.T, right + right.T)]),
    }
    # powers amplify float32's rounding by the condition number
    check_operator(kinds[kind], tolerance=2e-3, psd=kind != "sum")


def test_vec_is_row_major() -> None:
    L, R, G = normal(0, 2, 2), normal(1, 3, 3), normal(2, 2, 3)
    L, R = L @ L.T, R @ R.T
    op = KroneckerProduct(L, R)
    assert op.shape == (2, 3)
    torch.testing.assert_close(op.apply(G), L @ G @ R.T)
    torch.testing.assert_close(op.to_dense(), torch.kron(L, R))
    torch.testing.assert_close((torch.kron(L, R) @ G.flatten()).view(2, 3), L @ G @ R.T)


def test_a_transposed_factor_is_no_trouble_for_kron() -> None:
    left = normal(0, 3, 3)
    op = KroneckerProduct((left @ left.T).T, torch.eye(2, dtype=torch.float64))
    assert op.to_dense().shape == (6, 6)
    check_operator(KroneckerSum([(1.0, (left + left.T).T, torch.eye(2, dtype=torch.float64))]), psd=False)


def test_a_negative_scale_has_whole_powers_only() -> None:
    op = KroneckerProduct(torch.eye(2), torch.eye(2), -2.0)
    assert op.power(2).scale == 4.0
    assert op.power(-1).scale == -0.5
    with pytest.raises(OptionError, match="no real power"):
        op.power(0.5)


def test_a_kronecker_sum_refuses_powers_too_large_to_decompose() -> None:
    op = KroneckerSum([(1.0, torch.eye(65), torch.eye(64))])
    assert op.power(1) is op
    with pytest.raises(OptionError, match="4160 x 4160"):
        op.power(0.5)


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(ShapeError, match="at least one term"):
        KroneckerSum([])
    with pytest.raises(ShapeError, match="one shape"):
        KroneckerSum([(1.0, torch.eye(2), torch.eye(2)), (1.0, torch.eye(2), torch.eye(3))])
    with pytest.raises(ShapeError, match=r"must be \(3, 3\)"):
        EigenbasisDiagonal(None, torch.eye(2), torch.ones(2, 3))
    with pytest.raises(ShapeError, match=r"\(m, n\)"):
        Diagonal(torch.ones(3))
    for op in (KroneckerProduct(torch.eye(2), torch.eye(3)), Diagonal(torch.ones(2, 3)), Identity((2, 3))):
        with pytest.raises(ShapeError, match=r"\(3, 2\)"):
            op.apply(torch.zeros(3, 2))
        with pytest.raises(ShapeError, match="different shapes"):
            op.inner(Identity((3, 2)))


class Foreign:
    """An operator of someone else's: only the protocol is known of it."""

    shape = (2, 3)

    def __init__(self) -> None:
        root = normal(5, 6, 6)
        self.matrix = root @ root.T

    def apply(self, matrix: Tensor) -> Tensor:
        if matrix.shape[-2:] != self.shape:
            raise ValueError("wrong shape")
        return (matrix.flatten(-2) @ self.matrix.to(matrix)).view(matrix.shape)

    def norm(self) -> float:
        return float(self.matrix.norm())

    def trace(self) -> float:
        return float(self.matrix.trace())

    def power(self, exponent: float) -> Operator:
        out = Foreign()
        values, vectors = torch.linalg.eigh(self.matrix)
        out.matrix = (vectors * values**exponent) @ vectors.T
        return out

    def inner(self, other: Operator) -> float:
        if other.shape != self.shape:
            raise ValueError("wrong shape")
        return float((self.matrix * other.to_dense()).sum())

    def to_dense(self) -> Tensor:
        return self.matrix


def test_an_operator_of_someone_else_s_can_be_measured() -> None:
    foreign = Foreign()
    assert isinstance(foreign, Operator)
    check_operator(foreign)
    left = normal(0, 2, 2)
    for op in (
        KroneckerProduct(left @ left.T, torch.eye(3, dtype=torch.float64)),
        Diagonal(table(0, (2, 3))),
        Identity((2, 3), 3.0),
        KroneckerSum([(1.0, left, torch.eye(3, dtype=torch.float64))]),
    ):
        expected = float((op.to_dense() * foreign.matrix).sum())
        assert math.isclose(op.inner(foreign), expected, rel_tol=1e-12)
