"""Columns of every loss and label mode, against Hessians and gradients of the loss modules themselves."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from kronscope.errors import LabelError, OptionError
from kronscope.gradients.losses import Draws, OutputLoss, read_loss
from kronscope.gradients.losses.differentiated import DifferentiatedLoss
from tests.gradients.naive import close

F64 = torch.float64


def _hessian(loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    found = torch.autograd.functional.hessian(lambda out: loss(out, targets), outputs)
    assert isinstance(found, Tensor)
    return found.reshape(outputs.numel(), outputs.numel())


def _cases(reduction: str) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    tokens = torch.randint(0, 4, (3, 5))
    tokens[0, 1:] = -100
    tokens[1, 2] = -100
    pictures = torch.randint(0, 3, (2, 2, 3))
    pictures[1, 0] = 7
    return {
        "classes": (nn.CrossEntropyLoss(reduction=reduction), torch.randn(4, 5, dtype=F64), torch.tensor([0, 4, 2, 2])),
        "two classes": (
            nn.CrossEntropyLoss(reduction=reduction),
            torch.randn(3, 2, dtype=F64),
            torch.tensor([0, 1, 1]),
        ),
        "tokens": (nn.CrossEntropyLoss(reduction=reduction), torch.randn(3, 4, 5, dtype=F64), tokens),
        "pictures": (
            nn.CrossEntropyLoss(ignore_index=7, reduction=reduction),
            torch.randn(2, 3, 2, 3, dtype=F64),
            pictures,
        ),
        "int32 classes": (
            nn.CrossEntropyLoss(reduction=reduction),
            torch.randn(2, 3, dtype=F64),
            torch.tensor([2, 0], dtype=torch.int32),
        ),
        "regression": (nn.MSELoss(reduction=reduction), torch.randn(4, 3, dtype=F64), torch.randn(4, 3, dtype=F64)),
        "one number": (nn.MSELoss(reduction=reduction), torch.randn(4, dtype=F64), torch.randn(4, dtype=F64)),
        "regression sequence": (
            nn.MSELoss(reduction=reduction),
            torch.randn(2, 3, 2, dtype=F64),
            torch.randn(2, 3, 2, dtype=F64),
        ),
        "binary": (
            nn.BCEWithLogitsLoss(reduction=reduction),
            torch.randn(4, 3, dtype=F64),
            torch.rand(4, 3, dtype=F64),
        ),
        "one logit": (nn.BCEWithLogitsLoss(reduction=reduction), torch.randn(4, dtype=F64), torch.tensor([0, 1, 1, 0])),
    }


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", _cases("mean"))
def test_columns(name: str, reduction: str) -> None:
    module, outputs, targets = _cases(reduction)[name]
    loss = read_loss(module)
    loss.check(outputs, targets)
    exact, (real,) = loss.exact(outputs, targets), loss.real(outputs, targets)
    assert exact.count == loss.exact_columns(outputs.shape, loss.terms(targets)) == len(list(exact))
    stacked = torch.stack(list(exact))
    draws = Draws(0, torch.arange(len(outputs)), 4000)
    sampled = torch.stack(list(loss.sampled(outputs, targets, draws)))
    assert sampled.shape == (4000, *outputs.shape)
    integers = targets.dtype in (torch.int32, torch.int64)
    for index in range(len(outputs)):
        one, target = outputs[index : index + 1], targets[index : index + 1]
        if integers:
            target = target.long() if isinstance(module, nn.CrossEntropyLoss) else target.double()
        hessian = _hessian(module, one, target)
        columns = stacked[:, index].reshape(exact.count, -1)
        assert close(columns.T @ columns, hessian, 1e-12)
        leaf = one.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(leaf, target), leaf)
        assert close(real[index], gradient[0], 1e-12)
        # The sum over draws estimates the Hessian: off by about 1/√draws.
        drawn = sampled[:, index].reshape(4000, -1)
        assert close(drawn.T @ drawn, hessian, 0.15)


def test_numbers_of_columns() -> None:
    for name, count in {"classes": 4, "two classes": 1, "tokens": 15, "regression": 3, "binary": 3}.items():
        module, outputs, targets = _cases("mean")[name]
        loss = read_loss(module)
        assert loss.exact(outputs, targets).count == count, name


def test_sampled_cross_entropy_pulls_back_p_minus_a_label() -> None:
    outputs, targets = torch.randn(3, 4, 2, dtype=F64), torch.tensor([[0, 1], [2, -100], [3, 3]])
    columns = read_loss(nn.CrossEntropyLoss()).sampled(outputs, targets, Draws(3, torch.arange(3), 5))
    for column in columns:
        for sample, tokens in enumerate([2, 1, 2]):
            labels = outputs[sample].softmax(0) - column[sample] * math.sqrt(5 * tokens)
            one_hot = labels[:, :tokens]
            assert torch.allclose(one_hot, one_hot.round(), atol=1e-12)
            assert torch.allclose(one_hot.sum(0), torch.ones(tokens, dtype=F64))
        assert bool((column[1, :, 1] == 0).all())


@pytest.mark.parametrize("gap", [0.0, 5.0, 40.0, 700.0])
def test_exact_columns_stay_accurate_for_confident_predictions(gap: float) -> None:
    outputs = torch.tensor([[0.0, gap, 1.0, -gap]], dtype=F64)
    columns = torch.stack(list(read_loss(nn.CrossEntropyLoss()).exact(outputs, torch.tensor([0]))))[:, 0]
    # Every entry of diag(p) − ppᵀ to full relative accuracy, from probabilities in closed form.
    p = torch.exp(outputs[0] - outputs[0].logsumexp(0))
    hessian = -torch.outer(p, p)
    for index in range(4):
        others = [other for other in range(4) if other != index]
        hessian[index, index] = p[index] * p[others].sum()
    visible = hessian.abs() > 1e-290
    assert torch.allclose((columns.T @ columns)[visible], hessian[visible], rtol=1e-10, atol=0)
    assert bool(torch.isfinite(columns).all())


@given(seed=st.integers(-(2**40), 2**70), first=st.integers(0, 10**12), cut=st.integers(1, 4), count=st.integers(1, 3))
def test_draws_depend_on_seed_and_sample_only(seed: int, first: int, cut: int, count: int) -> None:
    samples = torch.arange(first, first + 5)
    loss, outputs = read_loss(nn.MSELoss()), torch.zeros(5, 2, dtype=F64)
    whole = torch.stack(list(loss.sampled(outputs, outputs, Draws(seed, samples, count))))
    later = torch.stack(list(loss.sampled(outputs[cut:], outputs[cut:], Draws(seed, samples[cut:], count))))
    assert torch.equal(whole[:, cut:], later)
    assert len(set(whole.flatten().tolist())) == whole.numel()
    other = torch.stack(list(loss.sampled(outputs, outputs, Draws(seed + 1, samples, count))))
    assert not torch.equal(whole, other)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, -1.0])), "weight=...\\) must be finite and not negative"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, math.inf])), "finite"),
        (nn.CrossEntropyLoss(label_smoothing=1.1), "label_smoothing in \\[0, 1\\], got 1.1"),
        (nn.CrossEntropyLoss(reduction="none"), "reduction 'mean' or 'sum', got 'none'"),
        (nn.MSELoss(reduction="none"), "reduction"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([-0.5])), "pos_weight=...\\) must be"),
        (nn.BCEWithLogitsLoss(weight=torch.tensor([math.nan])), "weight"),
        (nn.MSELoss, "make one, with \\(\\)"),
        ("cross-entropy", "module or a function .* got 'cross-entropy'"),
    ],
)
def test_losses_that_cannot_be_honoured(loss: object, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        read_loss(loss)


def test_a_subclass_with_its_own_forward_is_another_loss() -> None:
    class Focal(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target) ** 2

    class Renamed(nn.CrossEntropyLoss):
        pass

    assert isinstance(read_loss(Focal()), DifferentiatedLoss)
    assert read_loss(Renamed()) == read_loss(nn.CrossEntropyLoss())


CE, MSE, BCE = (read_loss(kind()) for kind in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss))


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "words"),
    [
        (CE, (4, 3), torch.tensor([0, 3, 1, 1]), "0..2 .* got 3"),
        (CE, (4, 3), torch.tensor([0, -1, 1, 1]), "got -1"),
        (CE, (4, 3), torch.tensor([[0.5, 0.5, -0.1]]).expand(4, 3), "probabilities must lie .* got -0.1"),
        (CE, (4, 3), torch.full((4, 3), math.nan), "got nan"),
        (CE, (4, 3), torch.ones(4, 3, dtype=torch.long), "probabilities as targets are shaped"),
        (CE, (4, 3), torch.ones(4, 2), "need class indices of shape \\(4,\\), got \\(4, 2\\)"),
        (read_loss(nn.CrossEntropyLoss(ignore_index=0)), (4, 3), torch.ones(4, 3), "ignore_index=0 means nothing"),
        (CE, (4, 3), torch.ones(4), "integers, got torch.float32"),
        (CE, (4, 3), torch.ones(4, dtype=torch.bool), "integers, got torch.bool"),
        (CE, (4, 3), torch.ones(4, 1, dtype=torch.long), "shape \\(4,\\), got \\(4, 1\\)"),
        (CE, (4, 7, 5), torch.ones(4, 7, dtype=torch.long), "transpose\\(1, 2\\)"),
        (CE, (4,), torch.ones(4, dtype=torch.long), "BCEWithLogitsLoss"),
        (CE, (4, 1), torch.zeros(4, dtype=torch.long), "one class"),
        (MSE, (4, 3), torch.ones(4), "shaped like the outputs \\(4, 3\\), got \\(4,\\)"),
        (MSE, (4, 1), torch.ones(4), "broadcasting"),
        (MSE, (4,), torch.ones(4, dtype=torch.complex64), "real targets"),
        (BCE, (4,), torch.tensor([0.0, 1.0, 1.5, 0.0]), "\\[0, 1\\], got 1.5"),
        (BCE, (4,), torch.tensor([0.0, 1.0, math.nan, 0.0]), "got nan"),
    ],
)
def test_labels_that_do_not_fit(loss: OutputLoss, outputs: tuple[int, ...], targets: Tensor, words: str) -> None:
    with pytest.raises(LabelError, match=words):
        loss.check(torch.zeros(outputs), targets)


def test_several_labels_a_sample_are_not_silently_class_probabilities() -> None:
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    assert "BCEWithLogitsLoss" in CE.doubt(several)
    assert "--loss bce" in CE.doubt(several)
    assert not CE.doubt(torch.eye(3)[:2])  # one label each
    assert not CE.doubt(0.9 * several)
    assert not CE.doubt(torch.tensor([0, 2]))
    assert not BCE.doubt(several)
