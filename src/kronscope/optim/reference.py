"""The update of one block, written to be read; :mod:`kronscope.optim.batched` is tested equal to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kronscope.kron.factors import Ema, FactorState, Sum
from kronscope.kron.grams import mode_gram
from kronscope.kron.powers import default_cutoff
from kronscope.kron.roots import Eigh, solve_roots
from kronscope.optim.config import Graft, Hyper, Norm, Trace
from kronscope.optim.grafts import graft_direction, rescaled, update_second_moment
from kronscope.optim.pieces import Tensors, isotropic_root, positive_power, ridge_of, unit_factor
from kronscope.optim.soap_batched import new_basis

__all__ = ["reference_update"]


def reference_update(
    state: Tensors, grad: Tensor, factored: Sequence[bool], hyper: Hyper, step: int, refresh: Sequence[bool]
) -> Tensor:
    """Update the state of one block with one gradient and return the step to take; written to be read.

    Args:
        state: One block's tensors, as :func:`new_state` makes them with ``packs=False`` but without the first index;
            changed in place.
        grad: The block's gradient.
        factored: Which modes have a factor.
        hyper: Options.
        step: Which step of this parameter it is, from 1.
        refresh: Which modes' roots are to be taken anew.
    """
    if hyper.family == "soap":
        return _reference_soap(state, grad, factored, hyper, step, refresh)
    modes = [mode for mode, has_factor in enumerate(factored) if has_factor]

    # 1. factors
    factors = _reference_factors(state, grad, modes, hyper, step)

    # 2. roots
    preconditioned = step >= hyper.start
    for mode in modes:
        if preconditioned and refresh[mode]:
            ridge, factor = ridge_of(hyper), factors[mode].read()
            found = solve_roots(factor.unsqueeze(0), hyper.exponent(mode), ridge, Eigh())
            state[f"root{mode}"].copy_(found.matrices[0])
            trace = factor.trace() + ridge.eps * factor.shape[0]
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
            update = _times(state[f"root{mode}"], update, mode)
        else:
            update = update * isotropic_root(grad.shape[mode], hyper.exponent(mode))

    # 5. length
    now = {mode: factors[mode].read().trace() + ridge_of(hyper).eps * grad.shape[mode] for mode in modes}
    if isinstance(hyper.scale, Trace):
        whole = torch.stack(list(now.values())).prod() if hyper.family == "kl" else now[modes[0]]
        update = update * positive_power(whole, -0.5)
    elif hyper.scale is None and not preconditioned:
        update = mean
    elif hyper.scale is None:
        for mode in modes:
            then = state["spectrum"][mode, 0]
            update = update * positive_power(torch.where(then > 0, then, now[mode]), hyper.exponent(mode))
    for mode in range(grad.ndim):
        if mode not in modes and hyper.family != "kl":
            if isinstance(hyper.scale, Trace):
                update = update * isotropic_root(grad.shape[mode], hyper.exponent(mode))
            elif hyper.scale is None and preconditioned:
                update = update * positive_power(now[modes[0]] / grad.shape[mode], hyper.exponent(mode))
    if isinstance(hyper.scale, Graft):
        graft = graft_direction(mean, state.get("graft_sq"), hyper, step)
        update = update * (graft.norm() / update.norm()) if preconditioned and update.norm() > 0 else graft
    elif isinstance(hyper.scale, Norm) and update.norm() > 0:
        update = update * (hyper.scale.rms * math.sqrt(grad.numel()) / update.norm())
    elif isinstance(hyper.scale, Trace) and hyper.scale.bound is not None:
        update = update / (update.norm() / math.sqrt(grad.numel()) / hyper.scale.bound).clamp_min(1.0)

    # 6. momentum
    if hyper.momentum > 0:
        buffer = state["momentum"].mul_(hyper.momentum).add_(update)
        update = update + hyper.momentum * buffer if hyper.nesterov else buffer.clone()
    return update


def _reference_factors(
    state: Tensors, grad: Tensor, modes: Sequence[int], hyper: Hyper, step: int
) -> dict[int, FactorState]:
    """Take the gradient into the factors: Shampoo's, with more power rounds, or KL-Shampoo's."""
    averaging = Sum() if hyper.is_sum else Ema(hyper.beta2)
    weight = 0.0 if hyper.is_sum else hyper.correction2(step - 1)
    old = {mode: state[f"factor{mode}"].clone() for mode in modes}
    factors: dict[int, FactorState] = {}
    two_sided = len(modes) == 2 and grad.ndim == 2
    for power_round in range(hyper.power_rounds if two_sided and hyper.family != "kl" else 1):
        grams = {}
        for mode in modes:
            if hyper.family == "kl":
                grams[mode] = _reference_kl_gram(state, grad, modes, mode)
            elif power_round == 0:
                grams[mode] = mode_gram(grad.unsqueeze(0), mode=mode)
            else:
                other = unit_factor(factors[1 - mode].read().unsqueeze(0))[0]
                grams[mode] = mode_gram(grad.unsqueeze(0), mode=mode, other=other)
        for mode in modes:
            factors[mode] = FactorState(state[f"factor{mode}"].copy_(old[mode]), averaging, weight)
            factors[mode].update(grams[mode])
    return factors


def _reference_kl_gram(state: Tensors, grad: Tensor, modes: Sequence[int], mode: int) -> Tensor:
    r"""Return :math:`G R^{-1} G^\top / n` (mode 0) or its mirror image; before the first root, R is a multiple of I."""
    rms = grad.norm() / math.sqrt(grad.numel())
    whitened = grad
    for other in modes:
        if other == mode:
            continue
        trace = state["spectrum"][other, 0]
        if trace > 0:
            whitened = _times(state[f"root{other}"], whitened, other) * positive_power(trace, -0.5)
        else:
            whitened = whitened * positive_power(rms, -1 / len(modes))
    return mode_gram(whitened.unsqueeze(0), mode=mode) / (grad.numel() // grad.shape[mode])


def _reference_soap(
    state: Tensors, grad: Tensor, factored: Sequence[bool], hyper: Hyper, step: int, refresh: Sequence[bool]
) -> Tensor:
    """Adam in the eigenbases of the factors; the bases are those of the steps before."""
    modes = [mode for mode, has_factor in enumerate(factored) if has_factor]
    inside = grad
    for mode in modes:
        inside = _times(state[f"basis{mode}"].T, inside, mode)
    mean = inside
    if hyper.beta1 > 0:
        state["exp_avg"].lerp_(inside, 1 - hyper.beta1)
        mean = state["exp_avg"] / (1 - hyper.beta1**step)
    decay = 1.0 if hyper.is_sum else hyper.beta2
    state["exp_avg_sq"].mul_(decay).add_(hyper.gain() * inside**2)
    deviation = (state["exp_avg_sq"] / hyper.correction2(step)).sqrt()
    # rounding in entries without a gradient must not be blown up to full steps
    floor = deviation.max() * default_cutoff(max(grad.shape), grad.dtype)
    update = mean / (deviation + floor + hyper.eps)
    update = update.nan_to_num(nan=0.0) if hyper.eps == 0 else update
    for mode in modes:
        update = _times(state[f"basis{mode}"], update, mode)
    averaging = Sum() if hyper.is_sum else Ema(hyper.beta2)
    for mode in modes:
        factor = FactorState(state[f"factor{mode}"], averaging)
        factor.update(mode_gram(grad.unsqueeze(0), mode=mode))
        if refresh[mode]:
            old = state[f"basis{mode}"].clone()
            new = new_basis(factor.total.unsqueeze(0), old.unsqueeze(0), hyper, step)[0]
            turn = new.T @ old
            if hyper.beta1 > 0:
                state["exp_avg"].copy_(_times(turn, state["exp_avg"], mode))
            state["exp_avg_sq"].copy_(_times(turn**2, state["exp_avg_sq"], mode))
            state[f"basis{mode}"].copy_(new)
    return rescaled(update.unsqueeze(0), hyper)[0]


def _times(matrix: Tensor, tensor: Tensor, mode: int) -> Tensor:
    """Multiply one mode of a tensor by a matrix."""
    product: Tensor = torch.tensordot(matrix, tensor, dims=([1], [mode]))
    return product.movedim(0, mode)
