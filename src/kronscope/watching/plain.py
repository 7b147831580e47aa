"""A plain copy of a model whose parameters are sharded over processes, to be measured."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from kronscope.gradients.matrices import unwrap

__all__ = ["is_sharded", "plain_copy"]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def is_sharded(model: nn.Module) -> bool:
    """Whether a parameter is a DTensor.

    >>> is_sharded(nn.Linear(2, 2))
    False
    """
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


@torch.no_grad()
def plain_copy(model: nn.Module) -> nn.Module:
    """Return a model of the same classes with whole parameters, which every process must call for together.

    ``fully_shard`` puts a class of its own before each module's, and hooks around its forward pass; the copy has
    neither, so that its backward passes touch nothing of the original.
    """
    memo: dict[int, Any] = {}

    def copied(module: nn.Module) -> nn.Module:
        if id(module) in memo:
            found: nn.Module = memo[id(module)]
            return found
        kind = type(module)
        is_wrapped = kind.__name__.startswith("FSDP") and len(kind.__mro__) > 2
        twin: nn.Module = object.__new__(kind.__mro__[2] if is_wrapped else kind)
        memo[id(module)] = twin
        vars(twin).update(vars(module))
        tables: dict[str, Any] = {
            "_parameters": {name: _whole(param, memo) for name, param in module._parameters.items()},
            "_buffers": {name: None if one is None else one.clone() for name, one in module._buffers.items()},
            "_modules": {name: None if one is None else copied(one) for name, one in module._modules.items()},
        }
        if is_wrapped:
            tables |= {name: copy.copy(vars(module)[name]) for name in _HOOKS if name in vars(module)}
            for name in _HOOKS:
                if name in tables:
                    tables[name].clear()
        vars(twin).update(tables)
        return twin

    return copied(unwrap(model))


def _whole(parameter: nn.Parameter | None, memo: dict[int, Any]) -> nn.Parameter | None:
    if parameter is None:
        return None
    if id(parameter) not in memo:
        tensor: Any = parameter.detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        memo[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    found: nn.Parameter = memo[id(parameter)]
    return found
