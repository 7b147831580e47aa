r"""Factors accumulated over time: sums, means and exponential means share one recursion.

.. math:: S_t = d\, S_{t-1} + g\, A_t, \qquad c_t = d\, c_{t-1} + g, \qquad \text{read} = S_t \text{ or } S_t / c_t .
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.errors import OptionError, ShapeError

__all__ = ["Averaging", "Ema", "FactorState", "Mean", "Sum"]


@dataclass(frozen=True)
class Sum:
    """Plain sum, as Adagrad and the original Shampoo."""

    decay: float = 1.0
    normalised: bool = False

    def gain(self, weight: float) -> float:
        """Return the factor in front of the new term."""
        return weight


@dataclass(frozen=True)
class Mean:
    """Weighted mean of everything seen."""

    decay: float = 1.0
    normalised: bool = True

    def gain(self, weight: float) -> float:
        """Return the factor in front of the new term."""
        return weight


@dataclass(frozen=True)
class Ema:
    """Exponential mean with bias correction.

    Attributes:
        decay: The usual beta, at least 0 and below 1.
    """

    decay: float = 0.95
    normalised: bool = True

    def __post_init__(self) -> None:
        """Check the decay."""
        if not 0.0 <= self.decay < 1.0:
            raise OptionError(f"Ema needs 0 <= decay < 1, got {self.decay}; for sums use Sum().")

    def gain(self, weight: float) -> float:
        """Return the factor in front of the new term."""
        return (1.0 - self.decay) * weight


Averaging = Sum | Mean | Ema


class FactorState:
    """One accumulated factor.

    >>> state = FactorState.zeros(1, Ema(0.5))
    >>> for value in (2.0, 4.0):
    ...     state.update(torch.tensor([[value]]))
    >>> state.read()
    tensor([[3.3333]])
    """

    def __init__(self, total: Tensor, averaging: Averaging, weight: float = 0.0) -> None:
        self.total = total
        self.averaging = averaging
        self.weight = weight

    @classmethod
    def zeros(
        cls,
        size: int,
        averaging: Averaging,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> FactorState:
        """Start from nothing."""
        return cls(torch.zeros(size, size, dtype=dtype, device=device), averaging)

    def update(self, gram: Tensor, weight: float = 1.0) -> None:
        """Take in one more Gram matrix.

        Raises:
            ShapeError: ``gram`` does not have the factor's shape; the state is unchanged.
        """
        if gram.shape != self.total.shape:
            raise ShapeError(f"this factor is {tuple(self.total.shape)}, got an update {tuple(gram.shape)}.")
        gain = self.averaging.gain(weight)
        if self.averaging.decay != 1.0:
            self.total.mul_(self.averaging.decay)
        self.total.add_(gram.to(self.total.dtype), alpha=gain)
        self.weight = self.averaging.decay * self.weight + gain

    def read(self) -> Tensor:
        """Return the sum, or the (bias-corrected) mean."""
        if self.averaging.normalised and self.weight > 0:
            return self.total / self.weight
        return self.total.clone()
