"""Losses without a formula of ours: differentiated sample by sample, or refused in words."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kronscope.errors import LabelError, NonFiniteError, OptionError
from kronscope.gradients.losses import Draws, OutputLoss, read_loss
from tests.gradients.naive import close

F64 = torch.float64


class _Slanted(nn.Module):
    """A convex loss whose Hessian is not diagonal, with a float32 buffer."""

    slant: Tensor

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.register_buffer("slant", torch.arange(size * size, dtype=torch.float32).reshape(size, size).sin())

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) @ self.slant.to(outputs.dtype)).square().sum()


class _NoBatching(torch.autograd.Function):
    """A square whose derivative cannot be batched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert isinstance(grad.max().item(), float)
        slope: Tensor = 2 * x * grad
        return slope


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    squares: Tensor = _NoBatching.apply(outputs - targets)  # type: ignore[no-untyped-call]
    return squares.mean()


def _columns(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss.check(outputs, targets)
    (real,) = loss.real(outputs, targets)
    return torch.stack(list(loss.exact(outputs, targets))), real


@pytest.mark.parametrize(
    ("general", "known"),
    [
        (F.cross_entropy, nn.CrossEntropyLoss()),
        (functools.partial(F.mse_loss, reduction="sum"), nn.MSELoss(reduction="sum")),
        (_square, nn.MSELoss()),
        (nn.HuberLoss(delta=1e3, reduction="sum"), lambda x, y: (x - y).square().sum() / 2),
    ],
)
def test_columns_are_those_of_the_same_loss_with_a_formula(general: Any, known: Any) -> None:
    outputs = torch.randn(4, 3, dtype=F64)
    targets = torch.tensor([0, 2, 1, 1]) if general is F.cross_entropy else torch.randn(4, 3, dtype=F64)
    found, expected = (_columns(read_loss(loss), outputs, targets) for loss in (general, known))
    products = [torch.einsum("csx,csy->sxy", columns, columns) for columns, _ in (found, expected)]
    assert close(products[0], products[1], 1e-12)
    assert close(found[1], expected[1], 1e-12)


def test_mixed_columns_are_the_largest_ones_and_sums_of_the_rest() -> None:
    loss, outputs, targets = read_loss(_Slanted()), torch.randn(2, 3, dtype=F64), torch.randn(2, 3, dtype=F64)
    exact, _ = _columns(loss, outputs, targets)
    sizes = loss.column_sizes(outputs, targets)
    assert close(exact.square().sum(2).T, sizes, 1e-12)
    assert close(sizes, sizes.sort(descending=True).values, 0.0)
    draws = Draws(3, torch.arange(2), 2, fixed=1)
    mixed = list(loss.mixed(outputs, targets, draws))
    assert close(mixed[0], exact[0], 1e-12)
    for number, column in enumerate(mixed[1:]):
        signs = draws.signs(number, 3).T[1:, :, None]
        assert close(column, (exact[1:] * signs).sum(0) / 2**0.5, 1e-12)


def test_the_loss_given_is_left_as_it_was() -> None:
    module = _Slanted().train()
    _columns(read_loss(module), torch.randn(2, 3), torch.randn(2, 3))
    assert module.slant.dtype == torch.float32
    assert module.training


def test_a_loss_with_kinks_has_no_curvature_beyond_them() -> None:
    outputs, targets = torch.tensor([[0.1, 5.0]], dtype=F64), torch.zeros(1, 2, dtype=F64)
    exact, real = _columns(read_loss(nn.SmoothL1Loss(reduction="sum")), outputs, targets)
    assert close(torch.einsum("csx,csy->xy", exact, exact), torch.diag(torch.tensor([1.0, 0.0], dtype=F64)), 1e-12)
    assert close(real, torch.tensor([[0.1, 1.0]], dtype=F64), 1e-12)


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (nn.HuberLoss(reduction="none"), OptionError, "one number for a sample, .* got shape \\(1, 3\\)"),
        (lambda outputs, targets: 1.0, OptionError, "got float"),
        (lambda outputs, targets: outputs.detach().sum(), OptionError, "cannot be differentiated"),
        (nn.NLLLoss(), LabelError, "NLLLoss.* fails for the outputs \\(1, 3\\) .* torch.float64 of one sample"),
    ],
)
def test_losses_that_do_not_work_on_one_sample(loss: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_loss(loss).check(torch.zeros(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("loss", "outputs", "error", "words"),
    [
        (lambda x, y: x.sin().sum(), torch.ones(1, 2), OptionError, "not convex: .* eigenvalue -0.841 .*empirical"),
        (nn.HuberLoss(), torch.ones(1, 257), OptionError, "up to 256 outputs per sample, got 257"),
        (nn.NLLLoss(), torch.ones(1, 2), OptionError, "is linear, .* nn.CrossEntropyLoss"),
        (lambda x, y: x.sqrt().sum(), torch.zeros(1, 2), NonFiniteError, "NaN or infinity"),
    ],
)
def test_no_exact_columns_without_a_small_positive_hessian(
    loss: Any, outputs: Tensor, error: type[Exception], words: str
) -> None:
    targets = torch.tensor([0]) if isinstance(loss, nn.NLLLoss) else torch.zeros_like(outputs)
    read, draws = read_loss(loss), Draws(0, torch.arange(1))
    read.check(outputs, targets)
    assert read.real(outputs, targets).count == 1
    for columns in (read.exact, read.column_sizes, lambda x, y: read.mixed(x, y, draws)):
        with pytest.raises(error, match=words):
            columns(outputs, targets)


def test_labels_of_an_unknown_distribution_are_not_drawn() -> None:
    with pytest.raises(OptionError, match=r"Labels cannot be drawn for .*HuberLoss.* labels='exact'"):
        read_loss(nn.HuberLoss()).sampled(torch.zeros(1, 2), torch.zeros(1, 2), Draws(0, torch.arange(1)))


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = _Slanted()
    module.state = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(OptionError, match=r"_Slanted cannot be copied .* wrap it in a function"):
        read_loss(module)


def test_texts_tell_losses_apart_but_not_processes() -> None:
    class Callable:
        def __init__(self, delta: float) -> None:
            self.delta = delta

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.huber_loss(outputs, targets, delta=self.delta)

    def all_losses(delta: float, size: int) -> list[Any]:
        huber = nn.HuberLoss(delta=delta)
        return [huber, functools.partial(F.huber_loss, delta=delta), Callable(delta), _Slanted(size), F.huber_loss]

    one, same, other = (list(map(read_loss, all_losses(*given))) for given in [(1.0, 3), (1.0, 3), (2.0, 4)])
    assert list(map(repr, one)) == list(map(repr, same))
    assert one[:4] == same[:4]
    assert all(repr(a) != repr(b) and a != b for a, b in zip(one[:4], other[:4], strict=True))
    assert "0x" not in "".join(map(repr, one))
    assert repr(one[4]) == "DifferentiatedLoss(text='torch.nn.functional.huber_loss')"
