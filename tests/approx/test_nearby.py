"""The search for the optimum with a matrix that is close: the same answers, few contractions of the matrix itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kronscope import GradientStream, SecondMoment
from kronscope.approx import Optimal
from kronscope.curvature import nearby as nearby_module
from kronscope.curvature.nearby import nearby


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
    return float(torch.linalg.matrix_norm(rearranged, 2))


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
    assert (next(iter(close.stream)).numel < grads.numel() / 2) == thin
    exact = torch.randn(shape[1], shape[1], generator=torch.Generator().manual_seed(0)).double().square()
    assert torch.allclose(close.left(exact), moment.left(exact), rtol=1e-4, atol=1e-5 * float(moment.left(exact).max()))
    found = Optimal().solve(stream)
    assert found.residual <= 1e-9
    assert found.sigma == pytest.approx(dense_optimum(grads), rel=1e-12)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("samples", [2, 64])
def test_the_matrix_itself_is_asked_a_few_times_only(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = batch_gradients(40, 50, 48, samples, seed=1)
    asked = {True: 0, False: 0}
    contraction = SecondMoment._contraction

    def counted(self: SecondMoment, mode: int, other: Tensor | None) -> Tensor:
        if other is not None:
            asked[self.stream is stream] += 1
        return contraction(self, mode, other)

    monkeypatch.setattr(SecondMoment, "_contraction", counted)
    stream = GradientStream.from_tensors(grads)
    found = Optimal().solve(stream)
    assert found.residual <= 1e-9
    assert asked[True] <= 6 < asked[False]


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
    other = SecondMoment(GradientStream.from_tensors(batch_gradients(25, 20, 22, 30, seed=9)))
    monkeypatch.setattr("kronscope.approx.svd.nearby", lambda moment: other)
    found = Optimal().solve(GradientStream.from_tensors(grads))
    assert found.sigma == pytest.approx(dense_optimum(grads), rel=1e-12)


def test_small_problems_have_no_close_matrix() -> None:
    assert nearby(SecondMoment(GradientStream.from_tensors(batch_gradients(30, 48, 44, 2)))) is None
