"""Facts: everything a SecondMoment says equals what its dense matrix says, for every form of the same atoms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronscope as ks
from kronscope.curvature import FormPlan, SecondMoment, chunks, pairs, passes
from kronscope.errors import DataError, MemoryBudgetError, ShapeError
from kronscope.gradients import stream as streams_module
from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Diagonal, EigenbasisDiagonal, Identity, KroneckerProduct, KroneckerSum, Operator
from kronscope.testing import StreamRecipe, oracle
from kronscope.testing.strategies import chunked, seeds, streams
from tests.curvature.lazy import formed, lazy, shuffled, single


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, expected: Tensor, scale: float, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(scale, 1e-300))


def check(stream: GradientStream, H: Tensor, seed: int, tolerance: float = 1e-11) -> None:
    """Compare every contraction with the dense matrix; errors are relative to the trace, which bounds all of H."""
    moment = SecondMoment(stream)
    m, n = stream.shape
    assert moment.shape == (m, n)
    trace = float(H.trace())
    assert math.isclose(moment.trace(), trace, rel_tol=tolerance, abs_tol=1e-300)
    assert math.isclose(moment.norm(), float(H.norm()), rel_tol=tolerance, abs_tol=1e-300)
    assert math.isclose(moment.norm_squared(), float(H.norm()) ** 2, rel_tol=2 * tolerance, abs_tol=1e-300)
    close(moment.to_dense(), H, trace, tolerance)
    R, L, V = normal(seed, n, n), normal(seed + 1, m, m), normal(seed + 2, 2, 3, m, n)
    close(moment.left(), oracle.left(H, (m, n)), trace, tolerance)
    close(moment.right(), oracle.right(H, (m, n)), trace, tolerance)
    for middle in (R, R + R.T, R - R.T):
        close(moment.left(middle), oracle.left(H, (m, n), middle), trace * float(middle.norm()), tolerance)
    for middle in (L, L + L.T, L - L.T):
        close(moment.right(middle), oracle.right(H, (m, n), middle), trace * float(middle.norm()), tolerance)
    expected = (V.reshape(6, m * n) @ H).reshape(V.shape)
    close(moment.matvec(V), expected, trace * float(V.norm()), tolerance)
    bases = [torch.linalg.qr(matrix).Q for matrix in (L, R)]
    for left in (None, bases[0]):
        for right in (None, bases[1]):
            turn = torch.kron(
                torch.eye(m).double() if left is None else left.contiguous(),
                torch.eye(n).double() if right is None else right.contiguous(),
            )
            close(moment.table(left, right), (turn.T @ H @ turn).diagonal().reshape(m, n), trace, tolerance)


@given(streams(max_dim=5), seeds())
def test_every_contraction_equals_that_of_the_dense_matrix(stream: GradientStream, seed: int) -> None:
    check(stream, oracle.second_moment(stream), seed)


@given(streams(max_dim=4), seeds())
def test_a_stream_that_is_not_in_memory_gives_the_same(stream: GradientStream, seed: int) -> None:
    check(lazy(stream), oracle.second_moment(stream), seed)


@given(streams(max_dim=4, kinds=("factored", "shared")), seeds())
def test_formed_gradients_give_the_same(stream: GradientStream, seed: int) -> None:
    check(formed(stream), oracle.second_moment(stream), seed)


@given(streams(max_dim=4), seeds(), st.integers(1, 4))
def test_order_and_chunks_change_nothing(stream: GradientStream, seed: int, pieces: int) -> None:
    check(shuffled(stream, seed, pieces), oracle.second_moment(stream), seed)


@given(streams(max_dim=4, badly_scaled=False), seeds())
def test_float32_atoms_are_accumulated_in_float64(stream: GradientStream, seed: int) -> None:
    narrow = single(stream)
    # the atoms' own rounding is in the oracle too; what is left is that of float32 products of whole gradients
    H = oracle.second_moment(narrow)
    assert SecondMoment(narrow).left().dtype == torch.float64
    check(narrow, H, seed, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["dense", "factored", "shared"])
@pytest.mark.parametrize("scale", [1e-12, 1e-10, 1e-3, 1e11])
@pytest.mark.parametrize("small_tile", [0.0, 1e9])
def test_float32_atoms_of_any_size_keep_their_digits(
    kind: str, scale: float, small_tile: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pairs of float32 gradients of 1e-10 have squares of 1e-40, below float32's range
    monkeypatch.setattr(pairs, "_SMALL_TILE", small_tile)
    stream = single(StreamRecipe(kind, (3, 4), samples=6, positions=2, scale=scale).build())
    H = oracle.second_moment(stream)
    assert math.isclose(SecondMoment(stream).norm(), float(H.norm()), rel_tol=1e-6)


def operators(shape: tuple[int, int], seed: int) -> list[Operator]:
    m, n = shape
    L, R = normal(seed, m, m), normal(seed + 1, n, n)
    table = normal(seed + 2, m, n).abs()
    product = KroneckerProduct(L @ L.T, R @ R.T, 0.4)
    return [
        Identity(shape, 0.3),
        product,
        product.power(0.5),  # decomposed: goes through the eigenbasis table
        EigenbasisDiagonal(torch.linalg.qr(L).Q, torch.linalg.qr(R).Q, table),
        EigenbasisDiagonal(None, torch.linalg.qr(R).Q, table),
        Diagonal(table),
        KroneckerSum([(0.5, L + L.T, R + R.T), (0.2, L - L.T, R - R.T), (0.1, L, R)]),
        KroneckerSum([(0.5, L @ L.T, R @ R.T)]).power(0.5),  # of no kind that inner knows
    ]


@given(streams(max_dim=4), seeds())
def test_inner_products_with_every_kind_of_operator(stream: GradientStream, seed: int) -> None:
    H = oracle.second_moment(stream)
    for form in (stream, lazy(stream)):
        moment = SecondMoment(form)
        for op in operators(stream.shape, seed):
            dense = op.to_dense()
            allowed = 1e-11 * float(H.trace()) * float(dense.norm())
            assert abs(moment.inner(op) - float((H * dense).sum())) <= allowed, type(op)


@pytest.mark.parametrize("kind", ["dense", "factored", "shared"])
def test_inner_products_with_an_optimizer_s_float32_operators(kind: str) -> None:
    stream = StreamRecipe(kind, (3, 4), samples=6, columns=2, positions=2).build()
    H, moment = oracle.second_moment(stream), SecondMoment(stream)
    L, R = normal(0, 3, 3).float(), normal(1, 4, 4).float()
    product = KroneckerProduct(L @ L.T, R @ R.T)
    for op in (
        product,
        product.power(0.5),
        EigenbasisDiagonal(torch.linalg.qr(L).Q, torch.linalg.qr(R).Q, normal(2, 3, 4).abs().float()),
        KroneckerSum([(0.5, L + L.T, R + R.T), (0.1, L, R)]),
    ):
        assert math.isclose(moment.inner(op), float((H * op.to_dense()).sum()), rel_tol=1e-4)


@given(streams(max_dim=4), seeds(), st.integers(1, 3))
def test_pair_sums_split_the_squared_norm_by_groups(stream: GradientStream, seed: int, count: int) -> None:
    groups = torch.randint(count, (stream.num_samples,), generator=torch.Generator().manual_seed(seed))
    count = int(groups.max()) + 1
    parts = [
        oracle.second_moment(stream.reweighted(torch.where(groups == g, weights_of(stream), 0.0))) for g in range(count)
    ]
    expected = torch.tensor([[float((one * two).sum()) for two in parts] for one in parts], dtype=torch.float64)
    for form in (stream, lazy(stream), shuffled(stream, seed, 2)):
        got = SecondMoment(form).pair_sums(groups)
        close(got, expected, float(expected.sum()))
    assert math.isclose(float(SecondMoment(stream).pair_sums()), float(expected.sum()), rel_tol=1e-11)


def test_the_norm_of_a_small_layer_is_not_made_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = GradientStream.from_tensors(normal(0, 50, 3, 4))
    expected = float(SecondMoment(stream).pair_sums())
    monkeypatch.setattr(SecondMoment, "pair_sums", None)
    assert math.isclose(SecondMoment(stream).norm_squared(), expected, rel_tol=1e-12)


@given(streams(max_dim=4))
def test_own_sums_are_the_pairs_of_a_sample_with_itself(stream: GradientStream) -> None:
    weights = weights_of(stream)
    grads = oracle.atoms(stream)[0].view(stream.num_samples, stream.columns, -1)
    grams = grads @ grads.mT
    for form in (stream, lazy(stream), formed(stream)):
        moment = SecondMoment(form)
        both = weights**2 * grams.square().sum((1, 2))
        same = weights**2 * grams.diagonal(dim1=1, dim2=2).square().sum(1)
        close(moment.own_sums(), both, float(both.max()))
        close(moment.own_sums(same_column=True), same, float(same.max()))


@given(streams(max_dim=4))
def test_the_mean_gradient(stream: GradientStream) -> None:
    grads, weights = oracle.atoms(stream)
    expected = torch.einsum("i,imn->mn", weights, grads)
    scale = float(weights @ grads.flatten(1).norm(dim=1))
    for form in (stream, lazy(stream), formed(stream)):
        close(SecondMoment(form).mean(), expected, scale)


def test_label_draws_are_averaged_in_the_mean() -> None:
    # D draws are D columns of a stream, each over the root of D so that H is their average
    draws = normal(0, 5, 4, 2, 3)
    atoms = DenseAtoms(draws / 2.0, torch.full((5,), 0.2, dtype=torch.float64), torch.arange(5))
    mean = SecondMoment(GradientStream.of_chunks(atoms, draws=True)).mean()
    torch.testing.assert_close(mean, draws.mean((0, 1)))


@settings(max_examples=20)
@given(streams(max_dim=4), seeds())
def test_one_more_atom_and_other_weights(stream: GradientStream, seed: int) -> None:
    H = oracle.second_moment(stream)
    extra = float(H.trace()) ** 0.5 * normal(seed, *stream.shape)
    stream.keep_bytes = 0
    grown = stream.with_atom(extra, 0.7)
    assert grown.num_samples == stream.num_samples + 1
    assert grown.keep_bytes == stream.keep_bytes == 0
    expected = H + 0.7 * torch.outer(extra.flatten(), extra.flatten())
    check(grown, expected, seed)
    check(stream.reweighted(2.0 * weights_of(stream)), 2.0 * H, seed)


@pytest.mark.parametrize("small_tile", [0.0, 1e9])
def test_the_mean_atom_of_a_float32_stream_can_be_added(small_tile: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_SMALL_TILE", small_tile)
    stream = single(StreamRecipe("dense", (3, 4), samples=6, cuts=(2,)).build())
    mean = SecondMoment(stream).mean()
    grown = stream.with_atom(mean, 3.0)
    assert math.isclose(SecondMoment(grown).norm(), float(oracle.second_moment(grown).norm()), rel_tol=1e-6)


@given(streams(max_dim=4, kinds=("factored",), deficient=False))
def test_kernels_are_the_pairs_of_either_side(stream: GradientStream) -> None:
    kernels = SecondMoment(stream).kernels()
    chunks = list(stream)
    both = any(min(c.row_factors.shape[1], c.col_factors.shape[1]) > 1 for c in chunks if isinstance(c, FactoredAtoms))
    if both:
        assert kernels is None
        return
    assert kernels is not None
    rows, cols, weights = kernels
    grads = oracle.atoms(stream)[0].view(stream.num_samples, stream.columns, -1)
    pairs = torch.einsum("icx,jdx->ijcd", grads, grads).square().sum((2, 3))
    close(rows * cols, pairs, float(pairs.max()))
    torch.testing.assert_close(weights, weights_of(stream))


def test_chunks_that_share_different_sides() -> None:
    # one chunk shares its inputs, the next shares nothing: their pairs are not a product of two kernels
    weights = torch.full((3,), 0.2, dtype=torch.float64)
    chunks: list[Atoms] = [
        FactoredAtoms(normal(0, 3, 2, 1, 3), normal(1, 3, 1, 1, 4), weights, torch.arange(3)),
        FactoredAtoms(normal(2, 3, 2, 1, 3), normal(3, 3, 2, 1, 4), weights, torch.arange(3, 6)),
        FactoredAtoms(normal(4, 3, 1, 1, 3), normal(5, 3, 2, 1, 4), weights, torch.arange(6, 9)),
        DenseAtoms(normal(6, 3, 2, 3, 4), weights, torch.arange(9, 12)),
    ]
    stream = chunked(*chunks)
    check(stream, oracle.second_moment(stream), 0)
    check(lazy(stream), oracle.second_moment(stream), 0)


def test_results_may_be_changed_by_their_reader() -> None:
    stream = StreamRecipe("dense", (3, 4), samples=5).build()
    moment = SecondMoment(stream)
    for read in (moment.left, moment.right, moment.mean, lambda: moment.table(None, None)):
        before = read().clone()
        read().zero_()
        assert torch.equal(read(), before)


def test_the_plan_is_printable_and_follows_the_form() -> None:
    plain = SecondMoment(StreamRecipe("factored", (5, 6), samples=4).build()).plan()
    assert (plain.gram, plain.contraction) == ("factored", "factored")
    assert "multiply-adds" in str(plain)
    whole = SecondMoment(StreamRecipe("dense", (5, 6)).build()).plan()
    assert (whole.gram, whole.contraction) == ("dense", "dense")
    # many positions of a narrow layer: forming each gradient once is cheaper
    many = SecondMoment(StreamRecipe("shared", (2, 2), samples=8, positions=9).build()).plan()
    assert (many.gram, many.contraction) == ("dense", "dense")
    assert many.costs[0] > many.costs[1]


@pytest.mark.parametrize("positions", [1, 2, 9])
@pytest.mark.parametrize("gram", ["factored", "dense"])
@pytest.mark.parametrize("contraction", ["factored", "dense"])
def test_every_plan_gives_the_same(
    positions: int, gram: str, contraction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = StreamRecipe("shared", (3, 4), samples=6, columns=2, positions=positions, cuts=(2,))
    H = oracle.second_moment(recipe.build())
    plan = FormPlan(gram, contraction, (0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(passes, "plan_form", lambda *_: plan)
    for cuts in ((2,), ()):
        stream = replace(recipe, cuts=cuts).build()
        check(lazy(stream), H, 0)
        check(stream, H, 0)


def test_a_basis_that_was_changed_in_place_is_another_one_and_not_all_are_kept() -> None:
    moment = SecondMoment(StreamRecipe("dense", (3, 4), samples=5).build())
    turned = torch.linalg.qr(normal(0, 3, 3)).Q
    moment.table(turned, None)
    turned.copy_(torch.linalg.qr(normal(1, 3, 3)).Q)
    fresh = SecondMoment(StreamRecipe("dense", (3, 4), samples=5).build()).table(turned, None)
    assert torch.equal(moment.table(turned, None), fresh)
    sizes = []
    for seed in range(40):
        moment.table(torch.linalg.qr(normal(seed, 3, 3)).Q, None)
        sizes.append(len(moment.passes.once("tables", dict)))
    assert sizes[-1] == sizes[20] < 20


def test_a_search_in_float32_leaves_nothing_that_an_answer_would_take() -> None:
    stream = GradientStream.from_tensors(normal(0, 50, 6, 7).float())
    expected = SecondMoment(GradientStream.from_tensors(normal(0, 50, 6, 7).float())).left()
    close_to_it = SecondMoment(stream, narrow=True).left()
    assert not torch.equal(close_to_it, expected)
    assert torch.equal(SecondMoment(stream).left(), expected)


def test_work_is_cut_into_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [
        StreamRecipe("dense", (3, 4), samples=9, columns=2),
        StreamRecipe("factored", (3, 4), samples=9, columns=2),
        StreamRecipe("shared", (3, 4), samples=9, columns=2, positions=3),
    ]
    expected = [oracle.second_moment(recipe.build()) for recipe in recipes]
    monkeypatch.setattr(chunks, "_WORK_BYTES", 1)
    monkeypatch.setattr(pairs, "_TILE_BYTES", 56)
    monkeypatch.setattr(streams_module, "_CHUNK_BYTES", 500)
    for recipe, H in zip(recipes, expected, strict=True):
        stream = GradientStream.of_chunks(*recipe.build())
        stream.keep_bytes = 0
        assert len(list(stream)) > 1
        check(stream, H, 0)


@given(streams(max_dim=4), seeds())
def test_other_weights_keep_what_does_not_depend_on_them(stream: GradientStream, seed: int) -> None:
    stream = shuffled(stream, seed, 2)
    weights = torch.rand(stream.num_samples, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = oracle.second_moment(stream.reweighted(weights))
    moment = SecondMoment(stream)
    moment.norm()
    moment.left()
    changed = moment.reweighted(weights)
    check(changed.stream, expected, seed)


def test_wrong_shapes_say_what_is_needed() -> None:
    moment = SecondMoment(StreamRecipe("dense", (2, 3)).build())
    with pytest.raises(ShapeError, match=r"left needs R of shape \(3, 3\)"):
        moment.left(torch.eye(2))
    with pytest.raises(ShapeError, match=r"right needs L of shape \(2, 2\)"):
        moment.right(torch.eye(3))
    with pytest.raises(ShapeError, match=r"matvec needs"):
        moment.matvec(torch.zeros(3, 2))
    with pytest.raises(ShapeError, match=r"the operator on \(3, 2\)"):
        moment.inner(Identity((3, 2)))


def test_a_dense_matrix_that_is_too_large_is_refused() -> None:
    stream = GradientStream.from_factors(torch.ones(1, 1, 300), torch.ones(1, 1, 300))
    with pytest.raises(MemoryBudgetError, match="without it"):
        SecondMoment(stream).to_dense()


def weights_of(stream: GradientStream) -> Tensor:
    return torch.cat([chunk.weights for chunk in stream])


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("scale", [1e90, 1e-90])
def test_gradients_beyond_the_range_of_float64_are_refused_in_words(scale: float, factored: bool) -> None:
    """Their fourth powers are infinite or zero, and a cosine of them read 1.0, NaN or an IndexError."""
    torch.manual_seed(0)
    if factored:
        stream = ks.GradientStream.from_factors(
            scale * torch.randn(10, 2, 3, dtype=torch.float64), torch.randn(10, 2, 4, dtype=torch.float64)
        )
    else:
        stream = ks.GradientStream.from_tensors(scale * torch.randn(10, 3, 4, dtype=torch.float64))
    with pytest.raises(DataError, match="multiply the loss"):
        ks.SecondMoment(stream).norm()
    for name in ("optimal", "shampoo2", "shampoo", "identity"):
        with pytest.raises(DataError, match="multiply the loss"):
            ks.cosine(ks.SecondMoment(stream), ks.approx.get(name).fit(stream))


def test_a_model_beyond_the_range_of_float64_gets_rows_that_say_so() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    data = [(torch.randn(8, 4, dtype=torch.float64), torch.zeros(8, 3, dtype=torch.float64))]
    small = ks.measure(_scaled_outputs(model, 1e-90), torch.nn.MSELoss(), data, progress=False)
    assert all("multiply the loss" in row.note and row.cosine != row.cosine for row in small)


def _scaled_outputs(model: torch.nn.Module, scale: float) -> torch.nn.Module:
    """The model with outputs times a number."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.inner(inputs) * scale
            return outputs

    return Scaled()


@pytest.mark.parametrize("size", [1e-70, 1e-30, 1e30, 1e70])
@pytest.mark.parametrize("shape", [(3, 4), (4, 3)])
def test_cosines_with_products_do_not_depend_on_the_size_of_gradients(size: float, shape: tuple[int, int]) -> None:
    """With Shampoo² three sums of squares are multiplied: it had a cosine of 0 where two still were numbers."""
    grads = torch.randn(20, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scaled = [GradientStream.from_tensors(grads * factor) for factor in (1.0, size)]
    for name in ("shampoo2", "tnt", "shampoo", "optimal", "soap", "one-sided"):
        expected, found = (ks.cosine(SecondMoment(stream), ks.approx.get(name).fit(stream)) for stream in scaled)
        assert found == pytest.approx(expected, rel=1e-10), name
    # the eigenvalues are asked for where they are known
    operators = [ks.approx.get("shampoo2").fit(stream) for stream in scaled]
    for operator in operators:
        operator.power(0.5)
    expected, found = (ks.cosine(SecondMoment(s), operator) for s, operator in zip(scaled, operators, strict=True))
    assert found == pytest.approx(expected, rel=1e-10)
