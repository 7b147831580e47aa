"""What must hold for every stream, and two things that only look as if they did."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kronscope as ks
from kronscope import approx
from kronscope.curvature.pairs import pair_squares
from kronscope.errors import ConvergenceError
from kronscope.gradients.atoms import DenseAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import EigenbasisDiagonal, KroneckerProduct
from kronscope.measures import batch_stream, kronecker_spectrum
from kronscope.testing import StreamRecipe, oracle
from kronscope.testing.strategies import seeds, streams
from tests.curvature.lazy import shuffled

SLACK = 1e-9


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(name: str, stream: GradientStream, **options: float) -> float:
    return ks.cosine(ks.SecondMoment(stream), approx.get(name, **options).fit(stream))


def cosines(stream: GradientStream) -> dict[str, float]:
    """The cosine of everything that can be fitted to a stream."""
    out = {}
    for name in approx.names():
        if "kfac" in name and any(isinstance(chunk, DenseAtoms) for chunk in stream):
            continue
        try:
            out[name] = cosine(name, stream)
        except ConvergenceError:
            assert name == "kl"
    return out


@given(streams(max_dim=5), seeds())
def test_no_kronecker_product_beats_the_optimal_one(stream: GradientStream, seed: int) -> None:
    sigma = oracle.rearranged_singular_values(stream)
    best = float(sigma[0] / sigma.norm())
    found = cosines(stream)
    assert math.isclose(found["optimal"], best, abs_tol=SLACK)
    for approximation in approx.all_approximations():
        if approximation.kronecker and approximation.name in found:
            assert found[approximation.name] <= best + SLACK, approximation.name
    m, n = stream.shape
    L, R = normal(seed, m, m), normal(seed + 1, n, n)
    assert ks.cosine(ks.SecondMoment(stream), KroneckerProduct(L @ L.T, R @ R.T)) <= best + SLACK
    for exponent in (0.1, 0.5, 1.0, 2.0):
        assert cosine("shampoo", stream, exponent=exponent) <= best + SLACK


@given(streams(max_dim=5), seeds())
def test_nothing_diagonal_in_shampoo_s_eigenbasis_beats_soap(stream: GradientStream, seed: int) -> None:
    moment = ks.SecondMoment(stream)
    soap = approx.get("soap").fit(stream)
    assert isinstance(soap, EigenbasisDiagonal)
    best = ks.cosine(moment, soap)
    assert math.isclose(best, soap.norm() / moment.norm(), abs_tol=SLACK)
    for name in ("shampoo2", "shampoo", "caspr"):
        assert cosine(name, stream) <= best + SLACK, name
    for exponent in (0.25, 0.7, 1.5):
        assert cosine("shampoo", stream, exponent=exponent) <= best + SLACK
    kappa = normal(seed, *stream.shape).abs()
    assert ks.cosine(moment, EigenbasisDiagonal(soap.left, soap.right, kappa)) <= best + SLACK


@given(streams(max_dim=5, kinds=("factored", "shared")))
def test_nothing_diagonal_in_k_fac_s_eigenbasis_beats_e_kfac(stream: GradientStream) -> None:
    assert cosine("kfac-expand", stream) <= cosine("ekfac", stream) + SLACK


@given(streams(max_dim=5))
def test_the_eigenbasis_table_has_the_factors_eigenvalues_for_sums(stream: GradientStream) -> None:
    moment = ks.SecondMoment(stream)
    left, right = (factor.spectrum for factor in moment.factors())
    table = moment.table(left.vectors, right.vectors)
    scale = moment.trace()
    torch.testing.assert_close(table.sum(1), left.values, rtol=0, atol=1e-11 * scale)
    torch.testing.assert_close(table.sum(0), right.values, rtol=0, atol=1e-11 * scale)


@given(streams(max_dim=5))
def test_the_norm_of_shampoo_is_the_trace_of_its_factor(stream: GradientStream) -> None:
    moment = ks.SecondMoment(stream)
    assert math.isclose(approx.get("shampoo").fit(stream).norm(), moment.trace(), rel_tol=1e-10)


@given(streams(max_dim=5))
def test_tnt_is_shampoo_squared(stream: GradientStream) -> None:
    assert cosine("tnt", stream) == cosine("shampoo2", stream)


@settings(max_examples=25)
@given(streams(max_dim=4, badly_scaled=False), st.sampled_from([1e-30, 1e-6, 0.3, -1.0, 1e6, 1e30]))
def test_the_scale_of_the_gradients_changes_nothing(stream: GradientStream, factor: float) -> None:
    (grads, weights), plain = oracle.atoms(stream), cosines(stream)
    same = {name: value for name, value in plain.items() if "kfac" not in name}
    scaled = cosines(GradientStream.from_tensors(factor * grads, weights))
    for name, value in same.items():
        if name in scaled:
            assert abs(scaled[name] - value) <= SLACK, name


@settings(max_examples=25)
@given(streams(max_dim=4, badly_scaled=False), seeds(), st.integers(1, 4))
def test_chunks_and_order_change_nothing(stream: GradientStream, seed: int, pieces: int) -> None:
    plain, other = cosines(stream), cosines(shuffled(stream, seed, pieces))
    for name in plain.keys() & other.keys():
        assert abs(plain[name] - other[name]) <= SLACK, name


@given(streams(max_dim=5, kinds=("factored",)))
def test_expand_is_reduce_where_nothing_is_shared(stream: GradientStream) -> None:
    one, two = (approx.get(name).fit(stream).to_dense() for name in ("kfac-expand", "kfac-reduce"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12 * float(one.norm()))


def test_expand_is_not_reduce_where_something_is() -> None:
    stream = StreamRecipe("shared", (3, 4), samples=6, positions=3).build()
    assert abs(cosine("kfac-expand", stream) - cosine("kfac-reduce", stream)) > 1e-3


@pytest.mark.parametrize("replacement", [True, False])
def test_batches_of_one_are_the_empirical_fisher(replacement: bool) -> None:
    stream = StreamRecipe("shared", (3, 4), samples=6, positions=2).build()
    H = oracle.second_moment(batch_stream(stream, 1, replacement=replacement))
    torch.testing.assert_close(H, oracle.second_moment(stream))


@given(streams(max_dim=4, weights=("uniform",), max_columns=1))
def test_the_batch_of_all_samples_is_the_mean_gradient(stream: GradientStream) -> None:
    count = stream.num_samples
    batches = batch_stream(stream, count, replacement=False)
    grads, weights = oracle.atoms(stream)
    mean = torch.einsum("i,imn->mn", weights, grads).flatten()
    expected = count * torch.outer(mean, mean)
    scale = float(oracle.second_moment(stream).trace())
    torch.testing.assert_close(oracle.second_moment(batches), expected, rtol=0, atol=1e-11 * count * scale)


@settings(max_examples=25)
@given(streams(max_dim=4, weights=("uniform",), max_columns=1, badly_scaled=False), st.integers(2, 50))
def test_factors_of_batches_are_those_of_their_stream(stream: GradientStream, size: int) -> None:
    batches = batch_stream(stream, size)
    H = oracle.second_moment(batches)
    moment = ks.SecondMoment(batches)
    for got, expected in (
        (moment.left(), oracle.left(H, stream.shape)),
        (moment.right(), oracle.right(H, stream.shape)),
        (moment.to_dense(), H),
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10 * float(H.trace()))
    for name in ("shampoo2", "shampoo", "soap", "diagonal"):
        expected_cosine = oracle.cosine(H, oracle.approximation(name, batches))
        assert abs(cosine(name, batches) - expected_cosine) <= SLACK, name


@pytest.mark.parametrize("logits", [1, 2])
def test_shampoo_squared_is_exact_for_the_last_layer_of_two_classes(logits: int) -> None:
    """One logit, or a softmax of two: Ĥ has rank one, for the last layer and for a single linear layer alike."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, logits)).double()
    inputs, labels = normal(0, 12, 5), torch.arange(12) % 2
    loss: nn.Module = nn.CrossEntropyLoss() if logits == 2 else nn.BCEWithLogitsLoss()
    targets = labels if logits == 2 else labels.double()[:, None]
    results = ks.measure(
        model, loss, [(inputs, targets)], layers=["0.weight", "2.weight"], approximations=approx.names(), progress=False
    )
    found = {(row.layer, row.approximation): row.cosine for row in results}
    H = oracle.gauss_newton(model, loss, inputs, targets, "2.weight")
    sigma = oracle.rearranged_singular_values(H, (logits, 4))
    assert float(sigma[1:].norm()) <= 1e-12 * float(sigma[0])
    for name in ("optimal", "shampoo2", "tnt", "optimal-paper", "soap"):
        assert math.isclose(found["2.weight", name], 1.0, abs_tol=1e-12), name
    # nothing of the kind holds for a hidden layer, nor for Shampoo itself
    assert found["0.weight", "shampoo2"] < 1 - 1e-4
    assert found["2.weight", "shampoo"] < 1 - 1e-3


@given(streams(max_dim=4), st.integers(1, 5))
def test_a_tile_of_the_gram_matrix_is_that_part_of_the_whole(stream: GradientStream, cut: int) -> None:
    grads, _ = oracle.atoms(stream)
    grads = grads.view(stream.num_samples, stream.columns, -1)
    whole = torch.einsum("icx,jdx->ijcd", grads, grads).square().sum((2, 3))
    starts = [0]
    for chunk in stream:
        starts.append(starts[-1] + len(chunk.weights))
    for i, first in enumerate(stream):
        for j, second in enumerate(stream):
            tile = whole[starts[i] : starts[i + 1], starts[j] : starts[j + 1]]
            torch.testing.assert_close(pair_squares(first, second), tile, rtol=0, atol=1e-11 * float(whole.max()))
            part = first.part(0, cut)
            torch.testing.assert_close(pair_squares(part, second), tile[:cut], rtol=0, atol=1e-11 * float(whole.max()))


@given(streams(max_dim=4))
def test_cosines_lie_between_zero_and_one(stream: GradientStream) -> None:
    for name, value in cosines(stream).items():
        assert 0 <= value <= 1, name


@given(streams(max_dim=4, badly_scaled=False))
def test_the_curves_of_figure_2_are_those_of_a_full_svd(stream: GradientStream) -> None:
    m, n = stream.shape
    spectrum = kronecker_spectrum(stream)
    u, sigma, vh = torch.linalg.svd(oracle.rearrange(oracle.second_moment(stream), (m, n)), full_matrices=False)
    assert math.isclose(spectrum["ratio"], float(sigma[0] / sigma.norm()), abs_tol=SLACK)
    # α_i: the identity of one side seen by the singular vectors of that side
    for curve, alpha in (
        ("left", vh @ torch.eye(n).double().flatten()),
        ("right", u.T @ torch.eye(m).double().flatten()),
    ):
        expected = float(alpha[0] * sigma[0] / (alpha * sigma).norm())
        assert math.isclose(spectrum[curve], abs(expected), abs_tol=1e-8), curve


def test_the_curve_of_exponents_goes_through_shampoo_and_its_square() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = [(normal(0, 8, 3), torch.arange(8) % 3)]
    for labels, size in (("exact", 1), ("exact", 5), ("real", 1), ("real", 5)):
        results = ks.measure(
            model,
            nn.CrossEntropyLoss(),
            data,
            layers=["0.weight"],
            labels=labels,
            batch_size=size,
            approximations=("shampoo2", "shampoo"),
            details=("exponents", "batch_sizes"),
            progress=False,
        )
        found = {row.approximation: row.cosine for row in results}
        details: dict[str, Any] = {detail.kind: detail.values for detail in results.details}
        exponents = details["exponents"]
        curve = dict(zip(exponents["exponent"], exponents["cosine"], strict=True))
        assert math.isclose(curve[1.0], found["shampoo2"], abs_tol=SLACK)
        assert math.isclose(curve[0.5], found["shampoo"], abs_tol=SLACK)
        sizes = details["batch_sizes"]
        by_size = dict(zip(sizes["batch_size"], sizes["shampoo2"], strict=True))
        if labels == "exact":
            assert set(by_size.values()) == {by_size[1.0]}
        else:
            assert by_size[8.0] != by_size[1.0]


# ---------------------------------------------------------------------------- not invariants


def test_shampoo_squared_can_be_worse_than_shampoo() -> None:
    """A counterexample: the identity and one matrix unit."""
    grads = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    stream = GradientStream.from_tensors(grads)
    H = oracle.second_moment(stream)
    squared, plain = cosine("shampoo2", stream), cosine("shampoo", stream)
    assert plain > squared + 0.004
    assert math.isclose(plain, oracle.cosine(H, oracle.approximation("shampoo", stream)), abs_tol=SLACK)
    assert math.isclose(squared, oracle.cosine(H, oracle.approximation("shampoo2", stream)), abs_tol=SLACK)


@pytest.mark.parametrize(
    ("name", "B", "A", "margin"),
    [
        ("kfac-reduce", [[[-1, 1], [0, -1]], [[-1, -1], [-1, 1]]], [[[-1, -1], [-1, -1]], [[0, 1], [1, 0]]], 0.07),
        ("kfac-expand", [[[-1, -1], [-1, -1]], [[1, -1], [-1, -1]]], [[[0, -1], [0, 0]], [[1, 0], [0, -1]]], 0.014),
        # without sharing, where both variants are one
        ("kfac-reduce", [[[-2, 0]], [[1, -2]], [[2, 0]]], [[[-2, 1]], [[0, -2]], [[-1, -2]]], 0.006),
    ],
)
def test_shampoo_squared_can_be_worse_than_k_fac(name: str, B: object, A: object, margin: float) -> None:
    """Counterexamples with two or three samples of a 2 x 2 layer."""
    stream = GradientStream.from_factors(torch.tensor(B, dtype=torch.float64), torch.tensor(A, dtype=torch.float64))
    H = oracle.second_moment(stream)
    squared, kfac = cosine("shampoo2", stream), cosine(name, stream)
    assert kfac > squared + margin
    assert math.isclose(kfac, oracle.cosine(H, oracle.approximation(name, stream)), abs_tol=SLACK)
    assert math.isclose(squared, oracle.cosine(H, oracle.approximation("shampoo2", stream)), abs_tol=SLACK)
