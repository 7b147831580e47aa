"""What the readable and the fast update share: the state of blocks, and a few formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kronscope.kron.roots import Ridge
from kronscope.optim.config import Graft, Hyper

__all__ = [
    "Tensors",
    "add_gram",
    "batched_times",
    "isotropic_root",
    "new_state",
    "positive_power",
    "ridge_of",
    "traces",
    "unit_factor",
]

Tensors = dict[str, Tensor]


def new_state(
    block: Sequence[int], factored: Sequence[bool], hyper: Hyper, count: int, dtype: torch.dtype, device: torch.device
) -> Tensors:
    """Make the state of ``count`` blocks: tensors only, each with the block's index first."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(count, *shape, dtype=dtype, device=device)

    state: Tensors = {}
    if hyper.beta1 > 0:
        state["exp_avg"] = zeros(*block)
    if hyper.family == "soap":
        state["exp_avg_sq"] = zeros(*block)
    elif isinstance(hyper.scale, Graft) and hyper.scale.kind != "sgd":
        state["graft_sq"] = zeros(*block)
    if hyper.momentum > 0:
        state["momentum"] = zeros(*block)
    for mode, has_factor in enumerate(factored):
        if not has_factor:
            continue
        size = block[mode]
        eye = torch.eye(size, dtype=dtype, device=device).repeat(count, 1, 1)
        state[f"factor{mode}"] = zeros(size, size)
        if hyper.family == "soap" or hyper.solver.is_warm:
            state[f"basis{mode}"] = eye.clone()
        if hyper.family != "soap":
            # the root of the identity over its trace, until a factor has been seen
            state[f"root{mode}"] = eye * isotropic_root(size, hyper.exponent(mode))
    if hyper.family != "soap":
        # per mode, at the last refresh: trace, largest and smallest eigenvalue, the solver's residual
        state["spectrum"] = zeros(len(block), 4)
    return state


def ridge_of(hyper: Hyper) -> Ridge:
    """Return what is added to the factors: eps to sums, damping to means."""
    return Ridge(eps=hyper.eps) if hyper.is_sum else Ridge(damping=hyper.damping)


def unit_factor(factors: Tensor) -> Tensor:
    r"""Return :math:`A \operatorname{tr} A / \lVert A \rVert_F^2`, the identity for A = 0."""
    norms = factors.square().sum((-2, -1))
    weights = torch.where(norms > 0, traces(factors) / norms.clamp_min(torch.finfo(norms.dtype).tiny), norms)
    eye = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    return torch.where((norms > 0).view(-1, 1, 1), factors * weights.view(-1, 1, 1), eye)


def traces(factors: Tensor) -> Tensor:
    """Traces of a stack of matrices."""
    return factors.diagonal(dim1=-2, dim2=-1).sum(-1)


def isotropic_root(size: int, exponent: float) -> float:
    """The root of the identity over its trace."""
    return math.pow(size, -exponent)


def positive_power(values: Tensor, exponent: float) -> Tensor:
    """Raise to a power, where zero stays zero."""
    positive = values > 0
    return torch.where(
        positive, torch.where(positive, values, torch.ones_like(values)) ** exponent, torch.zeros_like(values)
    )


def batched_times(matrices: Tensor, tensors: Tensor, mode: int) -> Tensor:
    """Multiply one mode of each tensor (B, ...) by its matrix (B, d, d)."""
    if tensors.ndim == 3:
        return torch.bmm(matrices, tensors) if mode == 0 else torch.bmm(tensors, matrices.mT)
    moved = tensors.movedim(mode + 1, 1)
    return torch.bmm(matrices, moved.flatten(2)).view(moved.shape).movedim(1, mode + 1)


def add_gram(factor: Tensor, grads: Tensor, mode: int, decay: float, gain: float) -> None:
    """Add the Gram matrices of one mode to the factors (B, d, d), in place and in one pass."""
    rows = (grads if mode == 0 else grads.mT) if grads.ndim == 3 else grads.movedim(mode + 1, 1).flatten(2)
    factor.baddbmm_(rows, rows.mT, beta=decay, alpha=gain)
