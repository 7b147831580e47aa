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

    def passes(self, hyper: Hyper) -> int:
        """Return 2, for a Gram matrix and the multiplication by the root, and one for each further round."""
        return 1 + hyper.power_rounds

    def add_to_factors(
        self, state: Tensors, grads: Tensor, moved: Tensor, modes: Sequence[int], hyper: Hyper, step: int
    ) -> None:
        """Add the Gram matrices."""
        if hyper.power_rounds > 1 and len(modes) == 2 and grads.ndim == 3:
            _add_in_rounds(state, grads, hyper, step)
            return
        for mode in modes:
            add_gram(state[f"factor{mode}"], moved if mode else grads, mode, hyper.beta2, hyper.gain())

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
    old = [factors[0] * hyper.beta2, factors[1] * hyper.beta2]
    for power_round in range(hyper.power_rounds):
        middle = [unit_factor(factors[mode] / hyper.correction2(step)) if power_round else None for mode in (0, 1)]
        left = grads if middle[1] is None else torch.bmm(grads, middle[1])
        right = grads if middle[0] is None else torch.bmm(middle[0], grads)
        torch.baddbmm(old[0], left, grads.mT, alpha=hyper.gain(), out=factors[0])
        torch.baddbmm(old[1], grads.mT, right, alpha=hyper.gain(), out=factors[1])
    for mode in (0, 1):
        stored = state[f"factor{mode}"]
        stored.copy_(pack((factors[mode] + factors[mode].mT) / 2, stored))


@final
class Shampoo(KroneckerOptimizer):
    r"""Precondition every matrix from both sides with powers of its gradients' Gram matrices.

    With :math:`L = \mathrm{E}[G G^\top]`, :math:`R = \mathrm{E}[G^\top G]` (exponential means with ``betas[1]``, or
    sums if that is 1), the mean :math:`M` of the gradients (``betas[0]``) and the exponent :math:`e` (``exponent``),

    .. math:: W \leftarrow W - \eta\, s\, L^{e} M R^{e} ,

    where :math:`s` is what ``scale`` says. The paper's view is that :math:`L \otimes R / \operatorname{tr} L` estimates
    the curvature matrix, so :math:`e = -1/2` with ``scale="trace"`` is its inverse square root, on Adam's scale.

    Args:
        params: The model, its named parameters (``model.named_parameters()``), or groups
            (:func:`kronscope.param_groups`), which let embeddings, heads and experts be recognised; or parameters
            without names. Frozen ones are planned when they are trained.
        lr: Learning rate :math:`\eta`, a number or a 0-D tensor. Start with AdamW's, then try a three times larger one.
        betas: Decay of the gradient mean, and of the factors; 1 for the second means sums, as in Adagrad.
        eps: Absolute. With sums, factors start at ``eps`` times the identity and nothing else regularises; with means
            it is Adam's eps (for grafts, and for parameters that get AdamW).
        weight_decay: Weight decay :math:`\lambda`.
        exponent: Exponent of each factor, or one per factor: -0.25 original Shampoo, -0.5 Shampoo².
        scale: ``"trace"``, ``"adam"``, ``"adagrad"``, ``"rmsprop"``, ``"sgd"``, ``"norm"``, None, or an object
            (:class:`Trace`, :class:`Graft`, :class:`Norm`).
        refresh: Steps between two roots of a factor, staggered over factors, or an object (:class:`Every`,
            :class:`Warmup`, :class:`Adaptive`).
        damping: With means: added to the eigenvalues, relative to the largest; 0 gives pseudo-inverses.
        start: First preconditioned step; before it, the graft's (or a plain) step is made. ``math.inf`` is never.
        block_size: Longest side of a block; None leaves matrices whole where the memory budget allows.
        memory_budget: Bytes for the factors and roots of all groups that do not have their own; None allows 16 times
            the parameters, or 64 MiB.
        power_rounds: Power-iteration rounds per update; more than one moves the factors towards the optimal
            Kronecker product.
        momentum: Heavy-ball momentum, after scaling.
        nesterov: Nesterov's form of it.
        decay: ``"decoupled"``, ``"coupled"`` (added to the gradient) or ``"cautious"`` (decoupled, only where it
            agrees with the update).
        maximize: Ascend.
        method: ``"auto"`` gives 0-D and 1-D parameters, embeddings and heads AdamW; ``"kronecker"`` and ``"adam"``
            decide for all.
        view: ``"matrix"`` flattens from dimension 1, ``"modes"`` gives every dimension a factor, ``"experts"`` takes
            the first dimension as a stack of matrices; by name, experts are recognised.
        merge: With ``"modes"``: neighbouring dimensions are merged while their product stays within this.
        split: Number (or sizes) of row parts that are matrices of their own, as 3 for a fused qkv.
        solver: ``"auto"``, or a root solver.
        nonfinite: ``"skip"`` a step whose gradient is not finite, or ``"raise"``.
        parallel: ``"auto"``: DTensor parameters divide the work over the processes of their mesh; other parameters are
            held by all of an initialised process group (``"replicated"``), which divide the roots only, so that each
            process can save the whole state. ``"divided"``: these too divide state and work. ``"single"``: this
            process is on its own.
        process_group: The processes that share the work; None takes the mesh's, or all.

    Raises:
        OptionError: an option has a value that is not allowed.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = Shampoo(model.parameters(), lr=1e-2)
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
        refresh: int | Refresh = DEFAULT_REFRESH,
        damping: float = 1e-4,
        start: float = 1,
        block_size: int | None = None,
        memory_budget: float | None = None,
        power_rounds: int = 1,
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
