"""Facts: powers add up on the range, minus one is the pseudo-inverse, rounding never counts as rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kronscope.errors import NonFiniteError, OptionError, ShapeError
from kronscope.kron import PsdFactor, Spectrum, default_cutoff, psd_power
from kronscope.testing import oracle
from kronscope.testing.strategies import psd_matrices

exponents = st.floats(-2, 2).map(lambda p: round(p, 3))


@given(psd_matrices(), exponents, exponents)
def test_exponents_add_up(matrix: Tensor, p: float, q: float) -> None:
    product = psd_power(matrix, p) @ psd_power(matrix, q)
    torch.testing.assert_close(product, psd_power(matrix, p + q), rtol=1e-9, atol=1e-9)


@given(psd_matrices(), exponents)
def test_a_power_is_that_of_the_dense_oracle(matrix: Tensor, p: float) -> None:
    torch.testing.assert_close(psd_power(matrix, p), oracle.power(matrix, p), rtol=1e-10, atol=1e-10)


@given(psd_matrices())
def test_minus_one_is_the_pseudo_inverse(matrix: Tensor) -> None:
    expected = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-10)
    torch.testing.assert_close(psd_power(matrix, -1), expected, rtol=1e-9, atol=1e-9)


@given(psd_matrices())
def test_zero_is_the_projector_onto_the_range(matrix: Tensor) -> None:
    projector = psd_power(matrix, 0)
    torch.testing.assert_close(projector @ projector, projector, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(projector @ matrix, matrix, rtol=1e-9, atol=1e-12)
    assert round(float(projector.trace())) == Spectrum.of(matrix).rank == int(torch.linalg.matrix_rank(matrix))


@given(psd_matrices(), exponents)
def test_a_power_is_symmetric_to_the_last_bit(matrix: Tensor, p: float) -> None:
    powered = psd_power(matrix, p)
    assert torch.equal(powered, powered.T)


@pytest.mark.parametrize("exponent", [-1.0, -0.25, 0.0, 0.5])
def test_the_cutoff_decides_what_counts_as_zero(exponent: float) -> None:
    matrix = torch.diag(torch.tensor([1.0, 1e-3, 1e-6], dtype=torch.float64))
    assert Spectrum.of(matrix).rank == 3
    assert Spectrum.of(matrix, cutoff=1e-4).rank == 2
    powered = psd_power(matrix, exponent, cutoff=1e-4).diagonal()
    expected = [1.0, 1e-3**exponent, 0.0]
    torch.testing.assert_close(powered, torch.tensor(expected, dtype=torch.float64))


def test_negative_eigenvalues_are_rounding_and_count_as_zero() -> None:
    matrix = torch.diag(torch.tensor([-1e-20, 2.0], dtype=torch.float64))
    assert psd_power(matrix, -1).diagonal().tolist() == [0.0, 0.5]


@pytest.mark.parametrize("exponent", [-2.0, -0.5, 0.0, 1.0, 1.5])
def test_every_power_of_zero_is_zero(exponent: float) -> None:
    assert not psd_power(torch.zeros(3, 3), exponent).any()


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_the_rank_does_not_depend_on_scale(scale: float) -> None:
    factor = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    assert Spectrum.of(scale * (factor.T @ factor)).rank == 2


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 2), (10, 9)])
def test_rounding_of_a_long_sum_is_not_rank(size: int, rank: int) -> None:
    # a softmax layer's row factor is such a sum: C rows whose sum is zero for every sample
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        mix = torch.randn(rank, size, dtype=torch.float64, generator=generator)
        vectors = torch.randn(5000, rank, dtype=torch.float64, generator=generator) @ mix
        gram = vectors.T @ vectors
        assert Spectrum.of(gram).rank == rank
        inverse = psd_power(gram, -1)
        torch.testing.assert_close(gram @ inverse @ gram, gram, rtol=1e-8, atol=1e-8 * float(gram.norm()))


def test_the_default_cutoff_follows_the_dtype() -> None:
    assert default_cutoff(64, torch.float32) == 64 * torch.finfo(torch.float32).eps
    assert default_cutoff(2000, torch.float64) == 2000 * torch.finfo(torch.float64).eps
    assert default_cutoff(2, torch.float64) == 1e-13


def test_a_stack_is_decomposed_matrix_by_matrix() -> None:
    stack = torch.diag_embed(torch.tensor([[1.0, 4.0], [0.0, 9.0]], dtype=torch.float64))
    spectrum = Spectrum.of(stack)
    assert spectrum.powered(-0.5).tolist() == [[1.0, 0.5], [0.0, 1 / 3]]
    torch.testing.assert_close(spectrum.matrix(), stack)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ShapeError, match="call mode_gram first"):
        psd_power(torch.zeros(2, 3), 0.5)
    with pytest.raises(ShapeError, match="square"):
        PsdFactor(torch.zeros(2, 3))
    with pytest.raises(NonFiniteError, match="check the gradients"):
        psd_power(torch.full((2, 2), math.nan), 0.5)
    for exponent in (math.nan, math.inf, -math.inf):
        with pytest.raises(OptionError, match="finite"):
            PsdFactor(torch.eye(2)).power(exponent)


@given(psd_matrices(), exponents)
def test_a_factor_s_power_shares_its_eigenvectors(matrix: Tensor, p: float) -> None:
    factor = PsdFactor(matrix)
    assert not factor.is_decomposed
    powered = factor.power(p)
    torch.testing.assert_close(powered.matrix, oracle.power(matrix, p), rtol=1e-10, atol=1e-10)
    if p != 1:
        assert powered.is_decomposed
        assert powered.spectrum.vectors is factor.spectrum.vectors
    assert math.isclose(powered.trace(), float(powered.matrix.trace()))
    assert math.isclose(powered.norm(), float(powered.matrix.norm()))


def test_the_first_power_is_the_factor_itself() -> None:
    factor = PsdFactor(torch.eye(3))
    assert factor.power(1) is factor


def test_a_factor_with_many_rows_of_zeros_is_decomposed_in_float32_or_else_in_float64() -> None:
    # LAPACK's float32 gives up on most of these, or returns NaN: the left side of an embedding of which a part was seen
    draw = torch.Generator().manual_seed(0)
    for rows, seen in [(300, 60), *[(120, 27)] * 20]:
        grads = torch.zeros(rows, 192, dtype=torch.float64)
        grads[torch.randperm(rows, generator=draw)[:seen]] = torch.randn(seen, 192, generator=draw).double()
        matrix = grads @ grads.T
        spectrum = PsdFactor(matrix, narrow=True).spectrum
        assert spectrum.rank == seen
        torch.testing.assert_close(spectrum.matrix(), matrix, rtol=1e-5, atol=1e-3)
