"""Shampoo, in all its forms: its rule, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor

from kronscope.kron.grams import mode_gram
from kronscope.kron.roots import RootSolver
from kronscope.kron.triangles import pack, unpack
from kronscope.optim.advice import with_advice
from kronscope.optim.base import KroneckerOptimizer
from kronscope.optim.block_math import add_gram, unit_factor
from kronscope.optim.block_state import Tensors
from kronscope.optim.config import DEFAULT_REFRESH, DEFAULT_SCALE, Graft, Hyper, Norm, Refresh, Trace
from kronscope.optim.rules import register
from kronscope.optim.rules.roots import RootRule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Shampoo", "ShampooRule"]


@register
@final
@dataclass(frozen=True)
class ShampooRule(RootRule):
    r"""Factors :math:`L = \mathrm{E}[G G^\top]`, :math:`R = \mathrm{E}[G^\top G]`.

    With more power rounds, the middle of each product is the other factor over its norm, :math:`G \bar R G^\top` and
    :math:`G^\top \bar L G`, which moves the factors towards the optimal Kronecker product.
    """

    name = "shampoo"
    title = "Shampoo"
    class_name = "Shampoo"
    is_plain_product = False

    def passes(self, hyper: Hyper) -> tuple[int, int]:
        """Return 1, for the multiplication by the root, and the rounds of a Gram matrix."""
        return 1, hyper.power_rounds

    def add_to_factors(
        self, state: Tensors, grads: Tensor, moved: Tensor, modes: Sequence[int], hyper: Hyper, step: int
    ) -> None:
        """Add the Gram matrices."""
        if hyper.power_rounds > 1 and len(modes) == 2 and grads.ndim == 3:
            _add_in_rounds(state, grads, hyper, step)
            return
        decay, gain = hyper.factor_decay(step), hyper.factor_gain(step)
        for mode in modes:
            add_gram(state[f"factor{mode}"], moved if mode else grads, mode, decay, gain)

    def reference_grams(
        self, state: Tensors, grad: Tensor, modes: Sequence[int], factors: Mapping[int, Tensor] | None
    ) -> dict[int, Tensor]:
        """Return the Gram matrices; after the first round, with the other factor in the middle."""
        if factors is None:
            return {mode: mode_gram(grad.unsqueeze(0), mode=mode) for mode in modes}
        middle = {mode: unit_factor(factors[1 - mode].unsqueeze(0))[0] for mode in modes}
        return {mode: mode_gram(grad.unsqueeze(0), mode=mode, other=middle[mode]) for mode in modes}


def _add_in_rounds(state: Tensors, grads: Tensor, hyper: Hyper, step: int) -> None:
    factors = [unpack(state["factor0"]), unpack(state["factor1"])]
    old = [factor * hyper.factor_decay(step) for factor in factors]
    for power_round in range(hyper.power_rounds):
        middle = [unit_factor(factors[mode] / hyper.factor_weight(step)) if power_round else None for mode in (0, 1)]
        left = grads if middle[1] is None else torch.bmm(grads, middle[1])
        right = grads if middle[0] is None else torch.bmm(middle[0], grads)
        torch.baddbmm(old[0], left, grads.mT, alpha=hyper.factor_gain(step), out=factors[0])
        torch.baddbmm(old[1], grads.mT, right, alpha=hyper.factor_gain(step), out=factors[1])
    for mode in (0, 1):
        stored = state[f"factor{mode}"]
        stored.copy_(pack((factors[mode] + factors[mode].mT) / 2, stored))


@final
class Shampoo(KroneckerOptimizer):
    r"""Shampoo: precondition every matrix from both sides with powers of its gradients' Gram matrices.

    With :math:`L = \mathrm{E}[G G^\top]`, :math:`R = \mathrm{E}[G^\top G]` (exponential means with decay ``betas[1]``,
    or sums if that is 1), the mean :math:`M` of the gradients (``betas[0]``) and the exponent :math:`e` (``exponent``),

    .. math:: W \leftarrow W - \eta\, s\, L^{e} M R^{e} ,

    where ``scale`` decides :math:`s`. In the paper's view :math:`L \otimes R / \operatorname{tr} L` estimates the
    curvature matrix, so that :math:`e = -1/2` with ``scale="trace"`` multiplies by its inverse square root.

    Args:
        params: The model, its named parameters (``model.named_parameters()``) or groups
            (:func:`kronscope.param_groups`), so that embeddings, heads and experts are recognised; or parameters
            without names. Frozen parameters are planned when their training begins.
        lr: Learning rate :math:`\eta`, a number or a 0-D tensor. Start with AdamW's, then try one three times as large.
        betas: Decay of the gradient's mean, and of the factors. 1 for the second means sums, as in Adagrad.
        eps: With sums, factors start at ``eps`` times the identity, and nothing else regularises them. With means it is
            Adam's eps, for grafts and for parameters that get AdamW.
        weight_decay: Weight decay.
        exponent: Exponent of each factor, or one for each: -0.25 is the original Shampoo, -0.5 is Shampoo².
        scale: ``"trace"``, ``"adam"``, ``"adagrad"``, ``"rmsprop"``, ``"sgd"``, ``"norm"``, None, or an object
            (:class:`~kronscope.Trace`, :class:`~kronscope.Graft`, :class:`~kronscope.Norm`).
        refresh: Steps between two roots of a factor; an object (:class:`~kronscope.Every`,
            :class:`~kronscope.Warmup`, :class:`~kronscope.Adaptive`, :class:`~kronscope.Budget`); or ``"auto"``, a
            budget of a fifth of the run. By default each root is taken 3 times in the first 20 steps, then once every
            10. Not all factors take their root at the same step.
        damping: With means: added to the eigenvalues, relative to the largest; 0 gives pseudo-inverses.
        statistics: After the first 10 steps, one gradient of every so many is taken into the factors, and counts for
            all of them. None takes every one.
        start: First preconditioned step. Before it the step is the graft's, or plain gradient descent. ``math.inf``
            means never.
        block_size: Longest side of a block. None cuts sides longer than 256 into equal parts, and a longer matrix that
            is 16 times as long as wide has a factor for its short side only; with sums, or a memory budget, it is as
            ``math.inf``, which leaves matrices whole where memory allows it.
        memory_budget: Bytes for the factors and roots of all groups that do not have a budget of their own. None allows
            16 times the size of the parameters, or 64 MiB if that is more.
        power_rounds: Rounds of power iteration per update; more than one moves the factors towards those of the optimal
            Kronecker product.
        momentum: Heavy-ball momentum, after scaling.
        nesterov: Whether momentum has Nesterov's form.
        decay: ``"decoupled"``, ``"coupled"`` (weight decay is added to the gradient) or ``"cautious"`` (decoupled, but
            only where it agrees with the update).
        maximize: Maximise the loss instead of minimising it.
        method: ``"auto"`` gives AdamW to 0-D and 1-D parameters, embeddings and heads; ``"kronecker"`` preconditions
            all parameters, ``"left"`` and ``"right"`` with the factor of the rows or of the columns alone; ``"adam"``
            gives AdamW to all.
        view: ``"matrix"`` flattens all dimensions from the second on (where ``block_size`` is None, the positions of a
            kernel with 256 channels or more share factors instead), ``"modes"`` gives every dimension a factor, and
            ``"experts"`` takes the first dimension as a stack of matrices (experts are also recognised by their names).
        merge: With ``view="modes"``: neighbouring dimensions are merged as long as their product is at most this.
        split: Number (or sizes) of the parts into which rows are cut, each a matrix of its own; 3 for a fused qkv.
        solver: ``"auto"``, or a root solver from :mod:`kronscope.optim`.
        nonfinite: ``"skip"`` a step whose gradient is not finite, or ``"raise"``.
        parallel: ``"auto"``: processes that hold DTensor parameters divide all work over their mesh; for other
            parameters an initialised process group divides only the roots (``"replicated"``), so that each process can
            save the whole state. ``"divided"``: these too divide state and work. ``"single"``: this process works
            alone.
        process_group: The processes that share the work; None takes the mesh's, or all.

    Raises:
        OptionError: an option has a value that is not allowed.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = Shampoo(model, lr=1e-2)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.operator(model.weight).shape
    (2, 3)
    """

    rule = ShampooRule()

    @with_advice
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        exponent: float | tuple[float, ...] = -0.5,
        scale: str | Trace | Graft | Norm | None = DEFAULT_SCALE,
        refresh: int | Literal["auto"] | Refresh = DEFAULT_REFRESH,
        damping: float = 1e-4,
        start: float = 1,
        statistics: int | None = None,
        block_size: float | None = None,
        memory_budget: float | None = None,
        power_rounds: int = 1,
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
            "exponent": exponent,
            "scale": scale,
            "refresh": refresh,
            "damping": damping,
            "start": start,
            "statistics": statistics,
            "block_size": block_size,
            "memory_budget": memory_budget,
            "power_rounds": power_rounds,
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
