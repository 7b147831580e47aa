"""KL-Shampoo, whose factors minimise a Kullback-Leibler divergence: its rule, and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.grams import mode_gram
from kronscope.kron.roots import RootSolver
from kronscope.optim.advice import with_advice
from kronscope.optim.base import KroneckerOptimizer
from kronscope.optim.block_math import add_gram, batched_times, positive_power
from kronscope.optim.block_state import Tensors
from kronscope.optim.config import DEFAULT_SCALE, SLOWER_REFRESH, Graft, Hyper, Norm, Refresh, Trace
from kronscope.optim.grafts import all_true, block_norms
from kronscope.optim.reference import times
from kronscope.optim.rules import register
from kronscope.optim.rules.roots import RootRule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["KLRule", "KLShampoo"]


@register
@final
@dataclass(frozen=True)
class KLRule(RootRule):
    r"""Factors :math:`L = \tfrac1n \mathrm{E}[G R^{-1} G^\top]`, :math:`R = \tfrac1m \mathrm{E}[G^\top L^{-1} G]`.

    The inverses are squares of the roots of the last refresh; before the first one, both factors count as the
    gradient's root mean square times the identity.
    """

    name = "kl"
    title = "KL-Shampoo"
    class_name = "KLShampoo"
    is_plain_product = True
    # each factor is whitened with the other's root, so the two sides of a block take theirs one after the other
    apart: ClassVar[int] = 1
    # its whitening uses the roots that precondition, which are inverse square roots
    fixed: ClassVar[Mapping[str, object]] = {"exponent": -0.5, "power_rounds": 1}
    # a quarter of the first roots in a step, which is then not much longer than the others
    default_refresh: ClassVar[Refresh] = SLOWER_REFRESH
    # whitening and Gram matrices are more than half of a step, and one gradient in two does as well
    default_statistics: ClassVar[int] = 2

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse sums, and what no roots can work with."""
        if group["betas"][1] == 1:
            raise OptionError(
                "KL-Shampoo's factors are means: sums of whitened gradients have no meaning; use beta2 < 1."
            )
        super().check_options(group)

    def passes(self, hyper: Hyper) -> tuple[int, int]:
        """Return 1, for the multiplication by the root, and 2: whitening and a Gram matrix."""
        return 1, 2

    def add_to_factors(
        self, state: Tensors, grads: Tensor, moved: Tensor, modes: Sequence[int], hyper: Hyper, step: int
    ) -> None:
        """Add the Gram matrices of gradients that the other factors' roots have whitened."""
        shape = (-1, *[1] * (moved.ndim - 1))
        # a pass over the gradients, which blocks that have had all their roots can do without
        on_host = moved.device.type == "cpu"
        is_known = on_host and all(all_true(state["spectrum"][:, mode, 0] > 0) for mode in modes)
        rms = None if is_known else block_norms(moved).flatten() / math.sqrt(moved[0].numel())
        white = {}
        for mode in modes:
            whitened = moved
            for other in modes:
                if other != mode:
                    trace = state["spectrum"][:, other, 0]
                    weight = positive_power(trace, -0.5)
                    if rms is not None:
                        # before the first root the other side is rms^(2/q) I; roots then hold a multiple of I as well
                        start = positive_power(rms, -1 / len(modes)) / state[f"root{other}"].flatten(1)[:, 0]
                        weight = torch.where(trace > 0, weight, start)
                    whitened = batched_times(state[f"root{other}"], whitened, other).mul_(weight.view(shape))
            white[mode] = whitened
        for mode, whitened in white.items():
            count = moved[0].numel() // moved.shape[1 + mode]
            add_gram(state[f"factor{mode}"], whitened, mode, hyper.factor_decay(step), hyper.factor_gain(step) / count)

    def reference_grams(
        self, state: Tensors, grad: Tensor, modes: Sequence[int], factors: Mapping[int, Tensor] | None
    ) -> dict[int, Tensor]:
        r"""Return :math:`G R^{-1} G^\top / n` and its mirror image; before the first root, R is a multiple of I."""
        rms = grad.norm() / math.sqrt(grad.numel())
        grams = {}
        for mode in modes:
            whitened = grad
            for other in modes:
                if other == mode:
                    continue
                trace = state["spectrum"][other, 0]
                if trace > 0:
                    whitened = times(state[f"root{other}"], whitened, other) * positive_power(trace, -0.5)
                else:
                    whitened = whitened * positive_power(rms, -1 / len(modes))
            grams[mode] = mode_gram(whitened.unsqueeze(0), mode=mode) / (grad.numel() // grad.shape[mode])
        return grams


@final
class KLShampoo(KroneckerOptimizer):
    r"""KL-Shampoo: Shampoo whose factors are whitened by each other.

    Of all Gaussians :math:`N(0, L \otimes R)`, the one closest in Kullback–Leibler divergence to that of the gradients
    has

    .. math:: L = \tfrac1n \mathrm{E}[G R^{-1} G^\top], \qquad R = \tfrac1m \mathrm{E}[G^\top L^{-1} G] ,

    and the update is :math:`L^{-1/2} M R^{-1/2}`, with :math:`M` the mean of the gradients. Expectations are
    exponential means with decay ``betas[1]``, and the inverses are those of the last roots, with ``damping``. Before
    the first root, both factors count as the gradient's root mean square times the identity, so that the first estimate
    has the gradient's size.

    Args:
        params: As for :class:`Shampoo`.
        lr: Learning rate.
        betas: Decay of the gradient's mean, and of the factors.
        eps: Adam's eps, for grafts and for parameters that get AdamW.
        weight_decay: Weight decay.
        scale: As for :class:`Shampoo`. ``"trace"`` and None both keep the factors' own scale; ``Trace(bound)`` limits
            it.
        refresh: As for :class:`Shampoo`; by default each root is taken once in steps 1 to 4, once in steps 5 to 8 and
            once in steps 9 to 20, then once every 10.
        damping: Added to the eigenvalues, relative to the largest.
        statistics: As for :class:`Shampoo`, but None takes one in two, where ``scale`` is a graft or a fixed
            length.
        start: First preconditioned step.
        block_size: As for :class:`Shampoo`.
        memory_budget: As for :class:`Shampoo`.
        momentum: Heavy-ball momentum, after scaling.
        nesterov: Whether momentum has Nesterov's form.
        decay: Kind of weight decay, as for :class:`Shampoo`.
        maximize: Maximise the loss instead of minimising it.
        method: As for :class:`Shampoo`.
        view: As for :class:`Shampoo`.
        merge: As for :class:`Shampoo`.
        split: As for :class:`Shampoo`.
        solver: ``"auto"``, or a root solver from :mod:`kronscope.optim`.
        nonfinite: ``"skip"`` a step whose gradient is not finite, or ``"raise"``.
        parallel: As for :class:`Shampoo`.
        process_group: As for :class:`Shampoo`.

    Raises:
        OptionError: an option has a value that is not allowed.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = KLShampoo(model.named_parameters(), lr=1e-2)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.operator(model.bias).shape
    (1, 2)
    """

    rule = KLRule()

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
        refresh: int | Literal["auto"] | Refresh = SLOWER_REFRESH,
        damping: float = 1e-4,
        start: float = 1,
        statistics: int | None = None,
        block_size: float | None = None,
        memory_budget: float | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        decay: Literal["decoupled", "coupled", "cautious"] = "decoupled",
        maximize: bool = False,
        method: Literal["auto", "kronecker", "left", "right", "adam"] = "auto",
        view: Literal["matrix", "modes", "experts"] = "matrix",
        merge: int = 0,
        split: int | tuple[int, ...] | None = None,
        solver: Literal["auto"] | RootSolver = "auto",
        nonfinite: Literal["skip", "raise"] = "skip",
        parallel: Literal["auto", "single", "replicated", "divided"] = "auto",
        process_group: ProcessGroup | None = None,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "scale": scale,
            "refresh": refresh,
            "damping": damping,
            "start": start,
            "statistics": statistics,
            "block_size": block_size,
            "memory_budget": memory_budget,
            "momentum": momentum,
            "nesterov": nesterov,
            "decay": decay,
            "maximize": maximize,
            "method": method,
            "view": view,
            "merge": merge,
            "split": split,
            "solver": solver,
            "nonfinite": nonfinite,
            "parallel": parallel,
            "process_group": process_group,
        }
        super().__init__(params, options)
