"""The ways to precondition a layer: what each approximates the curvature with, and what to set for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kronscope.approx import get
from kronscope.curvature import SecondMoment
from kronscope.errors import DataError
from kronscope.gradients.heads import HEAD_COUNTS, number_around
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct
from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.optim.blocks import MAX_SIDE
from kronscope.optim.groups import is_fused

__all__ = ["Blocks", "Candidate", "OneSide", "candidates"]

_SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class OneSide:
    r"""One factor alone: :math:`L \otimes I/n` (``side`` 0) or :math:`I \otimes R/m` (``side`` 1).

    Args:
        side: Which side has the factor.
    """

    side: int = 0
    kronecker: ClassVar[bool] = True
    fits_truth: ClassVar[bool] = False
    uses_batches: ClassVar[bool] = True
    in_shampoo_basis: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """``left`` or ``right``."""
        return ("left", "right")[self.side]

    @property
    def title(self) -> str:
        """For people."""
        return ("One-sided L", "One-sided R")[self.side]

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment."""
        moment = SecondMoment(stream)
        size = moment.shape[1 - self.side]
        own = moment.right() if self.side else moment.left()
        bare = torch.eye(size, dtype=own.dtype, device=own.device)
        return KroneckerProduct(bare, own, 1 / size) if self.side else KroneckerProduct(own, bare, 1 / size)


@dataclass(frozen=True)
class Blocks:
    r"""Shampoo² of each block by itself, nothing between blocks.

    With :math:`P_I` and :math:`P_J` the projections on a block's rows and columns, its factors are
    :math:`\sum w\, P_I G P_J G^\top P_I` and :math:`\sum w\, P_J G^\top P_I G P_J`.

    Args:
        name: ``split``, ``heads`` or ``blocks``.
        parts: Number of equal parts of the rows; 0 to cut by ``size``.
        size: Longest side of a block.
    """

    name: str = "blocks"
    parts: int = 0
    size: int = 0
    kronecker: ClassVar[bool] = False
    fits_truth: ClassVar[bool] = False
    uses_batches: ClassVar[bool] = True
    in_shampoo_basis: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """For people."""
        return {"split": "Split q, k, v", "heads": "Split by heads"}.get(self.name, "Blocks")

    def fit(self, stream: GradientStream) -> BlockDiagonal:
        """Fit the operator to the stream's second moment."""
        moment = SecondMoment(stream)
        m, n = moment.shape
        rows = _edges(m, m // self.parts) if self.parts else _edges(m, self.size)
        cols = [(0, n)] if self.parts else _edges(n, self.size)
        # with all columns in the middle the factor is remembered, and so on
        lefts = {one: moment.left(None if one == (0, n) else _projection(n, one)) for one in cols}
        rights = {one: moment.right(None if one == (0, m) else _projection(m, one)) for one in rows}
        places = torch.arange(m * n).view(m, n)
        blocks = []
        for (a, b), (c, d) in itertools.product(rows, cols):
            left, right = lefts[c, d][a:b, a:b], rights[a, b][c:d, c:d]
            trace = float(left.trace())
            blocks.append((places[a:b, c:d], KroneckerProduct(left, right, 1 / trace if trace > 0 else 0.0)))
        return BlockDiagonal((m, n), blocks)


def _edges(length: int, size: int) -> list[tuple[int, int]]:
    if size < 1:
        raise DataError(f"{length} rows cannot be cut into so many parts")
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _projection(length: int, part: tuple[int, int]) -> Tensor:
    diagonal = torch.zeros(length, dtype=torch.float64)
    diagonal[part[0] : part[1]] = 1
    return torch.diag(diagonal)


@dataclass(frozen=True)
class Candidate:
    """One way to precondition a layer.

    Attributes:
        approximation: What it approximates the curvature with.
        options: What to set in the parameter's group.
    """

    approximation: Any
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The approximation's name, as rows have it."""
        return str(self.approximation.name)


def candidates(name: str, parameter: Tensor, model: nn.Module) -> list[Candidate]:
    """Return the ways to precondition a parameter, the whole matrix first; sides that are too long have no factor.

    >>> model = nn.MultiheadAttention(16, 2)
    >>> [one.name for one in candidates("in_proj_weight", model.in_proj_weight, model)]
    ['shampoo2', 'left', 'right', 'diagonal', 'blocks', 'split', 'heads']
    """
    m, n = parameter.shape[0], parameter[0].numel()
    found = [Candidate(get("diagonal"), {"method": "adam"})]
    sides = [side for side, size in enumerate((m, n)) if 1 < size <= MAX_SIDE]
    found[:0] = [Candidate(OneSide(side), {"method": ("left", "right")[side]}) for side in sides]
    if max(m, n) <= MAX_SIDE:
        found.insert(0, Candidate(get("shampoo2"), {"method": "kronecker"}))
    size = 1 << ((max(m, n) - 1).bit_length() - 1) if max(m, n) > 1 else 0
    if size >= _SMALLEST_BLOCK:
        found.append(Candidate(Blocks(size=size), {"method": "kronecker", "block_size": size}))
    fused = is_fused(name, parameter)
    if fused:
        found.append(Candidate(Blocks("split", parts=3), {"method": "kronecker", "split": 3}))
    heads = _heads(name, model, m, fused=fused)
    if heads > 1:
        found.append(Candidate(Blocks("heads", parts=heads), {"method": "kronecker", "split": heads}))
    return found


def _heads(name: str, model: nn.Module, rows: int, *, fused: bool) -> int:
    """How many parts of rows belong to one head each, as far as the modules around a parameter say; 0 if unknown.

    Of query, key and value these are rows; the output projection of attention has its heads in the columns.
    """
    words = set(name.lower().replace("_proj", "").split("."))
    if not fused and not words & {"q", "k", "v", "query", "key", "value", "wq", "wk", "wv"}:
        return 0
    heads = number_around(name, dict(model.named_modules()), HEAD_COUNTS)
    parts = heads * (3 if fused else 1)
    return parts if heads and rows % parts == 0 and rows // parts > 1 else 0


def by_kind(found: Mapping[str, Sequence[Candidate]]) -> dict[tuple[Any, ...], list[str]]:
    """Sort layers by what they are measured with, so that layers of a kind share a measurement."""
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for name, several in found.items():
        kinds.setdefault(tuple(one.approximation for one in several), []).append(name)
    return kinds
