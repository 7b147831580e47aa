"""Loading a saved state: checked before anything changes, with an error that names the parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kronscope.errors import StateError
from kronscope.optim.blocks import Layout
from kronscope.optim.config import Hyper
from kronscope.optim.elementwise import elementwise_state
from kronscope.optim.stacks import factor_dtype, initial_state

__all__ = ["check_loaded", "load_tensors", "on_device"]


def check_loaded(
    saved: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    layouts: Mapping[Tensor, Layout],
    hypers: Sequence[Hyper],
    names: Sequence[str],
) -> None:
    """Check that a state dict fits an optimizer.

    Args:
        saved: The state dict.
        groups: The optimizer's parameter groups.
        layouts: Its layouts.
        hypers: The options its groups will have.
        names: Its parameters' names, in order.

    Raises:
        StateError: it does not fit.
    """
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise StateError(
            f"the saved state has {len(saved_groups)} parameter groups, this optimizer {len(groups)}; make the "
            f"optimizer with the same groups (add_param_group for those added during the run) before loading."
        )
    position = 0
    for index, (group, old, hyper) in enumerate(zip(groups, saved_groups, hypers, strict=True)):
        if len(group["params"]) != len(old["params"]):
            raise StateError(
                f"group {index} of the saved state has {len(old['params'])} parameters, this optimizer's "
                f"{len(group['params'])}; was the model changed?"
            )
        old_names = old.get("param_names", [])
        for place, (param, key) in enumerate(zip(group["params"], old["params"], strict=True)):
            name = names[position + place]
            origin = f" (saved as {old_names[place]})" if old_names and old_names[place] != name else ""
            if key in saved["state"]:
                _check_parameter(name + origin, param, saved["state"][key], layouts[param], hyper)
        position += len(group["params"])


def _check_parameter(name: str, param: Tensor, saved: Mapping[str, Any], layout: Layout, hyper: Hyper) -> None:
    ghost = torch.empty(param.shape, dtype=param.dtype, device="meta")
    if layout.is_elementwise:
        wanted = elementwise_state(ghost, factor_dtype(param))
    else:
        wanted = initial_state(ghost, layout, hyper)
    for key, tensor in wanted.items():
        if key not in saved:
            raise StateError(
                f"{name}: the saved state has no {key!r}. It has {sorted(saved)}; was it saved with other options "
                f"(betas, scale, momentum, block_size) or by another optimizer?"
            )
        if not isinstance(saved[key], Tensor) or saved[key].shape != tensor.shape:
            found = tuple(saved[key].shape) if isinstance(saved[key], Tensor) else saved[key]
            raise StateError(
                f"{name} {tuple(param.shape)}: {key!r} is {found} in the saved state but {tuple(tensor.shape)} here; "
                f"the parameter, or the blocks it is cut into, has another shape."
            )


def load_tensors(
    saved: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    state: dict[Tensor, Any],
    part: Callable[[Tensor, str, Tensor], Tensor],
) -> None:
    """Copy the saved tensors, keeping their dtypes; what steers the schedule stays on the CPU.

    Args:
        saved: The state dict.
        groups: The optimizer's parameter groups.
        state: The optimizer's state, which is replaced.
        part: Returns what this process keeps of a parameter's tensor.
    """
    for group, old in zip(groups, saved["param_groups"], strict=True):
        for param, key in zip(group["params"], old["params"], strict=True):
            if key in saved["state"]:
                state[param] = {
                    name: _placed(name, part(param, name, value), param) for name, value in saved["state"][key].items()
                }


def _placed(name: str, value: Tensor, param: Tensor) -> Tensor:
    on_host = name == "step" or not value.is_floating_point()
    return value.detach().to("cpu" if on_host else param.device, copy=True)


def on_device(tensors: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """Return a state on its parameter's device: DCP wants one device for all tensors but scalars."""
    return {name: tensor.to(param.device) if tensor.ndim else tensor for name, tensor in tensors.items()}
