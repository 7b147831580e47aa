r"""Update lengths: grafts, the trace scale and fixed norms, for stacks of blocks (B, ...).

With the bias-corrected gradient mean :math:`M` and the second moment :math:`v`, the grafted directions are

.. math:: M \;(\text{SGD}), \qquad \frac{M}{\sqrt{v} + \epsilon} \;(\text{Adagrad, RMSprop}),
          \qquad \frac{M}{\sqrt{v / (1-\beta_2^t)} + \epsilon} \;(\text{Adam}) .
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kronscope.optim.block_math import in_memory_order
from kronscope.optim.config import Graft, Hyper, Norm, Trace

__all__ = [
    "WAITING",
    "adam_graft",
    "all_true",
    "block_norms",
    "graft_direction",
    "rescaled",
    "update_second_moment",
    "waiting",
    "with_lengths_of",
]


# What a block makes of the graft's step until it has its first root. Adam's first step moves every entry by the whole
# learning rate, and a character GPT that made it ended 0.02 to 0.04 worse; a block that rested would look broken.
WAITING = 0.1


def update_second_moment(second: Tensor, grads: Tensor, hyper: Hyper) -> None:
    """Take squared gradients into the graft's second moment, in place."""
    beta2 = hyper.graft_beta2()
    if beta2 == 1:
        second.addcmul_(grads, grads)
    else:
        second.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)


def graft_direction(mean: Tensor, second: Tensor | None, hyper: Hyper, step: int) -> Tensor:
    """Return the update the grafted optimizer would make.

    Args:
        mean: Bias-corrected gradient mean.
        second: The graft's second moment; None for SGD.
        hyper: Options; ``hyper.scale`` is the graft.
        step: Number of gradients seen.
    """
    graft = hyper.scale
    assert isinstance(graft, Graft)
    if second is None:
        return mean
    beta2 = hyper.graft_beta2()
    eps = hyper.eps if graft.eps is None else graft.eps
    denominator = second.sqrt()
    if graft.kind == "adam" and beta2 < 1:
        denominator.div_((1 - beta2**step) ** 0.5)
    denominator.add_(eps)
    # 0/0, where no gradient has arrived yet and eps is zero, is no update
    return (mean / denominator).nan_to_num_(nan=0.0) if eps == 0 else mean / denominator


def adam_graft(state: dict[str, Tensor], grads: Tensor, hyper: Hyper, step: int) -> Tensor | None:
    """Update both moments and return Adam's direction; None where no kernel does that."""
    graft = hyper.scale
    if not isinstance(graft, Graft) or graft.kind != "adam" or hyper.beta1 == 0 or grads.device.type != "cpu":
        return None
    beta2, eps = hyper.graft_beta2(), hyper.eps if graft.eps is None else graft.eps
    if beta2 == 1 or eps == 0 or grads.dtype not in (torch.float32, torch.float64) or torch.compiler.is_compiling():
        return None
    # fused Adam on parameters of zero with the learning rate -1 leaves the direction itself
    direction = torch.zeros_like(state["exp_avg"])
    views = in_memory_order(direction, grads, state["exp_avg"], state["graft_sq"])
    if views is None:
        return None
    torch._fused_adam_(
        [views[0]],
        [views[1]],
        [views[2]],
        [views[3]],
        [],
        [torch.tensor(float(step))],
        amsgrad=False,
        lr=-1.0,
        beta1=hyper.beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )
    return direction


def with_lengths_of(graft: Callable[[], Tensor], direction: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Give each block of ``direction`` the length of the grafted optimizer's; in place where possible.

    Args:
        graft: Returns the grafted updates.
        direction: Updates (B, ...).
        lengths: Lengths (B, 1, ...) of the grafted updates, if they are known.
    """
    grafted = graft() if lengths is None else None
    wanted = lengths if grafted is None else block_norms(grafted)
    assert wanted is not None
    own = block_norms(direction)
    usable = own > 0
    out = direction.mul_(torch.where(usable, wanted / torch.where(usable, own, torch.ones_like(own)), own))
    # a direction of length zero has nothing to stretch: the grafted update itself is the honest fallback
    if all_true(usable):
        return out
    return torch.where(usable, out, graft() if grafted is None else grafted)


def waiting(seen: Tensor, update: Tensor, graft: Tensor) -> Tensor:
    """Return updates (B, ...) with those of blocks that have no root yet replaced by a part of the graft's.

    Args:
        seen: Which blocks (B,) have theirs.
        update: The blocks' own updates; may be changed.
        graft: The graft's.
    """
    if update.device.type == "cpu" and not torch.compiler.is_compiling():
        blocks = (~seen).nonzero().flatten()
        update[blocks] = WAITING * graft[blocks]
        return update
    return torch.where(seen.view(-1, *[1] * (update.ndim - 1)), update, WAITING * graft)


def rescaled(direction: Tensor, hyper: Hyper) -> Tensor:
    """Give each block its length: a fixed one, or its own up to a bound; in place where possible."""
    scale = hyper.scale
    if isinstance(scale, Norm):
        lengths = block_norms(direction)
        wanted_rms = scale.rms * direction[0].numel() ** 0.5
        return direction.mul_(torch.where(lengths > 0, wanted_rms / lengths, torch.zeros_like(lengths)))
    if isinstance(scale, Trace) and scale.bound is not None:
        largest = scale.bound * direction[0].numel() ** 0.5
        lengths = block_norms(direction)
        return direction.mul_(largest / lengths.clamp_min(largest))
    return direction


def block_norms(blocks: Tensor) -> Tensor:
    """Frobenius norm of each block, as (B, 1, ...) to multiply with."""
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=tuple(range(1, blocks.ndim)))
    return norms.view(-1, *[1] * (blocks.ndim - 1))


def all_true(mask: Tensor) -> bool:
    """Whether all entries hold; on an accelerator the answer is 'perhaps not', which costs a pass but no sync."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all())
