"""What a parameter is for: an embedding, a head, a bias, a stack of experts; from names and shapes, or from a model.

Names and shapes are all that ``model.named_parameters()`` tells, so the rules for them are the common ground: a model
only adds what its modules say for certain, and both come to the same answer wherever names follow custom.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

__all__ = ["EXPERTS", "LIKE_A_TABLE", "like_tables", "role_of", "roles_in", "roles_of"]

EXPERTS = "experts"
LIKE_A_TABLE = "shaped like an embedding or head"

_EMBEDDING_WORDS = {"embed", "embeds", "emb", "wte", "wpe", "token", "tokens"}
_EMBEDDING_ENDS = ("embedding", "embeddings", "embedder")
_EMBEDDING_NAMES = {
    "shared",
    "codebook",
    "relative_attention_bias",
    "query_feat",
    "queries_features",
    "reference_points",
}
# What a layer on top of an embedding is called, without a bias that would tell it from a table.
_LAYER_WORDS = {
    "proj",
    "project",
    "projection",
    "projections",
    "projector",
    "linear",
    "dense",
    "conv",
    "mapping",
    "patch",
}
_HEAD_NAMES = {
    "lm_head",
    "head",
    "heads",
    "classifier",
    "embed_out",
    "unembed",
    "unembedding",
    "output_layer",
    "cls_head",
    "score",
    "qa_outputs",
    "classification_head",
    "ctc_head",
    "output_projection",
    "proj_out",
}
# Modules whose last layer is not the model's output, though it may come last.
_INNER_WORDS = {"pooler", "transform", "projector", "resampler"}
# What DistributedDataParallel, torch.compile, FSDP, activation checkpointing and peft put around a name.
_WRAPPERS = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_model",
    "base_layer",
    "original_module",
}
# A matrix without a name counts as a table of words from this size on: there one-sided products, which are the least
# a factor costs, take twenty times as long as AdamW (32000 x 512: 0.5 s against 23 ms with two threads).
_TABLE_ROWS, _TABLE_RATIO, _TABLE_COLUMNS = 8192, 4, 128


def role_of(name: str) -> str:
    """Tell from a parameter's name whether it is an embedding or part of a head; empty where it is neither.

    >>> role_of("transformer.wte.weight"), role_of("lm_head.weight"), role_of("blocks.0.mlp.fc1.weight")
    ('embedding', 'head', '')
    """
    if any(part.startswith("lora_") for part in _parts(name)):
        # the two factors of an adapter are layers, whatever they adapt; only an embedding's is looked up by row
        return "embedding" if "lora_embedding" in name else ""
    if _head_of(name):
        return "head"
    return "embedding" if _is_embedding(name) else ""


def roles_of(names: Sequence[str], params: Sequence[Tensor], *, last: bool = True) -> list[str]:
    """Tell the roles of parameters from their names and shapes.

    Of several matrices in a head only the last one is it. Where no name says head, the last matrix of all is it,
    unless it is inside a block of a list, leads back to the width of an embedding, or is the only one; and with it the
    layer that ends another tower in the same way.

    Args:
        names: The names; empty where unknown.
        params: The parameters.
        last: Whether the last matrix may count as a head, that is, whether these are all of a model's parameters.

    >>> model = nn.ModuleDict({"classifier": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))})
    >>> roles_of(*zip(*model.named_parameters()))
    ['', '', 'head', '']
    """
    known = set(names)
    heads = {head: name for name, p in zip(names, params, strict=True) if p.ndim > 1 and (head := _head_of(name))}
    roles = []
    for name, param in zip(names, params, strict=True):
        role = (_role_by_shape(name, param) or role_of(name)) if param.ndim > 1 else ""
        if role == "head" and heads.get(_head_of(name)) != name:
            role = ""
        if role == "embedding" and _is_layer(name, param, known):
            role = ""
        roles.append(role)
    if last and "head" not in roles:
        for place in _last_matrices(names, params, roles):
            roles[place] = "head"
    return roles


def roles_in(model: nn.Module, *, head: bool | None = None) -> dict[Tensor, str]:
    """Tell the roles of all parameters of a model: what its modules are, and where they say nothing, the names.

    Args:
        model: The model.
        head: Whether the last matrix counts as a head. None: unless a head was recognised otherwise.
    """
    named = list(model.named_parameters())
    names, params = [name for name, _ in named], [param for _, param in named]
    roles: dict[Tensor, str] = dict(zip(params, roles_of(names, params, last=False), strict=True))
    owners = [(module, weight) for module in model.modules() for weight in _weights(module)]
    tables = {weight for module, weight in owners if _is_table(module, weight)}
    for _, weight in owners:
        if weight in tables:
            if roles.get(weight) != "vector":
                roles[weight] = "embedding"
        elif roles.get(weight) == "embedding":
            # the weight of a layer is no embedding, whatever the module around it is called
            roles[weight] = ""
    for output in _output_weights(model):
        if roles.get(output) == "":
            roles[output] = "head"
    if head is not False and (head or "head" not in roles.values()):
        for place in _last_matrices(names, params, [roles[param] for param in params]):
            roles[params[place]] = "head"
    return roles


def like_tables(params: Iterable[Tensor]) -> set[Tensor]:
    """Return the parameters that look like an embedding or a head by shape alone.

    These are long matrices, one or two of a kind: the layers of a large network, which may be as long, come in greater
    numbers.

    >>> import torch
    >>> len(like_tables([torch.empty(32000, 512, device="meta"), torch.empty(512, 2048, device="meta")]))
    1
    """
    matrices = [param for param in params if param.ndim == 2]
    counts = Counter(tuple(param.shape) for param in matrices)
    return {
        param
        for param in matrices
        if max(param.shape) > _TABLE_ROWS
        and max(param.shape) >= _TABLE_RATIO * min(param.shape)
        and min(param.shape) >= _TABLE_COLUMNS
        and counts[tuple(param.shape)] <= 2
    }


def _role_by_shape(name: str, param: Tensor) -> str:
    """Tell experts, the biases of several, and vectors with idle dimensions."""
    parts = _parts(name)
    if parts[-1] == "bias" or parts[-1].endswith("_bias"):
        return "bias"
    if param.numel() == max(param.shape) and (param.ndim > 2 or _is_magnitude(name)):
        return "vector"
    if param.ndim == 3 and "experts" in (word for part in parts for word in part.split("_")):
        return EXPERTS
    return ""


def _is_magnitude(name: str) -> bool:
    """Whether a name is that of the lengths that weight normalisation keeps beside the directions."""
    *modules, own = name.lower().split(".")
    return own == "weight_g" or (own == "original0" and "parametrizations" in modules)


def _is_embedding(name: str) -> bool:
    """Whether a name is that of a table: of its module, or of a parameter that belongs to no layer."""
    *modules, own = _parts(name)
    layers = [part for part in modules if not part.isdigit()]
    places = layers[-1:] if own.endswith("weight") else [*modules[-1:], own]
    for part in places:
        words = set(re.sub(r"\d", "", part).split("_"))
        is_called_so = words & _EMBEDDING_WORDS or any(word.endswith(_EMBEDDING_ENDS) for word in words)
        if part in _EMBEDDING_NAMES or (is_called_so and not words & _LAYER_WORDS):
            return True
    return False


def _is_layer(name: str, param: Tensor, known: set[str]) -> bool:
    """Whether what is called an embedding is the weight of a layer: it has a bias, or more than two dimensions."""
    if not name.endswith("weight"):
        return False
    return param.ndim > 2 or name.removesuffix("weight") + "bias" in known


def _last_matrices(names: Sequence[str], params: Sequence[Tensor], roles: Sequence[str]) -> list[int]:
    """Return where the last matrix is, if it can be the output of a model, and those that end other towers."""
    place = _last_matrix(names, params, roles)
    return [] if place is None else [place, *_twins(place, names, params, roles)]


def _twins(place: int, names: Sequence[str], params: Sequence[Tensor], roles: Sequence[str]) -> list[int]:
    """Return the matrices that are to other towers what one is to its own: their last, with the same name inside.

    ``text.proj`` and ``image.proj`` differ in the tower's name; ``text_projection`` and ``visual_projection`` are
    outside, and as many as there are towers.
    """
    split = [_parts(name) for name in names]
    own, last = split[place], params[place]
    inside, outside = [], []
    for other, parts in enumerate(split):
        param = params[other]
        if param.ndim != 2 or roles[other] or len(parts) != len(own) or not set(param.shape) & set(last.shape):
            continue
        differing = [i for i, (a, b) in enumerate(zip(parts, own, strict=True)) if a != b]
        if len(differing) != 1 or differing[0] == len(own) - 1 or _without_digits(parts) == _without_digits(own):
            continue
        depth = differing[0] + 1
        if depth < len(own) - 1:
            ours, theirs = (_matrices_under(path[:depth], split, params) for path in (own, parts))
            # one that makes what the other takes in comes before it, and is no tower beside it
            feeds = param.shape[0] == params[ours[0]].shape[-1] != params[theirs[0]].shape[-1]
            if other == theirs[-1] and not feeds:
                inside.append(other)
        elif parts[-2].split("_")[-1] == own[-2].split("_")[-1]:
            outside.append(other)
    return inside or (outside if len(outside) + 1 == _count_towers(split) else [])


def _matrices_under(path: Sequence[str], split: Sequence[Sequence[str]], params: Sequence[Tensor]) -> list[int]:
    return [i for i, parts in enumerate(split) if params[i].ndim > 1 and parts[: len(path)] == path]


def _count_towers(split: Sequence[Sequence[str]]) -> int:
    """Return how many modules of a model are built alike: as many of their parameters' names are the same as not."""
    inner: dict[str, set[str]] = {}
    for first, *rest in split:
        if len(rest) > 1:
            inner.setdefault(first, set()).add(".".join(rest))
    sets = list(inner.values())
    alike = [
        any(len(one & other) >= len(one ^ other) for j, other in enumerate(sets) if j != i)
        for i, one in enumerate(sets)
    ]
    return sum(alike)


def _without_digits(parts: Sequence[str]) -> list[str]:
    return [re.sub(r"\d", "", part) for part in parts]


def _last_matrix(names: Sequence[str], params: Sequence[Tensor], roles: Sequence[str]) -> int | None:
    """Return where the last matrix is, if it can be the output of a model."""
    matrices = [place for place, param in enumerate(params) if param.ndim > 1 and names[place] and not roles[place]]
    if len(matrices) < 2:
        return None
    place = _end(matrices, names)
    last = params[place]
    if last.ndim != 2:
        return None
    named = list(zip(names, params, strict=True))
    earlier = named[:place] if place == matrices[-1] else named[:place] + named[place + 1 :]
    widths = {param.shape[-1] for param, role in zip(params, roles, strict=True) if role == "embedding"}
    # what comes before makes its inputs, or it does not belong to the same model; a recurrent layer's rows are gates
    made = {p.shape[-1] if "weight_hh" in name else p.shape[0] for name, p in earlier if p.ndim > 1}
    follows = any(last.shape[1] % size == 0 for size in made | widths if size > 1)
    *modules, own = _parts(names[place])
    inner = any(word in _INNER_WORDS or word == "lora" for part in modules for word in part.split("_"))
    # one that leads back to an embedding's width is inside the model, whose outputs the embedding itself makes
    if own != "weight" or inner or not follows or last.shape[0] in widths or _is_repeated(modules, names):
        return None
    return place


def _end(matrices: Sequence[int], names: Sequence[str]) -> int:
    """Return where the last matrix is: the first one, where numbers tell that a group with the head comes first.

    Of ``fc3``, ``fc1`` and ``fc2`` it is ``fc3``. Numbers that only fall, as in ``fc64`` and ``fc10``, may be sizes.
    """
    own = _without_digits(_parts(names[matrices[-1]]))
    alike = [place for place in matrices if _without_digits(_parts(names[place])) == own]
    first, *others = (_numbers(names[place]) for place in alike)
    is_moved = len(others) > 1 and others == sorted(others) and first > others[-1] > others[0]
    return alike[0] if is_moved else matrices[-1]


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", _plain(name))]


def _is_repeated(modules: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a layer is part of a block in a list, such as ``h.11.mlp.c_proj``, or of one of several equal blocks."""
    for place, part in enumerate(modules):
        if part.isdigit() and any(not later.isdigit() for later in modules[place + 1 :]):
            if place > 0:
                return True
            # a sequence without a name: of blocks, if another of its entries has the same layer
            inside = ".".join(modules[1:])
            return sum(bool(re.fullmatch(rf"\d+\.{re.escape(inside)}\.weight", _plain(name))) for name in names) > 1
    return False


def _weights(module: nn.Module) -> list[Tensor]:
    """Return the parameters that make a module's weight.

    Not by asking for ``module.weight``: where that is parametrized, it is worked out at each look, and spectral
    normalisation takes a step of its power iteration.
    """
    if is_parametrized(module, "weight"):
        pieces = cast("nn.ModuleDict", module.parametrizations)["weight"]
        return list(pieces.parameters(recurse=False))
    return [param for name, param in module.named_parameters(recurse=False) if name == "weight"]


def _is_table(module: nn.Module, weight: Tensor) -> bool:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return True
    is_called_so = type(module).__name__.endswith("Embedding")
    return is_called_so and weight.ndim == 2 and getattr(module, "bias", None) is None


def _output_weights(model: nn.Module) -> list[Tensor]:
    """Return the weight of the layer that a model of transformers, wrapped or not, says makes its outputs."""
    found = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    asked = next((one for one in found if callable(one)), None)
    try:
        layer = asked() if asked is not None else None
    except (NotImplementedError, AttributeError, TypeError):
        return []
    return _weights(layer) if isinstance(layer, nn.Module) else []


def _plain(name: str) -> str:
    return ".".join(_parts(name))


def _parts(name: str) -> list[str]:
    """Return a name's parts in lower case, without wrappers and without what peft and parametrizations add."""
    parts: list[str] = []
    found = iter(name.lower().split("."))
    for part in found:
        if part == "modules_to_save":
            next(found, None)  # the adapter's name
        elif part == "parametrizations":
            parts.append(next(found, ""))  # the parameter's own name; what follows numbers its pieces
            break
        elif part not in _WRAPPERS:
            parts.append(part)
    return parts or [name]


def _head_of(name: str) -> str:
    """Return the name of the head a parameter is in, empty where it is in none."""
    parts = _parts(name)
    parts = parts[:-1] or parts
    for place, part in enumerate(parts):
        inside = parts[place + 1 :]
        # a list of modules called heads has those of attention
        is_list = part == "heads" and len(inside) > 1 and inside[0].isdigit()
        if part in _HEAD_NAMES and (place < 2 or not inside) and not is_list:
            return ".".join(parts[: place + 1])
    return ""
