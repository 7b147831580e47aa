"""SOAP step for step as its authors' implementation has it, for comparison: ``SOAP(reference=True)``.

It makes no first step, permutes the second moment into the order of the new eigenvalues instead of turning it, adds eps
before correcting the bias, and decays weights after the step. It goes block by block and in its own order of
operations, because in the null space of a factor the basis is decided by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.bases import by_reflections, eigenbasis
from kronscope.kron.triangles import unpack
from kronscope.optim.apply import apply_updates
from kronscope.optim.block_math import batched_times, short_inside
from kronscope.optim.block_state import Tensors
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Every, Hyper, Refresh
from kronscope.optim.rules import Moments
from kronscope.optim.rules.bases import EigenbasisRule

__all__ = ["PublishedSoapRule"]

# Longer dimensions get no factor.
_MAX_SIDE = 10_000


@final
@dataclass(frozen=True)
class PublishedSoapRule(EigenbasisRule):
    """The published algorithm; every dimension of a parameter with two or more has a factor."""

    default_refresh: ClassVar[Refresh] = Every(10)
    packs = False
    is_staggered = False
    # a refresh permutes the moments, which all modes share
    has_separate_roots = False

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse what the published algorithm does not have."""
        super().check_options(group)
        if not isinstance(group["refresh"], Every) or group["betas"][1] == 1 or group["decay"] != "decoupled":
            raise OptionError("the published SOAP refreshes every k steps (an int), has betas[1] < 1, decoupled decay.")
        plain = {"scale": None, "block_size": None, "memory_budget": None, "method": "auto", "merge": 0, "split": None}
        plain["statistics"] = 1
        other = [name for name, value in plain.items() if group[name] != value]
        if other:
            raise OptionError(f"the published SOAP has no option {', '.join(map(repr, other))}; leave reference out.")

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return the parameter as it is, whole."""
        if math.prod(shape) == 0:
            return Layout(shape, shape, (), "empty")
        view = shape or (1,)
        factored = tuple(len(shape) > 1 and size <= _MAX_SIDE for size in view)
        return Layout(shape, view, (Tile((0,) * len(view), view, view, factored),), "as published")

    def seen(self, step: int) -> int:
        """Return all steps but the first, which only makes a basis."""
        return step - 1

    def accumulate(self, state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Moments:
        """Take gradients into moments, but for the first, and into factors."""
        if step == 1:
            update = torch.zeros_like(grads)
        else:
            update = self.take_into_moments(state, short_inside(grads), modes, hyper, step)
        for mode in modes:
            others = [axis for axis in range(grads.ndim - 1) if axis != mode]
            for factor, grad in zip(state[f"factor{mode}"], grads, strict=True):
                factor.lerp_(torch.tensordot(grad, grad, dims=[others, others]), hyper.gain())
        return Moments(update)

    def denominators(self, deviations: Tensor, hyper: Hyper, correction1: float, correction2: float) -> Tensor:
        r"""Return :math:`(\sqrt v + \epsilon)\, c_1 / c_2`."""
        return deviations.add_(hyper.eps).mul_(correction1 / correction2)

    def refresh(self, state: Tensors, mode: int, index: Tensor | slice, hyper: Hyper, step: int) -> None:
        """Take new bases, turn the mean into them and permute the second moment."""
        old, second = state[f"basis{mode}"][index], state["exp_avg_sq"][index]
        new, second = _new_basis(unpack(state[f"factor{mode}"][index]), old, second, mode, step)
        if hyper.beta1 > 0:
            state["exp_avg"][index] = batched_times(new.mT @ old, state["exp_avg"][index], mode)
        state["exp_avg_sq"][index] = second
        state[f"basis{mode}"][index] = new

    def apply(self, targets: list[Tensor], updates: list[Tensor], group: dict[str, Any], steps: Sequence[int]) -> None:
        """Make no first step, and decay after the others."""
        moving = [place for place, step in enumerate(steps) if step > 1]
        moved = [targets[place] for place in moving]
        if moved:
            apply_updates(moved, [updates[place] for place in moving], {**group, "weight_decay": 0.0})
            if group["weight_decay"] != 0:
                torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])

    def reference(
        self, state: Tensors, grad: Tensor, modes: Sequence[int], hyper: Hyper, step: int, refresh: Sequence[bool]
    ) -> Tensor:
        """Do the same with a stack of one: nothing here is done for several blocks at once."""
        stack = {name: tensor.unsqueeze(0) for name, tensor in state.items()}
        moments = self.accumulate(stack, grad.unsqueeze(0), modes, hyper, step)
        for mode in modes:
            if refresh[mode]:
                self.refresh(stack, mode, torch.tensor([0]), hyper, step)
        return self.direction(stack, moments, modes, hyper, step)[0]

    def preview(self, state: Tensors, mean: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
        """Form the last updates again; the first ones are zero."""
        return torch.zeros(1) if step == 1 else super().preview(state, mean, modes, hyper, step)


def _new_basis(factors: Tensor, old: Tensor, second: Tensor, mode: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the new bases, and the second moment permuted into the order of their eigenvalues."""
    if step == 1:
        pairs = zip(factors, old, strict=True)
        return torch.stack([eigenbasis(*pair, place) for place, pair in enumerate(pairs)]), second
    bases, moments = [], []
    for place, (factor, basis, moment) in enumerate(zip(factors, old, second, strict=True)):
        order = (basis.T @ factor @ basis).diagonal().argsort(descending=True)
        moments.append(moment.index_select(mode, order))
        # where it fails, the basis of before stays, in this order
        bases.append(by_reflections(factor @ basis[:, order], basis[:, order], place))
    return torch.stack(bases), torch.stack(moments)
