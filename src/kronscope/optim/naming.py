"""Names of parameters as the model has them, without what wrappers put around them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

__all__ = ["is_place", "place_names", "plain_name", "plain_names"]

# What torch.compile, activation checkpointing and FSDP call what they wrap; no model has such names of its own.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_PARALLEL = "module."


def plain_name(name: str) -> str:
    """Return a name without the parts that only wrappers have.

    >>> plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.fc.weight")
    'layers.0.fc.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPED) or name


def plain_names(names: Sequence[str]) -> list[str]:
    """Return names without wrappers; that of DistributedDataParallel is one where all names begin with it.

    >>> plain_names(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
    ['fc.weight', 'fc.bias']
    >>> plain_names(["module.weight", "head.weight"])
    ['module.weight', 'head.weight']
    """
    plain = [plain_name(name) for name in names]
    if all(name.startswith(_PARALLEL) for name in plain):
        plain = [name.removeprefix(_PARALLEL) for name in plain]
    # two parameters never come to have one name
    return plain if len(set(plain)) == len(set(names)) else list(names)


def place_names(index: int, params: Sequence[Tensor]) -> list[str]:
    """Return what stands for the names of a group that has none.

    >>> import torch
    >>> place_names(1, [torch.zeros(3, 4)])
    ['group 1 parameter 0 (3, 4)']
    """
    return [f"group {index} parameter {place} {tuple(param.shape)}" for place, param in enumerate(params)]


def is_place(name: str) -> bool:
    """Whether a name is one of :func:`place_names`.

    >>> is_place("group 1 parameter 0 (3, 4)"), is_place("group 1.weight")
    (True, False)
    """
    return re.match(r"group \d+ parameter \d+ \(", name) is not None
