r"""Families that precondition with roots of their factors: Shampoo and KL-Shampoo.

With factors :math:`A_k` (``L`` and ``R`` for a matrix), exponents :math:`e_k` and the bias-corrected mean :math:`M` of
the gradients, an update is

.. math:: U = s \cdot A_1^{e_1} \times_1 \cdots A_q^{e_q} \times_q M ,

where :math:`s` is 1, the trace scale, or what gives :math:`U` a graft's or a fixed length. Roots are kept divided by
their factor's trace at the time, which :math:`s` undoes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.operators import KroneckerProduct, Operator
from kronscope.kron.roots import Ridge, RootSolver, root_order, root_residual, solve_roots
from kronscope.kron.triangles import pack, stored_traces, unpack
from kronscope.optim.block_math import (
    batched_times,
    identity_like,
    isotropic_root,
    kronecker,
    positive_power,
    short_inside,
)
from kronscope.optim.block_state import Blocks, Tensors
from kronscope.optim.blocks import Tile
from kronscope.optim.config import Adaptive, Graft, Hyper, Norm, Trace
from kronscope.optim.costs import ROOT_COST
from kronscope.optim.grafts import (
    adam_graft,
    all_true,
    block_norms,
    graft_direction,
    rescaled,
    update_second_moment,
    waiting,
    with_lengths_of,
)
from kronscope.optim.reference import update_with_roots
from kronscope.optim.rules import Moments, Rule

__all__ = ["RootRule"]


class RootRule(Rule):
    r"""What Shampoo and KL-Shampoo share; they differ in their factors.

    Attributes:
        is_plain_product: The factors' product itself estimates the curvature, and a side without a factor is the
            identity. If not, it is :math:`L \otimes R / \operatorname{tr} L`, and a side without a factor is
            :math:`(\operatorname{tr} A / d) I`, which makes that the one-sided :math:`L \otimes I / n`.
    """

    is_plain_product: ClassVar[bool]

    @abstractmethod
    def add_to_factors(
        self, state: Tensors, grads: Tensor, moved: Tensor, modes: Sequence[int], hyper: Hyper, step: int
    ) -> None:
        """Take gradients (B, ...) into the factors; ``moved`` are the same as they lie in the moments."""

    @abstractmethod
    def reference_grams(
        self, state: Tensors, grad: Tensor, modes: Sequence[int], factors: Mapping[int, Tensor] | None
    ) -> dict[int, Tensor]:
        """Return what one block's gradient adds to its factors, written to be read.

        Args:
            state: The block's state.
            grad: Its gradient.
            modes: The modes that have a factor.
            factors: The factors that the round before led to; None in the first round.
        """

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse exponents that the solver or the schedule cannot work with."""
        is_sum = float(group["betas"][1]) == 1
        ridge = Ridge(eps=float(group["eps"])) if is_sum else Ridge(damping=float(group["damping"]))
        exponent = group["exponent"]
        for one in exponent if isinstance(exponent, tuple | list) else (exponent,):
            group["solver"].check(one, ridge)
            if isinstance(group["refresh"], Adaptive) and root_order(one) is None:
                raise OptionError(
                    f"an Adaptive refresh looks at how well a root fits, which works for exponents -1, -1/2, -1/3, "
                    f"..., got {one}; use Every or Warmup."
                )

    def matrices(self, solver: RootSolver) -> int:
        """Return 2 for a factor and its root, and 1 for the basis that a warm start keeps beside them."""
        return 3 if solver.is_warm else 2

    def refresh_cost(self, block: Sequence[int], mode: int, hyper: Hyper) -> float:
        """Return the cost of a root."""
        return ROOT_COST * float(block[mode]) ** 3

    def new_state(self, blocks: Blocks, hyper: Hyper) -> Tensors:
        """Make moments, factors, roots, and what is known of the factors' spectra."""
        state: Tensors = {}
        if hyper.beta1 > 0:
            state["exp_avg"] = blocks.moment()
        if isinstance(hyper.scale, Graft) and hyper.scale.kind != "sgd":
            state["graft_sq"] = blocks.moment()
        if hyper.momentum > 0:
            state["momentum"] = blocks.moment()
        for mode in blocks.modes:
            state[f"factor{mode}"] = blocks.factor(mode)
            if hyper.solver.is_warm:
                state[f"basis{mode}"] = blocks.identity(mode)
            # the root of the identity over its trace, until a factor has been seen
            state[f"root{mode}"] = blocks.root(mode, isotropic_root(blocks.block[mode], hyper.exponent(mode)))
        # per mode, at the last refresh: trace, largest and smallest eigenvalue, the solver's residual
        state["spectrum"] = blocks.zeros(len(blocks.block), 4)
        return state

    def accumulate(self, state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Moments:
        """Take gradients into factors, their mean, and the graft's second moment."""
        moved = short_inside(grads)
        if hyper.gathers(step):
            self.add_to_factors(state, grads, moved, modes, hyper, step)
        graft = adam_graft(state, moved, hyper, step)
        if graft is not None:
            return Moments(state["exp_avg"], block_norms(graft), graft if hyper.waits_for_roots(step) else None)
        if "graft_sq" in state:
            update_second_moment(state["graft_sq"], moved, hyper)
        if hyper.beta1 == 0:
            return Moments(moved)
        return Moments(state["exp_avg"].lerp_(moved, 1 - hyper.beta1))

    def refresh(self, state: Tensors, mode: int, index: Tensor | slice, hyper: Hyper, step: int) -> None:
        """Take the roots of the factors of one mode and some blocks anew."""
        factors = unpack(state[f"factor{mode}"][index]) / hyper.factor_weight(step)
        basis = state.get(f"basis{mode}")
        root, first = state[f"root{mode}"], hyper.takes_first_roots(step)
        found = solve_roots(
            factors,
            hyper.exponent(mode),
            hyper.ridge,
            hyper.solver,
            previous=None if first else unpack(root[index]),
            warm=None if basis is None or first else basis[index],
        )
        trace = stored_traces(factors) + hyper.ridge.eps * factors.shape[-1]
        spectrum = torch.cat([trace.unsqueeze(-1), found.extremes, found.residuals.unsqueeze(-1)], -1)
        vectors = found.vectors
        if found.fresh is not None:
            # a root that stays, stays with the trace it was divided by
            spectrum = torch.where(found.fresh.view(-1, 1), spectrum, state["spectrum"][index, mode])
            if basis is not None and vectors is not None:
                vectors = torch.where(found.fresh.view(-1, 1, 1), vectors, basis[index])
        root[index] = pack(found.matrices, root)
        if basis is not None and vectors is not None:
            basis[index] = vectors
        state["spectrum"][index, mode] = spectrum

    def root_tensors(self, state: Tensors, mode: int) -> list[Tensor]:
        """Return roots, the bases of a warm start, and spectra."""
        basis = [state[f"basis{mode}"]] if f"basis{mode}" in state else []
        return [state[f"root{mode}"], *basis, state["spectrum"][:, mode]]

    def direction(
        self, state: Tensors, moments: Moments, modes: Sequence[int], hyper: Hyper, step: int, *, peek: bool = False
    ) -> Tensor:
        """Return the preconditioned mean at its length, with momentum."""
        mean = moments.mean
        correction = 1 - hyper.beta1**step if hyper.beta1 > 0 else 1.0
        grafted = isinstance(hyper.scale, Graft)

        def graft() -> Tensor:
            if moments.graft is not None:
                return moments.graft
            return graft_direction(mean / correction, state.get("graft_sq"), hyper, step)

        if step >= hyper.start:
            update = _preconditioned(state, mean, modes)
        else:
            update = graft() if grafted else mean / correction
        if grafted and step >= hyper.start:
            update = with_lengths_of(graft, update, moments.lengths)
            if hyper.waits_for_roots(step):
                seen = (state["spectrum"][:, list(modes), 0] > 0).any(1)
                if not all_true(seen):
                    update = waiting(seen, update, graft())
        elif not grafted:
            weights = self._weights(state, mean, modes, hyper, step)
            if weights is not None:
                weights = weights / correction if step >= hyper.start else weights
                # infinity times a gradient of zero would be NaN
                weights = weights.clamp(max=torch.finfo(weights.dtype).max)
                update.mul_(weights.view(-1, *[1] * (mean.ndim - 1)))
            update = rescaled(update, hyper)
        if hyper.momentum > 0:
            buffer = state["momentum"]
            if not peek:
                buffer.mul_(hyper.momentum).add_(update)
            update = update.add_(buffer, alpha=hyper.momentum) if hyper.nesterov else buffer.clone()
        return update

    def _weights(self, state: Tensors, mean: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor | None:
        """Return the factor (B,) in front of the product of roots, which were divided by their traces; None for one."""
        preconditioned = step >= hyper.start
        if isinstance(hyper.scale, Norm) or (hyper.scale is None and not preconditioned):
            return None
        sizes = mean.shape[1:]
        now = {mode: _traces(state, mode, sizes[mode], hyper, step) for mode in modes}
        # sides without a factor that are not simply the identity
        bare = [] if self.is_plain_product else [mode for mode in range(len(sizes)) if mode not in modes]
        if isinstance(hyper.scale, Trace):
            whole = torch.stack(list(now.values())).prod(0) if self.is_plain_product else now[modes[0]]
            isotropic = bare + ([] if preconditioned else list(modes))
            known = math.prod([isotropic_root(sizes[mode], hyper.exponent(mode)) for mode in isotropic])
            return positive_power(whole, -0.5) * known
        weights = torch.ones_like(now[modes[0]])
        for mode in modes:
            then = state["spectrum"][:, mode, 0]
            weights = weights * positive_power(torch.where(then > 0, then, now[mode]), hyper.exponent(mode))
        for mode in bare:
            weights = weights * positive_power(now[modes[0]] / sizes[mode], hyper.exponent(mode))
        return weights

    def reference(
        self, state: Tensors, grad: Tensor, modes: Sequence[int], hyper: Hyper, step: int, refresh: Sequence[bool]
    ) -> Tensor:
        """Do the same for one block."""
        return update_with_roots(self, state, grad, modes, hyper, step, refresh)

    def preview(self, state: Tensors, mean: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
        """Form the last updates again."""
        return self.direction(state, Moments(mean), modes, hyper, step, peek=True)

    def residuals(self, state: Tensors, mode: int, rows: Tensor | slice, hyper: Hyper, step: int) -> Tensor:
        """Return how far stored roots are from being the roots of the present factors."""
        factors = unpack(state[f"factor{mode}"][rows]) / hyper.factor_weight(step)
        largest, roots = state["spectrum"][rows, mode, 1], unpack(state[f"root{mode}"][rows])
        return root_residual(factors, roots, hyper.exponent(mode), hyper.ridge, largest)

    def conditions(self, state: Tensors, mode: int, hyper: Hyper, step: int, *, quick: bool = False) -> Tensor:
        """Return largest over smallest eigenvalue, without the ridge, at the last refresh.

        A factor that is singular has the inverse of the rounding error. With the ridge every one that is nearly so
        would have the inverse of the damping, which says nothing of the factor.
        """
        largest, smallest = state["spectrum"][:, mode, 1], state["spectrum"][:, mode, 2]
        ridge = hyper.ridge
        top = (largest - ridge.eps) / (1 + ridge.damping)
        bottom = smallest - ridge.eps - ridge.damping * top
        ratio = top / torch.maximum(bottom, torch.finfo(top.dtype).eps * top)
        return torch.where(smallest > 0, ratio, torch.full_like(largest, math.nan))

    def operator_tensors(self, modes: Sequence[int]) -> list[str]:
        """Return the names of the factors."""
        return [f"factor{mode}" for mode in modes]

    def operator(self, state: Tensors, tile: Tile, hyper: Hyper, step: int) -> Operator:
        """Return the product of the factors, divided by the first one's trace unless it is a plain one."""
        block = tile.block if len(tile.block) > 1 else (1, *tile.block)
        factors = {mode: state[f"factor{mode}"] / hyper.factor_weight(step) for mode in tile.modes}
        whole = factors[tile.modes[0]].trace()
        if self.is_plain_product:
            filled = [factors.get(mode, identity_like(size, whole)) for mode, size in enumerate(block)]
            return KroneckerProduct(filled[0], kronecker(filled[1:]))
        # each side beyond the first is divided by the trace
        filled = [
            factors[mode] if mode in factors else identity_like(size, whole) * (whole / size)
            for mode, size in enumerate(block)
        ]
        scale = float(whole) ** -(len(block) - 1) if float(whole) > 0 else 0.0
        return KroneckerProduct(filled[0], kronecker(filled[1:]), scale)


def _traces(state: Tensors, mode: int, size: int, hyper: Hyper, step: int) -> Tensor:
    """Return the traces (B,) of the factors as they are now, with the eps that sums start from."""
    return stored_traces(state[f"factor{mode}"]) / hyper.factor_weight(step) + hyper.ridge.eps * size


def _preconditioned(state: Tensors, mean: Tensor, modes: Sequence[int]) -> Tensor:
    if mean.ndim == 3:
        update = torch.bmm(unpack(state["root0"]), mean) if 0 in modes else mean
        return torch.bmm(update, unpack(state["root1"])) if 1 in modes else update
    update = short_inside(mean)
    for mode in modes:
        update = batched_times(state[f"root{mode}"], update, mode)
    return update
