"""The heads of attention: which rows or columns of a projection belong to one of them.

Query, key and value projections, apart or fused, have their heads in the outputs; the projection behind attention has
them in its inputs. Whatever the order in which a fused weight holds them, each head is a range of as many outputs as a
head is wide. A weight is known by its name, and the width of a head by the modules around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from kronscope.errors import LayerError

__all__ = ["HEAD_COUNTS", "head_cut", "number_around", "projections"]

# What attention modules and their configs call the number of heads, that of keys and values, and the width of a head.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_kv")
_QUERIES = {"q", "query", "wq", "to_q", "q_lin", "q_attn"}
_KEYS = {"k", "v", "key", "value", "wk", "wv", "to_k", "to_v", "k_lin", "v_lin"}
_FUSED = {"in", "qkv", "c_attn", "query_key_value", "wqkv", "to_qkv", "attn_qkv"}
_BEHIND = {"out", "o", "wo", "to_out", "out_lin", "c", "proj", "dense"}
# Also what MLPs call theirs: only within attention do they have heads.
_COMMON = {"o", "c", "proj", "dense"}


def head_cut(
    name: str, shape: tuple[int, int], modules: Mapping[str, nn.Module], count: int | None = None
) -> tuple[int, int]:
    """Say how a projection is cut into heads.

    Args:
        name: The parameter's name.
        shape: Its rows and columns.
        modules: The model's modules by name.
        count: How many heads it has (of a fused weight: each of query, key and value); None asks the modules.

    Returns:
        0 if heads are ranges of rows or 1 if of columns, and the length of a range.

    Raises:
        LayerError: It is no projection by its name, nobody knows how many heads it has, or they do not divide it.

    >>> model = nn.MultiheadAttention(16, 2)
    >>> head_cut("in_proj_weight", (48, 16), dict(model.named_modules()))
    (0, 8)
    >>> head_cut("out_proj.weight", (16, 16), dict(model.named_modules()))
    (1, 8)
    """
    role = _role(name)
    if not role:
        raise LayerError(
            f"{name!r} is not known as a projection of attention by its name, so heads may be rows or columns of it; "
            f"cut it into equal parts: '{name}[/8]' for rows, '{name}[:, /8]' for columns."
        )
    side = 1 if role == "behind" else 0
    if type(modules.get(name.rpartition(".")[0])).__name__ == "Conv1D":  # transformers' own: stored as (in, out)
        side = 1 - side
    size = shape[side]
    if count is None:
        width = number_around(name, modules, _WIDTHS)
        if width and size % width == 0:
            return side, width
    parts = _parts(name, role, modules, count)
    if parts < 1 or size % parts:
        what = ("rows", "columns")[side]
        raise LayerError(f"the {size} {what} of {name!r} cannot be cut into {parts} heads of equal width.")
    return side, size // parts


def projections(module: str, matrices: Iterable[str]) -> Iterator[str]:
    """The projections of attention within a module, of all matrices by name.

    >>> list(projections("attn", ["attn.qkv.weight", "attn.proj.weight", "mlp.proj.weight"]))
    ['attn.qkv.weight', 'attn.proj.weight']
    """
    return (name for name in matrices if name.startswith(f"{module}.") and _role(name))


def number_around(name: str, modules: Mapping[str, nn.Module], attributes: Iterable[str]) -> int:
    """A positive number that the module of a parameter, a module around it or their configs have; 0 if none has.

    Args:
        name: The parameter's name.
        modules: The model's modules by name.
        attributes: What it may be called.
    """
    attributes, path = tuple(attributes), name
    while path:
        path = path.rpartition(".")[0]
        around = modules.get(path)
        for source in (around, getattr(around, "config", None)):
            for attribute in attributes:
                number = getattr(source, attribute, None)
                if isinstance(number, int) and number > 0:
                    return number
    return 0


def _parts(name: str, role: str, modules: Mapping[str, nn.Module], count: int | None) -> int:
    """How many ranges the heads' side of a projection has."""
    heads = count or number_around(name, modules, HEAD_COUNTS)
    if not heads:
        raise LayerError(f"the modules around {name!r} do not say how many heads it has; write '{name}[heads=8]'.")
    keys = number_around(name, modules, _KEY_COUNTS) or heads
    if role == "fused":
        return heads + 2 * keys
    return keys if role == "key" and count is None else heads


def _role(name: str) -> str:
    """``query``, ``key`` (also of values), ``fused`` or ``behind`` attention; empty if a name says nothing."""
    *path, last = name.split(".")
    if last == "weight" and path:
        last = path.pop()
        if last.isdigit() and path:  # diffusers' to_out.0
            last = path.pop()
    word = last.lower().removesuffix("_weight").removesuffix("_proj")
    for role, words in (("query", _QUERIES), ("key", _KEYS), ("fused", _FUSED)):
        if word in words:
            return role
    within = any("att" in part.lower() for part in path)
    return "behind" if word in _BEHIND and (within or word not in _COMMON or last.lower() == "o_proj") else ""
