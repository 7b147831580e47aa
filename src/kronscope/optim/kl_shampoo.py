"""KL-Shampoo: factors that minimise a Kullback-Leibler divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, final

from torch import Tensor

from kronscope.kron.roots import RootSolver
from kronscope.optim.advice import with_advice
from kronscope.optim.base import KroneckerOptimizer
from kronscope.optim.config import DEFAULT_REFRESH, DEFAULT_SCALE, Graft, Norm, Refresh, Trace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["KLShampoo"]


@final
class KLShampoo(KroneckerOptimizer):
    r"""Shampoo with factors that are whitened by each other.

    For the Gaussian :math:`N(0, L \otimes R)` closest in Kullback-Leibler divergence to that of the gradients,

    .. math:: L = \tfrac1n \mathrm{E}[G R^{-1} G^\top], \qquad R = \tfrac1m \mathrm{E}[G^\top L^{-1} G] ,

    and the update is :math:`L^{-1/2} M R^{-1/2}`. Expectations are exponential means (``betas[1]``) and the inverses
    those of the last refresh, with ``damping``; before the first one, both factors count as the gradient's root mean
    square times the identity, so that the first estimate has the gradient's own size.

    Args:
        params: As for :class:`Shampoo`.
        lr: Learning rate.
        betas: Decay of the gradient mean, and of the factors.
        eps: Adam's eps, for grafts and for parameters that get AdamW.
        weight_decay: Weight decay.
        scale: As for :class:`Shampoo`; ``"trace"`` and None both use the factors' own, ``Trace(bound)`` bounds it.
        refresh: As for :class:`Shampoo`.
        damping: Added to the eigenvalues, relative to the largest.
        start: First preconditioned step.
        block_size: Longest side of a block.
        memory_budget: Bytes for a group's factors and roots.
        momentum: Heavy-ball momentum, after scaling.
        nesterov: Nesterov's form of it.
        decay: Kind of weight decay.
        maximize: Ascend.
        method: As for :class:`Shampoo`.
        view: As for :class:`Shampoo`.
        merge: As for :class:`Shampoo`.
        split: As for :class:`Shampoo`.
        solver: ``"auto"``, or a root solver.
        nonfinite: ``"skip"`` or ``"raise"``.
        parallel: As for :class:`Shampoo`.
        process_group: As for :class:`Shampoo`.

    Raises:
        OptionError: an option has a value that is not allowed.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = KLShampoo(model.parameters(), lr=1e-2)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    """

    family = "kl"

    @with_advice
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        scale: str | Trace | Graft | Norm | None = DEFAULT_SCALE,
        refresh: int | Refresh = DEFAULT_REFRESH,
        damping: float = 1e-4,
        start: float = 1,
        block_size: int | None = None,
        memory_budget: float | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        decay: Literal["decoupled", "coupled", "cautious"] = "decoupled",
        maximize: bool = False,
        method: Literal["auto", "kronecker", "adam"] = "auto",
        view: Literal["matrix", "modes", "experts"] = "matrix",
        merge: int = 0,
        split: int | tuple[int, ...] | None = None,
        solver: Literal["auto"] | RootSolver = "auto",
        nonfinite: Literal["skip", "raise"] = "skip",
        parallel: Literal["auto", "single", "replicated", "divided"] = "auto",
        process_group: ProcessGroup | None = None,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, defaults)
