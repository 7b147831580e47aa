"""The statements of "A New Perspective on Shampoo's Preconditioner", each a test that carries its name.

Where the paper's vec is column-stacking, ours is row-major; L is m x m on the output side, R is n x n.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kronscope as ks
from kronscope import approx
from kronscope.approx import Optimal, singular_triples
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct
from kronscope.measures import batch_stream
from kronscope.testing import StreamRecipe, oracle
from kronscope.testing.strategies import psd_matrices, seeds, shapes, streams


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def smallest_eigenvalue(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[0])


def fitted(name: str, stream: GradientStream, **options: float) -> Tensor:
    return approx.get(name, **options).fit(stream).to_dense()


@given(shapes(), seeds())
def test_lemma_1_kronecker_products_act_on_both_sides(shape: tuple[int, int], seed: int) -> None:
    """(L ⊗ R) vec(G) = vec(L G Rᵀ), row-major."""
    m, n = shape
    L, R, G = normal(seed, m, m), normal(seed + 1, n, n), normal(seed + 2, m, n)
    torch.testing.assert_close(torch.kron(L, R) @ G.flatten(), (L @ G @ R.T).flatten())
    product = KroneckerProduct(L @ L.T, R @ R.T)
    torch.testing.assert_close(product.apply(G), L @ L.T @ G @ R @ R.T)


def largest_rank(stream: GradientStream) -> int:
    return max(int(torch.linalg.matrix_rank(grad)) for grad in oracle.atoms(stream)[0])


@given(streams(max_dim=4, badly_scaled=False), st.sampled_from([1e-6, 1e-2, 1.0]))
def test_lemma_2_loewner_bound_with_epsilon(stream: GradientStream, epsilon: float) -> None:
    """εI + (1/r) Σ g gᵀ ≼ (εI + Σ G Gᵀ)^½ ⊗ (εI + Σ Gᵀ G)^½ for gradients of rank at most r."""
    m, n = stream.shape
    H, moment = oracle.second_moment(stream), ks.SecondMoment(stream)
    r = largest_rank(stream)
    L = moment.left() + epsilon * torch.eye(m).double()
    R = moment.right() + epsilon * torch.eye(n).double()
    bound = KroneckerProduct(L, R).power(0.5).to_dense()
    gap = bound - epsilon * torch.eye(m * n).double() - H / max(r, 1)
    assert smallest_eigenvalue(gap) >= -1e-9 * float(bound.norm())


@given(streams(max_dim=4))
def test_lemma_3_loewner_bound_by_shampoo(stream: GradientStream) -> None:
    """H ≼ r E[G Gᵀ]^½ ⊗ E[Gᵀ G]^½ for gradients of rank at most r."""
    H, K = oracle.second_moment(stream), fitted("shampoo", stream)
    assert smallest_eigenvalue(largest_rank(stream) * K - H) >= -1e-9 * float(K.norm())


def test_lemma_3_needs_the_rank() -> None:
    """One orthogonal gradient: H reaches r times Shampoo, so that r cannot be left out."""
    stream = GradientStream.from_tensors(torch.eye(3, dtype=torch.float64)[None])
    H, K = oracle.second_moment(stream), fitted("shampoo", stream)
    assert abs(smallest_eigenvalue(3 * K - H)) < 1e-12
    assert smallest_eigenvalue(2.9 * K - H) < -0.05


@given(shapes(4), seeds())
def test_lemma_4_the_rearrangement_turns_kronecker_products_into_rank_one(shape: tuple[int, int], seed: int) -> None:
    """‖H − L ⊗ R‖ = ‖reshape(H) − vec(L) vec(R)ᵀ‖, row-major, for any H, L (m x m) and R (n x n)."""
    m, n = shape
    H, L, R = normal(seed, m * n, m * n), normal(seed + 1, m, m), normal(seed + 2, n, n)
    one = (H - torch.kron(L, R)).norm()
    other = (oracle.rearrange(H, shape) - torch.outer(L.flatten(), R.flatten())).norm()
    torch.testing.assert_close(one, other)


def test_lemma_4_fails_for_the_other_order_of_vec() -> None:
    """Mixing the two conventions is silent: L ⊗ R and R ⊗ L have one shape, and only one of them fits."""
    stream = StreamRecipe("factored", (3, 4), samples=50, seed=1).build()
    H, moment = oracle.second_moment(stream), ks.SecondMoment(stream)
    right = oracle.cosine(H, torch.kron(moment.left(), moment.right()))
    wrong = oracle.cosine(H, torch.kron(moment.right(), moment.left()))
    assert right > wrong + 0.01
    assert math.isclose(right, ks.cosine(moment, approx.get("shampoo2").fit(stream)), abs_tol=1e-12)


@given(streams(max_dim=4, badly_scaled=False), seeds())
def test_corollary_1_the_first_singular_triple_is_the_closest_kronecker_product(
    stream: GradientStream, seed: int
) -> None:
    """min ‖H − L ⊗ R‖ is reached by σ₁ U₁ ⊗ V₁ and is √(‖H‖² − σ₁²)."""
    H, fit = oracle.second_moment(stream), Optimal().solve(stream)
    sigma = oracle.rearranged_singular_values(stream)
    distance = float((H - fit.operator.to_dense()).norm())
    scale = float(H.norm())
    assert math.isclose(fit.sigma, float(sigma[0]), rel_tol=1e-10)
    assert abs(distance - float(sigma[1:].norm())) <= 1e-7 * scale
    for attempt in range(5):
        L = fit.operator.left.matrix + 0.1 * normal(seed + attempt, *fit.operator.left.matrix.shape)
        R = fit.operator.right.matrix + 0.1 * normal(seed + attempt + 9, *fit.operator.right.matrix.shape)
        other = torch.kron(L, R)
        best_scale = float((H * other).sum() / (other * other).sum())
        assert float((H - best_scale * other).norm()) >= distance - 1e-9 * scale


@given(streams(max_dim=5))
def test_proposition_1_one_round_of_power_iteration_is_shampoo_squared(stream: GradientStream) -> None:
    """One simultaneous round from the identities is E[G Gᵀ] ⊗ E[Gᵀ G], up to scale."""
    round_one, squared = fitted("optimal-paper", stream, rounds=1), fitted("shampoo2", stream)
    assert oracle.cosine(round_one, squared) >= 1 - 1e-12
    m, n = stream.shape
    rearranged = oracle.rearrange(oracle.second_moment(stream), stream.shape)
    L = (rearranged @ torch.eye(n).double().flatten()).reshape(m, m)
    R = (rearranged.T @ torch.eye(m).double().flatten()).reshape(n, n)
    torch.testing.assert_close(
        squared, torch.kron(L, R) / torch.trace(L), rtol=1e-9, atol=1e-12 * float(squared.norm())
    )


def test_proposition_1_is_about_simultaneous_rounds() -> None:
    """An alternating round uses the new L for R already, and is another matrix."""
    stream = StreamRecipe("dense", (3, 4), samples=5, seed=2).build()
    moment = ks.SecondMoment(stream)
    alternating = torch.kron(moment.left(), moment.right(moment.left()))
    assert oracle.cosine(alternating, fitted("shampoo2", stream)) < 1 - 1e-4


@given(streams(max_dim=5))
def test_lemma_5_the_first_singular_vectors_are_positive_semi_definite(stream: GradientStream) -> None:
    """V₁ is PSD, and U₁ with it."""
    fit = Optimal().solve(stream).operator
    for factor in (fit.left.matrix, fit.right.matrix):
        assert smallest_eigenvalue(factor) >= -1e-8
        assert math.isclose(float(factor.norm()), 1.0, rel_tol=1e-9)
    assert fit.scale > 0


@given(psd_matrices(6), psd_matrices(6))
def test_proposition_2_the_identity_maximises_the_worst_inner_product(matrix: Tensor, other: Tensor) -> None:
    """I/√m = argmax over unit PSD M of the least inner product with a unit PSD M'."""
    m = len(matrix)
    identity = torch.eye(m).double() / m**0.5
    if float(other.norm()) > 0 and len(other) == m:
        # the identity's inner product with any unit PSD matrix is at least 1/√m …
        assert float((identity * other).sum() / other.norm()) >= 1 / m**0.5 - 1e-12
    if float(matrix.norm()) == 0:
        return
    vectors = torch.linalg.eigh(matrix / matrix.norm()).eigenvectors
    worst = torch.outer(vectors[:, 0], vectors[:, 0])
    assert math.isclose(float(worst.norm()), 1.0, rel_tol=1e-12)
    least = float((matrix / matrix.norm() * worst).sum())
    # … while every other one has a rank-one matrix it meets at no more, with equality for the identity alone
    assert least <= 1 / m**0.5 + 1e-12
    if least >= 1 / m**0.5 - 1e-12:
        torch.testing.assert_close(matrix / matrix.norm(), identity, rtol=0, atol=1e-5)


@given(streams(max_dim=4, deficient=False, badly_scaled=False))
def test_lemma_6_later_singular_vectors_are_not_positive_semi_definite(stream: GradientStream) -> None:
    """If V₁ is positive definite, no V_i with i ≥ 2 is PSD (nor is −V_i)."""
    found = singular_triples(ks.SecondMoment(stream), 5, tolerance=1e-10, max_rounds=1000)
    for factors in (found.left, found.right):
        if smallest_eigenvalue(factors[0]) < 1e-4:
            continue
        for later, sigma in zip(factors[1:], found.sigma[1:], strict=True):
            if float(sigma) < 1e-6 * float(found.sigma[0]):
                continue
            values = torch.linalg.eigvals(later)
            # an antisymmetric factor has imaginary eigenvalues, a symmetric one real ones of both signs
            is_antisymmetric = bool(torch.allclose(later, -later.T, atol=1e-7))
            assert is_antisymmetric or (float(values.real.min()) < -1e-5 and float(values.real.max()) > 1e-5)


def test_lemma_6_is_not_vacuous() -> None:
    stream = StreamRecipe("dense", (3, 4), samples=30).build()
    found = singular_triples(ks.SecondMoment(stream), 3, tolerance=1e-10, max_rounds=1000)
    assert smallest_eigenvalue(found.right[0]) > 0.1
    assert len(found.sigma) == 3


def exact_kronecker(seed: int, m: int, n: int) -> GradientStream:
    """All products of the columns of two square roots: H = A ⊗ B exactly."""
    a, b = normal(seed, m, m), normal(seed + 1, n, n)
    return GradientStream.from_tensors(torch.einsum("im,jn->ijmn", a, b).reshape(-1, m, n))


@given(shapes(4), seeds())
def test_corollary_2_an_exact_kronecker_product_is_recovered_with_its_scale(shape: tuple[int, int], seed: int) -> None:
    """If Ĥ has rank one then H = E[G Gᵀ] ⊗ E[Gᵀ G] / tr E[G Gᵀ]."""
    stream = exact_kronecker(seed, *shape)
    H = oracle.second_moment(stream)
    sigma = oracle.rearranged_singular_values(stream)
    assert float(sigma[1:].norm()) <= 1e-12 * float(sigma[0])
    for name in ("shampoo2", "tnt", "optimal"):
        torch.testing.assert_close(fitted(name, stream), H, rtol=0, atol=1e-9 * float(H.norm()))


def test_corollary_2_needs_the_trace() -> None:
    stream = exact_kronecker(0, 2, 3)
    H, moment = oracle.second_moment(stream), ks.SecondMoment(stream)
    assert float((torch.kron(moment.left(), moment.right()) - H).norm()) > 0.1 * float(H.norm())


@pytest.mark.parametrize("p", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("rank", [4, 2])
def test_powers_of_shampoo_are_half_powers_of_its_square(p: float, rank: int) -> None:
    """H_{1/2}^{-p} = H_1^{-p/2}: both searches over exponents go through the same preconditioners."""
    stream = StreamRecipe("dense", (3, 4), samples=30, col_rank=rank).build()
    moment = ks.SecondMoment(stream)
    half = approx.get("shampoo").fit(stream)
    whole = KroneckerProduct(moment.left(), moment.right())
    torch.testing.assert_close(half.power(-p).to_dense(), whole.power(-p / 2).to_dense(), rtol=1e-9, atol=1e-10)
    scaled = approx.get("shampoo2").fit(stream).power(-p / 2)
    assert oracle.cosine(half.power(-p).to_dense(), scaled.to_dense()) >= 1 - 1e-12


class Batches:
    """Exact expectations over all batches of B out of N samples, each with its own finite set of labels."""

    def __init__(self, grads: list[list[Tensor]], probabilities: list[list[float]]) -> None:
        self.grads, self.probabilities = grads, probabilities

    def second_moment(self, size: int, *, replacement: bool) -> Tensor:
        """E[vec(G_B) vec(G_B)ᵀ] by going through every batch and every draw of its labels."""
        count = len(self.grads)
        batches = list(
            itertools.product(range(count), repeat=size) if replacement else itertools.permutations(range(count), size)
        )
        total: Tensor | float = 0.0
        for batch in batches:
            for labels in itertools.product(*(range(len(self.grads[x])) for x in batch)):
                chance = math.prod(self.probabilities[x][s] for x, s in zip(batch, labels, strict=True))
                mean = torch.stack([self.grads[x][s] for x, s in zip(batch, labels, strict=True)]).mean(0).flatten()
                total = total + chance / len(batches) * torch.outer(mean, mean)
        assert isinstance(total, Tensor)
        return total


def softmax_gradients(seed: int, count: int, classes: int) -> Batches:
    """G_{x,s} = (p − e_s) aᵀ of a softmax layer, whose mean over s ~ p is zero."""
    inputs, logits = normal(seed, count, 3), normal(seed + 1, count, classes)
    p = logits.softmax(1)
    eye = torch.eye(classes).double()
    grads = [[torch.outer(p[x] - eye[s], inputs[x]) for s in range(classes)] for x in range(count)]
    return Batches(grads, p.tolist())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("replacement", [True, False])
def test_lemma_7_the_batch_size_does_not_matter_with_sampled_labels(size: int, replacement: bool) -> None:
    """|B| E_{B,s}[G_{B,s} G_{B,s}ᵀ] = E_{x,s}[G_{x,s} G_{x,s}ᵀ], for the whole of H and so for L and R."""
    batches = softmax_gradients(0, count=3, classes=2)
    expected = batches.second_moment(1, replacement=True)
    torch.testing.assert_close(size * batches.second_moment(size, replacement=replacement), expected)


def test_lemma_7_in_the_library_exact_labels_know_no_batch_size() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    data = [(normal(0, 6, 3), torch.tensor([0, 1, 2, 2, 1, 0]))]
    rows = [
        [
            (row.approximation, row.cosine)
            for row in ks.measure(model, torch.nn.CrossEntropyLoss(), data, batch_size=size, progress=False)
        ]
        for size in (1, 5)
    ]
    assert rows[0] == rows[1]


def real_gradients(seed: int, count: int) -> Batches:
    """One gradient per sample, with a mean that is not zero."""
    return Batches([[normal(seed + x, 2, 3) + 0.5] for x in range(count)], [[1.0]] * count)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lemma_8_batches_of_real_labels_mix_in_the_mean_gradient(size: int) -> None:
    """E_B[G_B G_Bᵀ] = E[G Gᵀ]/|B| + (1 − 1/|B|) E[G] E[G]ᵀ over batches drawn with replacement."""
    batches = real_gradients(0, 4)
    enumerated = batches.second_moment(size, replacement=True)
    grads = torch.stack([grads[0] for grads in batches.grads])
    mean = grads.mean(0).flatten()
    second = batches.second_moment(1, replacement=True)
    torch.testing.assert_close(enumerated, second / size + (1 - 1 / size) * torch.outer(mean, mean))
    stream = batch_stream(GradientStream.from_tensors(grads), size)
    torch.testing.assert_close(oracle.second_moment(stream), size * enumerated)
    check_factors(stream, size * enumerated)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lemma_8_without_replacement(size: int) -> None:
    """B E_B[G_B G_Bᵀ] = E₂ + (B−1)(N Ḡ Ḡᵀ − E₂)/(N−1); at B = N it is N Ḡ Ḡᵀ."""
    batches = real_gradients(10, 4)
    enumerated = batches.second_moment(size, replacement=False)
    grads = torch.stack([grads[0] for grads in batches.grads])
    stream = batch_stream(GradientStream.from_tensors(grads), size, replacement=False)
    torch.testing.assert_close(oracle.second_moment(stream), size * enumerated)
    check_factors(stream, size * enumerated)
    if size == 4:
        mean = grads.mean(0).flatten()
        torch.testing.assert_close(4 * enumerated, 4 * torch.outer(mean, mean))


def check_factors(stream: GradientStream, H: Tensor) -> None:
    """The stream's own contractions, which it may know in closed form."""
    moment = ks.SecondMoment(stream)
    torch.testing.assert_close(moment.left(), oracle.left(H, stream.shape))
    torch.testing.assert_close(moment.right(), oracle.right(H, stream.shape))
    assert math.isclose(moment.norm(), float(H.norm()), rel_tol=1e-12)
