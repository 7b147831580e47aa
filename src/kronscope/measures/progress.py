"""Progress with the time left: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from kronscope.support.texts import printable

__all__ = ["Bar", "shortened"]

# Seconds before the first line where there is no terminal, and between lines.
_FIRST_LINE, _NEXT_LINE = 10.0, 30.0
# What counts and both times take of a line, with the gaps between them.
_NUMBERS = 31
_WIDEST_BAR = 40


def shortened(name: str, width: int) -> str:
    """A layer's name in at most so many characters, so that layers can still be told apart.

    From the left, parts become their first letters; numbers and the last part stay. What is still too long is cut
    there, since names differ at their ends.

    >>> shortened("model.layers.17.self_attn.q_proj.weight", 30)
    'm.l.17.self_attn.q_proj.weight'
    >>> shortened("model.layers.17.self_attn.q_proj.weight", 12)
    '….s.q.weight'
    """
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= width:
            break
        if not part.isdecimal():
            parts[place] = part[:1]
    short = ".".join(parts)
    return short if len(short) <= width else f"…{short[len(short) - max(width - 1, 0) :]}"


class Bar:
    """Says on standard error what is being done and how long it will take.

    Args:
        shown: Whether to show anything.
    """

    def __init__(self, shown: bool) -> None:
        # here: importing kronscope need not import them
        from rich import progress
        from rich.console import Console

        self._console = console = Console(stderr=True)
        self._lines = shown and not console.is_terminal
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(self._bar_width()),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._progress.add_task("", total=None)
        self._what, self._done, self._total = "", 0, 1
        self._began = time.monotonic()
        self._next = self._began + _FIRST_LINE

    def __enter__(self) -> Bar:
        """Start drawing."""
        if not self._progress.disable:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and leave the line empty."""
        # older versions of rich write an empty line even where nothing was drawn
        if not self._progress.disable:
            self._progress.stop()

    def begin(self, what: str, total: int) -> None:
        """Start a new piece of work."""
        what = printable(what)
        self._progress.reset(self._task, description=what, total=total)
        self._what, self._done, self._total, self._began = what, 0, total, time.monotonic()
        self._tell()

    def at(self, done: int, total: int, what: str | None = None) -> None:
        """Say how much of it is done, and what is being done."""
        self._what, self._done, self._total = self._what if what is None else printable(what), done, total
        self._progress.update(self._task, completed=done, total=total, description=self._what)
        self._tell()

    def say(self, what: str, name: str = "") -> None:
        """Say what is being done now, and to which layer, whose name a bar shortens where it has no room."""
        self._what = printable(f"{what} {name}".rstrip())
        room = self._console.width - self._bar_width() - _NUMBERS
        short = printable(what if not name else f"{what} {shortened(printable(name), room - len(what) - 1)}")
        self._progress.update(self._task, description=short)
        self._tell()

    def step(self) -> None:
        """One more unit is done."""
        self._progress.advance(self._task)
        self._done += 1
        self._tell()

    def _bar_width(self) -> int:
        return min(_WIDEST_BAR, self._console.width // 4)

    def _tell(self) -> None:
        """Write a line, if it is time for one."""
        now = time.monotonic()
        if not self._lines or now < self._next:
            return
        self._next = now + _NEXT_LINE
        spent = now - self._began
        left = f", about {spent / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        sys.stderr.write(f"kronscope: {self._what}: {self._done} of {self._total} after {spent:.0f} s{left}\n")
        sys.stderr.flush()
