"""What stands in a run's folder: the environment, records that are only appended to, and the last two checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kronscope.errors import RunError
from kronscope.support.callers import callers_level
from kronscope.support.files import naming, write_atomically
from kronscope.support.texts import wants_to_run

__all__ = ["Checkpoint", "Checkpoints", "Records", "environment", "read_records"]

_PACKAGES = ("kronscope", "numpy", "transformers", "scikit-learn", "pillow")
_KEEP = 2
_CHECKPOINT = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")


def environment() -> dict[str, Any]:
    """Versions, machine and threads: what decides the last digits. No names of people, hosts or folders.

    >>> environment()["torch"] == str(torch.__version__)
    True
    """
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: _version(name) for name in _PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file, also while it is written; a last line cut short by a kill is left out.

    Raises:
        RunError: A line is no record.
    """
    content = path.read_bytes() if path.exists() else b""
    return [
        _record(line, path, number)
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], 1)
    ]


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: line {number} is no record. Remove that line, or put back a copy of the file.")
    return found


class Records:
    """A file of records, one line of JSON each, open for writing; it is made with the first one.

    Args:
        path: The file.
        size: How many bytes of it to keep; what a killed process wrote after them is dropped.

    Raises:
        RunError: The file has fewer bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "metrics.jsonl"
    ...     records = Records(path)
    ...     records.append({"step": 1, "loss": 0.5})
    ...     records.close()
    ...     read_records(path)
    [{'step': 1, 'loss': 0.5}]
    """

    _file: int | None = None

    def __init__(self, path: Path, size: int = 0) -> None:
        self._path = path
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise RunError(f"{path} is shorter than the last checkpoint says ({size} bytes); it was cut from outside.")
        if found > size:
            os.truncate(path, size)

    @classmethod
    def resume(cls, path: Path) -> Records:
        """Open a file whose every whole line counts; only a last line cut short by a kill is dropped."""
        return cls(path, path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; it survives the process from here on.

        Raises:
            OSError: The disk is full, for example; the error names the file, and nothing of the line is left.
        """
        line = json.dumps(dict(record), allow_nan=False).encode() + b"\n"
        file = self._open()
        size = os.fstat(file).st_size
        try:
            with naming(self._path):
                view = memoryview(line)
                while view:
                    view = view[os.write(file, view) :]
        except BaseException:
            # the next line must not begin in the middle of this one
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)
            raise

    def sync(self) -> int:
        """Wait until all lines are on the disk; return how many bytes they are."""
        file = self._open()
        with naming(self._path):
            os.fsync(file)
        return os.fstat(file).st_size

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        # No buffer: a line is with the operating system when append returns, whatever happens to the process. And no
        # file object, which may be collected before this one and complain that nobody closed it.
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        return self._file


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after ``step`` training steps.

    Attributes:
        step: The number of steps.
        state: What was saved: tensors and plain values.
        metrics_bytes: How long the file of records was at that time; resuming cuts it back to this length.
        metrics_sum: The checksum of these bytes; None in checkpoints of versions before.

    >>> Checkpoint(10, {"weight": torch.ones(2)}, 0).step
    10
    """

    step: int
    state: dict[str, Any]
    metrics_bytes: int = 0
    metrics_sum: int | None = None


class Checkpoints:
    """The files ``step-<step>-<checksum of the file>.pt`` of a folder.

    Args:
        folder: The folder; it is made with the first checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, checkpoint: Checkpoint) -> None:
        """Write one, then remove all but the last two."""
        buffer = io.BytesIO()
        torch.save(vars(checkpoint) | {}, buffer)
        name = f"step-{checkpoint.step:08d}-{_checksum(buffer.getbuffer())}.pt"
        write_atomically(self.folder / name, lambda file: file.write(buffer.getbuffer()))
        for path in self._files()[:-_KEEP]:
            path.unlink()

    def latest(
        self, lacks: Callable[[Checkpoint], str | None] = lambda checkpoint: None, *, remove_others: bool = False
    ) -> Checkpoint | None:
        """The last one that can be gone on from, or None; those passed over are named in a warning.

        Args:
            lacks: What a checkpoint counts on and is not there, in words; None if all is.
            remove_others: Remove those passed over.
        """
        files = self._files()
        for left, path in reversed(list(enumerate(files))):
            checkpoint = _load(path)
            if isinstance(checkpoint, str):
                wrong = checkpoint
            elif lack := lacks(checkpoint):
                wrong = f"cannot be gone on from: {lack.rstrip('.')}"
            else:
                return checkpoint
            instead = "going back to the checkpoint before it" if left else "the run begins anew"
            warnings.warn(f"{path.name} {wrong}; {instead}.", stacklevel=callers_level())
            if remove_others:
                path.unlink()
        return None

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        named = [(match, path) for path in self.folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
        return [path for _, path in sorted((int(match[1]), path) for match, path in named)]


def _load(path: Path) -> Checkpoint | str:
    """What a file holds, or what is wrong with it."""
    content = path.read_bytes()
    # torch.load does not look at checksums, and would take changed weights for good ones.
    if not path.stem.endswith(_checksum(content)):
        return "is damaged"
    try:
        return Checkpoint(**torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except Exception as error:  # noqa: BLE001  # somebody else made it, with a checksum of its own
        if wants_to_run(error):
            return "holds other things than tensors, which may run code, and is not opened"
        return "is damaged"


def _checksum(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
