"""A run's folder: written atomically, locked against a second writer, resumable after a kill at any moment.

::

    config.json          what was asked for; written last when a run is made, so a folder that has it is a run
    environment.json     versions and machine, without names or paths
    metrics.jsonl        one line a step
    watch.jsonl          what watching recorded, one line each
    checkpoints/         the last two: step-<step>-<checksum of the file>.pt
    stored/              results of single measurements
    results.json         the results, when they are there
    done.json            written when the run is finished
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kronscope.errors import RunError
from kronscope.runs.contents import Checkpoint, Checkpoints, Records, environment, read_records
from kronscope.runs.folder import KEPT, Before, check_free, differences, plain, read_json, take_lock
from kronscope.support.callers import callers_level
from kronscope.support.files import refuse_links, remove_leftovers, write_json
from kronscope.support.locks import FileLock
from kronscope.support.processes import ALONE, Processes

__all__ = ["Run"]

# The name under which a stored result has its checksum.
_SUM = "checksum"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Run:
    """One run's folder, open for writing or for reading only.

    Make one with :meth:`start`, :meth:`create` or :meth:`open`, and use it in a ``with`` block, or call :meth:`close`.
    If the block ends with an error before anything was kept, the folder is left as it was before.

    Several processes may share a run. All of them make the same calls; only the one with rank 0 touches the folder, and
    tells the others what is in it.

    Attributes:
        folder: The folder.
        config: What was asked for.
        processes: The processes that share the run.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Run.create(folder + "/run", {"steps": 2}) as run:
    ...         run.log(1, loss=0.5)
    ...         run.checkpoint(1, {"weight": torch.ones(2)})
    ...         run.log(2, loss=0.25)
    ...     with Run.open(folder + "/run", resume=True) as run:
    ...         run.latest().step, run.metrics()
    (1, [{'step': 1, 'loss': 0.5}])
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], writer: _Writer | None = None, processes: Processes = ALONE
    ) -> None:
        self.folder = folder
        self.config = dict(config)
        self.processes = processes
        self._writer = writer
        self._checkpoints = Checkpoints(folder / "checkpoints")

    # ------------------------------------------------------------------ making and opening

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        reopen: bool = True,
        lacks: Callable[[Run, Checkpoint], str | None] = lambda run, checkpoint: None,
        processes: Processes = ALONE,
    ) -> Run:
        """Make a run or, with ``resume``, go on with the one that is there.

        With ``resume`` and nothing to resume, a new run is made: the run may have been killed before it left anything.

        Args:
            path: The folder.
            config: What is asked for, as plain data.
            resume: Go on with a run of the same configuration.
            reopen: With ``resume``, also take a run that is finished.
            lacks: As for :meth:`open`.
            processes: The processes that share the run.

        Raises:
            RunError: There is a run and ``resume`` is not set, or it has another configuration, is finished or in use.
        """
        run: Run | None = None
        with processes.failing_together():
            if processes.rank == 0:
                run = cls._start(Path(path), plain(config), resume, reopen, lacks)
                run.processes = processes
        return run or cls(Path(path), plain(config), None, processes)

    @classmethod
    def _start(
        cls,
        folder: Path,
        config: Mapping[str, Any],
        resume: bool,
        reopen: bool,
        lacks: Callable[[Run, Checkpoint], str | None],
    ) -> Run:
        if not (folder / "config.json").exists():
            return cls.create(folder, config)
        found = cls.open(folder)
        if not resume:
            raise RunError(
                f"{folder} already holds a {'finished ' if found.done else ''}run; go on with it "
                f"(resume=True, --resume) or choose another folder (--out on the command line)."
            )
        if found.done and not reopen:
            raise RunError(
                f"{folder} already holds a run that is finished; choose another folder (--out on the command line), or remove this one first."
            )
        changed = differences(found.config, config)
        if changed:
            raise RunError(
                f"{folder} holds a run with another configuration: {'; '.join(changed)}. "
                f"Ask for the same, or choose another folder (--out on the command line)."
            )
        return cls.open(folder, resume=True, lacks=lacks)

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> Run:
        """Make a new run in a folder that holds none.

        Raises:
            RunError: The folder holds a run, cannot be made, or is in use.
        """
        folder = Path(path)
        check_free(folder)
        before = Before(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"Could not make the folder {folder}: {error.strerror}; choose another (--out).") from error
        lock = take_lock(folder)
        try:
            check_free(folder)  # another process may have been faster
            run = cls(folder, plain(config), _Writer(lock, Records(folder / "metrics.jsonl"), before))
            run._remove_leftovers()
            write_json(folder / "environment.json", environment())
            write_json(folder / "config.json", run.config)
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        lacks: Callable[[Run, Checkpoint], str | None] = lambda run, checkpoint: None,
    ) -> Run:
        """Open a run: to read it, or with ``resume`` to go on from its last checkpoint.

        Resuming takes the lock and drops what was logged after the checkpoint, since it will be logged again. A
        checkpoint that is damaged, or counts on what is not there any more, is removed, and the one before it taken.

        Args:
            path: The folder.
            resume: Go on with the run.
            lacks: What else a checkpoint counts on and is not there, in words; None if all is. It may read the run.

        Raises:
            RunError: There is no run, it is damaged, or (with ``resume``) in use.
        """
        folder = Path(path)
        config = read_json(folder / "config.json")
        if config is None:
            if (folder / "config.json").exists():
                raise RunError(f"{folder / 'config.json'} is damaged (it is empty); put back a copy of it.")
            raise RunError(f"{folder} holds no run: there is no config.json. Give the folder a run was written to.")
        run = cls(folder, config)
        if not resume:
            return run
        lock = take_lock(folder)
        try:
            run._remove_leftovers()
            checkpoint = run._checkpoints.latest(
                lambda found: run._lacks_records(found) or lacks(run, found), remove_others=True
            )
            kept = 0 if checkpoint is None else checkpoint.metrics_bytes
            run._writer = _Writer(lock, Records(folder / "metrics.jsonl", kept))
            run._compare_environment()
        except BaseException:
            lock.release()
            raise
        return run

    def _lacks_records(self, checkpoint: Checkpoint) -> str | None:
        path = self._metrics_path
        content = path.read_bytes() if path.exists() else b""
        if len(content) < checkpoint.metrics_bytes:
            return f"{path.name} has {len(content)} of the {checkpoint.metrics_bytes} bytes it had then"
        if checkpoint.metrics_sum not in (None, zlib.crc32(content[: checkpoint.metrics_bytes])):
            return f"{path.name} is not what it was then"
        return None

    @property
    def _metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _remove_leftovers(self) -> None:
        for folder in (self.folder, self._checkpoints.folder, self.folder / "stored"):
            refuse_links(folder)
            remove_leftovers(folder)

    def _compare_environment(self) -> None:
        now = environment()
        try:
            before = self.environment
        except RunError as error:
            # no number depends on it
            warnings.warn(f"{error} The present environment is written in its place.", stacklevel=callers_level())
            write_json(self.folder / "environment.json", now)
            return
        changed = [f"{key}: {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]
        if not changed:
            return
        if not self._keeps_something():
            write_json(self.folder / "environment.json", now)
        warnings.warn(
            f"This run was begun under another environment ({'; '.join(changed)}); its numbers may "
            f"differ in the last digits from those of an undisturbed run.",
            stacklevel=callers_level(),
        )

    # ------------------------------------------------------------------ ending

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        writer = self._writer
        if error is not None and writer is not None and writer.before is not None and not self._keeps_something():
            writer.before.restore(writer.lock)
        self.close()

    def close(self) -> None:
        """Release the folder; everything is on disk already."""
        if self._writer is not None:
            self._writer.records.close()
            self._writer.lock.release()
            self._writer = None

    def finish(self, needs: Iterable[str] = ()) -> None:
        """Mark the run as finished, once everything it needs is on disk.

        Args:
            needs: Files that a finished run has, by their names in the folder.

        Raises:
            RunError: One of them is missing.
        """

        def mark() -> None:
            self._writing()
            missing = [name for name in needs if not (self.folder / name).is_file()]
            if missing:
                raise RunError(
                    f"{self.folder} cannot be finished without {', '.join(missing)}: somebody removed what the run had "
                    "written. Go on with the run (resume=True, --resume); it makes what is missing again."
                )
            write_json(self.folder / "done.json", {"finished": True})

        self.processes.on_rank_0(mark)

    # ------------------------------------------------------------------ what is in it

    @property
    def results_path(self) -> Path:
        """The path at which results belong, ``results.json``."""
        return self.folder / "results.json"

    @property
    def environment(self) -> dict[str, Any]:
        """What the run was made under."""
        return self.processes.on_rank_0(lambda: read_json(self.folder / "environment.json") or {})

    @property
    def done(self) -> bool:
        """Whether :meth:`finish` was called."""
        return self.processes.on_rank_0((self.folder / "done.json").exists)

    def log(self, step: int, **metrics: float) -> None:
        """Append one line to ``metrics.jsonl``.

        Only numbers that would be the same in a repeated run belong there, so no times. This is the only method that
        does not wait for other processes.
        """
        if self.processes.rank == 0:
            # JSON has no NaN and no infinity.
            values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            self._writing().records.append({"step": step, **values})

    def metrics(self) -> list[dict[str, Any]]:
        """All lines logged so far; a last line cut short by a kill is left out."""
        return self.processes.on_rank_0(lambda: read_records(self.folder / "metrics.jsonl"))

    def appending(self, name: str) -> Records:
        """Open a file of the folder for records that no checkpoint counts: a resumed run keeps every whole line.

        Only for the process with rank 0; the caller closes it.
        """
        self._writing()
        return Records.resume(self.folder / name)

    def store(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep a single result under a name, so that a resumed run need not compute it again."""

        def write() -> None:
            self._writing()
            write_json(self._stored_path(name), {**content, _SUM: _checksum(content)})

        self.processes.on_rank_0(write)

    def stored(self, name: str) -> dict[str, Any] | None:
        """What was stored under that name, or None.

        Raises:
            RunError: It is not what was stored.
        """

        def read() -> dict[str, Any] | None:
            path = self._stored_path(name)
            content = read_json(path)
            # versions before wrote none
            if content is not None and _SUM in content and content.pop(_SUM) != _checksum(content):
                raise RunError(f"{path} is damaged (its checksum is another); go on with the run to measure it again.")
            return content

        return self.processes.on_rank_0(read)

    def stored_names(self) -> list[str]:
        """The names under which something is stored."""
        return self.processes.on_rank_0(lambda: [path.stem for path in (self.folder / "stored").glob("*.json")])

    def checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Save the state after ``step`` steps (tensors and plain values), keeping the last two."""

        def save() -> None:
            # The lines a checkpoint counts on must reach the disk before it does.
            size = self._writing().records.sync()
            found = zlib.crc32(self._metrics_path.read_bytes()[:size])
            self._checkpoints.save(Checkpoint(step, dict(state), size, found))

        self.processes.all_gather_object(step)  # every process has written what belongs to the state
        self.processes.on_rank_0(save)

    def latest(self) -> Checkpoint | None:
        """The last checkpoint, or None when there is none."""
        return self.processes.on_rank_0(self._checkpoints.latest)

    def _stored_path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise RunError(f"A stored result needs a name of letters, digits, '.', '_' and '-', got {name!r}.")
        return self.folder / "stored" / f"{name}.json"

    def _writing(self) -> _Writer:
        if self._writer is None:
            raise RunError(f"{self.folder} is open for reading only, or closed; open it with resume=True.")
        return self._writer

    def _keeps_something(self) -> bool:
        return any((self.folder / name).exists() for name in KEPT)


class _Writer:
    """What the one who writes to a folder holds: its lock, the open records, and what was there before a new run."""

    def __init__(self, lock: FileLock, records: Records, before: Before | None = None) -> None:
        self.lock, self.records, self.before = lock, records, before


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(plain(content), sort_keys=True).encode())
