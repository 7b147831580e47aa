"""The folder of one measurement: taken before the work, written to only when there are results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kronscope import figures
from kronscope.measures import Results
from kronscope.paper.runs import claim, environment, write_json
from kronscope.support.locks import FileLock
from kronscope.support.processes import ALONE, Processes

__all__ = ["MeasurementFolder"]


class MeasurementFolder:
    """A folder that is locked, and otherwise untouched until there are results.

    A measurement that is killed leaves the lock's file, which means nothing, and one that fails leaves what was there
    before; so the same command can be given again. Use it in a ``with`` block.

    Args:
        path: The folder.
        processes: The processes, if several measure together; rank 0 has the folder.

    Raises:
        RunError: The folder holds a run, cannot be made, or is in use.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with MeasurementFolder(parent + "/new") as folder:
    ...         during = folder.path.exists()
    ...     during, folder.path.exists()
    (True, False)
    """

    def __init__(self, path: str | os.PathLike[str], processes: Processes = ALONE) -> None:
        self.path = Path(path)
        self._processes = processes
        self._lock: FileLock | None = None
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self._locked_before = (self.path / ".lock").exists()
        self._written = False
        with processes.failing_together():
            if processes.rank == 0:
                self._lock = claim(self.path)

    def __enter__(self) -> MeasurementFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, results: Results, config: Mapping[str, Any]) -> list[Path]:
        """Write the results, what was asked for, the picture and the report; return the files to look at.

        With several processes all of them call it, and only rank 0 writes.

        Raises:
            ResultsError: A file cannot be written.
        """
        files: list[Path] = []
        with self._processes.failing_together():
            if self._lock is not None:
                for leftover in self.path.glob(".*.tmp"):  # of a kill in the middle of a write
                    leftover.unlink()
                # first what took long: a folder that has it is never written to again
                files.append(results.save(self.path / "results.json"))
                self._written = True
                write_json(self.path / "environment.json", environment())
                write_json(self.path / "config.json", config)
                picture = figures.cosines(results)
                files += [figures.save(picture, self.path / f"figure{suffix}") for suffix in (".png", ".pdf")]
                files.append(results.report(self.path / "report.html"))
                write_json(self.path / "done.json", {"finished": True})
        return files

    def close(self) -> None:
        """Let go of the folder; without results it is then as it was before."""
        if self._lock is None:
            return
        if self._written or self._locked_before:
            self._lock.release()
        else:
            self._lock.remove()
        self._lock = None
        for folder in self._made:
            with contextlib.suppress(OSError):  # it has content
                folder.rmdir()
