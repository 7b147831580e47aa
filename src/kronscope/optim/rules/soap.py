"""SOAP, Adam in the eigenbases of Shampoo's factors: its rule, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from kronscope.kron.bases import eigenbases, improved_basis
from kronscope.kron.powers import default_cutoff
from kronscope.kron.roots import RootSolver, WarmQR
from kronscope.kron.triangles import unpack
from kronscope.optim.advice import with_advice
from kronscope.optim.base import KroneckerOptimizer
from kronscope.optim.block_math import add_gram, batched_times, short_inside
from kronscope.optim.block_state import Tensors
from kronscope.optim.config import SLOWER_REFRESH, Hyper, Norm, Refresh
from kronscope.optim.reference import update_in_bases, with_sums, with_unseen
from kronscope.optim.rules import Moments, Rule, register
from kronscope.optim.rules.bases import EigenbasisRule
from kronscope.optim.rules.published_soap import PublishedSoapRule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SOAP", "SoapRule"]

_SOLVER = WarmQR()


@register
@final
@dataclass(frozen=True)
class SoapRule(EigenbasisRule):
    r"""Adam in bases that start at the identity, so that the first step is Adam's.

    When a basis changes by :math:`T = Q_{new}^\top Q_{old}`, the mean turns with :math:`T`. The second moment is
    multiplied by the squared entries of :math:`T`, which leaves it too even, and then each of its rows is given the sum
    that is known: that of :math:`Q^\top G` is :math:`\sum_j \mathrm{E}[(Q^\top G)_{ij}^2] = (Q^\top A Q)_{ii}` for
    the factor :math:`A = \mathrm{E}[G G^\top]`.
    """

    carries = True
    # its first bases can wait a few steps: until then it is Adam
    default_refresh: ClassVar[Refresh] = SLOWER_REFRESH
    # bases change slowly, and its second moment sees every gradient
    default_statistics: ClassVar[int] = 2
    has_own_length: ClassVar[bool] = True

    def for_group(self, group: Mapping[str, Any]) -> Rule:
        """Return the published algorithm where ``reference=True`` asks for it."""
        return PublishedSoapRule() if group["reference"] else self

    def seen(self, step: int) -> int:
        """Return all steps."""
        return step

    def accumulate(self, state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Moments:
        """Take gradients into moments and factors; the updates are formed with the bases of before."""
        moved = short_inside(grads)
        update = self.take_into_moments(state, moved, modes, hyper, step)
        decay, gain = hyper.factor_decay(step), hyper.factor_gain(step)
        for mode in modes if hyper.gathers(step) else ():
            add_gram(state[f"factor{mode}"], moved if mode else grads, mode, decay, gain)
        return Moments(update)

    def denominators(self, deviations: Tensor, hyper: Hyper, correction1: float, correction2: float) -> Tensor:
        r"""Return :math:`c_1 ((\sqrt v + f) / c_2 + \epsilon)`, in one pass.

        The floor :math:`f` is the size of rounding in the largest entry: where the gradients have no component, turning
        them leaves rounding errors, which Adam would blow up to full steps.
        """
        largest = deviations.amax(tuple(range(1, deviations.ndim)), keepdim=True)
        floor = largest * default_cutoff(max(deviations.shape[1:]), deviations.dtype)
        floor = (floor / correction2 + hyper.eps) * correction1
        return torch.add(floor, deviations, alpha=correction1 / correction2, out=deviations)

    def refresh(self, state: Tensors, mode: int, index: Tensor | slice, hyper: Hyper, step: int) -> Tensor:
        """Return the eigenbases (k, d, d) of some blocks' factors, which :meth:`carry` brings in."""
        old, factors = state[f"basis{mode}"][index], unpack(state[f"factor{mode}"][index])
        return new_basis(factors / hyper.factor_weight(step), old, hyper, step)

    def carry(self, state: Tensors, mode: int, index: Tensor | slice, found: Tensor, hyper: Hyper, step: int) -> None:
        """Carry both moments of some blocks into new bases (k, d, d) of one mode, and keep these."""
        old, factors = state[f"basis{mode}"][index], unpack(state[f"factor{mode}"][index])
        turn = found.mT @ old
        sums = (found * (factors @ found)).sum(-2)
        if hyper.leaves_out(step):
            share, before = hyper.seen_share(step), (old * (factors @ old)).sum(-2)
            sums = with_unseen(share * sums, share * before, state["exp_avg_sq"][index], turn, mode)
        state["exp_avg_sq"][index] = batched_times(turn.square(), state["exp_avg_sq"][index], mode)
        if hyper.beta1 > 0:
            state["exp_avg"][index] = batched_times(turn, state["exp_avg"][index], mode)
        state[f"basis{mode}"][index] = found
        state["exp_avg_sq"][index] = with_sums(state["exp_avg_sq"][index], sums, mode)

    def reference(
        self, state: Tensors, grad: Tensor, modes: Sequence[int], hyper: Hyper, step: int, refresh: Sequence[bool]
    ) -> Tensor:
        """Do the same for one block."""
        return update_in_bases(new_basis, state, grad, modes, hyper, step, refresh)


def new_basis(factors: Tensor, old: Tensor, hyper: Hyper, step: int) -> Tensor:
    """Return the eigenbases of factors (B, d, d), in descending order; warm-started after the first ones if asked."""
    if hyper.solver.is_warm and not hyper.takes_first_roots(step):
        return improved_basis(factors, old, getattr(hyper.solver, "rounds", 1))
    return eigenbases(factors, old)


@final
class SOAP(KroneckerOptimizer):
    r"""SOAP: Adam in the eigenbases of :math:`L = \mathrm{E}[G G^\top]` and :math:`R = \mathrm{E}[G^\top G]`.

    .. math:: W \leftarrow W - \eta\, Q_L \frac{\hat m}{\sqrt{\hat v} + \epsilon} Q_R^\top .

    Both moments are kept in the bases. When a basis changes they are carried over: the mean is turned, and the second
    moment multiplied by the squared entries of :math:`Q_{new}^\top Q_{old}` and then, row by row, by what gives it the
    sums :math:`(Q_{new}^\top L\, Q_{new})_{ii}` that it would have, had all gradients been seen in the new basis. A
    step uses the bases of the steps before it; the first step is Adam's.

    Args:
        params: As for :class:`Shampoo`.
        lr: Learning rate.
        betas: Decay of the gradient's mean, and of second moment and factors. 1 for the second means sums.
        eps: Adam's eps.
        weight_decay: Weight decay.
        refresh: When the bases are computed anew, as for :class:`Shampoo`. By default each is taken once in steps 1 to
            4, once in steps 5 to 8 and once in steps 9 to 20, then once every 10.
        scale: None for Adam's own scale; ``"norm"`` or :class:`~kronscope.Norm` for a fixed root mean square.
        statistics: As for :class:`Shampoo`, but None takes one in two. The second moment sees all of them.
        block_size: As for :class:`Shampoo`.
        memory_budget: As for :class:`Shampoo`.
        decay: Kind of weight decay, as for :class:`Shampoo`.
        maximize: Maximise the loss instead of minimising it.
        method: As for :class:`Shampoo`.
        view: As for :class:`Shampoo`.
        merge: As for :class:`Shampoo`.
        split: As for :class:`Shampoo`.
        solver: ``"auto"`` decomposes anew, ``WarmQR()`` turns the last basis by a power step.
        nonfinite: ``"skip"`` a step whose gradient is not finite, or ``"raise"``.
        parallel: As for :class:`Shampoo`.
        process_group: As for :class:`Shampoo`.
        reference: Do exactly what the published implementation does, for comparisons: no update at the first step; a
            factor for every dimension of a parameter that has two or more; all bases computed at the same step (every
            10 steps, unless told otherwise); second moments permuted instead of turned; weight decay after the step.

    Raises:
        OptionError: an option has a value that is not allowed.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = SOAP(model.named_parameters(), lr=1e-2)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.skipped_steps
    0
    """

    rule = SoapRule()

    @with_advice
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        refresh: int | Literal["auto"] | Refresh = SLOWER_REFRESH,
        scale: str | Norm | None = None,
        statistics: int | None = None,
        block_size: float | None = None,
        memory_budget: float | None = None,
        decay: Literal["decoupled", "coupled", "cautious"] = "decoupled",
        maximize: bool = False,
        method: Literal["auto", "kronecker", "left", "right", "adam"] = "auto",
        view: Literal["matrix", "modes", "experts"] = "matrix",
        merge: int = 0,
        split: int | tuple[int, ...] | None = None,
        solver: Literal["auto"] | RootSolver = _SOLVER,
        nonfinite: Literal["skip", "raise"] = "skip",
        parallel: Literal["auto", "single", "replicated", "divided"] = "auto",
        process_group: ProcessGroup | None = None,
        reference: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "refresh": refresh,
            "scale": scale,
            "statistics": statistics,
            "block_size": block_size,
            "memory_budget": memory_budget,
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
            "reference": reference,
        }
        super().__init__(params, options)
