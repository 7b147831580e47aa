"""The ends of a step: checked gradients in, decayed parameters out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kronscope.errors import GradientError

__all__ = [
    "apply_updates",
    "check_fits",
    "check_has_data",
    "check_supported",
    "finite_gradients",
    "prepared_gradient",
    "what_is_not_finite",
]


def check_supported(grad: Tensor, name: Callable[[], str]) -> None:
    """Refuse gradients the optimizers cannot treat.

    Raises:
        GradientError: the gradient is sparse, complex, not floating-point, or without data.
    """
    if grad.is_meta:
        raise GradientError(
            f"the gradient of {name()} is on the meta device, which has no data; make the model with to_empty() and "
            f"weights, and the optimizer after that."
        )
    if grad.layout != torch.strided:
        raise GradientError(
            f"the gradient of {name()} is sparse; use Embedding(sparse=False), or give the parameter to "
            f"torch.optim.SparseAdam."
        )
    if not grad.is_floating_point():
        raise GradientError(
            f"the gradient of {name()} has dtype {grad.dtype}; only real floating-point parameters can be trained. "
            f"A complex parameter can be stored as torch.view_as_real of itself."
        )


def check_fits(param: Tensor, name: Callable[[], str]) -> None:
    """Refuse a gradient of another shape than its parameter's: what adds them would read beyond its end.

    Raises:
        GradientError: it has another shape.
    """
    grad = param.grad
    if grad is not None and grad.shape != param.shape:
        raise GradientError(
            f"{name()} has shape {tuple(param.shape)}, its gradient {tuple(grad.shape)}: its data was replaced after "
            f"the backward pass. Call zero_grad(), and backward() again."
        )


def check_has_data(param: Tensor, name: Callable[[], str]) -> None:
    """Refuse a parameter without a gradient that will never have one.

    Raises:
        GradientError: it is on the meta device.
    """
    if param.is_meta and param.requires_grad:
        raise GradientError(
            f"{name()} is on the meta device and has no gradient: to_empty() and load_state_dict(assign=True) give a "
            f"model other parameters than this optimizer has, which it would never change. Make the optimizer after "
            f"them."
        )


def what_is_not_finite(params: Mapping[str, Tensor]) -> str:
    """Say which gradients are not finite, and whether their parameters are.

    Args:
        params: Names, and what this process has of the parameters.
    """
    names = ", ".join(list(params)[:3]) + (" and others" if len(params) > 3 else "")
    text = f"the gradient of {names} is not finite, or its square overflows"
    lost = [name for name, param in params.items() if not bool(torch.isfinite(param).all())]
    return f"{text}; {lost[0]} itself is not finite, so no later step can help: load a checkpoint" if lost else text


def finite_gradients(grads: Sequence[Tensor]) -> list[bool]:
    """Tell for each gradient whether it, and the sum of its squares in at least float32, is finite.

    One host synchronisation per device.
    """
    verdict = [True] * len(grads)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(grads):
        if grad.numel():
            wide = torch.promote_types(grad.dtype, torch.float32)
            alike.setdefault((grad.device, wide), []).append(index)
    norms: dict[torch.device, list[Tensor]] = {}
    for (device, wide), indices in alike.items():
        found = torch.stack(torch._foreach_norm([grads[i] for i in indices], 2.0, wide))
        # above it squares overflow, even where a norm is accumulated in a wider type
        limit = torch.finfo(wide).max ** 0.5
        norms.setdefault(device, []).append(found <= limit)
    order: dict[torch.device, list[int]] = {}
    for (device, _), indices in alike.items():
        order.setdefault(device, []).extend(indices)
    for device, parts in norms.items():
        for index, good in zip(order[device], torch.cat(parts).tolist(), strict=True):
            verdict[index] = good
    return verdict


def prepared_gradient(param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the gradient to descend along: negated to maximize, with coupled weight decay added."""
    if group["maximize"]:
        grad = -grad
    if group["decay"] == "coupled" and group["weight_decay"] != 0:
        grad = grad.add(param, alpha=group["weight_decay"])
    return grad


def apply_updates(params: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
    r"""Step: :math:`W \leftarrow W - \eta \lambda\, (m \circ W) - \eta U`, with :math:`m` the kind of decay's mask.

    Args:
        params: Parameters :math:`W`, changed in place.
        updates: Updates :math:`U` of the same shapes; may be changed.
        group: Gives the learning rate :math:`\eta` (a number or a 0-D tensor), the decay :math:`\lambda` and its kind:
            decoupled (:math:`m = 1`), cautious (:math:`m = 1` where :math:`U W > 0`), or coupled (done before).
    """
    places: dict[torch.device, list[int]] = {}
    for index, param in enumerate(params):
        places.setdefault(param.device, []).append(index)
    for device, indices in places.items():
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu" and lr.device != device:
            # a tensor learning rate must not be read on the host
            lr = lr.to(device, non_blocking=True)
        _apply_with([params[i] for i in indices], [updates[i] for i in indices], lr, group)


def _apply_with(params: list[Tensor], updates: list[Tensor], lr: float | Tensor, group: dict[str, Any]) -> None:
    """Step on one device."""
    weight_decay = group["weight_decay"]
    if weight_decay != 0 and group["decay"] == "decoupled":
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    elif weight_decay != 0 and group["decay"] == "cautious":
        for param, update in zip(params, updates, strict=True):
            param.sub_(param * (update * param > 0) * (lr * weight_decay))
    if isinstance(lr, Tensor):
        torch._foreach_mul_(updates, -lr)
        torch._foreach_add_(params, updates)
    else:
        torch._foreach_add_(params, updates, alpha=-float(lr))
