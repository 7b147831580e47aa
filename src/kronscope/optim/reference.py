"""The order of a step for one block, written to be read; the rules, which treat stacks, are tested equal to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronscope.kron.grams import mode_gram
from kronscope.kron.powers import default_cutoff
from kronscope.kron.roots import Eigh, solve_roots
from kronscope.optim.block_math import isotropic_root, positive_power
from kronscope.optim.block_state import Tensors
from kronscope.optim.config import Graft, Hyper, Norm, Trace
from kronscope.optim.grafts import WAITING, graft_direction, rescaled, update_second_moment

if TYPE_CHECKING:
    from kronscope.optim.rules.roots import RootRule

__all__ = ["reference_update", "times", "update_in_bases", "update_with_roots", "with_sums", "with_unseen"]


def reference_update(
    state: Tensors, grad: Tensor, modes: Sequence[int], hyper: Hyper, step: int, refresh: Sequence[bool]
) -> Tensor:
    """Update the state of one block with one gradient and return the step to take.

    Args:
        state: One block's tensors, as the rule's ``new_state`` makes them with ``packs=False`` but without the first
            index; changed in place.
        grad: The block's gradient.
        modes: The modes that have a factor.
        hyper: Options.
        step: Which step of this parameter it is, from 1.
        refresh: Which modes' roots are to be taken anew.
    """
    return hyper.rule.reference(state, grad, modes, hyper, step, refresh)


def update_with_roots(
    rule: RootRule,
    state: Tensors,
    grad: Tensor,
    modes: Sequence[int],
    hyper: Hyper,
    step: int,
    refresh: Sequence[bool],
) -> Tensor:
    """Do :func:`reference_update` for families that precondition with roots."""
    # 1. factors
    factors = _factors(rule, state, grad, modes, hyper, step)

    # 2. roots
    preconditioned = step >= hyper.start
    for mode in modes:
        if preconditioned and refresh[mode]:
            found = solve_roots(factors[mode].unsqueeze(0), hyper.exponent(mode), hyper.ridge, Eigh())
            state[f"root{mode}"].copy_(found.matrices[0])
            trace = factors[mode].trace() + hyper.ridge.eps * grad.shape[mode]
            state["spectrum"][mode] = torch.stack([trace, *found.extremes[0], found.residuals[0]])

    # 3. first moment, and the graft's second
    mean = grad
    if hyper.beta1 > 0:
        state["exp_avg"].lerp_(grad, 1 - hyper.beta1)
        mean = state["exp_avg"] / (1 - hyper.beta1**step)
    if "graft_sq" in state:
        update_second_moment(state["graft_sq"], grad, hyper)

    # 4. direction
    update = mean
    for mode in modes:
        if preconditioned:
            update = times(state[f"root{mode}"], update, mode)
        else:
            update = update * isotropic_root(grad.shape[mode], hyper.exponent(mode))

    # 5. length
    now = {mode: factors[mode].trace() + hyper.ridge.eps * grad.shape[mode] for mode in modes}
    if isinstance(hyper.scale, Trace):
        whole = torch.stack(list(now.values())).prod() if rule.is_plain_product else now[modes[0]]
        update = update * positive_power(whole, -0.5)
    elif hyper.scale is None and not preconditioned:
        update = mean
    elif hyper.scale is None:
        for mode in modes:
            then = state["spectrum"][mode, 0]
            update = update * positive_power(torch.where(then > 0, then, now[mode]), hyper.exponent(mode))
    for mode in range(grad.ndim):
        if mode not in modes and not rule.is_plain_product:
            if isinstance(hyper.scale, Trace):
                update = update * isotropic_root(grad.shape[mode], hyper.exponent(mode))
            elif hyper.scale is None and preconditioned:
                update = update * positive_power(now[modes[0]] / grad.shape[mode], hyper.exponent(mode))
    if isinstance(hyper.scale, Graft):
        graft = graft_direction(mean, state.get("graft_sq"), hyper, step)
        # a block that waits for its first root makes a part of the graft's step
        has_root = any(state["spectrum"][mode, 0] > 0 for mode in modes)
        waits = preconditioned and hyper.waits_for_roots(step) and not has_root
        is_own = preconditioned and not waits and update.norm() > 0
        update = update * (graft.norm() / update.norm()) if is_own else graft * (WAITING if waits else 1.0)
    elif isinstance(hyper.scale, Norm) and update.norm() > 0:
        update = update * (hyper.scale.rms * math.sqrt(grad.numel()) / update.norm())
    elif isinstance(hyper.scale, Trace) and hyper.scale.bound is not None:
        update = update / (update.norm() / math.sqrt(grad.numel()) / hyper.scale.bound).clamp_min(1.0)

    # 6. momentum
    if hyper.momentum > 0:
        buffer = state["momentum"].mul_(hyper.momentum).add_(update)
        update = update + hyper.momentum * buffer if hyper.nesterov else buffer.clone()
    return update


def _factors(
    rule: RootRule, state: Tensors, grad: Tensor, modes: Sequence[int], hyper: Hyper, step: int
) -> dict[int, Tensor]:
    """Take the gradient into the factors, and return them corrected for their bias."""
    if not hyper.gathers(step):
        return {mode: state[f"factor{mode}"] / hyper.factor_weight(step) for mode in modes}
    old = {mode: state[f"factor{mode}"].clone() for mode in modes}
    rounds = hyper.power_rounds if len(modes) == 2 and grad.ndim == 2 else 1
    factors: dict[int, Tensor] | None = None
    for _ in range(rounds):
        # every round starts again from the factors of the step before
        for mode, gram in rule.reference_grams(state, grad, modes, factors).items():
            state[f"factor{mode}"].copy_(hyper.factor_decay(step) * old[mode] + hyper.factor_gain(step) * gram)
        factors = {mode: state[f"factor{mode}"] / hyper.factor_weight(step) for mode in modes}
    assert factors is not None
    return factors


def update_in_bases(
    new_basis: Callable[[Tensor, Tensor, Hyper, int], Tensor],
    state: Tensors,
    grad: Tensor,
    modes: Sequence[int],
    hyper: Hyper,
    step: int,
    refresh: Sequence[bool],
) -> Tensor:
    """Do :func:`reference_update` for Adam in eigenbases, which are those of the steps before."""
    inside = grad
    for mode in modes:
        inside = times(state[f"basis{mode}"].T, inside, mode)
    mean = inside
    if hyper.beta1 > 0:
        state["exp_avg"].lerp_(inside, 1 - hyper.beta1)
        mean = state["exp_avg"] / (1 - hyper.beta1**step)
    state["exp_avg_sq"].mul_(hyper.beta2).add_(hyper.gain() * inside**2)
    deviation = (state["exp_avg_sq"] / hyper.correction2(step)).sqrt()
    # rounding in entries without a gradient must not be blown up to full steps
    floor = deviation.max() * default_cutoff(max(grad.shape), grad.dtype)
    update = mean / (deviation + floor + hyper.eps)
    update = update.nan_to_num(nan=0.0) if hyper.eps == 0 else update
    for mode in modes:
        update = times(state[f"basis{mode}"], update, mode)
    for mode in modes:
        factor = state[f"factor{mode}"]
        if hyper.gathers(step):
            gram = mode_gram(grad.unsqueeze(0), mode=mode)
            factor.copy_(hyper.factor_decay(step) * factor + hyper.factor_gain(step) * gram)
        if refresh[mode]:
            old = state[f"basis{mode}"].clone()
            new = new_basis(factor.unsqueeze(0), old.unsqueeze(0), hyper, step)[0]
            turn = new.T @ old
            if hyper.beta1 > 0:
                state["exp_avg"].copy_(times(turn, state["exp_avg"], mode))
            second, sums = state["exp_avg_sq"].unsqueeze(0), (new.T @ factor @ new).diag().unsqueeze(0)
            if hyper.leaves_out(step):
                share, before = hyper.seen_share(step), (old.T @ factor @ old).diag().unsqueeze(0)
                sums = with_unseen(share * sums, share * before, second, turn.unsqueeze(0), mode)
            second = times(turn**2, second[0], mode).unsqueeze(0)
            state["exp_avg_sq"].copy_(with_sums(second, sums, mode)[0])
            state[f"basis{mode}"].copy_(new)
    return rescaled(update.unsqueeze(0), hyper)[0]


def with_sums(moments: Tensor, sums: Tensor, mode: int) -> Tensor:
    """Scale the slices of moments (B, ...) along a mode so that they add up to ``sums`` (B, d); zeros stay zero.

    Sums below the rounding of the largest are not known, and taken to be that: a second moment of zero would blow up
    the rounding in gradients. It is float32's rounding also in float64, so that what arrives in a null space does not
    depend much on the basis it happens to have there.
    """
    others = [axis for axis in range(1, moments.ndim) if axis != 1 + mode]
    present = moments.sum(others, keepdim=True)
    least = sums.amax(-1, keepdim=True) * default_cutoff(sums.shape[-1], torch.float32)
    wanted = torch.maximum(sums, least).view(present.shape)
    return moments * torch.where(present > 0, wanted / present, torch.ones_like(present))


def with_unseen(sums: Tensor, before: Tensor, moments: Tensor, turn: Tensor, mode: int) -> Tensor:
    """Return the sums (B, d) that moments should have in a new basis, where the factors have not seen every gradient.

    What the factors lack is known in the old basis, by the moments' own sums. Turned as if it had no other direction
    there, it is added; less than both what the factors say and what turned sums would be is nobody's estimate.

    Args:
        sums: The sums (B, d) in the new basis, by the factors.
        before: The same in the old basis.
        moments: The moments (B, ...) in the old basis.
        turn: Turns (B, d, d) from the old basis to the new one.
        mode: The mode.
    """
    known = moments.sum([axis for axis in range(1, moments.ndim) if axis != 1 + mode])
    unseen, turned = ((turn.square() @ part.unsqueeze(-1)).squeeze(-1) for part in (known - before, known))
    return torch.maximum(sums + unseen, torch.minimum(sums, turned))


def times(matrix: Tensor, tensor: Tensor, mode: int) -> Tensor:
    """Multiply one mode of a tensor by a matrix."""
    product: Tensor = torch.tensordot(matrix, tensor, dims=([1], [mode]))
    return product.movedim(0, mode)
