"""Facts: every approximation is the matrix its textbook formula gives, and its cosine agrees to 1e-9."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import kronscope as ks
from kronscope import approx
from kronscope.approx.kfac import kfac_factors
from kronscope.errors import ConvergenceError, NotFactoredError
from kronscope.gradients.atoms import DenseAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.testing import StreamRecipe, oracle
from kronscope.testing.strategies import chunked, streams
from tests.curvature.lazy import formed, lazy, single

CLOSE = 1e-9
# kl may have no answer, or many, on a small stream; it has tests of its own
EVERYWHERE = tuple(name for name in approx.names() if name != "kl")


def compare(name: str, stream: GradientStream, H: Tensor, expected: Tensor) -> None:
    op = approx.get(name).fit(stream)
    cosine = ks.cosine(ks.SecondMoment(stream), op)
    assert abs(cosine - oracle.cosine(H, expected)) <= CLOSE, name
    # where two singular values agree a sum of Kronecker products is not unique, but its cosine is
    if name != "kronecker-sum":
        assert float((op.to_dense() - expected).norm()) <= 1e-8 * float(expected.norm()), name


def dense_only(stream: GradientStream) -> bool:
    return any(isinstance(chunk, DenseAtoms) for chunk in stream)


@given(streams(max_dim=5))
def test_every_approximation_equals_its_textbook_formula(stream: GradientStream) -> None:
    H = oracle.second_moment(stream)
    for name in EVERYWHERE:
        if "kfac" in name and dense_only(stream):
            with pytest.raises(NotFactoredError):
                approx.get(name).fit(stream)
        else:
            compare(name, stream, H, oracle.approximation(name, stream))


@settings(max_examples=20)
@given(streams(max_dim=4, kinds=("factored", "shared")))
def test_the_form_of_the_atoms_does_not_matter(stream: GradientStream) -> None:
    H = oracle.second_moment(stream)
    for name in EVERYWHERE:
        expected = oracle.approximation(name, stream)
        compare(name, lazy(stream), H, expected)
        if "kfac" not in name:
            compare(name, formed(stream), H, expected)


@pytest.mark.parametrize("kind", ["dense", "factored", "shared"])
@pytest.mark.parametrize("shape", [(3, 4), (5, 2), (1, 4), (4, 1)])
def test_kl_on_streams_with_gradients_enough(kind: str, shape: tuple[int, int]) -> None:
    for seed in range(3):
        stream = StreamRecipe(kind, shape, samples=60, positions=2, weights="random", cuts=(17,), seed=seed).build()
        compare("kl", stream, oracle.second_moment(stream), oracle.approximation("kl", stream))


@pytest.mark.parametrize("exponent", [0.0, 0.25, 1.0, 2.0, -0.5])
def test_any_exponent_of_shampoo(exponent: float) -> None:
    stream = StreamRecipe("shared", (3, 4), samples=20, positions=2).build()
    op = approx.get("shampoo", exponent=exponent).fit(stream)
    expected = oracle.approximation("shampoo", stream, exponent=exponent)
    torch.testing.assert_close(op.to_dense(), expected, rtol=1e-9, atol=1e-9 * float(expected.norm()))


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_any_number_of_simultaneous_rounds(rounds: int) -> None:
    stream = StreamRecipe("dense", (3, 4), samples=5, weights="random").build()
    op = approx.get("optimal-paper", rounds=rounds).fit(stream)
    torch.testing.assert_close(op.to_dense(), oracle.approximation("optimal-paper", stream, rounds=rounds))


@pytest.mark.parametrize("kind", ["dense", "factored", "shared"])
@pytest.mark.parametrize("rank", [1, 2, 4, 9, 30])
def test_any_rank_of_a_kronecker_sum(kind: str, rank: int) -> None:
    stream = StreamRecipe(kind, (3, 4), samples=7, columns=2, positions=2).build()
    H = oracle.second_moment(stream)
    op = approx.get("kronecker-sum", rank=rank).fit(stream)
    sigma = oracle.rearranged_singular_values(stream)
    assert math.isclose(
        ks.cosine(ks.SecondMoment(stream), op), float(sigma[:rank].norm() / sigma.norm()), abs_tol=CLOSE
    )
    if rank >= 9:
        torch.testing.assert_close(op.to_dense(), H, rtol=0, atol=1e-7 * float(H.norm()))


def test_float32_gradients() -> None:
    stream = single(StreamRecipe("shared", (3, 4), samples=30, columns=2, positions=3).build())
    H = oracle.second_moment(stream)
    for name in approx.names():
        expected = oracle.cosine(H, oracle.approximation(name, stream))
        # gradients that are formed of float32 factors are float32 themselves
        assert abs(ks.cosine(ks.SecondMoment(stream), approx.get(name).fit(stream)) - expected) <= 1e-7, name


@pytest.mark.parametrize("reduce", [True, False])
def test_k_fac_s_factors_of_float32_atoms_are_summed_in_float64(reduce: bool) -> None:
    stream = single(StreamRecipe("shared", (3, 4), samples=30, columns=2, positions=9).build())
    for got, expected in zip(
        kfac_factors(stream, reduce=reduce), oracle.kfac_factors(stream, reduce=reduce), strict=True
    ):
        torch.testing.assert_close(got.matrix, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1e8, 1e20])
def test_very_small_and_very_large_gradients(scale: float) -> None:
    plain = StreamRecipe("shared", (3, 4), samples=30, columns=2, positions=2)
    scaled = StreamRecipe("shared", (3, 4), samples=30, columns=2, positions=2, scale=scale)
    for name in approx.names():
        cosines = [ks.cosine(ks.SecondMoment(s), approx.get(name).fit(s)) for s in (plain.build(), scaled.build())]
        assert abs(cosines[0] - cosines[1]) <= CLOSE, name


def test_no_weight_at_all_is_zero_and_its_cosine_is_not_a_number() -> None:
    for recipe in (StreamRecipe("dense"), StreamRecipe("factored"), StreamRecipe("shared", positions=2)):
        stream = recipe.build()
        nothing = stream.reweighted(torch.zeros(stream.num_samples))
        for name in approx.names():
            if "kfac" in name and dense_only(stream):
                continue
            op = approx.get(name).fit(nothing)
            assert op.norm() == 0.0, name
            assert op.shape == stream.shape
            assert math.isnan(ks.cosine(ks.SecondMoment(nothing), op)), name


def test_k_fac_s_refusal_says_what_it_needs() -> None:
    stream = StreamRecipe("dense").build()
    for name in ("kfac-reduce", "kfac-expand", "ekfac"):
        with pytest.raises(NotFactoredError, match="inputs and output gradients"):
            approx.get(name).fit(stream)


def test_repeated_atoms_weigh_as_one_of_their_total_weight() -> None:
    stream = StreamRecipe("factored", (3, 4), samples=5, columns=2, weights="random").build()
    (chunk,) = stream
    half = type(chunk)(**{**vars(chunk), "weights": chunk.weights / 3})
    repeated = chunked(half, half, half)
    for name in approx.names():
        try:
            expected = approx.get(name).fit(stream).to_dense()
        except ConvergenceError:
            continue
        got = approx.get(name).fit(repeated).to_dense()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-8 * float(expected.norm()), msg=name)
