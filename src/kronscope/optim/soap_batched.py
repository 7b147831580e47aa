"""SOAP for stacks of equal blocks: Adam in the eigenbases of the factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kronscope.kron.roots import eigenbases, orthogonal_iteration
from kronscope.optim.config import Hyper
from kronscope.optim.pieces import Tensors, add_gram, batched_times

__all__ = ["change_basis", "new_basis", "soap_accumulate"]


def soap_accumulate(state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
    decay, gain = (1.0 if hyper.is_sum else hyper.beta2), hyper.gain()
    inside = grads
    for mode in modes:
        inside = batched_times(state[f"basis{mode}"].mT, inside, mode)
    second = state["exp_avg_sq"].mul_(decay).addcmul_(inside, inside, value=gain)
    mean, correction1 = inside, 1.0
    if hyper.beta1 > 0:
        mean, correction1 = state["exp_avg"].lerp_(inside, 1 - hyper.beta1), 1 - hyper.beta1**step
    denominator = second.sqrt().div_(hyper.correction2(step) ** 0.5).add_(hyper.eps).mul_(correction1)
    update = torch.div(mean, denominator, out=denominator)
    if hyper.eps == 0:
        update.nan_to_num_(nan=0.0)
    for mode in modes:
        update = batched_times(state[f"basis{mode}"], update, mode)
    for mode in modes:
        add_gram(state[f"factor{mode}"], grads, mode, decay, gain)
    return update


def new_basis(factors: Tensor, old: Tensor, hyper: Hyper, step: int) -> Tensor:
    """Return the eigenbases of factors (B, d, d), in descending order; warm-started after the first step if asked."""
    if hyper.solver.is_warm and step > 1:
        rounds = getattr(hyper.solver, "rounds", 1)
        return orthogonal_iteration(factors, old, rounds)[0]
    return eigenbases(factors, old)


def change_basis(state: Tensors, mode: int, index: Tensor, new: Tensor, old: Tensor, hyper: Hyper) -> None:
    """Carry both moments into the new basis: the mean turns, the second moment by the squared entries."""
    turn = new.mT @ old
    if hyper.beta1 > 0:
        state["exp_avg"][index] = batched_times(turn, state["exp_avg"][index], mode)
    state["exp_avg_sq"][index] = batched_times(turn.square(), state["exp_avg_sq"][index], mode)
    state[f"basis{mode}"][index] = new
