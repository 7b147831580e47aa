"""The parts of a gradient history: which process keeps a step, in which folder, and how all parts are read as one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronscope.errors import DataError, DistributedError, OptionError
from kronscope.gradients.disk_store import DiskStore
from kronscope.gradients.storage import Asked, MemoryStore, Store
from kronscope.kron.devices import wide
from kronscope.support.processes import Processes

__all__ = [
    "JoinedStore",
    "common_steps",
    "check_averaged",
    "resume_records",
    "open_store",
    "folder_of_process",
    "keeper_of",
    "why_lacking",
    "write_store",
]

_FOLDER = re.compile(r"process-(\d+)-of-(\d+)")
_GOLDEN = 0x9E3779B97F4A7C15


def keeper_of(step: int, size: int) -> int:
    """Return the rank, of ``size`` processes, that keeps a step.

    Multiples of the golden ratio, modulo 1, fill the unit interval evenly, and so does every k-th of them. So the
    processes keep about equally many steps, also after every second step was dropped.

    >>> [keeper_of(step, 2) for step in range(1, 9)]
    [0, 1, 0, 1, 0, 0, 1, 0]
    """
    return ((step - 1) * _GOLDEN % 2**64) * size >> 64


def common_steps(parts: Sequence[tuple[Sequence[int], int]]) -> tuple[list[int], int]:
    """Return the steps up to which every process has its records, and the k of "one step in k is recorded".

    A crash may have stopped one process some steps before the others, and one may have thinned its records already.

    Args:
        parts: The steps of each process, and its k.

    >>> common_steps([([1, 3, 6], 1), ([2, 5], 1)])
    ([1, 2, 3], 1)
    """
    every = max(every for _, every in parts)
    steps = sorted(step for steps, _ in parts for step in steps if (step - 1) % every == 0)
    gap = next((number for number, step in enumerate(steps) if step != 1 + number * every), len(steps))
    return steps[:gap], every


def folder_of_process(path: Path, processes: Processes) -> Path:
    """The folder that this process writes to.

    Raises:
        DataError: it is no folder, or holds the history of another number of processes.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file, and a gradient history needs a folder; pick another path.")
    size = processes.world_size
    before = {found for found, _, _ in _folders(path)} | ({1} if (path / "history.json").exists() else set())
    if before - {size}:
        raise DataError(
            f"the gradient history in {path} was recorded by {min(before - {size})} process(es), and there are {size} "
            "now; go on with as many, read it with GradientHistory.open, or pick another path."
        )
    return path if size == 1 else path / f"process-{processes.rank}-of-{size}"


def write_store(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
    every: int,
    folder: Path | None,
    resume: bool,
    space: int | None = None,
) -> Store:
    """Return a store to write to: a new folder, one to go on with, or memory."""
    if folder is None:
        return MemoryStore(shapes, dtypes, every, space)
    if not (resume and (folder / "history.json").exists()):
        return DiskStore.create(folder, names, shapes, dtypes, every, space)
    store = DiskStore.open(folder, append=True)
    if (store.names, store.shapes) != (list(names), list(shapes)):
        store.close()
        raise DataError(f"the history in {folder} is of other layers: {', '.join(store.names)}; use another path.")
    if space is not None:
        store.limit(space)
    return store


def why_lacking(path: Path, state: Mapping[str, Any]) -> str | None:
    """Why the records in a folder are not those of a saved state; None if they are, every byte of them.

    Args:
        path: The folder.
        state: What ``GradientHistory.state_dict`` returned.

    Raises:
        OSError: A file cannot be read.
    """
    try:
        found = _folders(path)
        stores = [DiskStore.open(folder) for _, _, folder in found] or [DiskStore.open(path)]
        every = max([int(state["every"]), *(store.every for store in stores)])
        steps = {int(step) for step in state["steps"] if (int(step) - 1) % every == 0}
        for store in stores:
            store.verify(sum(step in steps for step in store.steps))
    except DataError as error:
        return str(error)
    known = {step for store in stores for step in store.steps}
    # parts of other processes may be on machines of their own
    complete = not found or len(found) == max(size for size, _, _ in found)
    if complete and steps - known:
        return f"the gradient history in {path} lacks step {min(steps - known)}."
    return None


def open_store(path: Path, processes: Processes) -> tuple[DiskStore | JoinedStore, list[int], int]:
    """Open a history for reading; any number of processes may have written it.

    Returns:
        This process's part, the recorded steps of all, and how many steps there were.

    Raises:
        DataError: there is none, it is damaged, or a part is missing.
    """
    with processes.failing_together():
        found = _folders(path)
        if processes.world_size == 1 and not found:
            store = DiskStore.open(path)
            _check_even(store)
            return store, store.steps, _total(store.steps, store.every, store.seen)
        size = max((size for size, _, _ in found), default=1)
        folders = {number: folder for count, number, folder in found if count == size} or {0: path}
        own = [n for n in folders if n % processes.world_size == processes.rank]
        stores = [DiskStore.open(folders[number]) for number in own]
        like = stores[0] if stores else DiskStore.open(next(iter(folders.values())))
        if size == 1:
            for store in stores:
                _check_even(store)
    fact = (size, own, [(store.steps, store.every) for store in stores], max((s.seen for s in stores), default=0))
    facts = processes.all_gather_object(fact)
    size = max(fact[0] for fact in facts)
    missing = sorted(set(range(size)) - {number for fact in facts for number in fact[1]})
    if missing:
        raise DataError(
            f"the gradient history in {path} lacks process-{missing[0]}-of-{size}; put all parts where they are read."
        )
    steps, every = common_steps([part for fact in facts for part in fact[2]])
    return JoinedStore(stores, set(steps), every, like), steps, _total(steps, every, max(fact[3] for fact in facts))


def resume_records(
    store: DiskStore, processes: Processes, every: int | None, dtype: torch.dtype | None
) -> tuple[list[int], int]:
    """Bring stored records to the point from which all processes can go on, in the form asked for now.

    What remains is one step in k, up to the last step that no process lacks.

    Args:
        store: The records of this process.
        processes: The processes.
        every: Keep one step in ``every``; None for as many as before.
        dtype: How to keep numbers; None for as before.

    Returns:
        The recorded steps of all processes, and how many steps there were.

    Raises:
        OptionError: the records there do not hold what is asked for now.
        DataError: steps are missing between the records.
    """
    with processes.failing_together():
        if processes.world_size == 1:
            _check_even(store)
    fact = (store.steps, store.every, store.seen, store.dtypes, store.asked)
    facts = processes.all_gather_object(fact)
    steps, stored = common_steps([(fact[0], fact[1]) for fact in facts])
    total = _total(steps, stored, max(fact[2] for fact in facts))
    half = any(torch.float16 in fact[3] for fact in facts)
    kept = [torch.float16] * len(store.dtypes) if half else store.dtypes
    asked = max((fact[4] for fact in facts), key=lambda asked: asked.every)
    next_every = _next_every(store.path, every, stored, asked)
    dtypes = _next_dtypes(store.path, dtype, kept, asked)
    steps = [step for step in steps if (step - 1) % next_every == 0]
    known = set(steps)
    keep = [index for index, step in enumerate(store.steps) if step in known]
    with processes.failing_together():
        if len(keep) < len(store.steps) or store.dtypes != dtypes or store.every != next_every:
            store.asked = Asked(
                asked.every if next_every == stored else next_every, asked.dtypes if dtypes == kept else tuple(dtypes)
            )
            store.rewrite(keep, dtypes, next_every)
        if store.seen != total:
            store.note_step(total)
    return steps, total


def _next_every(path: Path, every: int | None, stored: int, asked: Asked) -> int:
    if every is None or every == stored:
        return stored
    if every % stored == 0:
        return every
    if stored % every == 0 and every % asked.every == 0:  # fewer are there for want of space
        return stored
    raise OptionError(
        f"the gradient history in {path} has one step in {stored}, and with every={every} it would no longer be an "
        f"even sample; leave every out to go on with {stored}, give a multiple of {stored} to thin it, or pick another "
        "path."
    )


def _next_dtypes(path: Path, dtype: torch.dtype | None, kept: list[torch.dtype], asked: Asked) -> list[torch.dtype]:
    if dtype is None or set(asked.dtypes) == {dtype}:
        return kept
    if all(dtype.itemsize <= old.itemsize for old in kept):
        return [dtype] * len(kept)
    names = ", ".join(sorted({str(old).removeprefix("torch.") for old in kept}))
    raise OptionError(
        f"the gradient history in {path} is kept in {names}, and {dtype} would not bring back the digits it lacks; "
        "leave dtype out to go on, or pick another path."
    )


def _check_even(store: DiskStore) -> None:
    """Raise DataError unless one process's records are of every k-th step."""
    for number, step in enumerate(store.steps):
        if step != 1 + number * store.every:
            raise DataError(
                f"the gradient history in {store.path} is no even sample: it should hold one step in {store.every}, "
                f"but its record {number + 1} is of step {step}. Record it again to another path."
            )


def _total(steps: Sequence[int], every: int, seen: int) -> int:
    """How many steps there were; the count and the records are written one after the other, so one may be ahead."""
    return min(max(seen, steps[-1]), steps[-1] + every - 1) if steps else 0


def check_averaged(processes: Processes, layers: Sequence[str], grads: Sequence[Tensor]) -> None:
    """Raise DistributedError unless the processes have the same gradients."""
    norms = torch.tensor([float(torch.linalg.vector_norm(wide(grad))) for grad in grads])
    every = torch.stack(processes.all_gather_object(norms))
    wrong = ~torch.isclose(every, every[:1], rtol=1e-3, atol=0.0, equal_nan=True).all(0)
    if bool(wrong.any()):
        raise DistributedError(
            f"the gradients of {layers[int(wrong.nonzero()[0])]!r} differ between processes; average them before the "
            "optimizer's step, as DistributedDataParallel does, or record each process alone with distributed=False."
        )


def _folders(path: Path) -> list[tuple[int, int, Path]]:
    """The parts in a folder: number of processes, rank, and where."""
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
        steps: The steps to read; others are left out.
        every: One step in ``every`` is recorded.
        like: Has the names, shapes and types, also where ``stores`` is empty.
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
        self.space = like.space

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

    def note_step(self, step: int) -> None:
        """Refuse."""
        self.append(0, ())

    def sync(self) -> None:
        """Do nothing: what is read is there."""

    def close(self) -> None:
        """Let go of files."""
        for store in self._stores:
            store.close()
