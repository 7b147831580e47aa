"""Which parameters are embeddings and heads, and parameter groups made from a model."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kronscope.errors import OptionError

__all__ = ["param_groups", "role_of", "roles_of"]

_EMBEDDING_WORDS = ("embed", "embeds", "embedding", "embeddings", "emb", "wte", "wpe", "embedder")
_HEAD_NAMES = (
    "lm_head",
    "head",
    "heads",
    "classifier",
    "embed_out",
    "unembed",
    "unembedding",
    "output_layer",
    "cls_head",
)
_FUSED_NAMES = ("in_proj_weight", "qkv", "wqkv", "query_key_value", "c_attn")


# What DistributedDataParallel, torch.compile, FSDP and activation checkpointing put in front of a name.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def role_of(name: str) -> str:
    """Tell from a parameter's name whether it is an embedding or part of a head; empty where it is neither.

    >>> role_of("transformer.wte.weight"), role_of("lm_head.weight"), role_of("blocks.0.mlp.fc1.weight")
    ('embedding', 'head', '')
    """
    if _head_of(name):
        return "head"
    parts = _modules(name)
    words = [word for part in parts for word in part.split("_")]
    # a patch embedding is an ordinary layer on pixels, with few columns and a gradient for every entry
    if "patch" not in words and any(word in _EMBEDDING_WORDS for word in words):
        return "embedding"
    return ""


def roles_of(names: Sequence[str], params: Sequence[Tensor]) -> list[str]:
    """Tell the roles of parameters from their names; of several matrices in a head only the last one is it.

    >>> model = nn.ModuleDict({"classifier": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))})
    >>> roles_of(*zip(*model.named_parameters()))
    ['', '', 'head', '']
    """
    last = {
        head: name for name, param in zip(names, params, strict=True) if param.ndim > 1 and (head := _head_of(name))
    }
    roles = []
    for name in names:
        role = role_of(name)
        roles.append("" if role == "head" and last.get(_head_of(name)) != name else role)
    return roles


def _modules(name: str) -> list[str]:
    """Return the names of the modules a parameter is in, or its own where there is none, without wrappers."""
    parts = [part for part in name.lower().split(".") if part not in _WRAPPERS]
    return parts[:-1] or parts


def _head_of(name: str) -> str:
    """Return the name of the head a parameter is in, empty where it is in none."""
    parts = _modules(name)
    for place, part in enumerate(parts):
        inside = parts[place + 1 :]
        # a list of modules called heads has those of attention
        is_list = part == "heads" and len(inside) > 1 and inside[0].isdigit()
        if part in _HEAD_NAMES and (place < 2 or not inside) and not is_list:
            return ".".join(parts[: place + 1])
    return ""


def param_groups(
    model: nn.Module,
    *,
    head: bool | None = None,
    decay_vectors: bool = False,
    split_qkv: bool = False,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Sort a model's parameters into groups for :class:`Shampoo`, :class:`SOAP` and :class:`KLShampoo`.

    Embeddings are recognised by their module, heads by their name, by sharing their weight with an embedding, or as
    the last linear layer of the model. Both get AdamW inside the optimizer, as do parameters of fewer than two
    dimensions.

    Args:
        model: The model; parameters that do not require gradients are left out.
        head: Whether the last linear layer counts as a head. None: unless a head was recognised otherwise.
        decay_vectors: Give parameters of fewer than two dimensions the weight decay too.
        split_qkv: Cut fused query-key-value weights into three matrices.
        overrides: Options for parameters whose name fits a pattern, for example ``{"blocks.0.*": {"lr": 1e-4}}``; the
            first pattern that fits is taken.

    Returns:
        Groups with named parameters.

    Raises:
        OptionError: a pattern fits no parameter.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10))
    >>> [(group["params"][0][0], group["roles"]) for group in param_groups(model)]
    [('0.weight', ['embedding', 'head']), ('1.weight', ['']), ('1.bias', ['', ''])]
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    roles = _roles(model, named, head)
    groups: dict[str, dict[str, Any]] = {}
    unused = dict(overrides or {})
    for name, param in named:
        options = dict(_override(name, overrides or {}, unused))
        role = roles.get(param, "")
        if role:
            key = "embeddings and heads"
        elif param.ndim < 2:
            key = "vectors"
            if not decay_vectors:
                options.setdefault("weight_decay", 0.0)
        elif split_qkv and _is_fused(name, param):
            key = "fused"
            options.setdefault("split", 3)
        else:
            key = "matrices"
        group = groups.setdefault(f"{key} {sorted(options.items(), key=str)}", {"params": [], "roles": [], **options})
        group["params"].append((name, param))
        group["roles"].append(role)
    if unused:
        raise OptionError(
            f"the pattern(s) {sorted(unused)} fit no parameter; the first are {[n for n, _ in named[:5]]}."
        )
    return list(groups.values())


def _roles(model: nn.Module, named: Sequence[tuple[str, Tensor]], head: bool | None) -> dict[Tensor, str]:
    roles: dict[Tensor, str] = {}
    layers: set[Tensor] = set()
    last: Tensor | None = None
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            roles[module.weight] = "embedding"
        elif isinstance(getattr(module, "weight", None), Tensor):
            layers.add(module.weight)  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Bilinear):
            last = module.weight
    matrices = [(name, param) for name, param in named if param.ndim >= 2]
    by_name = roles_of([name for name, _ in matrices], [param for _, param in matrices])
    for (_, param), role in zip(matrices, by_name, strict=True):
        # the weight of a layer is no embedding, whatever the module around it is called
        if role and param not in roles and not (role == "embedding" and param in layers):
            roles[param] = role
    is_tied = last is not None and roles.get(last) == "embedding"
    found = "head" in roles.values() or is_tied
    if last is not None and last not in roles and (head or (head is None and not found)):
        roles[last] = "head"
    return roles


def _override(name: str, overrides: Mapping[str, Mapping[str, Any]], unused: dict[str, Any]) -> Mapping[str, Any]:
    for pattern, options in overrides.items():
        if fnmatch.fnmatchcase(name, pattern):
            unused.pop(pattern, None)
            return options
    return {}


def _is_fused(name: str, param: Tensor) -> bool:
    if param.ndim != 2 or not any(part in _FUSED_NAMES for part in name.lower().split(".")):
        return False
    if param.shape[1] == 3 * param.shape[0]:
        warnings.warn(
            f"{name} {tuple(param.shape)} holds query, key and value side by side, as transformers' Conv1D does; "
            f"split_qkv cuts rows, so it stays whole.",
            UserWarning,
            stacklevel=3,
        )
        return False
    return param.shape[0] % 3 == 0
