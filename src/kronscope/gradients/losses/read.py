"""From a loss as it is used in training to what measuring needs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from kronscope.errors import OptionError
from kronscope.gradients.losses.columns import OutputLoss, Weights
from kronscope.gradients.losses.cross_entropy import CrossEntropy
from kronscope.gradients.losses.differentiated import DifferentiatedLoss
from kronscope.gradients.losses.elementwise import BinaryCrossEntropy, SquaredError

__all__ = ["LossFunction", "read_loss"]

# Outputs and targets to one number; a module is one as well.
LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def read_loss(loss: object, curved: bool = False) -> OutputLoss:
    """Understand a loss: torch's modules by their formulas, anything else by differentiating it.

    Args:
        loss: A module, or a function of outputs and targets.
        curved: Refuse one whose Hessian is known to be zero.

    Raises:
        OptionError: It is no function, or has an option that cannot be honoured.

    >>> read_loss(nn.MSELoss(reduction="sum"))
    SquaredError(mean=False)
    >>> read_loss(nn.HuberLoss(delta=2.0))
    DifferentiatedLoss(text="torch.nn.modules.loss.HuberLoss(delta=2.0, reduction='mean')")
    """
    for kind in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss):
        if isinstance(loss, kind) and type(loss).forward is kind.forward:
            break
    else:
        if not callable(loss) or isinstance(loss, type):
            advice = "; make one, with ()" if isinstance(loss, type) else ""
            raise OptionError(
                f"The loss must be a module or a function (outputs, targets) -> number, got {loss!r}{advice}."
            )
        found = DifferentiatedLoss.of(loss)
        if curved:
            found.check_curved()
        return found
    name, reduction = type(loss).__name__, loss.reduction
    if reduction not in ("mean", "sum"):
        raise OptionError(f"{name} needs reduction 'mean' or 'sum', got {reduction!r}.")
    mean = reduction == "mean"
    if isinstance(loss, nn.CrossEntropyLoss):
        if not 0 <= loss.label_smoothing <= 1:
            raise OptionError(f"{name} needs label_smoothing in [0, 1], got {loss.label_smoothing}.")
        return CrossEntropy(mean, loss.ignore_index, _weights(loss, "weight"), loss.label_smoothing)
    if isinstance(loss, nn.MSELoss):
        return SquaredError(mean)
    return BinaryCrossEntropy(mean, _weights(loss, "pos_weight"), _weights(loss, "weight"))


def _weights(loss: nn.Module, option: str) -> Weights | None:
    given = getattr(loss, option)
    if given is None:
        return None
    weights = Weights.of(given)
    if not all(0 <= value < float("inf") for value in weights.values):
        raise OptionError(
            f"{type(loss).__name__}({option}=...) must be finite and not negative, got {list(weights.values)[:8]}; a "
            "negative weight makes the loss concave."
        )
    return weights
