"""The updates of a stack of equal blocks in a few large calls; :mod:`kronscope.optim.reference` specifies them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kronscope.kron.roots import solve_roots
from kronscope.kron.triangles import pack, stored_traces, unpack
from kronscope.optim.config import Graft, Hyper, Norm, Trace
from kronscope.optim.grafts import (
    adam_graft,
    block_norms,
    graft_direction,
    rescaled,
    update_second_moment,
    with_lengths_of,
)
from kronscope.optim.pieces import (
    Tensors,
    add_gram,
    batched_times,
    isotropic_root,
    positive_power,
    ridge_of,
    short_first,
    unit_factor,
)
from kronscope.optim.soap_batched import change_basis, soap_accumulate

__all__ = ["accumulate", "batched_update", "direction", "refresh_roots"]


def batched_update(
    state: Tensors,
    grads: Tensor,
    factored: Sequence[bool],
    hyper: Hyper,
    step: int,
    due: Sequence[Tensor | None],
) -> Tensor:
    """Do what :func:`reference_update` does for each block of a stack.

    Args:
        state: What :func:`new_state` makes; changed in place.
        grads: Gradients (B, ...); not changed.
        factored: Which modes have a factor.
        hyper: Options.
        step: The step all these blocks are at, from 1.
        due: For each mode, which blocks' roots are to be taken anew: indices, or None for no block.
    """
    moments = accumulate(state, grads, factored, hyper, step)
    for mode, index in enumerate(due):
        if index is not None and (hyper.family == "soap" or step >= hyper.start):
            refresh_roots(state, mode, index, hyper, step)
    return direction(state, moments, factored, hyper, step)


class Moments(NamedTuple):
    """What a step takes from the gradients.

    Attributes:
        mean: Mean of the gradients, not corrected for its bias; for SOAP the finished update.
        lengths: The lengths (B, 1, ...) of the grafted optimizer's updates, where they came in the same pass.
    """

    mean: Tensor
    lengths: Tensor | None = None


def accumulate(state: Tensors, grads: Tensor, factored: Sequence[bool], hyper: Hyper, step: int) -> Moments:
    """Take gradients into factors and moments."""
    modes = [mode for mode, has_factor in enumerate(factored) if has_factor]
    if hyper.family == "soap":
        return Moments(soap_accumulate(state, grads, modes, hyper, step))
    decay, gain = (1.0 if hyper.is_sum else hyper.beta2), hyper.gain()
    moved = short_first(grads)
    if hyper.family == "kl":
        _accumulate_kl(state, moved, modes, decay, gain)
    elif hyper.power_rounds > 1 and len(modes) == 2 and grads.ndim == 3:
        _accumulate_rounds(state, grads, hyper, step)
    else:
        for mode in modes:
            add_gram(state[f"factor{mode}"], moved if mode else grads, mode, decay, gain)
    graft = adam_graft(state, moved, hyper, step)
    if graft is not None:
        return Moments(state["exp_avg"], block_norms(graft))
    if "graft_sq" in state:
        update_second_moment(state["graft_sq"], moved, hyper)
    if hyper.beta1 == 0:
        return Moments(moved)
    return Moments(state["exp_avg"].lerp_(moved, 1 - hyper.beta1))


def refresh_roots(state: Tensors, mode: int, index: Tensor, hyper: Hyper, step: int) -> None:
    """Take the roots (for SOAP: the eigenbases) of the factors of one mode and some blocks anew."""
    if hyper.family == "soap":
        change_basis(state, mode, index, hyper, step)
        return
    factors = unpack(state[f"factor{mode}"][index]) / hyper.correction2(step)
    basis = state.get(f"basis{mode}")
    warm = None if basis is None or step == 1 else basis[index]
    root = state[f"root{mode}"]
    found = solve_roots(
        factors,
        hyper.exponent(mode),
        ridge_of(hyper),
        hyper.solver,
        previous=unpack(root[index]) if step > 1 else None,
        warm=warm,
    )
    root[index] = pack(found.matrices, root)
    if basis is not None and found.vectors is not None:
        basis[index] = found.vectors
    trace = stored_traces(factors) + ridge_of(hyper).eps * factors.shape[-1]
    state["spectrum"][index, mode] = torch.cat([trace.unsqueeze(-1), found.extremes, found.residuals.unsqueeze(-1)], -1)


def direction(
    state: Tensors, moments: Moments, factored: Sequence[bool], hyper: Hyper, step: int, *, peek: bool = False
) -> Tensor:
    """Return the updates of a stack from what :func:`accumulate` returned; ``peek`` forms the last ones again."""
    mean = moments.mean
    if hyper.family == "soap":
        return rescaled(mean, hyper)
    correction = 1 - hyper.beta1**step if hyper.beta1 > 0 else 1.0
    grafted = isinstance(hyper.scale, Graft)

    def graft() -> Tensor:
        return graft_direction(mean / correction, state.get("graft_sq"), hyper, step)

    if step >= hyper.start:
        update = _preconditioned(state, mean, factored)
    else:
        update = graft() if grafted else mean / correction
    if grafted and step >= hyper.start:
        update = with_lengths_of(graft, update, moments.lengths)
    elif not grafted:
        weights = _weights(state, mean, factored, hyper, step, step >= hyper.start)
        if weights is not None:
            weights = weights / correction if step >= hyper.start else weights
            update.mul_(weights.view(-1, *[1] * (mean.ndim - 1)))
        update = rescaled(update, hyper)
    if hyper.momentum > 0:
        buffer = state["momentum"]
        if not peek:
            buffer.mul_(hyper.momentum).add_(update)
        update = update.add_(buffer, alpha=hyper.momentum) if hyper.nesterov else buffer.clone()
    return update


def _traces(state: Tensors, mode: int, size: int, hyper: Hyper, step: int) -> Tensor:
    """Return the traces (B,) of the factors as they are now, with the eps that sums start from."""
    return stored_traces(state[f"factor{mode}"]) / hyper.correction2(step) + ridge_of(hyper).eps * size


def _preconditioned(state: Tensors, mean: Tensor, factored: Sequence[bool]) -> Tensor:
    if mean.ndim == 3:
        update = torch.bmm(unpack(state["root0"]), mean) if factored[0] else mean
        return torch.bmm(update, unpack(state["root1"])) if factored[1] else update
    update = short_first(mean)
    for mode, has_factor in enumerate(factored):
        if has_factor:
            update = batched_times(state[f"root{mode}"], update, mode)
    return update


def _weights(
    state: Tensors, mean: Tensor, factored: Sequence[bool], hyper: Hyper, step: int, preconditioned: bool
) -> Tensor | None:
    """Return the factor (B,) in front of the product of roots, which were divided by their traces; None for one."""
    if isinstance(hyper.scale, Norm) or (hyper.scale is None and not preconditioned):
        return None
    modes = [mode for mode, has_factor in enumerate(factored) if has_factor]
    now = {mode: _traces(state, mode, mean.shape[1 + mode], hyper, step) for mode in modes}
    bare = [mode for mode in range(len(factored)) if mode not in modes]
    if isinstance(hyper.scale, Trace):
        whole = torch.stack(list(now.values())).prod(0) if hyper.family == "kl" else now[modes[0]]
        # KL-Shampoo's missing side is the identity itself, not the identity over its trace
        isotropic = ([] if hyper.family == "kl" else bare) + ([] if preconditioned else modes)
        known = math.prod(isotropic_root(mean.shape[1 + mode], hyper.exponent(mode)) for mode in isotropic)
        return positive_power(whole, -0.5) * known
    weights = torch.ones_like(now[modes[0]])
    for mode in modes:
        then = state["spectrum"][:, mode, 0]
        weights = weights * positive_power(torch.where(then > 0, then, now[mode]), hyper.exponent(mode))
    for mode in bare if hyper.family != "kl" else []:
        weights = weights * positive_power(now[modes[0]] / mean.shape[1 + mode], hyper.exponent(mode))
    return weights


def _accumulate_kl(state: Tensors, grads: Tensor, modes: Sequence[int], decay: float, gain: float) -> None:
    shape = (-1, *[1] * (grads.ndim - 1))
    rms = block_norms(grads).flatten() / math.sqrt(grads[0].numel())
    grams = {}
    for mode in modes:
        whitened = grads
        for other in modes:
            if other != mode:
                trace = state["spectrum"][:, other, 0]
                seen = trace > 0
                # before the first root the other side is rms^(2/q) I; roots then hold a multiple of I as well
                start = positive_power(rms, -1 / len(modes)) / state[f"root{other}"].flatten(1)[:, 0]
                weight = torch.where(seen, positive_power(trace, -0.5), start)
                whitened = batched_times(state[f"root{other}"], whitened, other) * weight.view(shape)
        grams[mode] = whitened
    for mode, whitened in grams.items():
        count = grads[0].numel() // grads.shape[1 + mode]
        add_gram(state[f"factor{mode}"], whitened, mode, decay, gain / count)


def _accumulate_rounds(state: Tensors, grads: Tensor, hyper: Hyper, step: int) -> None:
    decay, gain = (1.0 if hyper.is_sum else hyper.beta2), hyper.gain()
    factors = [unpack(state["factor0"]), unpack(state["factor1"])]
    old = [factors[0] * decay, factors[1] * decay]
    for power_round in range(hyper.power_rounds):
        middle = [unit_factor(factors[mode] / hyper.correction2(step)) if power_round else None for mode in (0, 1)]
        left = grads if middle[1] is None else torch.bmm(grads, middle[1])
        right = grads if middle[0] is None else torch.bmm(middle[0], grads)
        torch.baddbmm(old[0], left, grads.mT, alpha=gain, out=factors[0])
        torch.baddbmm(old[1], grads.mT, right, alpha=gain, out=factors[1])
    for mode in (0, 1):
        stored = state[f"factor{mode}"]
        stored.copy_(pack((factors[mode] + factors[mode].mT) / 2, stored))
