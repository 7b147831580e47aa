"""Where recorded gradients are kept: what every store does, and the one in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Asked", "MemoryStore", "Store", "encode", "record_bytes", "to_state"]


class Store(Protocol):
    """Records of all layers, one after each recorded step.

    Attributes:
        steps: The training step of each record, ascending.
        dtypes: How each layer's numbers are kept.
        every: One step in ``every`` has a record.
        space: The most bytes that the records may take; None for no limit.
    """

    steps: list[int]
    dtypes: list[torch.dtype]
    every: int
    space: int | None

    def append(self, step: int, grads: Sequence[Tensor]) -> None:
        """Add one record per layer."""
        ...

    def read(self, layer: int, start: int, stop: int) -> Tensor:
        """Return records (k, m, n) of a layer, in float32 where they are kept in float16."""
        ...

    def rewrite(self, keep: Sequence[int], dtypes: Sequence[torch.dtype], every: int) -> None:
        """Keep only the records with these numbers, in these types."""
        ...

    def keep_first(self, count: int) -> None:
        """Drop all records but the first ``count``."""
        ...

    def note_step(self, step: int) -> None:
        """Remember that the run came to a step that has no record here."""
        ...

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


@dataclass(frozen=True)
class Asked:
    """What the user asked for; for want of space the records may be fewer, or in float16.

    Attributes:
        every: One step in ``every``.
        dtypes: How to keep each layer's numbers.
    """

    every: int
    dtypes: tuple[torch.dtype, ...]


def record_bytes(shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes of one record; half precision carries a scale in front, so that small gradients keep their digits."""
    return shape[0] * shape[1] * dtype.itemsize + (8 if dtype == torch.float16 else 0)


def encode(grad: Tensor, dtype: torch.dtype) -> tuple[float, Tensor]:
    """Return a scale and the numbers to keep."""
    if dtype != torch.float16:
        return 1.0, grad.to(dtype)
    scale = float(grad.abs().max()) or 1.0
    return scale, (grad / scale).to(dtype)


class MemoryStore:
    """Records in memory."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        dtypes: Sequence[torch.dtype],
        every: int = 1,
        space: int | None = None,
    ) -> None:
        self.shapes, self.dtypes, self.every, self.space = list(shapes), list(dtypes), every, space
        self.steps: list[int] = []
        self._records: list[list[tuple[float, Tensor]]] = [[] for _ in shapes]
        # Records that lie in one tensor, by the layer and the first of them.
        self._joined: dict[tuple[int, int], Tensor] = {}

    def append(self, step: int, grads: Sequence[Tensor]) -> None:
        """Add one record per layer."""
        for records, grad, dtype in zip(self._records, grads, self.dtypes, strict=True):
            scale, values = encode(grad, dtype)
            # on the host: a run's records would fill a device's memory, and weights and numbers are there too
            records.append((scale, values.cpu()))
        self.steps.append(step)

    def read(self, layer: int, start: int, stop: int) -> Tensor:
        """Return records (k, m, n) of a layer."""
        chosen = self._records[layer][start:stop]
        wide = torch.float32 if self.dtypes[layer] == torch.float16 else self.dtypes[layer]
        return torch.stack([values.to(wide) * scale if scale != 1.0 else values.to(wide) for scale, values in chosen])

    def shared(self, layer: int, start: int, stop: int) -> Tensor:
        """Return records (k, m, n) of a layer for readers that leave them as they are.

        They are moved into one tensor when they are first asked for, so that later readers need no copy.
        """
        known = self._joined.get((layer, start))
        if known is not None and len(known) == stop - start:
            return known
        records = self.read(layer, start, stop)
        if self.dtypes[layer] != torch.float16:
            self._records[layer][start:stop] = [(1.0, record) for record in records]
            self._joined[layer, start] = records
        return records

    def rewrite(self, keep: Sequence[int], dtypes: Sequence[torch.dtype], every: int) -> None:
        """Keep only the records with these numbers, in these types."""
        self._joined.clear()
        for layer, dtype in enumerate(dtypes):
            records = [self._records[layer][index] for index in keep]
            if dtype != self.dtypes[layer]:
                records = [encode(values.double() * scale, dtype) for scale, values in records]
            self._records[layer] = records
        self.steps = [self.steps[index] for index in keep]
        self.dtypes, self.every = list(dtypes), every

    def keep_first(self, count: int) -> None:
        """Drop all records but the first ``count``."""
        self._joined.clear()
        self._records = [records[:count] for records in self._records]
        self.steps = self.steps[:count]

    def note_step(self, step: int) -> None:
        """Do nothing: the history itself counts steps, and lasts as long as the records in memory."""

    def sync(self) -> None:
        """Do nothing: there are no files."""

    def close(self) -> None:
        """Do nothing: there are no files."""


def to_state(store: Store, layers: int) -> dict[str, Any]:
    """Return what a checkpoint needs: everything from memory, the number of records from disk."""
    state: dict[str, Any] = {"steps": list(store.steps)}
    if isinstance(store, MemoryStore):
        count = len(store.steps)
        state["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in store.dtypes]
        state["grads"] = [store.read(layer, 0, count) if count else None for layer in range(layers)]
    return state
