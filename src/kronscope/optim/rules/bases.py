r"""Families that run Adam in the eigenbases :math:`Q_k` of their factors: SOAP, and SOAP as it was published.

With :math:`G' = Q_L^\top G Q_R`, both moments are kept in the bases,

.. math:: m \leftarrow \beta_1 m + (1-\beta_1) G', \quad v \leftarrow \beta_2 v + (1-\beta_2) G'^{\circ 2}, \quad
          U = Q_L \Big(\frac{\hat m}{\sqrt{\hat v} + \epsilon}\Big) Q_R^\top .

The bases are those of the steps before.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.devices import wide
from kronscope.kron.operators import EigenbasisDiagonal, Operator
from kronscope.kron.rescues import FAILURES
from kronscope.kron.roots import Eigh, RootSolver, WarmQR
from kronscope.kron.triangles import unpack
from kronscope.optim.block_math import batched_times, identity_like, kronecker, short_inside
from kronscope.optim.block_state import Blocks, Tensors
from kronscope.optim.blocks import Tile
from kronscope.optim.config import Hyper, Norm
from kronscope.optim.costs import BASIS_COST, ELEMENT_COST, ROOT_COST
from kronscope.optim.grafts import rescaled
from kronscope.optim.rules import Moments, Rule
from kronscope.optim.solvers import CostModel

__all__ = ["EigenbasisRule"]


class EigenbasisRule(Rule):
    """What both forms of SOAP share; they differ in how bases and moments change."""

    name = "soap"
    title = "SOAP"
    class_name = "SOAP"
    fixed: ClassVar[Mapping[str, object]] = {
        "exponent": -0.5,
        "damping": 0.0,
        "start": 1,
        "power_rounds": 1,
        "momentum": 0.0,
        "nesterov": False,
    }

    @abstractmethod
    def seen(self, step: int) -> int:
        """Return the number of gradients in the moments after ``step`` steps."""

    @abstractmethod
    def denominators(self, deviations: Tensor, hyper: Hyper, correction1: float, correction2: float) -> Tensor:
        """Return what the mean is divided by; may change its argument.

        Args:
            deviations: Square roots (B, ...) of the second moment as it is kept.
            hyper: Options.
            correction1: The mean's weight so far.
            correction2: The root of the second moment's weight so far.
        """

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse scales that are not Adam's, and solvers without eigenvectors."""
        if not isinstance(group["scale"], Norm | None):
            raise OptionError(
                f"SOAP has Adam's scale; scale must be None, 'norm' or Norm(rms), got {group['scale']!r}."
            )
        if not isinstance(group["solver"], Eigh | WarmQR | CostModel):
            raise OptionError(
                f"SOAP needs eigenvectors; solver must be 'auto', WarmQR() or Eigh(), got {group['solver']!r}."
            )

    def matrices(self, solver: RootSolver) -> int:
        """Return 2: a factor and its basis."""
        return 2

    def refresh_cost(self, block: Sequence[int], mode: int, hyper: Hyper) -> float:
        """Return the cost of a basis, and of turning both moments into it."""
        size, entries = float(block[mode]), math.prod(block)
        basis = BASIS_COST if hyper.solver.is_warm else ROOT_COST
        # one product more gives the sums of the second moment
        return (basis + 1) * size**3 + 2 * entries * size + 2 * ELEMENT_COST * entries

    def passes(self, hyper: Hyper) -> tuple[int, int]:
        """Return 2, for two turns, and 1 for a Gram matrix."""
        return 2, 1

    def new_state(self, blocks: Blocks, hyper: Hyper) -> Tensors:
        """Make moments, factors and bases."""
        state: Tensors = {}
        if hyper.beta1 > 0:
            state["exp_avg"] = blocks.moment()
        state["exp_avg_sq"] = blocks.moment()
        for mode in blocks.modes:
            state[f"factor{mode}"] = blocks.factor(mode)
            state[f"basis{mode}"] = blocks.identity(mode)
        return state

    def take_into_moments(self, state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
        """Take gradients into both moments, and return the updates."""
        inside = grads
        for mode in modes:
            inside = batched_times(state[f"basis{mode}"].mT, inside, mode)
        state["exp_avg_sq"].mul_(hyper.beta2).addcmul_(inside, inside, value=hyper.gain())
        if hyper.beta1 > 0:
            state["exp_avg"].lerp_(inside, 1 - hyper.beta1)
        # both moments have the turned gradient, so that its place is free: new memory would have to be mapped
        free = inside if modes and hyper.beta1 > 0 and inside.stride() == state["exp_avg_sq"].stride() else None
        return self._adam(state, inside, modes, hyper, step, free)

    def _adam(
        self,
        state: Tensors,
        inside: Tensor,
        modes: Sequence[int],
        hyper: Hyper,
        step: int,
        free: Tensor | None = None,
    ) -> Tensor:
        """Return Adam's step in the bases, turned back.

        Args:
            state: The state.
            inside: The turned gradient, used where there is no mean.
            modes: The modes that have a basis.
            hyper: Options.
            step: The step.
            free: A tensor like the moments that may be overwritten.
        """
        mean = state["exp_avg"] if hyper.beta1 > 0 else inside
        seen = self.seen(step)
        correction1, correction2 = 1 - hyper.beta1**seen, hyper.correction2(seen) ** 0.5
        denominators = self.denominators(torch.sqrt(state["exp_avg_sq"], out=free), hyper, correction1, correction2)
        update = torch.div(mean, denominators, out=denominators)
        if hyper.eps == 0:
            # 0/0: an entry that has been zero so far moves nothing
            update.nan_to_num_(nan=0.0)
        update = short_inside(update)
        for mode in modes:
            update = batched_times(state[f"basis{mode}"], update, mode)
        return update

    def root_tensors(self, state: Tensors, mode: int) -> list[Tensor]:
        """Return the bases."""
        return [state[f"basis{mode}"]]

    def direction(
        self, state: Tensors, moments: Moments, modes: Sequence[int], hyper: Hyper, step: int, *, peek: bool = False
    ) -> Tensor:
        """Return the updates, which were formed with the bases of before, at their length."""
        return rescaled(moments.mean, hyper)

    def preview(self, state: Tensors, mean: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
        """Form the last updates again, in the present bases."""
        if hyper.beta1 == 0:
            for mode in modes:
                mean = batched_times(state[f"basis{mode}"].mT, mean, mode)
        return rescaled(self._adam(state, mean, modes, hyper, step), hyper)

    def residuals(self, state: Tensors, mode: int, rows: Tensor | slice, hyper: Hyper, step: int) -> Tensor:
        r"""Return how far :math:`Q^\top A Q` is from a diagonal matrix, relative to the factor's size."""
        factors = unpack(state[f"factor{mode}"][rows]) / hyper.factor_weight(step)
        basis = state[f"basis{mode}"][rows]
        moved = factors @ basis
        rest = moved - basis * (basis * moved).sum(-2, keepdim=True)
        tiny = torch.finfo(factors.dtype).tiny
        sizes = torch.linalg.vector_norm(factors, dim=(-2, -1)).clamp_min(tiny)
        residuals: Tensor = torch.linalg.vector_norm(rest, dim=(-2, -1)) / sizes
        return residuals

    def conditions(self, state: Tensors, mode: int, hyper: Hyper, step: int, *, quick: bool = False) -> Tensor:
        r"""Return largest over smallest eigenvalue that is not zero, of the present factors.

        The quick ones are of the diagonal of :math:`Q^\top A Q`, whose entries lie between the eigenvalues.
        """
        factors = unpack(state[f"factor{mode}"])
        if quick:
            basis = state[f"basis{mode}"]
            values = (basis * (factors @ basis)).sum(-2)
            values = wide(values).clamp_min(0)
        else:
            try:
                values = torch.linalg.eigvalsh(wide(factors) / hyper.factor_weight(step)).clamp_min(0)
            except FAILURES:
                return factors.new_full(factors.shape[:1], math.nan)
        positive = torch.where(values > 0, values, values.amax(-1, keepdim=True))
        conditions: Tensor = values.amax(-1) / positive.amin(-1)
        return conditions

    def operator_tensors(self, modes: Sequence[int]) -> list[str]:
        """Return the names of the second moment and the bases."""
        return ["exp_avg_sq", *(f"basis{mode}" for mode in modes)]

    def operator(self, state: Tensors, tile: Tile, hyper: Hyper, step: int) -> Operator:
        """Return the second moment as a diagonal matrix in the bases."""
        block = tile.block if len(tile.block) > 1 else (1, *tile.block)
        values = state["exp_avg_sq"] / hyper.correction2(max(self.seen(step), 1))
        bases = [state.get(f"basis{mode}") for mode in range(len(tile.block))]
        bases = bases if len(tile.block) > 1 else [None, *bases]
        right = None
        if any(basis is not None for basis in bases[1:]):
            pairs = zip(bases[1:], block[1:], strict=True)
            right = kronecker([identity_like(size, values) if basis is None else basis for basis, size in pairs])
        return EigenbasisDiagonal(bases[0], right, values.reshape(block[0], math.prod(block[1:])))
