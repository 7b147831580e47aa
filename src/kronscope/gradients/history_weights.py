"""The weights that past gradients have in what an optimizer accumulates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kronscope.errors import OptionError

__all__ = ["history_weights"]


def history_weights(steps: Tensor, last: int | Tensor, beta: float | None) -> Tensor:
    r"""Return the weights of gradients in Adagrad's sum, or in an exponential mean, at a later step.

    With :math:`t` (``steps``), :math:`T` (``last``) and :math:`\beta` (``beta``) they are
    :math:`(1-\beta)\beta^{T-t}`; without ``beta`` they are 1.

    Args:
        steps: The steps of the gradients.
        last: The later step; one for all gradients, or one for each.
        beta: The decay of the mean; None for the sum.

    Raises:
        OptionError: ``beta`` is not in [0, 1).

    >>> history_weights(torch.tensor([1, 2, 3]), 3, 0.5)
    tensor([0.1250, 0.2500, 0.5000], dtype=torch.float64)
    """
    if beta is None:
        return torch.ones(len(steps), dtype=torch.float64)
    if not 0 <= beta < 1:
        raise OptionError(f"beta must be at least 0 and below 1, got {beta}.")
    if beta == 0:
        return (steps == last).double()
    return (1 - beta) * torch.exp((last - steps).double() * math.log(beta))
