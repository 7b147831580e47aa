"""Class weights, smoothing, class probabilities and weights of outputs: columns against autograd on one sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kronscope.errors import LabelError, OptionError
from kronscope.gradients.losses import Draws, read_loss
from tests.gradients.naive import close

F64 = torch.float64
CLASSES = 4


def _hessian_and_gradient(loss: nn.Module, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    hessian = torch.autograd.functional.hessian(lambda out: loss(out, targets), outputs)
    leaf = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, targets), leaf)
    assert isinstance(hessian, Tensor)
    return hessian.reshape(outputs.numel(), outputs.numel()), gradient


def _check_against_autograd(module: nn.Module, plain: nn.Module, outputs: Tensor, targets: Tensor) -> None:
    loss, unweighted, numbers = read_loss(module), read_loss(plain), torch.arange(len(outputs))
    loss.check(outputs, targets)
    exact = loss.exact(outputs, targets)
    assert exact.count == loss.exact_columns(outputs.shape, loss.terms(targets))
    all_exact, (real,) = torch.stack(list(exact)), loss.real(outputs, targets)
    largest_first = Draws(0, numbers, 1, outputs[0].numel())
    mixed = torch.stack(list(loss.mixed(outputs, targets, largest_first)))
    sizes = loss.column_sizes(outputs, targets)
    heights = []
    for index in range(len(outputs)):
        one, target = outputs[index : index + 1], targets[index : index + 1]
        hessian, gradient = _hessian_and_gradient(module, one, target)
        for columns in (all_exact[:, index].flatten(1), mixed[:, index].flatten(1)):
            assert close(columns.T @ columns, hessian, 1e-12)
        assert close(real[index], gradient[0], 1e-12)
        assert close(sizes[index].sum(), hessian.trace(), 1e-12)
        lengths = mixed[:-1, index].flatten(1).square().sum(1)
        assert close(lengths, sizes[index].sort(descending=True).values, 1e-12)
        before = _hessian_and_gradient(plain, one, target)[0].diagonal()
        heights.append((hessian.diagonal() / before.where(before > 0, 1.0)).reshape(outputs.shape[1:]))
    # random columns have the plain loss's second moment, so weights must multiply them by roots
    roots, draws = torch.stack(heights).sqrt(), Draws(0, numbers, 3)
    for found, expected in zip(
        [*loss.sampled(outputs, targets, draws), *loss.mixed(outputs, targets, draws)],
        [*unweighted.sampled(outputs, targets, draws), *unweighted.mixed(outputs, targets, draws)],
        strict=True,
    ):
        assert close(found, expected * roots, 1e-12)


def _targets(kind: str) -> Tensor:
    if kind == "indices":
        return torch.tensor([0, 3, 2])
    if kind == "probabilities":
        return torch.rand(3, CLASSES, dtype=F64).softmax(1)
    if kind == "token probabilities":
        return torch.rand(3, CLASSES, 3, dtype=F64)  # that need not sum up to 1
    return torch.tensor([[0, 1, 2], [3, -100, 0], [-100, 1, -100]])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "tokens", "probabilities", "token probabilities"])
def test_cross_entropy_is_torchs_own(kind: str, weighted: bool, smoothing: float, reduction: str) -> None:
    torch.manual_seed(0)
    targets = _targets(kind)
    outputs = torch.randn(3, CLASSES, *([3] if "token" in kind else []), dtype=F64)
    weight = torch.tensor([0.5, 2.0, 0.0, 1.5], dtype=F64) if weighted else None
    if kind == "indices" and weighted:
        targets = torch.tensor([0, 3, 1])  # a weight of 0 alone is torch's 0/0
    module = nn.CrossEntropyLoss(weight, label_smoothing=smoothing, reduction=reduction)
    _check_against_autograd(module, nn.CrossEntropyLoss(reduction="sum"), outputs, targets)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_samples_that_count_for_nothing_have_no_columns(smoothing: float) -> None:
    weight = torch.tensor([1.0, 0.0, 2.0], dtype=F64)
    outputs, targets = torch.randn(2, 3, 2, dtype=F64), torch.tensor([[-100, -100], [0, 2]])
    loss = read_loss(nn.CrossEntropyLoss(weight, label_smoothing=smoothing))
    for columns in (loss.exact(outputs, targets), loss.real(outputs, targets)):
        stacked = torch.stack(list(columns))
        assert bool((stacked[:, 0] == 0).all())
        assert bool((stacked[:, 1] != 0).any())


def test_a_mean_over_labels_of_weight_zero_is_refused_when_smoothed() -> None:
    loss = read_loss(nn.CrossEntropyLoss(torch.tensor([1.0, 0.0]), label_smoothing=0.1))
    with pytest.raises(LabelError, match="class weight 0, by which the mean divides"):
        loss.check(torch.zeros(2, 2), torch.tensor([0, 1]))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("pos_weight", [None, (3,), (), (2, 3)])
@pytest.mark.parametrize("weight", [None, (3,), (1, 1, 3), (2, 1)])
def test_binary_cross_entropy_is_torchs_own(
    pos_weight: tuple[int, ...] | None, weight: tuple[int, ...] | None, reduction: str
) -> None:
    torch.manual_seed(0)
    given = [None if shape is None else 3 * torch.rand(shape, dtype=F64) for shape in (pos_weight, weight)]
    module = nn.BCEWithLogitsLoss(given[1], pos_weight=given[0], reduction=reduction)
    targets = torch.rand(3, 2, 3, dtype=F64)
    targets[0] = targets[0].round()
    plain = nn.BCEWithLogitsLoss(reduction="sum")
    _check_against_autograd(module, plain, torch.randn(3, 2, 3, dtype=F64), targets)


@pytest.mark.parametrize(
    ("module", "outputs", "words"),
    [
        (nn.CrossEntropyLoss(torch.ones(3)), (2, 4), "one weight for each of the 4 classes .* got weights of shape"),
        (
            nn.BCEWithLogitsLoss(torch.ones(2, 1)),
            (2, 4),
            "weight=...\\) of shape \\(2, 1\\) does not fit .* \\(1, 4\\)",
        ),
        (nn.BCEWithLogitsLoss(torch.ones(2)), (2,), "a weight for each sample of a batch"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), (2, 4), "pos_weight=...\\) of shape \\(3,\\)"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(1, 1, 4)), (2, 4), "pos_weight"),
    ],
)
def test_weights_that_do_not_fit(module: nn.Module, outputs: tuple[int, ...], words: str) -> None:
    targets = torch.ones(2, dtype=torch.long) if isinstance(module, nn.CrossEntropyLoss) else torch.ones(outputs)
    with pytest.raises(OptionError, match=words):
        read_loss(module).check(torch.zeros(outputs), targets)


def test_losses_with_the_same_weights_are_equal_and_others_are_not() -> None:
    def read(weight: list[float], smoothing: float = 0.0) -> object:
        return read_loss(nn.CrossEntropyLoss(torch.tensor(weight), label_smoothing=smoothing))

    assert read([1.0, 2.0]) == read([1.0, 2.0]) != read([1.0, 2.5])
    # processes compare texts
    assert repr(read([1.0, 2.0])) == repr(read([1.0, 2.0])) != repr(read([1.0, 2.0], 0.1))
