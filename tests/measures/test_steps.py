"""Steps that are preconditioned with an approximation, against dense solves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kronscope as ks
from kronscope import approx
from kronscope.errors import KronscopeError, OptionError, ShapeError
from kronscope.kron import Operator
from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.measures import steps


def problem(m: int, n: int, count: int) -> tuple[ks.GradientStream, Tensor]:
    draw = torch.Generator().manual_seed(10 * m + n)
    grads = torch.randn(count, m, n, generator=draw, dtype=torch.float64) * torch.logspace(
        0, -2, n, dtype=torch.float64
    )
    return ks.GradientStream.from_tensors(grads), torch.randn(m, n, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("name", ["optimal", "shampoo2", "shampoo", "soap", "diagonal", "identity", "one-sided"])
@pytest.mark.parametrize(("m", "n", "count"), [(3, 5, 40), (6, 2, 7)])
def test_quality_is_that_of_dense_solves(name: str, m: int, n: int, count: int) -> None:
    stream, g = problem(m, n, count)
    check_against_dense_solves(ks.SecondMoment(stream), approx.get(name).fit(stream), g)


@pytest.mark.parametrize("optimizer", [ks.Shampoo, ks.KLShampoo, ks.SOAP])
@pytest.mark.parametrize("block_size", [4, math.inf])
def test_what_an_optimizer_holds_is_judged_also_in_blocks(optimizer: type[ks.Shampoo], block_size: float) -> None:
    stream, g = problem(6, 5, 40)
    weight = torch.nn.Parameter(torch.zeros(6, 5))
    live = optimizer([weight], block_size=block_size)
    for seed in range(3):
        weight.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
        live.step()
    check_against_dense_solves(ks.SecondMoment(stream), live.operator(weight), g)


def test_several_approximations_share_one_newton_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, g = problem(4, 3, 30)
    H, fits = ks.SecondMoment(stream), {name: approx.get(name).fit(stream) for name in ("optimal", "shampoo", "soap")}
    apart = {name: ks.step_quality(H, K, g, damping=[0.1, 1.0]) for name, K in fits.items()}
    solve, calls = steps._conjugate_gradients, []

    def counted(apply: Callable[[Tensor], Tensor], gradient: Tensor, tolerance: float) -> tuple[Tensor, int]:
        calls.append(apply)
        return solve(apply, gradient, tolerance)

    monkeypatch.setattr(steps, "_conjugate_gradients", counted)
    together = ks.step_quality(H, fits, g, damping=[0.1, 1.0])
    assert list(together) == list(fits)
    for name, answers in together.items():
        for one, other in zip(answers, apart[name], strict=True):
            assert vars(one) == pytest.approx(vars(other), rel=1e-12)
    assert len(calls) == 2
    assert ks.step_quality(H, {}, g) == {}


class ClassesFirst(torch.nn.Module):
    """Turns (batch, position, class) into what a cross entropy takes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize("positions", [1, 6])
def test_random_columns_are_multiplied_in_float32_and_judged_as_dense_solves(positions: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 300), ClassesFirst())
    batch = torch.randn(30, positions, 7), torch.randint(300, (30, positions))
    with pytest.warns(UserWarning, match="random columns"):
        H = ks.second_moment(model, torch.nn.CrossEntropyLoss(), [batch], "0.weight", max_columns=16, progress=False)
    assert H.stream.random_columns
    dense, V = H.to_dense(), torch.randn(2, 5, 7, dtype=torch.float64)
    for scale in (1.0, 1e-30, 1e30):  # the last two are beyond float32 once they are squared
        expected = scale * (V.flatten(1) @ dense.T).view_as(V)
        torch.testing.assert_close(H.matvec(scale * V), expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    assert float(H.matvec(torch.zeros(5, 7)).abs().max()) == 0
    check_against_dense_solves(H, approx.get("shampoo2").fit(H.stream), V[0], within=1e-4)


def test_entries_of_no_block_are_damped_alone() -> None:
    stream, g = problem(2, 3, 20)
    part = ks.GradientStream.from_tensors(torch.randn(9, 2, 2, generator=torch.Generator().manual_seed(0)))
    corner = torch.tensor([[0, 1], [3, 4]])
    K = BlockDiagonal((2, 3), [(corner, approx.get("shampoo2").fit(part))])
    check_against_dense_solves(ks.SecondMoment(stream), K, g)


def check_against_dense_solves(H: ks.SecondMoment, K: Operator, g: Tensor, within: float = 1e-6) -> None:
    m, n = g.shape
    full, other = H.to_dense(), K.to_dense()
    other = other * (full * other).sum() / other.square().sum()
    eye, flat = torch.eye(m * n, dtype=torch.float64), g.flatten()
    for found in ks.step_quality(H, K, g, damping=[0.01, 1.0]):
        ridge = found.damping * full.diagonal().mean() * eye
        newton, step = torch.linalg.solve(full + ridge, flat), torch.linalg.solve(other + ridge, flat)

        def decrease(d: Tensor, ridge: Tensor = ridge, newton: Tensor = newton) -> float:
            return float((flat @ d) ** 2 / (d @ (full + ridge) @ d) / (flat @ newton))

        assert found.cosine == pytest.approx(float(step @ newton / step.norm() / newton.norm()), abs=within)
        assert found.decrease == pytest.approx(decrease(step), abs=within)
        assert found.plain_decrease == pytest.approx(decrease(flat), abs=within)
        assert 0 < found.iterations <= 2 * m * n


def test_a_matrix_that_is_a_kronecker_product_is_inverted_perfectly() -> None:
    pieces = [torch.einsum("a,b->ab", *pair) for pair in zip(torch.eye(2), torch.eye(2), strict=True)]
    corners = torch.stack([*pieces, pieces[0].flip(1), pieces[1].flip(1)]).double()
    stream = ks.GradientStream.from_tensors(corners)
    H, K = ks.SecondMoment(stream), approx.get("shampoo2").fit(stream)
    for found in ks.step_quality(H, K, torch.randn(2, 2)):
        assert found.cosine == pytest.approx(1.0)
        assert found.decrease == pytest.approx(1.0)


def test_what_cannot_be_compared_is_refused_in_words() -> None:
    stream, g = problem(3, 4, 10)
    H, K = ks.SecondMoment(stream), approx.get("shampoo2").fit(stream)
    with pytest.raises(ShapeError, match="the gradient is"):
        ks.step_quality(H, K, g.T)
    with pytest.raises(OptionError, match="damping must be positive"):
        ks.step_quality(H, K, g, damping=[0.0])
    with pytest.raises(OptionError, match="must not be zero"):
        ks.step_quality(H, K, torch.zeros(3, 4))
    with pytest.raises(KronscopeError, match="NaN or infinity"):
        ks.step_quality(H, K, torch.full((3, 4), float("nan")))
    with pytest.raises(OptionError, match="no eigenbasis"):
        ks.step_quality(H, approx.get("kronecker-sum").fit(stream), g)
