"""A run of several processes: rank 0 has the folder, the others are told what is in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kronscope.paper.runs import Checkpoint, Run
from kronscope.support.processes import ALONE, Processes

__all__ = ["AnyRun", "SharedRun", "processes_of", "start_run"]


class SharedRun:
    """As :class:`~kronscope.paper.runs.Run`, for all processes: every one of them must call what it calls.

    Only rank 0 touches the folder, so it need not be visible to the others; what fails there fails on all.

    Args:
        path: The folder.
        config: What was asked for.
        resume: Go on with the run that is there, if there is one.
        processes: The processes.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: Mapping[str, Any], resume: bool, processes: Processes
    ) -> None:
        self.folder = Path(path)
        self.processes = processes
        self._run: Run | None = None
        with processes.failing_together():
            if processes.rank == 0:
                self._run = Run.start(path, config, resume=resume)

    def __enter__(self) -> SharedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._run.close()

    @property
    def _first(self) -> Run:
        assert self._run is not None
        return self._run

    @property
    def results_path(self) -> Path:
        """Where the results belong."""
        return self.folder / "results.json"

    @property
    def environment(self) -> dict[str, Any]:
        """What the run was made under."""
        return self.processes.on_rank_0(lambda: self._first.environment)

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return self.processes.on_rank_0(lambda: self._first.done)

    def finish(self) -> None:
        """Mark the run as finished."""
        self.processes.on_rank_0(lambda: self._first.finish())  # noqa: PLW0108  # the others have no such object

    def log(self, step: int, **metrics: float) -> None:
        """Append one line to the metrics; the only method that waits for nobody."""
        if self._run is not None:
            self._run.log(step, **metrics)

    def store(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep a single result under a name."""
        self.processes.on_rank_0(lambda: self._first.store(name, content))

    def stored(self, name: str) -> dict[str, Any] | None:
        """What was stored under that name, or None."""
        return self.processes.on_rank_0(lambda: self._first.stored(name))

    def checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Save the state, once every process has written what belongs to it."""
        self.processes.all_gather_object(step)
        self.processes.on_rank_0(lambda: self._first.checkpoint(step, state))

    def latest(self) -> Checkpoint | None:
        """The last checkpoint, or None when there is none."""
        return self.processes.on_rank_0(lambda: self._first.latest())  # noqa: PLW0108


AnyRun = Run | SharedRun


def start_run(path: str | os.PathLike[str], config: Mapping[str, Any], resume: bool, processes: Processes) -> AnyRun:
    """Make a run or go on with it, alone or with other processes.

    Raises:
        RunError: As :meth:`Run.start` does.
    """
    return (
        Run.start(path, config, resume=resume)
        if processes.world_size == 1
        else SharedRun(path, config, resume, processes)
    )


def processes_of(run: AnyRun | None) -> Processes:
    """The processes that share a run."""
    return run.processes if isinstance(run, SharedRun) else ALONE
