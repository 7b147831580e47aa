"""SOAP: Adam in the eigenbases of Shampoo's factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor

from kronscope.kron.roots import RootSolver, WarmQR
from kronscope.optim.advice import with_advice
from kronscope.optim.apply import apply_updates
from kronscope.optim.base import KroneckerOptimizer
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import DEFAULT_REFRESH, Norm, Refresh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SOAP"]

# The published algorithm gives longer dimensions no factor.
_PUBLISHED_MAX_SIDE = 10_000
_SOLVER = WarmQR()


@final
class SOAP(KroneckerOptimizer):
    r"""Run Adam in the eigenbases of :math:`L = \mathrm{E}[G G^\top]` and :math:`R = \mathrm{E}[G^\top G]`.

    .. math:: W \leftarrow W - \eta\, Q_L \frac{\hat m}{\sqrt{\hat v} + \epsilon} Q_R^\top ,

    with both moments kept in the bases and carried along when a basis changes: the mean is turned, the second moment by
    the squared entries of :math:`Q_{new}^\top Q_{old}`. A step uses the bases of the steps before it; the first step is
    Adam's.

    Args:
        params: As for :class:`Shampoo`.
        lr: Learning rate.
        betas: Decay of the gradient mean, and of second moment and factors; 1 for the second means sums.
        eps: Adam's eps.
        weight_decay: Weight decay.
        refresh: As for :class:`Shampoo`, for the bases.
        scale: None for Adam's own scale, ``"norm"`` or :class:`Norm` for a fixed root mean square.
        block_size: Longest side of a block.
        memory_budget: Bytes for a group's factors and bases.
        decay: Kind of weight decay.
        maximize: Ascend.
        method: As for :class:`Shampoo`.
        view: As for :class:`Shampoo`.
        merge: As for :class:`Shampoo`.
        split: As for :class:`Shampoo`.
        solver: ``WarmQR()`` turns the last basis by a power step, ``"auto"`` decomposes anew.
        nonfinite: ``"skip"`` or ``"raise"``.
        parallel: As for :class:`Shampoo`.
        process_group: As for :class:`Shampoo`.
        reference: Do exactly what the published implementation does: no first step, every dimension of two or more a
            factor, all bases refreshed together (every 10 steps unless told otherwise), second moments permuted, weight
            decay after the step. For comparison.

    Raises:
        OptionError: an option has a value that is not allowed.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = SOAP(model.parameters(), lr=1e-2)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    """

    family = "soap"

    @with_advice
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        refresh: int | Refresh = DEFAULT_REFRESH,
        scale: str | Norm | None = None,
        block_size: int | None = None,
        memory_budget: float | None = None,
        decay: Literal["decoupled", "coupled", "cautious"] = "decoupled",
        maximize: bool = False,
        method: Literal["auto", "kronecker", "adam"] = "auto",
        view: Literal["matrix", "modes", "experts"] = "matrix",
        merge: int = 0,
        split: int | tuple[int, ...] | None = None,
        solver: Literal["auto"] | RootSolver = _SOLVER,
        nonfinite: Literal["skip", "raise"] = "skip",
        parallel: Literal["auto", "single", "replicated", "divided"] = "auto",
        process_group: ProcessGroup | None = None,
        reference: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, defaults)

    def _fixed_layout(self, group: dict[str, Any], param: Tensor) -> Layout | None:
        return _published_layout(param) if group["reference"] else None

    def _apply(self, params: list[Tensor], targets: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        if not group["reference"]:
            apply_updates(targets, updates, group)
            return
        moving = [i for i, param in enumerate(params) if int(self.state[param]["step"]) > 1]
        moved = [targets[i] for i in moving]
        if moved:
            apply_updates(moved, [updates[i] for i in moving], {**group, "weight_decay": 0.0})
            if group["weight_decay"] != 0:
                torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])


def _published_layout(param: Tensor) -> Layout:
    shape = tuple(param.shape)
    if math.prod(shape) == 0:
        return Layout(shape, shape, (), "empty")
    view = shape or (1,)
    factored = tuple(len(shape) > 1 and size <= _PUBLISHED_MAX_SIDE for size in view)
    return Layout(shape, view, (Tile((0,) * len(view), view, view, factored),), "as published")
