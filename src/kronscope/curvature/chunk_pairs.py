"""Every unordered pair of chunks once: of one process, or of all processes that share the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from kronscope.curvature.chunks import ChunksFrom
from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.support.processes import Processes

__all__ = ["over_pairs"]

_T = TypeVar("_T")
Add = Callable[[Atoms, Atoms, bool], None]


def over_pairs(cut: Callable[[], ChunksFrom], add: Add, processes: Processes) -> None:
    """Call ``add(first, second, same)`` for every pair of chunks, ``same`` where both are one chunk.

    With several processes, each in turn sends its chunks to all others. A pair of chunks of two processes is the work
    of one of them: of the later one where its own chunk has an even number, else of the earlier one. So each does half.

    Args:
        cut: Returns what iterates this process's chunks from a given number on.
        add: Called with pairs; each pair is given on one process only.
        processes: The processes.
    """
    _Exchange(processes, add).run(cut)


class _Exchange:
    """The turns of all processes; one that fails keeps taking part to the end, so that none waits for it."""

    def __init__(self, processes: Processes, add: Add) -> None:
        self.processes, self.add = processes, add
        self.failure: BaseException | None = None

    def run(self, cut: Callable[[], ChunksFrom]) -> None:
        chunks = self._tried(cut) or _nothing
        for owner in range(self.processes.world_size):
            source = self._tried(chunks, 0) or iter(()) if owner == self.processes.rank else iter(())
            number = 0
            while (chunk := _sent(self.processes, owner, self._tried(next, source, None))) is not None:
                self._tried(self._pair, owner, chunk, number, chunks)
                number += 1
        if self.failure is not None:
            raise self.failure

    def _pair(self, owner: int, chunk: Atoms, number: int, chunks: ChunksFrom) -> None:
        if owner == self.processes.rank:
            self.add(chunk, chunk, True)
            for later in chunks(number + 1):
                self.add(chunk, later, False)
        elif owner < self.processes.rank:
            for index, own in enumerate(chunks(0)):
                if index % 2 == 0:
                    self.add(_beside(chunk, own), own, False)
        elif number % 2 == 1:
            for own in chunks(0):
                self.add(_beside(chunk, own), own, False)

    def _tried(self, action: Callable[..., _T], *arguments: Any) -> _T | None:
        if self.failure is not None:
            return None
        try:
            return action(*arguments)
        except BaseException as error:  # noqa: BLE001  # raised at the end of the exchange
            self.failure = error
            return None


def _nothing(start: int) -> Iterator[Atoms]:
    return iter(())


def _tensors(atoms: Atoms) -> dict[str, Tensor]:
    found = {field.name: getattr(atoms, field.name) for field in fields(atoms)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _beside(atoms: Atoms, other: Atoms) -> Atoms:
    """The atoms on the device of the others."""
    return atoms.to(other.weights.device)


def _sent(processes: Processes, owner: int, atoms: Atoms | None) -> Atoms | None:
    """One process's chunk, on all of them; None for none."""
    head: tuple[str, tuple[bool, ...], list[tuple[str, tuple[int, ...], torch.dtype]]] | None = None
    if atoms is not None:
        way = atoms.row_inputs if isinstance(atoms, FactoredAtoms) else ()
        head = (
            type(atoms).__name__,
            way,
            [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in _tensors(atoms).items()],
        )
    head = processes.broadcast_object(head, src=owner)
    if head is None:
        return None
    kind, way, entries = head
    own = _tensors(atoms) if atoms is not None else {}
    tensors = {name: processes.broadcast(own.get(name), shape, dtype, src=owner) for name, shape, dtype in entries}
    if atoms is not None:
        return atoms
    return DenseAtoms(**tensors) if kind == "DenseAtoms" else FactoredAtoms(**tensors, row_inputs=way)
