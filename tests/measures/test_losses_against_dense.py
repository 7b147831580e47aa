"""Every kind of loss through the front door, against dense matrices from torch's own derivatives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import OptionError
from kronscope.gradients import Recorder, resolve_layers
from kronscope.testing import jacobians

F64 = torch.float64
WEIGHT = torch.tensor([0.5, 2.0, 1.5], dtype=F64)
SAMPLES, OUTPUTS = 6, 3


class _LogCosh(nn.Module):
    """A loss of one's own: convex, and its Hessian depends on outputs and targets."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).cosh().log().sum() + outputs.sum().square()


def _targets(kind: str) -> Tensor:
    if kind == "indices":
        return torch.arange(SAMPLES) % OUTPUTS
    values = torch.rand(SAMPLES, OUTPUTS, dtype=F64)
    return values / values.sum(1, keepdim=True) if kind == "probabilities" else values


CASES: dict[str, tuple[Any, str]] = {
    "class weights": (nn.CrossEntropyLoss(WEIGHT), "indices"),
    "class weights, sum": (nn.CrossEntropyLoss(WEIGHT, reduction="sum"), "indices"),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), "indices"),
    "smoothing and weights": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2), "indices"),
    "probabilities": (nn.CrossEntropyLoss(), "probabilities"),
    "probabilities and weights": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), "probabilities"),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), "numbers"),
    "output weights": (nn.BCEWithLogitsLoss(WEIGHT, pos_weight=2 * WEIGHT, reduction="sum"), "numbers"),
    "huber": (nn.HuberLoss(delta=0.3), "numbers"),
    "poisson": (nn.PoissonNLLLoss(), "numbers"),
    "own": (_LogCosh(), "numbers"),
    "function": (functools.partial(F.cross_entropy, label_smoothing=0.2), "indices"),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()


@pytest.mark.parametrize("truth", ["gauss_newton", "empirical_fisher"])
@pytest.mark.parametrize("name", CASES)
def test_the_matrix_is_that_of_the_loss(name: str, truth: str) -> None:
    model, (loss, kind) = _model(), CASES[name]
    inputs, targets = torch.randn(SAMPLES, 4, dtype=F64), _targets(kind)
    found = ks.second_moment(model, loss, [(inputs, targets)], "0.weight", truth, progress=False).to_dense()
    oracle = jacobians.gauss_newton if truth == "gauss_newton" else jacobians.empirical_fisher
    expected = oracle(model, loss, inputs, targets, "0.weight")
    assert float((found - expected).norm()) < 1e-12 * float(expected.norm())


def test_sequences_with_weights_smoothing_and_padding() -> None:
    torch.manual_seed(1)
    model, loss = _model(), nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1, ignore_index=-1)

    def forward(model: nn.Module, inputs: Tensor) -> Tensor:
        outputs: Tensor = model(inputs).transpose(1, 2)
        return outputs

    inputs, targets = torch.randn(3, 4, 4, dtype=F64), torch.randint(OUTPUTS, (3, 4))
    targets[0, 2:], targets[1] = -1, -1
    data = [(inputs, targets)]
    for truth, oracle in (("gauss_newton", jacobians.gauss_newton), ("empirical_fisher", jacobians.empirical_fisher)):
        found = ks.second_moment(model, loss, data, "2.weight", truth, forward=forward, progress=False).to_dense()
        expected = oracle(model, loss, inputs, targets, "2.weight", forward=forward)
        assert float((found - expected).norm()) < 1e-12 * float(expected.norm())


@pytest.mark.parametrize("name", ["smoothing and weights", "pos_weight", "own"])
def test_cosines_with_a_loss(name: str) -> None:
    model, (loss, kind) = _model(), CASES[name]
    inputs, targets = torch.randn(SAMPLES, 4, dtype=F64), _targets(kind)
    (row,) = ks.measure(model, loss, [(inputs, targets)], "0.weight", approximations=["diagonal"], progress=False)
    H = jacobians.gauss_newton(model, loss, inputs, targets, "0.weight")
    assert row.cosine == pytest.approx(float(H.diagonal().norm() / H.norm()), abs=1e-12)


def test_any_loss_has_an_empirical_fisher_matrix() -> None:
    model = nn.Sequential(_model(), nn.LogSoftmax(1))
    inputs, targets = torch.randn(SAMPLES, 4, dtype=F64), _targets("indices")

    def chance_of_an_error(outputs: Tensor, targets: Tensor) -> Tensor:  # concave in log-probabilities
        return 1 - (-F.nll_loss(outputs, targets)).exp()

    for loss in (nn.NLLLoss(WEIGHT), chance_of_an_error):
        arguments = (model, loss, [(inputs, targets)], "0.0.weight")
        found = ks.second_moment(*arguments, truth="empirical_fisher", progress=False).to_dense()
        expected = jacobians.empirical_fisher(model, loss, inputs, targets, "0.0.weight")  # type: ignore[arg-type]
        assert float((found - expected).norm()) < 1e-12 * float(expected.norm())
        with pytest.raises(OptionError, match="truth='empirical_fisher'"):
            ks.second_moment(*arguments, progress=False)


def test_hessians_of_a_chunk_stay_within_the_memory_budget() -> None:
    torch.manual_seed(0)
    model, outputs = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 128)), 128
    seen: list[int] = []

    def forward(model: nn.Module, inputs: Tensor) -> Tensor:
        seen.append(len(inputs))
        found: Tensor = model(inputs)
        return found

    data = [(torch.randn(64, 2), torch.randn(64, outputs))]
    recorder = Recorder(
        model, nn.HuberLoss(), data, resolve_layers(model, ["0.weight"]), forward=forward, chunk_bytes=1 << 20
    )
    for labels, most in (("exact", (1 << 20) // (8 * outputs**2)), ("real", 64)):
        seen.clear()
        recorder.streams(labels)
        assert max(seen) <= most
    assert max(seen) == 64
