"""Facts: every contraction equals its einsum, whatever the form of the gradients, their sharing and the path taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kronscope.errors import OptionError, ShapeError
from kronscope.kron import factored_gram, mode_gram, symmetric_inner
from kronscope.testing.strategies import seeds

# one width on each side of the blocked product, and one that four blocks do not divide
WIDTHS = (1, 5, 256, 301)


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("width", WIDTHS)
def test_symmetric_inner_is_the_full_product_and_symmetric_to_the_last_bit(width: int) -> None:
    x = normal(0, 7, width)
    product = symmetric_inner(x)
    close(product, x.T @ x)
    assert torch.equal(product, product.T)


@pytest.mark.parametrize("width", WIDTHS)
def test_symmetric_inner_of_two_matrices_whose_product_is_symmetric(width: int) -> None:
    x = normal(0, 7, width)
    y = normal(1, 7, 1) * x
    close(symmetric_inner(x, y), x.T @ y)


@pytest.mark.parametrize("rows", WIDTHS)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("middle", ["none", "symmetric", "general"])
@pytest.mark.parametrize("weighted", [False, True])
def test_mode_gram_of_matrices(rows: int, mode: int, middle: str, weighted: bool) -> None:
    grads = normal(0, 3, rows, 4)
    size = grads.shape[2 - mode]
    other = {"none": None, "general": normal(1, size, size)}.get(middle, torch.eye(size).double())
    if middle == "symmetric":
        other = normal(1, size, size)
        other = other + other.T
    weights = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64) if weighted else None
    w = torch.ones(3).double() if weights is None else weights
    M = torch.eye(size).double() if other is None else other
    formula = "k,kia,ab,kjb->ij" if mode == 0 else "k,kai,ab,kbj->ij"
    close(mode_gram(grads, weights, mode, other), torch.einsum(formula, w, grads, M, grads))


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_mode_gram_of_tensors_unfolds_along_the_mode(mode: int) -> None:
    grads = normal(0, 5, 2, 3, 4)
    weights = torch.rand(5, dtype=torch.float64)
    unfolded = grads.movedim(mode + 1, 1).flatten(2)
    close(mode_gram(grads, weights, mode), torch.einsum("k,kia,kja->ij", weights, unfolded, unfolded))


def test_mode_gram_of_vectors_is_their_second_moment() -> None:
    grads = normal(0, 5, 3)
    close(mode_gram(grads), grads.T @ grads)


def test_mode_gram_says_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match="add a first dimension"):
        mode_gram(torch.zeros(3))
    with pytest.raises(OptionError, match=r"mode must be in 0\.\.1"):
        mode_gram(torch.zeros(2, 3, 4), mode=2)
    with pytest.raises(ShapeError, match="square matrix on the other mode"):
        mode_gram(torch.zeros(2, 3, 4), mode=0, other=torch.eye(3))
    with pytest.raises(ShapeError, match="square matrix on the other mode"):
        mode_gram(torch.zeros(2, 3, 4, 5), mode=0, other=torch.eye(4))


@given(
    seed=seeds(),
    sizes=st.tuples(*[st.integers(1, 4)] * 5),
    shared=st.sampled_from(["kept", "contracted", "neither"]),
    weighted=st.booleans(),
    middle=st.sampled_from(["none", "symmetric", "general"]),
)
def test_factored_gram_is_that_of_the_formed_gradients(
    seed: int, sizes: tuple[int, int, int, int, int], shared: str, weighted: bool, middle: str
) -> None:
    k, c, t, p, q = sizes
    kept = normal(seed, k, 1 if shared == "kept" else c, t, p)
    contracted = normal(seed + 1, k, 1 if shared == "contracted" else c, t, q)
    weights = torch.rand(k, dtype=torch.float64) if weighted else None
    other = None if middle == "none" else normal(seed + 2, q, q)
    if other is not None and middle == "symmetric":
        other = other + other.T
    grads = torch.einsum("kctp,kctq->kcpq", kept.expand(k, c, t, p), contracted.expand(k, c, t, q))
    w = torch.ones(k).double() if weights is None else weights
    M = torch.eye(q).double() if other is None else other
    expected = torch.einsum("k,kcia,ab,kcjb->ij", w, grads, M, grads)
    got = factored_gram(kept, contracted, weights, other)
    scale = float(torch.einsum("k,kcia,ab,kcjb->ij", w, grads.abs(), M.abs(), grads.abs()).max())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13 * max(scale, 1e-300) * (1 + q * t))


@pytest.mark.parametrize("positions", [1, 2])
def test_factored_gram_of_a_wide_side(positions: int) -> None:
    kept, contracted = normal(0, 3, 2, positions, 301), normal(1, 3, 1, positions, 2)
    grads = kept.mT @ contracted
    close(factored_gram(kept, contracted), torch.einsum("kcia,kcja->ij", grads, grads))
