"""Parameter groups made from a model."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from kronscope.errors import OptionError
from kronscope.optim.naming import plain_names
from kronscope.optim.roles import roles_in

__all__ = ["is_fused", "param_groups"]

_FUSED_NAMES = ("in_proj_weight", "qkv", "wqkv", "query_key_value", "c_attn")


def param_groups(
    model: nn.Module,
    *,
    head: bool | None = None,
    decay_vectors: bool = False,
    split_qkv: bool = False,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Sort a model's parameters into groups for :class:`Shampoo`, :class:`SOAP` and :class:`KLShampoo`.

    Embeddings, heads and parameters of fewer than two dimensions get AdamW inside the optimizer. An embedding is
    recognised by its module or its name. A head is recognised if the model itself says so, by its name, by sharing its
    weight with an embedding, or as the last matrix of the model, or of each of its towers. Each expert of a stack of
    experts is a matrix of its own.

    Args:
        model: The model; parameters that do not require gradients are left out.
        head: Whether the last matrix counts as a head. None: only if no head was recognised otherwise.
        decay_vectors: Give parameters of fewer than two dimensions the weight decay too.
        split_qkv: Cut fused query-key-value weights into three matrices.
        overrides: Options for parameters whose name fits a pattern, for example ``{"blocks.0.*": {"lr": 1e-4}}``; the
            first pattern that fits is taken. A name counts with and without what DistributedDataParallel and
            ``torch.compile`` put in front of it.

    Returns:
        Groups of named parameters, as the optimizers take them; the names are the model's, without wrappers.

    Raises:
        OptionError: a pattern fits no parameter.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10))
    >>> [(group["params"][0][0], group["roles"]) for group in param_groups(model)]
    [('0.weight', ['embedding', 'head']), ('1.weight', ['']), ('1.bias', ['', ''])]
    """
    everything = list(model.named_parameters())
    plain = plain_names([name for name, _ in everything])
    given = {param: name for name, param in everything}
    named = [(name, param) for name, (_, param) in zip(plain, everything, strict=True) if param.requires_grad]
    roles = roles_in(model, head=head)
    groups: dict[str, dict[str, Any]] = {}
    unused = dict(overrides or {})
    for name, param in named:
        options = dict(_override({name, given[param]}, overrides or {}, unused))
        role = roles.get(param, "")
        if role in ("embedding", "head"):
            key = "embeddings and heads"
        elif param.ndim < 2 or role in ("bias", "vector"):
            key = "vectors"
            if not decay_vectors:
                options.setdefault("weight_decay", 0.0)
        elif split_qkv and is_fused(name, param):
            key = "fused"
            options.setdefault("split", 3)
        else:
            key = "matrices"
            if split_qkv:
                _warn_if_side_by_side(name, param)
        group = groups.setdefault(f"{key} {sorted(options.items(), key=str)}", {"params": [], "roles": [], **options})
        group["params"].append((name, param))
        group["roles"].append(role)
    if unused:
        raise OptionError(
            f"the pattern(s) {sorted(unused)} fit no parameter; the first are {[n for n, _ in named[:5]]}."
        )
    return list(groups.values())


def _override(
    names: Iterable[str], overrides: Mapping[str, Mapping[str, Any]], unused: dict[str, Any]
) -> Mapping[str, Any]:
    for pattern, options in overrides.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            unused.pop(pattern, None)
            return options
    return {}


def is_fused(name: str, param: Tensor) -> bool:
    """Whether a weight holds query, key and value, one above the other.

    >>> import torch
    >>> is_fused("attn.qkv.weight", torch.empty(12, 4)), is_fused("attn.proj.weight", torch.empty(12, 4))
    (True, False)
    """
    return _has_fused_name(name, param) and param.shape[0] % 3 == 0 and not _is_side_by_side(param)


def _has_fused_name(name: str, param: Tensor) -> bool:
    return param.ndim == 2 and any(part in _FUSED_NAMES for part in name.lower().split("."))


def _is_side_by_side(param: Tensor) -> bool:
    return param.shape[1] == 3 * param.shape[0]


def _warn_if_side_by_side(name: str, param: Tensor) -> None:
    if _has_fused_name(name, param) and _is_side_by_side(param):
        warnings.warn(
            f"{name} {tuple(param.shape)} holds query, key and value side by side, as transformers' Conv1D does; "
            f"split_qkv cuts rows, so it stays whole.",
            UserWarning,
            stacklevel=3,
        )
