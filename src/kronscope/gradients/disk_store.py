"""Recorded gradients in append-only files that survive a crash up to the last step."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kronscope.errors import DataError
from kronscope.gradients.storage import Asked, encode, record_bytes
from kronscope.support.files import remove_leftovers, write_json
from kronscope.support.locks import FileLock, HeldError, lock_folder

__all__ = ["DiskStore"]

_FORMAT = "kronscope-gradients"
_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}


class DiskStore:
    """Records in a folder: one append-only file per layer, and one with the steps, written last.

    A record counts once its step is in the file of steps, so a crash in the middle of a step loses that step and
    nothing else. Steps between records are counted in a file of eight bytes, ``seen``. The layers' files are read as
    memory maps. Who writes holds the lock of the folder.

    Attributes:
        seen: The last training step that was seen, with a record or without.
        asked: What the records would be with space enough.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        dtypes: Sequence[torch.dtype],
        every: int = 1,
    ) -> None:
        self.path, self.names, self.shapes, self.dtypes = path, list(names), list(shapes), list(dtypes)
        self.every = every
        self.steps: list[int] = []
        self.seen = 0
        self.asked = Asked(every, tuple(dtypes))
        self._files: list[int] = []
        self._seen_file: int | None = None
        self._lock: FileLock | None = None

    @classmethod
    def create(
        cls,
        path: Path,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        dtypes: Sequence[torch.dtype],
        every: int = 1,
    ) -> DiskStore:
        """Start a new folder.

        Raises:
            DataError: the folder holds a history already, cannot be made, or is being written.
        """
        _check_empty(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"could not make the folder {path}: {error.strerror}; pick another path.") from error
        store = cls(path, names, shapes, dtypes, every)
        store._lock = _lock(path)
        try:
            _check_empty(path)
            store._remove_others()
            (path / "seen").unlink(missing_ok=True)
            store._open(os.O_TRUNC)
            store._describe()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, path: Path, *, append: bool = False) -> DiskStore:
        """Open a folder that was written before, also after a crash.

        Args:
            path: The folder.
            append: Go on writing. Otherwise nothing is touched, since another process may be writing.

        Raises:
            DataError: there is no history, it is damaged, two wrote it at once, or (with ``append``) one is writing.
        """
        if not append:
            return cls._read(path)
        lock = _lock(path)
        try:
            store = cls._read(path)
            store._trim()
            store._remove_others()
            store._open()
        except BaseException:
            lock.release()
            raise
        store._lock = lock
        return store

    @classmethod
    def _read(cls, path: Path) -> DiskStore:
        try:
            text = json.loads((path / "history.json").read_text())
            if text["format"] != _FORMAT or text["version"] != 1:
                raise DataError(
                    f"{path} was written by another version of kronscope: {text['format']} {text['version']}."
                )
            layers = text["layers"]
            store = cls(
                path,
                [layer["name"] for layer in layers],
                [(layer["rows"], layer["cols"]) for layer in layers],
                [getattr(torch, layer["dtype"]) for layer in layers],
            )
            store._generation, store.every = int(text["generation"]), int(text.get("every", 1))
            asked = text.get("asked", {"every": 1, "dtypes": [layer["dtype"] for layer in layers]})
            store.asked = Asked(int(asked["every"]), tuple(getattr(torch, name) for name in asked["dtypes"]))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"there is no gradient history in {path}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"the gradient history in {path} is damaged: {error}.") from error
        raw = store._file("steps").read_bytes() if store._file("steps").exists() else b""
        steps = np.frombuffer(raw[: len(raw) // 8 * 8], dtype=np.int64).tolist()
        complete = [
            store._file(str(index)).stat().st_size // record_bytes(shape, dtype)
            if store._file(str(index)).exists()
            else 0
            for index, (shape, dtype) in enumerate(zip(store.shapes, store.dtypes, strict=True))
        ]
        store.steps = steps[: min([len(steps), *complete])]
        for before, step in pairwise(store.steps):
            if step <= before:
                raise DataError(
                    f"the gradient history in {path} has step {step} after step {before}: two histories wrote to it at "
                    "once, and their gradients cannot be told apart. Record it again to another path."
                )
        store.seen = max([store._read_seen(), *store.steps[-1:]])
        return store

    _generation = 0

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.{self._generation}.bin"

    def _describe(self) -> None:
        layers = [
            {"name": name, "rows": shape[0], "cols": shape[1], "dtype": str(dtype).removeprefix("torch.")}
            for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True)
        ]
        text = {
            "format": _FORMAT,
            "version": 1,
            "generation": self._generation,
            "every": self.every,
            "asked": {
                "every": self.asked.every,
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.asked.dtypes],
            },
            "layers": layers,
        }
        write_json(self.path / "history.json", text)

    def _remove_others(self) -> None:
        """Remove what a crash in the middle of :meth:`rewrite` left behind."""
        remove_leftovers(self.path)
        for file in self.path.glob("*.bin"):
            name, _, generation = file.stem.rpartition(".")
            if (name == "steps" or name.isdigit()) and generation != str(self._generation):
                file.unlink(missing_ok=True)

    def _open(self, more: int = 0) -> None:
        names = [*(str(index) for index in range(len(self.shapes))), "steps"]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | more
        self._files = [os.open(self._file(name), flags, 0o644) for name in names]

    def _trim(self) -> None:
        """Cut what a crash left behind after the last complete record."""
        for index, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            _truncate(self._file(str(index)), len(self.steps) * record_bytes(shape, dtype))
        _truncate(self._file("steps"), 8 * len(self.steps))

    def append(self, step: int, grads: Sequence[Tensor]) -> None:
        """Add one record per layer; the step is written last and makes them count."""
        for file, grad, dtype in zip(self._files, grads, self.dtypes, strict=False):
            scale, values = encode(grad, dtype)
            head = np.float64(scale).tobytes() if dtype == torch.float16 else b""
            _write(file, head + values.contiguous().cpu().numpy().tobytes())
        _write(self._files[-1], np.int64(step).tobytes())
        self.steps.append(step)
        self.seen = step

    def note_step(self, step: int) -> None:
        """Note a step that has no record here, in place: eight bytes."""
        self._check_writing()
        self.seen = step
        if self._seen_file is None:
            self._seen_file = os.open(self.path / "seen", os.O_WRONLY | os.O_CREAT, 0o644)
        os.lseek(self._seen_file, 0, os.SEEK_SET)
        _write(self._seen_file, np.int64(step).tobytes())

    def _read_seen(self) -> int:
        raw = (self.path / "seen").read_bytes() if (self.path / "seen").exists() else b""
        return int(np.frombuffer(raw, dtype=np.int64)[0]) if len(raw) == 8 else 0

    def _check_writing(self) -> None:
        if not self._files:
            raise DataError(
                "a gradient history that was closed, or opened for reading, cannot be changed; attach with resume=True "
                "to go on with it."
            )

    def read(self, layer: int, start: int, stop: int) -> Tensor:
        """Return records (k, m, n) of a layer; a view of the file unless they are in half precision."""
        (m, n), dtype = self.shapes[layer], self.dtypes[layer]
        size = record_bytes((m, n), dtype)
        # copy-on-write: torch wants memory it could write to, and the file must stay as it is
        raw = np.memmap(self._file(str(layer)), np.uint8, "c", start * size, ((stop - start) * size,))
        if dtype != torch.float16:
            return torch.from_numpy(raw.view(_NUMPY[dtype]).reshape(-1, m, n))
        rows = np.asarray(raw).reshape(stop - start, size)
        scales = torch.from_numpy(rows[:, :8].copy().view(np.float64)).float().view(-1, 1, 1)
        return torch.from_numpy(rows[:, 8:].copy().view(np.float16).reshape(-1, m, n)).float() * scales

    def rewrite(self, keep: Sequence[int], dtypes: Sequence[torch.dtype], every: int) -> None:
        """Keep only these records, in these types, in new files that replace the old ones at once."""
        self.note_step(self.seen)  # the last record may go
        new = DiskStore(self.path, self.names, self.shapes, dtypes)
        new._generation = self._generation + 1
        new._open(os.O_TRUNC)
        for index in keep:
            new.append(self.steps[index], [self.read(layer, index, index + 1)[0] for layer in range(len(self.shapes))])
        new.close()
        self._close_files()
        self.dtypes, self.every, self.steps, self._generation = list(dtypes), every, new.steps, new._generation
        self._describe()  # from here on the new files are the history
        self._remove_others()
        self._open()

    def keep_first(self, count: int) -> None:
        """Drop all records but the first ``count``."""
        self._check_writing()
        self.steps = self.steps[:count]
        self._trim()

    def close(self) -> None:
        """Close the files and let go of the folder."""
        self._close_files()
        if self._seen_file is not None:
            os.close(self._seen_file)
            self._seen_file = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def _lock(folder: Path) -> FileLock:
    try:
        return lock_folder(folder)
    except HeldError as error:
        holder = "this process" if str(error) == f"process {os.getpid()}" else str(error) or "another process"
        raise DataError(
            f"another gradient history is being recorded to {folder}, by {holder}; close() that one first, or pick "
            "another path."
        ) from None
    except OSError as error:
        raise DataError(f"could not write to {folder}: {error.strerror}; pick another path.") from error


def _check_empty(path: Path) -> None:
    if (path / "history.json").exists():
        raise DataError(
            f"{path} holds a gradient history already; open it with GradientHistory.open, go on with it "
            "(resume=True), pick another path, or remove it."
        )


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _truncate(path: Path, size: int) -> None:
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)
