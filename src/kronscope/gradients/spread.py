"""Recorded gradients spread over processes: which one keeps a step, in which folder, and how to read them all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kronscope.errors import DataError, DistributedError
from kronscope.gradients.shards import Shards, together
from kronscope.gradients.storage import DiskStore, MemoryStore, Store

__all__ = [
    "JoinedStore",
    "agreed_steps",
    "align",
    "check_averaged",
    "open_store",
    "own_folder",
    "owner",
    "write_store",
]

_FOLDER = re.compile(r"process-(\d+)-of-(\d+)")
_GOLDEN = 0x9E3779B97F4A7C15


def owner(step: int, size: int) -> int:
    """Which of ``size`` processes keeps a step.

    Multiples of the golden ratio fill the unit interval evenly, and so does every k-th of them: processes keep equally
    much, also after every second step was dropped.

    >>> [owner(step, 2) for step in range(1, 9)]
    [0, 1, 0, 1, 0, 0, 1, 0]
    """
    return ((step - 1) * _GOLDEN % 2**64) * size >> 64


def agreed_steps(parts: Sequence[tuple[Sequence[int], int]]) -> tuple[list[int], int]:
    """Return the steps that are recorded without a gap, and every which one; a crash may have cut one part short.

    Args:
        parts: The steps of each process and every which step it kept.

    >>> agreed_steps([([1, 3, 6], 1), ([2, 5], 1)])
    ([1, 2, 3], 1)
    """
    every = max(every for _, every in parts)
    steps = sorted(step for steps, _ in parts for step in steps if (step - 1) % every == 0)
    gap = next((number for number, step in enumerate(steps) if step != 1 + number * every), len(steps))
    return steps[:gap], every


def own_folder(path: Path, shards: Shards | None) -> Path:
    """The folder this process writes to.

    Raises:
        DataError: it holds the history of another number of processes.
    """
    size = 1 if shards is None else shards.size
    before = {found for found, _, _ in _folders(path)} | ({1} if (path / "history.json").exists() else set())
    if before - {size}:
        raise DataError(
            f"the gradient history in {path} was recorded by {min(before - {size})} process(es), and there are {size} "
            "now; go on with as many, read it with GradientHistory.open, or pick another path."
        )
    return path if shards is None else path / f"process-{shards.rank}-of-{shards.size}"


def write_store(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
    every: int,
    folder: Path | None,
    resume: bool,
) -> Store:
    """Start to write to a folder, or go on, or to memory."""
    if folder is None:
        return MemoryStore(shapes, dtypes, every)
    if not (resume and (folder / "history.json").exists()):
        return DiskStore.create(folder, names, shapes, dtypes, every)
    store = DiskStore.open(folder, append=True)
    if (store.names, store.shapes) != (list(names), list(shapes)):
        store.close()
        raise DataError(f"the history in {folder} is of other layers: {', '.join(store.names)}; use another path.")
    return store


def open_store(path: Path, shards: Shards | None) -> tuple[DiskStore | JoinedStore, list[int]]:
    """Open a history for reading, by however many processes it was written; return this process's part and all steps.

    Raises:
        DataError: there is none, it is damaged, or a part is missing.
    """
    with together(shards):
        found = _folders(path)
        if shards is None and not found:
            store = DiskStore.open(path)
            return store, store.steps
        size = max((size for size, _, _ in found), default=1)
        folders = {number: folder for count, number, folder in found if count == size} or {0: path}
        own = [n for n in folders if shards is None or n % shards.size == shards.rank]
        stores = [DiskStore.open(folders[number]) for number in own]
        like = stores[0] if stores else DiskStore.open(next(iter(folders.values())))
    fact = (size, own, [(store.steps, store.every) for store in stores])
    facts = [fact] if shards is None else shards.gathered(fact)
    size = max(found for found, _, _ in facts)
    missing = sorted(set(range(size)) - {number for _, numbers, _ in facts for number in numbers})
    if missing:
        raise DataError(
            f"the gradient history in {path} lacks process-{missing[0]}-of-{size}; put all parts where they are read."
        )
    steps, every = agreed_steps([part for _, _, parts in facts for part in parts])
    return JoinedStore(stores, set(steps), every, like), steps


def align(store: Store, shards: Shards) -> list[int]:
    """Keep the steps that all processes have recorded up to, in one type, and return those of all.

    A crash may have stopped the processes at different ones.
    """
    half = any(torch.float16 in dtypes for dtypes in shards.gathered(store.dtypes))
    dtypes = [torch.float16] * len(store.dtypes) if half else store.dtypes
    steps, every = agreed_steps(shards.gathered((store.steps, store.every)))
    known = set(steps)
    keep = [index for index, step in enumerate(store.steps) if step in known]
    if len(keep) < len(store.steps) or store.dtypes != dtypes or store.every != every:
        store.rewrite(keep, dtypes, every)
    return steps


def check_averaged(shards: Shards, layers: Sequence[str], grads: Sequence[Tensor]) -> None:
    """Raise where every process has gradients of its own."""
    norms = torch.tensor([float(torch.linalg.vector_norm(grad.double())) for grad in grads])
    every = torch.stack(shards.gathered(norms))
    wrong = ~torch.isclose(every, every[:1], rtol=1e-3, atol=0.0, equal_nan=True).all(0)
    if bool(wrong.any()):
        raise DistributedError(
            f"the gradients of {layers[int(wrong.nonzero()[0])]!r} differ between processes; average them before the "
            "optimizer's step, as DistributedDataParallel does, or record each process alone with distributed=False."
        )


def _folders(path: Path) -> list[tuple[int, int, Path]]:
    """Parts in a folder: of how many processes, which one, where."""
    matches = [(_FOLDER.fullmatch(folder.name), folder) for folder in path.glob("process-*-of-*")]
    return sorted(
        (int(match[2]), int(match[1]), folder)
        for match, folder in matches
        if match is not None and (folder / "history.json").exists()
    )


class JoinedStore:
    """Records of several folders in the order of their steps, to be read.

    Args:
        stores: The folders.
        steps: The steps that count.
        every: Every which step there is.
        like: A folder that says names, shapes and types, also where ``stores`` is empty.
    """

    def __init__(self, stores: Sequence[DiskStore], steps: set[int], every: int, like: DiskStore) -> None:
        self._stores = list(stores)
        self._places = sorted(
            (step, which, index)
            for which, store in enumerate(stores)
            for index, step in enumerate(store.steps)
            if step in steps
        )
        self.steps: list[int] = [step for step, _, _ in self._places]
        self.names, self.shapes, self.dtypes, self.every = like.names, like.shapes, list(like.dtypes), every

    def read(self, layer: int, start: int, stop: int) -> Tensor:
        """Return records (k, m, n) of a layer."""
        places = self._places[start:stop]
        return torch.stack([self._stores[which].read(layer, index, index + 1)[0] for _, which, index in places])

    def append(self, step: int, grads: Sequence[Tensor]) -> None:
        """Refuse."""
        raise DataError("a gradient history that was opened can be read only; attach with resume=True to go on.")

    def rewrite(self, keep: Sequence[int], dtypes: Sequence[torch.dtype], every: int) -> None:
        """Refuse."""
        self.append(0, ())

    def keep_first(self, count: int) -> None:
        """Refuse."""
        self.append(0, ())

    def close(self) -> None:
        """Let go of files."""
        for store in self._stores:
            store.close()
