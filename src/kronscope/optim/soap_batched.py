r"""SOAP for stacks of equal blocks: Adam in the eigenbases :math:`Q_k` of the factors.

With :math:`G' = Q_L^\top G Q_R`, both moments are kept in the bases,

.. math:: m \leftarrow \beta_1 m + (1-\beta_1) G', \quad v \leftarrow \beta_2 v + (1-\beta_2) G'^{\circ 2}, \quad
          U = Q_L \Big(\frac{\hat m}{\sqrt{\hat v} + \epsilon}\Big) Q_R^\top .

The bases are those of the steps before (at the first step the identity, so that it is Adam's). When a basis changes by
:math:`T = Q_{new}^\top Q_{old}`, the mean turns with :math:`T` and the second moment with its squared entries. The
published algorithm instead makes no first step, permutes the second moment into the order of the new eigenvalues, and
adds :math:`\epsilon` before correcting the bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kronscope.kron.bases import eigenbases, improved_basis
from kronscope.kron.powers import default_cutoff
from kronscope.kron.triangles import unpack
from kronscope.optim.config import Hyper
from kronscope.optim.pieces import Tensors, add_gram, batched_times, short_first

__all__ = [
    "change_basis",
    "new_bases",
    "new_basis",
    "soap_accumulate",
    "soap_direction",
    "soap_floor",
    "turn_moments",
]


def soap_accumulate(state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
    """Take gradients into moments and factors; return the updates in the bases of before."""
    decay, gain = (1.0 if hyper.is_sum else hyper.beta2), hyper.gain()
    moved = short_first(grads)
    if hyper.published and step == 1:
        update = torch.zeros_like(grads)
    else:
        inside = moved
        for mode in modes:
            inside = batched_times(state[f"basis{mode}"].mT, inside, mode)
        state["exp_avg_sq"].mul_(decay).addcmul_(inside, inside, value=gain)
        if hyper.beta1 > 0:
            state["exp_avg"].lerp_(inside, 1 - hyper.beta1)
        update = soap_direction(state, inside, modes, hyper, step)
    for mode in modes:
        if hyper.published:
            _add_gram_as_published(state[f"factor{mode}"], grads, mode, gain)
        else:
            add_gram(state[f"factor{mode}"], moved if mode else grads, mode, decay, gain)
    return update


def soap_direction(state: Tensors, inside: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
    """Return Adam's step in the bases, turned back; ``inside`` is the turned gradient, used without a first moment."""
    mean = state["exp_avg"] if hyper.beta1 > 0 else inside
    seen = step - 1 if hyper.published else step
    correction1, correction2 = 1 - hyper.beta1**seen, hyper.correction2(seen) ** 0.5
    denominator = state["exp_avg_sq"].sqrt()
    if hyper.published:
        denominator.add_(hyper.eps).mul_(correction1 / correction2)
    else:
        # (√v + floor) / c₂ + ε, all times c₁, in one pass
        floor = (soap_floor(denominator) / correction2 + hyper.eps) * correction1
        torch.add(floor, denominator, alpha=correction1 / correction2, out=denominator)
    update = torch.div(mean, denominator, out=denominator)
    if hyper.eps == 0:
        # 0/0: an entry that has been zero so far moves nothing
        update.nan_to_num_(nan=0.0)
    update = short_first(update)
    for mode in modes:
        update = batched_times(state[f"basis{mode}"], update, mode)
    return update


def soap_floor(deviations: Tensor) -> Tensor:
    """Return what is added to the square roots (B, ...) of a second moment: the size of rounding in the largest.

    Where the gradients have no component, turning them leaves rounding errors, which Adam would blow up to full steps.
    """
    largest = deviations.amax(tuple(range(1, deviations.ndim)), keepdim=True)
    return largest * default_cutoff(max(deviations.shape[1:]), deviations.dtype)


def new_basis(factors: Tensor, old: Tensor, hyper: Hyper, step: int) -> Tensor:
    """Return the eigenbases of factors (B, d, d), in descending order; warm-started after the first step if asked."""
    if hyper.solver.is_warm and step > 1:
        return improved_basis(factors, old, getattr(hyper.solver, "rounds", 1))
    return eigenbases(factors, old)


def new_bases(state: Tensors, mode: int, index: Tensor, hyper: Hyper, step: int) -> Tensor:
    """Return the eigenbases (k, d, d) of some blocks' factors in one mode, as they are now."""
    old, factors = state[f"basis{mode}"][index], unpack(state[f"factor{mode}"][index])
    return new_basis(factors / hyper.correction2(step), old, hyper, step)


def turn_moments(state: Tensors, mode: int, index: Tensor, new: Tensor, hyper: Hyper) -> None:
    """Carry both moments of some blocks into new bases (k, d, d) of one mode, and keep these."""
    # a slice is no copy
    rows = slice(int(index), int(index) + 1) if index.numel() == 1 else index
    turn = new.mT @ state[f"basis{mode}"][rows]
    state["exp_avg_sq"][rows] = batched_times(turn.square(), state["exp_avg_sq"][rows], mode)
    if hyper.beta1 > 0:
        state["exp_avg"][rows] = batched_times(turn, state["exp_avg"][rows], mode)
    state[f"basis{mode}"][rows] = new


def change_basis(state: Tensors, mode: int, index: Tensor, hyper: Hyper, step: int) -> None:
    """Take the eigenbases of some blocks' factors in one mode anew, and carry both moments into them."""
    if not hyper.published:
        turn_moments(state, mode, index, new_bases(state, mode, index, hyper, step), hyper)
        return
    old, second = state[f"basis{mode}"][index], state["exp_avg_sq"][index]
    new, second = _basis_as_published(unpack(state[f"factor{mode}"][index]), old, second, mode, step)
    if hyper.beta1 > 0:
        state["exp_avg"][index] = batched_times(new.mT @ old, state["exp_avg"][index], mode)
    state["exp_avg_sq"][index] = second
    state[f"basis{mode}"][index] = new


# --- the published algorithm: block by block and in its own order of operations, because in the null space of a factor
# the basis is decided by rounding ---------------------------------------------------------------------------------


def _add_gram_as_published(factors: Tensor, grads: Tensor, mode: int, gain: float) -> None:
    others = [axis for axis in range(grads.ndim - 1) if axis != mode]
    for factor, grad in zip(factors, grads, strict=True):
        factor.lerp_(torch.tensordot(grad, grad, dims=[others, others]), gain)


def _basis_as_published(factors: Tensor, old: Tensor, second: Tensor, mode: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the new bases, and the second moment permuted into the order of their eigenvalues."""
    if step == 1:
        return torch.stack([torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in factors]), second
    bases, moments = [], []
    for factor, basis, moment in zip(factors, old, second, strict=True):
        order = (basis.T @ factor @ basis).diagonal().argsort(descending=True)
        moments.append(moment.index_select(mode, order))
        bases.append(torch.linalg.qr(factor @ basis[:, order]).Q)
    return torch.stack(bases), torch.stack(moments)
