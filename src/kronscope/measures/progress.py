"""A progress bar with the time left, or nothing at all."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Bar"]


class Bar:
    """One line on standard error that says what is being done and how long it will take.

    Args:
        shown: Whether to show anything; off a terminal nothing is drawn either way.
    """

    def __init__(self, shown: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and leave the line empty."""
        self._progress.stop()

    def begin(self, what: str, total: int) -> None:
        """Start a new piece of work."""
        self._progress.reset(self._task, description=what, total=total)

    def at(self, done: int, total: int, what: str | None = None) -> None:
        """Say how much of it is done, and what is being done."""
        self._progress.update(self._task, completed=done, total=total, description=what)

    def say(self, what: str) -> None:
        """Say what is being done now."""
        self._progress.update(self._task, description=what)

    def step(self) -> None:
        """One more unit is done."""
        self._progress.advance(self._task)
