"""The search for the optimum with a matrix that is close: the same answers, few contractions of the matrix itself."""

from __future__ import annotations

import pytest
import torch
from scipy.sparse.linalg import svds
from torch import Tensor

from kronscope import GradientStream, SecondMoment
from kronscope.approx import Optimal
from kronscope.curvature import nearby as nearby_module
from kronscope.curvature.nearby import Nearby, nearby
from kronscope.curvature.passes import Passes
from kronscope.gradients.atoms import FactoredAtoms


def batch_gradients(count: int, m: int, n: int, samples: int, seed: int = 0) -> Tensor:
    """Gradients of a linear layer on batches of a few samples, with spectra that decay."""
    generator = torch.Generator().manual_seed(seed)
    errors = torch.randn(count, samples, m, generator=generator) * torch.logspace(0, -1, m)
    inputs = torch.randn(count, samples, n, generator=generator) * torch.logspace(0, -2, n)
    return errors.mT @ inputs


def dense_optimum(grads: Tensor) -> float:
    """The largest singular value of the rearranged matrix."""
    wide = grads.double()
    rearranged = torch.einsum("kab,kcd->acbd", wide, wide).reshape(wide.shape[1] ** 2, -1) / len(wide)
    return float(svds(rearranged.numpy(), 1, return_singular_vectors=False)[0])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby_module, "_WORTH", 0.0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("samples", "thin"), [(2, True), (64, False)], ids=["gradients of low rank", "gradients of full rank"]
)
@pytest.mark.parametrize("shape", [(48, 44), (44, 60)])
def test_the_optimum_found_with_a_close_matrix_is_the_dense_one(
    samples: int, thin: bool, shape: tuple[int, int]
) -> None:
    grads = batch_gradients(30, *shape, samples)
    stream = GradientStream.from_tensors(grads)
    moment = SecondMoment(stream)
    close = nearby(moment)
    assert close is not None
    assert (next(iter(close.matrix.stream)).numel < grads.numel() / 2) == thin
    exact = torch.randn(shape[1], shape[1], generator=torch.Generator().manual_seed(0)).double().square()
    image = moment.left(exact)
    assert torch.allclose(close.matrix.left(exact), image, rtol=1e-4, atol=1e-5 * float(image.max()))
    found = Optimal().solve(stream)
    assert found.residual <= 1e-9
    assert found.sigma == pytest.approx(dense_optimum(grads), rel=1e-12)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("samples", [2, 64])
def test_the_matrix_itself_is_asked_a_few_times_only(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = batch_gradients(40, 50, 48, samples, seed=1)
    asked = {True: 0, False: 0}
    contraction = Passes.contraction

    def counted(self: Passes, mode: int, other: Tensor | None) -> Tensor:
        if other is not None:
            asked[self.stream is stream] += 1
        return contraction(self, mode, other)

    monkeypatch.setattr(Passes, "contraction", counted)
    stream = GradientStream.from_tensors(grads)
    found = Optimal().solve(stream)
    assert found.residual <= 1e-9
    # thin factors give the contractions of the matrix itself, too
    assert asked[True] <= (0 if samples == 2 else 6) < asked[False]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("shape", [(48, 60), (60, 48)])
def test_contractions_by_thin_factors_leave_out_only_what_they_say(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(4)
    grads = batch_gradients(70, *shape, 2)
    # more than rounding, so that what is left out shows
    grads += 2e-6 * grads.flatten(1).norm(dim=1).view(-1, 1, 1) / 50 * torch.randn(grads.shape, generator=generator)
    weights = torch.rand(70, generator=generator).double()
    moment = SecondMoment(GradientStream.from_tensors(grads, weights=weights))
    close = nearby(moment)
    assert close is not None
    assert close.refined is not None
    bound = close.refined.left_out
    assert 1e-13 < bound / moment.trace() < 1e-10
    for size, thin, itself, near in (
        (shape[1], close.refined.left, moment.left, close.matrix.left),
        (shape[0], close.refined.right, moment.right, close.matrix.right),
    ):
        middle = torch.randn(size, size, generator=generator).double()
        middle = middle + middle.T
        middle /= middle.norm()
        error = float((thin(middle) - itself(middle)).norm())
        assert error <= bound
        # of the first order without the refinement
        assert error < 1e-3 * float((near(middle) - itself(middle)).norm())


@pytest.mark.usefixtures("always")
def test_what_float32_does_not_hold_is_searched_with_the_matrix_itself() -> None:
    grads = batch_gradients(20, 9, 8, 3)
    assert nearby(SecondMoment(GradientStream.from_tensors(grads.double()))) is None
    assert nearby(SecondMoment(GradientStream.from_tensors(grads * 1e-20))) is None
    assert Optimal().solve(GradientStream.from_tensors(grads * 1e-20)).residual <= 1e-9


@pytest.mark.usefixtures("always")
def test_gradients_of_a_higher_rank_than_the_first_ones_are_not_cut() -> None:
    grads = torch.cat([batch_gradients(16, 64, 64, 2), batch_gradients(16, 64, 64, 40)])
    stream = GradientStream.from_tensors(grads[torch.randperm(32, generator=torch.Generator().manual_seed(3))])
    assert Optimal().solve(stream).sigma == pytest.approx(dense_optimum(grads), rel=1e-12)


@pytest.mark.usefixtures("always")
def test_corrections_that_do_not_help_leave_it_to_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = batch_gradients(25, 20, 22, 30)
    other = Nearby(SecondMoment(GradientStream.from_tensors(batch_gradients(25, 20, 22, 30, seed=9))))
    monkeypatch.setattr("kronscope.approx.svd.nearby", lambda moment: other)
    found = Optimal().solve(GradientStream.from_tensors(grads))
    assert found.sigma == pytest.approx(dense_optimum(grads), rel=1e-12)


def test_small_problems_have_no_close_matrix() -> None:
    assert nearby(SecondMoment(GradientStream.from_tensors(batch_gradients(30, 48, 44, 2)))) is None


@pytest.mark.parametrize("tokens", [1, 6])
def test_the_optimum_of_random_float32_columns_is_as_good_as_their_products(tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, cols = torch.randn(12, 8, tokens, 9, generator=generator), torch.randn(12, 1, tokens, 7, generator=generator)
    chunk = FactoredAtoms(rows, cols, torch.full((12,), 1 / 12, dtype=torch.float64), torch.arange(12))
    found = Optimal().solve(GradientStream.of_chunks(chunk, random_columns=8))
    assert found.residual <= 1e-5
    grads = chunk.dense().grads.flatten(0, 1)
    assert found.sigma == pytest.approx(8 * dense_optimum(grads), rel=1e-5)
