"""Losses that are a sum over single outputs: their Hessians are diagonal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kronscope.errors import LabelError, OptionError
from kronscope.gradients.losses.columns import Columns, Draws, Weights, mixed_units, unit_columns

__all__ = ["BinaryCrossEntropy", "SquaredError"]


@dataclass(frozen=True)
class SquaredError:
    r""":math:`\|f - y\|^2` over the D outputs of a sample, divided by D under mean: Hessian :math:`2I` or :math:`2I/D`.

    Draws are :math:`y \sim N(f, I/2)` for the sum, for which the gradient's covariance is the Hessian.
    """

    mean: bool = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise LabelError unless targets are shaped like the outputs."""
        _check_same_shape("MSELoss", outputs, targets)

    def doubt(self, targets: Tensor) -> str:
        """None."""
        return ""

    def terms(self, targets: Tensor) -> int:
        """Outputs of a sample."""
        return math.prod(targets.shape[1:])

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """One per output."""
        return terms

    def kept_bytes(self, outputs: torch.Size) -> int:
        """Columns are made from the outputs when asked for."""
        return 0

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Scaled unit vectors."""
        values = torch.full(outputs.shape, math.sqrt(self._factor(outputs)), dtype=torch.float64, device=outputs.device)
        return unit_columns(values)

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Gaussian vectors."""
        noise = draws.normal((draws.count, *outputs.shape[1:])).to(outputs.device)
        noise *= math.sqrt(self._factor(outputs) / draws.count)
        return Columns(draws.count, lambda index: noise[:, index])

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Unit vectors, then ± sums of the others."""
        return mixed_units(self.column_sizes(outputs, targets).sqrt(), outputs, draws)

    def column_sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """All the same."""
        flat = outputs.detach().flatten(1)
        return torch.full(flat.shape, self._factor(outputs), dtype=torch.float64, device=outputs.device)

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Twice the difference."""
        return Columns(1, lambda _: self._factor(outputs) * (outputs.detach().double() - targets.double()))

    def _factor(self, outputs: Tensor) -> float:
        return 2.0 / math.prod(outputs.shape[1:]) if self.mean else 2.0


@dataclass(frozen=True)
class BinaryCrossEntropy:
    r"""Sigmoid cross-entropy of each of D outputs: Hessian :math:`\operatorname{diag}(p(1-p))`, over D under mean.

    With ``pos_weight`` :math:`\pi` and ``weight`` :math:`w` an output's loss is
    :math:`-w(\pi y\log p + (1-y)\log(1-p))`, its gradient :math:`w((1-y)p - \pi y(1-p))` and its second derivative
    :math:`w(1 - y + \pi y)\,p(1-p)`.

    Attributes:
        mean: Whether to take the mean over outputs instead of the sum.
        pos_weight: :math:`\pi`, for one sample's outputs.
        weight: :math:`w`, for one sample's outputs.
    """

    mean: bool = True
    pos_weight: Weights | None = None
    weight: Weights | None = None

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check targets and weights.

        Raises:
            LabelError: Targets are not shaped like the outputs or do not lie in [0, 1].
            OptionError: Weights do not fit a single sample.
        """
        _check_same_shape("BCEWithLogitsLoss", outputs, targets)
        for option in ("pos_weight", "weight"):
            _check_fits(option, getattr(self, option), (1, *outputs.shape[1:]))
        wrong = ~((targets >= 0) & (targets <= 1))
        if bool(wrong.any()):
            raise LabelError(f"BCEWithLogitsLoss needs targets in [0, 1], got {targets[wrong][0].item()}.")

    def doubt(self, targets: Tensor) -> str:
        """None."""
        return ""

    def terms(self, targets: Tensor) -> int:
        """Outputs of a sample."""
        return math.prod(targets.shape[1:])

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """One per output."""
        return terms

    def kept_bytes(self, outputs: torch.Size) -> int:
        """Columns are made from the outputs when asked for."""
        return 0

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Unit vectors times the standard deviation of the label."""
        logits = outputs.detach().double()
        deviation = ((F.logsigmoid(logits) + F.logsigmoid(-logits)) / 2).exp()
        return unit_columns(deviation * math.sqrt(self._factor(outputs)) * self._heights(targets).sqrt())

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Bernoulli labels from the model's own probabilities, whatever the weights.

        Weights multiply the gradient by the root of what they multiply the second derivative by.
        """
        logits, weight = outputs.detach().double(), math.sqrt(self._factor(outputs) / draws.count)
        uniform = draws.uniform((draws.count, *outputs.shape[1:])).to(outputs.device)
        labels = (uniform < logits.sigmoid().unsqueeze(1)).double()
        root = self._heights(targets).sqrt()
        return Columns(draws.count, lambda index: weight * _sigmoid_minus(logits, labels[:, index]) * root)

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """The largest deviations, then ± sums of the others."""
        return mixed_units(self.column_sizes(outputs, targets).sqrt(), outputs, draws)

    def column_sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Variances of the labels, times the weights."""
        logits = outputs.detach().double()
        variances = (F.logsigmoid(logits) + F.logsigmoid(-logits)).exp() * self._factor(outputs)
        return (variances * self._heights(targets)).flatten(1)

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Sigmoid minus the label."""
        logits, labels = outputs.detach().double(), targets.double()
        positive, each = self._weights(targets)
        return Columns(1, lambda _: self._factor(outputs) * _sigmoid_minus(logits, labels, positive) * each)

    def _factor(self, outputs: Tensor) -> float:
        return 1.0 / math.prod(outputs.shape[1:]) if self.mean else 1.0

    def _weights(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``pos_weight`` and ``weight``, 1 where there is none."""
        one = torch.ones((), dtype=torch.float64, device=targets.device)
        positive, each = (
            one if given is None else given.to(targets.device) for given in (self.pos_weight, self.weight)
        )
        return positive, each

    def _heights(self, targets: Tensor) -> Tensor:
        """What the weights multiply each second derivative by."""
        positive, each = self._weights(targets)
        return (1 + (positive - 1) * targets.double()) * each


def _sigmoid_minus(logits: Tensor, labels: Tensor, positive: Tensor | float = 1.0) -> Tensor:
    """σ(z) − y without cancellation: (1−y) σ(z) − y σ(−z), the second part times a weight."""
    return (1 - labels) * logits.sigmoid() - positive * labels * (-logits).sigmoid()


def _check_fits(option: str, weights: Weights | None, single: tuple[int, ...]) -> None:
    """Weights must broadcast to one sample's outputs, without making them more."""
    if weights is None:
        return
    shape = weights.shape
    fits = len(shape) <= len(single) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(single), strict=False)
    )
    if not fits:
        raise OptionError(
            f"BCEWithLogitsLoss({option}=...) of shape {shape} does not fit the outputs {single} of one sample. A "
            "sample's loss is taken by itself, so a weight for each sample of a batch has no place here."
        )


def _check_same_shape(name: str, outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        raise LabelError(
            f"{name} needs targets shaped like the outputs {tuple(outputs.shape)}, got {tuple(targets.shape)}; "
            "reshape one of them (broadcasting would mix samples)."
        )
    if targets.is_complex():
        raise LabelError(f"{name} needs real targets, got {targets.dtype}.")
