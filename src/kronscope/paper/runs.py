"""A run's folder: written atomically, locked against a second writer, resumable after a kill at any moment.

::

    config.json          what was asked for; written last when a run is made, so a folder that has it is a run
    environment.json     versions and machine, without names or paths
    metrics.jsonl        one line a step
    checkpoints/         the last two: step-<step>-<checksum of the file>.pt
    stored/              results of single measurements
    results.json         the results, when they are there
    done.json            written when the run is finished
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from kronscope.errors import RunError
from kronscope.paper.lock import lock_folder
from kronscope.support.files import write_atomically
from kronscope.support.locks import FileLock

__all__ = ["Checkpoint", "Run", "claim", "environment", "write_json"]

_KEEP = 2
_CONTENTS = ("checkpoints", "stored", "metrics.jsonl", "results.json", "done.json")
_CHECKPOINT = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after ``step`` training steps."""

    step: int
    state: dict[str, Any]


class Run:
    """One run's folder, open for writing or only for reading.

    Made by :meth:`start`, :meth:`create` or :meth:`open`; use it in a ``with`` block, or call :meth:`close`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Run.create(folder + "/run", {"steps": 2}) as run:
    ...         run.log(1, loss=0.5)
    ...         run.checkpoint(1, {"weight": torch.ones(2)})
    ...         run.log(2, loss=0.25)
    ...     with Run.open(folder + "/run", resume=True) as run:
    ...         run.latest().step, run.metrics()
    (1, [{'step': 1, 'loss': 0.5}])
    """

    def __init__(self, folder: Path, config: dict[str, Any], lock: FileLock | None) -> None:
        self.folder = folder
        self.config = config
        self._lock = lock
        self._metrics: BinaryIO | None = None

    @classmethod
    def start(cls, path: str | os.PathLike[str], config: Mapping[str, Any], *, resume: bool = False) -> Run:
        """Make a run, or go on with the one that is there when ``resume`` is set.

        With ``resume`` and nothing to resume, a run is made: a kill may have come before there was one.

        Raises:
            RunError: There is a run and ``resume`` is not set, or it has another configuration or is in use.
        """
        folder = Path(path)
        if not (folder / "config.json").exists():
            return cls.create(folder, config)
        found = cls.open(folder)
        if not resume:
            raise RunError(
                f"{folder} already holds a {'finished ' if found.done else ''}run; go on with it "
                f"(resume=True, --resume) or choose another folder (--out)."
            )
        differences = _differences(found.config, _plain(config))
        if differences:
            raise RunError(
                f"{folder} holds a run with another configuration: {'; '.join(differences)}. "
                f"Ask for the same, or choose another folder (--out)."
            )
        return cls.open(folder, resume=True)

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> Run:
        """Make a new run in a folder that holds none.

        Raises:
            RunError: The folder holds a run, cannot be made, or is in use.
        """
        folder = Path(path)
        lock = claim(folder)
        try:
            run = cls(folder, _plain(config), lock)
            run._clear()
            write_json(folder / "environment.json", environment())
            write_json(folder / "config.json", run.config)
            run._open_metrics(0)
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, resume: bool = False) -> Run:
        """Open a run: to read it, or with ``resume`` to go on from its last checkpoint.

        Resuming takes the lock and drops what was logged after the checkpoint, since it will be logged again.

        Raises:
            RunError: There is no run, it is damaged, or (with ``resume``) in use.
        """
        folder = Path(path)
        config = _read_json(folder / "config.json")
        if config is None:
            raise RunError(f"{folder} holds no run: there is no config.json. Give the folder a run was written to.")
        if not resume:
            return cls(folder, config, None)
        lock = lock_folder(folder)
        try:
            run = cls(folder, config, lock)
            run._resume()
        except BaseException:
            lock.release()
            raise
        return run

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder. Everything is on disk already."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def results_path(self) -> Path:
        """Where the results belong: ``results.json``."""
        return self.folder / "results.json"

    @property
    def environment(self) -> dict[str, Any]:
        """What the run was made under."""
        return _read_json(self.folder / "environment.json") or {}

    @property
    def done(self) -> bool:
        """Whether :meth:`finish` was called."""
        return (self.folder / "done.json").exists()

    def finish(self) -> None:
        """Mark the run as finished; call it when the results are on disk."""
        self._writable()
        write_json(self.folder / "done.json", {"finished": True})

    def log(self, step: int, **metrics: float) -> None:
        """Append one line to ``metrics.jsonl``. Only what repeats exactly belongs there: no times."""
        file = self._writable()
        # JSON has no NaN and no infinity.
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        file.write(json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines logged so far; a last line cut short by a kill is left out."""
        path = self.folder / "metrics.jsonl"
        content = path.read_bytes() if path.exists() else b""
        return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]

    def store(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep a single result under a name, so that a resumed run need not compute it again."""
        self._writable()
        write_json(self._stored_path(name), dict(content))

    def stored(self, name: str) -> dict[str, Any] | None:
        """What was stored under that name, or None."""
        return _read_json(self._stored_path(name))

    def checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Save the state after ``step`` steps (tensors and plain values), keeping the last two."""
        metrics = self._writable()
        # The lines a checkpoint counts on must reach the disk before it does.
        os.fsync(metrics.fileno())
        content = {"step": step, "metrics_bytes": metrics.tell(), "state": dict(state)}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        path = self._checkpoints / f"step-{step:08d}-{_checksum(buffer.getbuffer())}.pt"
        write_atomically(path, lambda file: file.write(buffer.getbuffer()))
        for _, path in self._checkpoint_files()[:-_KEEP]:
            path.unlink()

    def latest(self) -> Checkpoint | None:
        """The last checkpoint, or None when there is none."""
        return self._load_latest()[0]

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _stored_path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise RunError(f"A stored result needs a name of letters, digits, '.', '_' and '-', got {name!r}.")
        return self.folder / "stored" / f"{name}.json"

    def _writable(self) -> BinaryIO:
        if self._metrics is None:
            raise RunError(f"{self.folder} is open for reading only, or closed; open it with resume=True.")
        return self._metrics

    def _checkpoint_files(self) -> list[tuple[int, Path]]:
        if not self._checkpoints.is_dir():
            return []
        named = [(match, path) for path in self._checkpoints.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
        return sorted((int(match[1]), path) for match, path in named)

    def _load_latest(self) -> tuple[Checkpoint | None, int]:
        for _, path in reversed(self._checkpoint_files()):
            content = path.read_bytes()
            # torch.load does not look at checksums, and would take changed weights for good ones.
            if path.stem.endswith(_checksum(content)):
                saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
                return Checkpoint(saved["step"], saved["state"]), saved["metrics_bytes"]
            warnings.warn(f"{path.name} is damaged; going back to the checkpoint before it.", stacklevel=4)
            if self._lock is not None:
                path.unlink()
        return None, 0

    def _resume(self) -> None:
        self._clear()
        self._open_metrics(self._load_latest()[1])
        now, before = environment(), self.environment
        changed = [f"{key}: {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]
        if changed:
            warnings.warn(
                f"This run was begun under another environment ({'; '.join(changed)}); its numbers may "
                f"differ in the last digits from those of an undisturbed run.",
                stacklevel=4,
            )

    def _open_metrics(self, size: int) -> None:
        path = self.folder / "metrics.jsonl"
        # Unbuffered: a line is with the operating system when log returns, whatever happens to the process.
        self._metrics = path.open("ab", buffering=0)
        if self._metrics.tell() < size:
            self._metrics.close()
            raise RunError(f"{path} is shorter than the last checkpoint says ({size} bytes); it was cut from outside.")
        self._metrics.truncate(size)
        self._metrics.seek(size)

    def _clear(self) -> None:
        # What a kill in the middle of a write leaves behind.
        for folder in (self.folder, self._checkpoints, self.folder / "stored"):
            for path in folder.glob(".*.tmp"):
                path.unlink()


def claim(folder: Path) -> FileLock:
    """Make a folder that holds no run, and lock it.

    Raises:
        RunError: The folder holds a run, cannot be made, or is in use.
    """
    _check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"Could not make the folder {folder}: {error.strerror}; choose another (--out).") from error
    lock = lock_folder(folder)
    try:
        _check_free(folder)  # another process may have been faster
    except BaseException:
        lock.release()
        raise
    return lock


def _check_free(folder: Path) -> None:
    if (folder / "config.json").exists():
        raise RunError(f"{folder} already holds a run; choose another folder (--out), or remove this one first.")
    remains = [name for name in _CONTENTS if (folder / name).exists()]
    if remains:
        raise RunError(
            f"{folder} has {', '.join(remains)} of another run but no config.json; "
            f"remove them, or choose another folder (--out)."
        )


def environment() -> dict[str, Any]:
    """Versions, machine and threads: what decides the last digits. No names of people, hosts or folders.

    >>> environment()["torch"] == str(torch.__version__)
    True
    """
    packages = ("kronscope", "numpy", "transformers", "scikit-learn", "pillow")
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: _version(name) for name in packages},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _checksum(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(config), allow_nan=False))
    return plain


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain data so that people can read it too."""
    text = json.dumps(dict(content), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(path, lambda file: file.write(text.encode() + b"\n"))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read ({error}); the run is damaged: choose another folder (--out)."
        ) from error
    return content


def _differences(before: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted({*before, *asked}):
        old, new = before.get(key), asked.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} is {old!r} there, {new!r} was asked")
    return found
