"""Putting the uses of a layer's weights together into its atoms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.matrices import LayerSpec
from kronscope.gradients.sample_axes import SampleAxis
from kronscope.gradients.uses import ConvUse, Use

__all__ = ["Assembler", "DenseAssembler", "FactoredAssembler", "UsePart", "Sizes", "parts_of"]


@dataclass(frozen=True)
class UsePart:
    """The part of a use that falls into a layer.

    Attributes:
        use: The use.
        index: The use's number in the list of gradients.
        axis: Where its samples are.
        row: First row within the layer.
        start: First row within the use.
        length: How many rows.
        cols: First column within the parameter, and one past the last.
    """

    use: Use
    index: int
    axis: SampleAxis
    row: int
    start: int
    length: int
    cols: tuple[int, int]

    def cut(self, rows: Tensor) -> Tensor:
        """The layer's part of the use's rows, given in the last dimension."""
        return rows[..., self.start : self.start + self.length]

    def cut_cols(self, cols: Tensor) -> Tensor:
        """The layer's part of the parameter's columns, given in the last dimension."""
        return cols[..., self.cols[0] : self.cols[1]]


def parts_of(spec: LayerSpec, uses: Sequence[Use], axes: Mapping[tuple[str, int], SampleAxis]) -> list[UsePart]:
    """All parts of uses that fall into a layer; ``axes`` is keyed by parameter and ordinal."""
    parts = []
    for index, use in enumerate(uses):
        place = use.place
        for row, at, length, segment in spec.overlaps(place.parameter, place.start, place.start + place.rows):
            axis, cols = axes[place.parameter, place.ordinal], (segment.first, segment.last)
            parts.append(UsePart(use, index, axis, row, at - place.start, length, cols))
    return parts


class _Group:
    """Pieces that share positions: the same columns of the same input, different rows."""

    def __init__(self, part: UsePart) -> None:
        self.parts = [part]
        self.input_is_cols = part.use.input_is_cols
        self._key = (part.use.key(), part.axis, part.cols)

    def takes(self, part: UsePart) -> bool:
        disjoint = all(
            part.row + part.length <= other.row or other.row + other.length <= part.row for other in self.parts
        )
        return disjoint and self._key == (part.use.key(), part.axis, part.cols)


def _grouped(parts: Sequence[UsePart]) -> list[_Group]:
    groups: list[_Group] = []
    for part in parts:
        for group in groups:
            if group.takes(part):
                group.parts.append(part)
                break
        else:
            groups.append(_Group(part))
    return groups


@dataclass(frozen=True)
class Sizes:
    """How large the atoms of a layer are, known before they are made.

    Attributes:
        positions: Positions t of the factored form; 0 if there is none.
        shared_rows: Whether all columns share the row factors.
        shared_cols: Whether all columns share the column factors.
        windows: Numbers of each sample in the windows of convolutions, which are laid out while atoms are made.
    """

    positions: int
    shared_rows: bool
    shared_cols: bool
    windows: int = 0

    @classmethod
    def of(cls, parts: Sequence[UsePart], samples: int) -> Sizes:
        """Sizes of the factored form of these parts."""
        groups = _grouped(parts)
        kinds = {group.input_is_cols for group in groups}
        firsts = [group.parts[0].use for group in groups]
        return cls(
            sum(use.positions(samples) for use in firsts),
            True not in kinds,
            False not in kinds,
            sum(use.positions(samples) * use.window_size for use in firsts if isinstance(use, ConvUse)),
        )

    def entries(self, shape: tuple[int, int], columns: int) -> int:
        """Numbers per sample in factored form."""
        rows = 1 if self.shared_rows else columns
        cols = 1 if self.shared_cols else columns
        return self.positions * (rows * shape[0] + cols * shape[1])


class Assembler(Protocol):
    """Collects output gradients column by column and gives the atoms of one layer."""

    def add(self, column: int, grads: Sequence[Tensor | None], unscale: Tensor | None = None) -> None:
        """Take the gradients of all uses' outputs for one column, times a factor (samples,) if there is one."""

    def finish(self, weights: Tensor, samples: Tensor) -> Atoms:
        """Give the atoms."""


class FactoredAssembler:
    """Keeps inputs and output gradients apart; groups of parts are further positions."""

    def __init__(
        self, spec: LayerSpec, parts: Sequence[UsePart], samples: int, columns: int, dtype: torch.dtype
    ) -> None:
        self._groups = _grouped(parts)
        self._samples = samples
        sizes = Sizes.of(parts, samples)
        device = parts[0].use.place.inputs.device
        m, n = spec.shape
        rows, cols = (1 if sizes.shared_rows else columns), (1 if sizes.shared_cols else columns)
        # Rows that no part of a group covers are zero at the group's positions.
        gaps = any(sum(part.length for part in group.parts) < m for group in self._groups)
        new_rows = torch.zeros if gaps else torch.empty
        self._rows = new_rows(samples, rows, sizes.positions, m, dtype=dtype, device=device)
        self._cols = torch.empty(samples, cols, sizes.positions, n, dtype=dtype, device=device)
        self._starts: list[int] = []
        start = 0
        for group in self._groups:
            self._starts.append(start)
            length = group.parts[0].use.positions(samples)
            at = slice(start, start + length)
            first = group.parts[0]
            side = first.use.input_side(first.axis, samples).unsqueeze(1)
            if group.input_is_cols:
                self._cols[:, :, at] = first.cut_cols(side)
            else:
                for part in group.parts:
                    self._rows[:, :, at, part.row : part.row + part.length] = part.cut(side)
            start += length

    def add(self, column: int, grads: Sequence[Tensor | None], unscale: Tensor | None = None) -> None:
        """Take the gradients of all uses' outputs for one column, times a factor (samples,) if there is one."""
        for start, group in zip(self._starts, self._groups, strict=True):
            for part in group.parts:
                at = slice(start, start + part.use.positions(self._samples))
                if group.input_is_cols:
                    target = self._rows[:, column, at, part.row : part.row + part.length]
                else:
                    target = self._cols[:, column, at]
                grad = grads[part.index]
                if grad is None:
                    target.zero_()
                    continue
                side = part.use.grad_side(grad, part.axis, self._samples)
                target.copy_(part.cut(side) if group.input_is_cols else part.cut_cols(side))
                if unscale is not None:
                    target.mul_(unscale[:, None, None])

    def finish(self, weights: Tensor, samples: Tensor) -> Atoms:
        """Give the atoms."""
        row_inputs: tuple[bool, ...] = ()
        if len({group.input_is_cols for group in self._groups}) > 1:
            lengths = [group.parts[0].use.positions(self._samples) for group in self._groups]
            row_inputs = tuple(
                not group.input_is_cols
                for group, length in zip(self._groups, lengths, strict=True)
                for _ in range(length)
            )
        return FactoredAtoms(self._rows, self._cols, weights, samples, row_inputs)


class DenseAssembler:
    """Forms whole gradients."""

    def __init__(
        self, spec: LayerSpec, parts: Sequence[UsePart], samples: int, columns: int, dtype: torch.dtype
    ) -> None:
        self._parts = parts
        self._samples = samples
        device = parts[0].use.place.inputs.device
        self._grads = torch.zeros(samples, columns, *spec.shape, dtype=dtype, device=device)
        # A table lookup adds into rows and needs no one-hot matrix.
        self._inputs = {
            part.index: part.use.input_side(part.axis, samples).to(dtype)
            for part in parts
            if part.use.place.inputs.is_floating_point()
        }

    def add(self, column: int, grads: Sequence[Tensor | None], unscale: Tensor | None = None) -> None:
        """Take the gradients of all uses' outputs for one column, times a factor (samples,) if there is one."""
        for part in self._parts:
            grad = grads[part.index]
            if grad is None:
                continue
            inputs = self._inputs.get(part.index, grad)
            if part.use.input_is_cols:  # other columns are not even formed
                whole = part.use.gradient(grad, part.cut_cols(inputs), part.axis, self._samples)
            else:
                whole = part.cut_cols(part.use.gradient(grad, inputs, part.axis, self._samples))
            rows = whole[:, part.start : part.start + part.length]
            if unscale is not None:
                rows = rows.to(self._grads.dtype) * unscale[:, None, None]
            self._grads[:, column, part.row : part.row + part.length] += rows

    def finish(self, weights: Tensor, samples: Tensor) -> Atoms:
        """Give the atoms."""
        return DenseAtoms(self._grads, weights, samples)
