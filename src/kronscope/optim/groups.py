"""Which parameters are embeddings and heads, and parameter groups made from a model."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kronscope.errors import OptionError

__all__ = ["param_groups", "role_of"]

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


def role_of(name: str) -> str:
    """Tell from a parameter's name whether it is an embedding or a head; empty where it is neither.

    >>> role_of("transformer.wte.weight"), role_of("lm_head.weight"), role_of("blocks.0.mlp.fc1.weight")
    ('embedding', 'head', '')
    """
    parts = name.lower().split(".")[:-1] or [name.lower()]
    if any(part in _HEAD_NAMES for part in parts[:2]) or parts[-1] in _HEAD_NAMES:
        return "head"
    words = [word for part in parts for word in part.split("_")]
    # a patch embedding is an ordinary layer on pixels, with few columns and a gradient for every entry
    if "patch" not in words and any(word in _EMBEDDING_WORDS for word in words):
        return "embedding"
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
    last: Tensor | None = None
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            roles[module.weight] = "embedding"
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Bilinear):
            last = module.weight
    for name, param in named:
        if param.ndim >= 2 and param not in roles and role_of(name):
            roles[param] = role_of(name)
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
    parts = name.lower().split(".")
    return param.ndim == 2 and param.shape[0] % 3 == 0 and any(part in _FUSED_NAMES for part in parts)
