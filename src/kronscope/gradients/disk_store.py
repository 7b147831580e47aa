"""Recorded gradients in append-only files that survive a crash up to the last step."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kronscope.errors import DataError
from kronscope.gradients.storage import Asked, encode, record_bytes
from kronscope.support.files import naming, remove_leftovers, write_json
from kronscope.support.locks import FileLock, HeldError, lock_folder

__all__ = ["DiskStore"]

_FORMAT = "kronscope-gradients"
# Bytes that are compared with checksums at a time.
_PORTION = 64 << 20
_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}


class DiskStore:
    """Records in a folder: one append-only file per layer, and one with the steps, written last.

    A record counts once its step is in the file of steps, so a crash in the middle of a step loses that step and
    nothing else. Steps between records are counted in a file of eight bytes, ``seen``. The layers' files are read as
    memory maps; every record has a checksum, which is compared when the record is first read. Who writes holds the lock
    of the folder.

    Attributes:
        seen: The last training step that was seen, with a record or without.
        asked: What the records would be with space enough.
        space: The most bytes that the records may take; None for no limit.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        dtypes: Sequence[torch.dtype],
        every: int = 1,
        space: int | None = None,
    ) -> None:
        self.path, self.names, self.shapes, self.dtypes = path, list(names), list(shapes), list(dtypes)
        self.every, self.space = every, space
        self.steps: list[int] = []
        self.seen = 0
        self.asked = Asked(every, tuple(dtypes))
        # histories of versions before have no checksums
        self._summed = True
        # which records of a layer were compared with their checksums
        self._compared: dict[int, NDArray[np.bool_]] = {}
        self._files: dict[str, int] = {}
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
        space: int | None = None,
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
        store = cls(path, names, shapes, dtypes, every, space)
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
            text = json.loads((path / "history.json").read_bytes())
            if text["format"] != _FORMAT or text["version"] != 1:
                raise DataError(
                    f"{path} was written by another version of kronscope: {text['format']} {text['version']}."
                )
            layers = text["layers"]
            store = cls(
                path,
                [str(layer["name"]) for layer in layers],
                [(_positive(layer["rows"]), _positive(layer["cols"])) for layer in layers],
                [_dtype(layer["dtype"]) for layer in layers],
                _positive(text.get("every", 1)),
            )
            store._generation, store._summed = int(text["generation"]), bool(text.get("checksums", False))
            asked = text.get("asked", {"every": 1, "dtypes": [layer["dtype"] for layer in layers]})
            store.asked = Asked(_positive(asked["every"]), tuple(_dtype(name) for name in asked["dtypes"]))
            store.space = None if text.get("space") is None else _positive(text["space"])
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"there is no gradient history in {path}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"the gradient history in {path} is damaged: {error}. Record it again.") from error
        raw = store._file("steps").read_bytes() if store._file("steps").exists() else b""
        steps = np.frombuffer(raw[: len(raw) // 8 * 8], dtype=np.int64).tolist()
        complete = [
            store._file(name).stat().st_size // size if store._file(name).exists() else 0
            for name, size in store._sizes().items()
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

    def _sizes(self) -> dict[str, int]:
        """The files in the order in which a record is written to them, and the bytes of a record in each."""
        layers = zip(self.shapes, self.dtypes, strict=True)
        sizes = {str(index): record_bytes(shape, dtype) for index, (shape, dtype) in enumerate(layers)}
        return sizes | ({"checksums": 4 * len(self.shapes)} if self._summed else {}) | {"steps": 8}

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
            "space": self.space,
            "checksums": self._summed,
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
            if (name in ("steps", "checksums") or name.isdigit()) and generation != str(self._generation):
                file.unlink(missing_ok=True)

    def _open(self, more: int = 0) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | more
        for name in self._sizes():
            self._files[name] = os.open(self._file(name), flags, 0o644)

    def _trim(self) -> None:
        """Cut what a crash left behind after the last complete record."""
        for name, size in self._sizes().items():
            _truncate(self._file(name), len(self.steps) * size)

    def append(self, step: int, grads: Sequence[Tensor]) -> None:
        """Add one record per layer; the step is written last and makes them count.

        Raises:
            OSError: The disk is full, for example; the error names the file, and nothing of the record is left.
        """
        sums: list[int] = []
        try:
            for index, (grad, dtype) in enumerate(zip(grads, self.dtypes, strict=True)):
                scale, values = encode(grad, dtype)
                head = np.float64(scale).tobytes() if dtype == torch.float16 else b""
                record = head + values.contiguous().cpu().numpy().tobytes()
                sums.append(zlib.crc32(record))
                self._write(str(index), record)
            if self._summed:
                self._write("checksums", np.array(sums, dtype=np.uint32).tobytes())
            self._write("steps", np.int64(step).tobytes())
        except BaseException:
            # half a record would shift all that come after it
            with contextlib.suppress(OSError):
                self._trim()
            raise
        self.steps.append(step)
        self.seen = step

    def _write(self, name: str, data: bytes) -> None:
        with naming(self._file(name)):
            _write(self._files[name], data)

    def sync(self) -> None:
        """Wait until all records are on the disk, and not only with the operating system."""
        for name, file in self._files.items():
            with naming(self._file(name)):
                os.fsync(file)

    def limit(self, space: int) -> None:
        """Change the most bytes that the records may take, from the next one on."""
        if space != self.space:
            self.space = space
            self._describe()

    def note_step(self, step: int) -> None:
        """Note a step that has no record here, in place: eight bytes."""
        self._check_writing()
        self.seen = step
        if self._seen_file is None:
            self._seen_file = os.open(self.path / "seen", os.O_WRONLY | os.O_CREAT, 0o644)
        with naming(self.path / "seen"):
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
        """Return records (k, m, n) of a layer; a view of the file unless they are in half precision.

        Raises:
            DataError: A record is not what was written.
        """
        (m, n), dtype = self.shapes[layer], self.dtypes[layer]
        size = record_bytes((m, n), dtype)
        # copy-on-write: torch wants memory it could write to, and the file must stay as it is
        raw = np.memmap(self._file(str(layer)), np.uint8, "c", start * size, ((stop - start) * size,))
        self._compare(layer, start, raw.reshape(stop - start, size))
        if dtype != torch.float16:
            return torch.from_numpy(raw.view(_NUMPY[dtype]).reshape(-1, m, n))
        rows = np.asarray(raw).reshape(stop - start, size)
        scales = torch.from_numpy(rows[:, :8].copy().view(np.float64)).float().view(-1, 1, 1)
        return torch.from_numpy(rows[:, 8:].copy().view(np.float16).reshape(-1, m, n)).float() * scales

    def verify(self, count: int) -> None:
        """Compare the first ``count`` records of every layer with their checksums.

        Raises:
            DataError: A record is not what was written.
        """
        for layer, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            portion = max(1, _PORTION // record_bytes(shape, dtype))
            for start in range(0, count, portion):
                self.read(layer, start, min(start + portion, count))

    def _compare(self, layer: int, start: int, records: NDArray[np.uint8]) -> None:
        if not self._summed:
            return
        known = self._compared.get(layer, np.zeros(0, np.bool_))
        if len(known) < len(self.steps):
            known = np.concatenate([known, np.zeros(len(self.steps) - len(known), np.bool_)])
            self._compared[layer] = known
        stop = start + len(records)
        if known[start:stop].all():
            return
        width = len(self.shapes)
        sums = np.fromfile(self._file("checksums"), np.uint32, len(records) * width, offset=4 * width * start)
        for record, (content, expected) in enumerate(zip(records, sums[layer::width], strict=True), start):
            if not known[record] and zlib.crc32(content) != expected:
                raise DataError(
                    f"the gradient history in {self.path} is damaged: the gradient of {self.names[layer]!r} at step "
                    f"{self.steps[record]} is not what was recorded. Go back to a checkpoint before that step, or "
                    "record it again."
                )
        known[start:stop] = True

    def rewrite(self, keep: Sequence[int], dtypes: Sequence[torch.dtype], every: int) -> None:
        """Keep only these records, in these types, in new files that replace the old ones at once."""
        self.note_step(self.seen)  # the last record may go
        new = DiskStore(self.path, self.names, self.shapes, dtypes)
        new._generation = self._generation + 1
        try:
            new._open(os.O_TRUNC)
            for index in keep:
                grads = [self.read(layer, index, index + 1)[0] for layer in range(len(self.shapes))]
                new.append(self.steps[index], grads)
            new.sync()
        except BaseException:
            # what there was stays
            new.close()
            for name in new._sizes():
                new._file(name).unlink(missing_ok=True)
            raise
        new.close()
        before = self.dtypes, self.every, self.steps, self._generation, self._summed
        self.dtypes, self.every, self.steps, self._generation = list(dtypes), every, new.steps, new._generation
        self._summed = True
        try:
            self._describe()  # from here on the new files are the history
        except BaseException:
            self.dtypes, self.every, self.steps, self._generation, self._summed = before
            raise
        self._compared = {}
        self._close_files()
        self._remove_others()
        self._open()

    def keep_first(self, count: int) -> None:
        """Drop all records but the first ``count``."""
        self._check_writing()
        self.steps = self.steps[:count]
        self._compared = {}
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
        for file in self._files.values():
            os.close(file)
        self._files = {}


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


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"a positive whole number is expected, not {value!r}")
    return value


def _dtype(name: str) -> torch.dtype:
    found = {str(dtype).removeprefix("torch."): dtype for dtype in _NUMPY}
    return found[name]


def _truncate(path: Path, size: int) -> None:
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)
