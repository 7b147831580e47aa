r"""AdamW, or diagonal Adagrad, for the parameters that get no Kronecker factors.

.. math:: m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
          u = \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon} .

With :math:`\beta_2 = 1` squares are summed from :math:`\epsilon`, and :math:`u = \hat m / \sqrt{\epsilon + \sum g^2}`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kronscope.optim.apply import apply_updates, prepared_gradient
from kronscope.optim.config import Hyper

__all__ = ["elementwise_directions", "elementwise_state", "elementwise_step"]


def elementwise_state(param: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make the state of one parameter; the step counts gradients seen."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
    }


def elementwise_step(
    params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], hyper: Hyper, group: dict[str, Any]
) -> None:
    """Update parameters, or parts of them, elementwise; the states' steps are those they are at now, from 1."""
    if _can_fuse(params, grads, states, hyper, group):
        _fused(params, grads, states, hyper, group)
        return
    steps = [int(state["step"]) for state in states]
    by_step: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        by_step.setdefault(step, []).append(index)
    for step, indices in by_step.items():
        chosen = [params[i] for i in indices]
        taken = [prepared_gradient(params[i], grads[i], group).to(states[i]["exp_avg"].dtype) for i in indices]
        means = [states[i]["exp_avg"] for i in indices]
        seconds = [states[i]["exp_avg_sq"] for i in indices]
        apply_updates(chosen, _updates(taken, means, seconds, hyper, step), group)


def _updates(grads: list[Tensor], means: list[Tensor], seconds: list[Tensor], hyper: Hyper, step: int) -> list[Tensor]:
    torch._foreach_lerp_(means, grads, 1 - hyper.beta1)
    if hyper.is_sum:
        torch._foreach_addcmul_(seconds, grads, grads)
    else:
        torch._foreach_mul_(seconds, hyper.beta2)
        torch._foreach_addcmul_(seconds, grads, grads, value=1 - hyper.beta2)
    return elementwise_directions(means, seconds, hyper, step)


def elementwise_directions(means: list[Tensor], seconds: list[Tensor], hyper: Hyper, step: int) -> list[Tensor]:
    """Return the updates of parameters with these moments, which are not changed."""
    if hyper.is_sum:
        denominators = torch._foreach_sqrt(torch._foreach_add(seconds, hyper.eps))
    else:
        denominators = torch._foreach_sqrt(seconds)
        torch._foreach_div_(denominators, hyper.correction2(step) ** 0.5)
        torch._foreach_add_(denominators, hyper.eps)
    torch._foreach_mul_(denominators, 1 - hyper.beta1**step)
    updates = list(torch._foreach_div(means, denominators))
    if hyper.eps == 0:
        # 0/0: a gradient that has been zero so far moves nothing
        updates = [update.nan_to_num_(nan=0.0) for update in updates]
    return updates


def _can_fuse(
    params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], hyper: Hyper, group: dict[str, Any]
) -> bool:
    """One kernel does it all on the CPU, 3.5 times faster, where state and parameter share a dtype."""
    return (
        not hyper.is_sum
        and hyper.eps > 0
        and hasattr(torch, "_fused_adamw_")
        and (group["decay"] == "decoupled" or group["weight_decay"] == 0)
        and not isinstance(group["lr"], Tensor)
        and all(p.device.type == "cpu" and p.numel() > 0 and p.dtype in (torch.float32, torch.float64) for p in params)
        and len({p.dtype for p in params}) == 1
        and all(
            g.dtype == p.dtype and p.is_contiguous() and g.is_contiguous() and s["exp_avg"].is_contiguous()
            for p, g, s in zip(params, grads, states, strict=True)
        )
    )


def _fused(
    params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], hyper: Hyper, group: dict[str, Any]
) -> None:
    torch._fused_adamw_(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        lr=float(group["lr"]),
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=float(group["weight_decay"]),
        eps=hyper.eps,
        maximize=bool(group["maximize"]),
    )
