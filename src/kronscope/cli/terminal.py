"""What all commands say and how: the console, where results are, how an experiment goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from rich.console import Console

from kronscope.measures.progress import Bar
from kronscope.paper.training import Event
from kronscope.runs.folder import is_unfinished
from kronscope.support.launch import is_rank_0
from kronscope.support.texts import printable

__all__ = ["ShowTraining", "default_folder", "end_interrupted", "open_console", "say", "say_where"]


def open_console() -> Console:
    """Standard output; of several processes only one speaks."""
    return Console(quiet=not is_rank_0())


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: square brackets in a path are no markup, and its width is the terminal's business."""
    console.print(printable(text), style=style or None, markup=False, highlight=False, soft_wrap=True)


def say_where(console: Console, paths: Iterable[Path]) -> None:
    """List the files a command has written."""
    say(console, "Written:")
    for path in dict.fromkeys(paths):
        say(console, f"  {path}")


def default_folder(path: Path, config: Mapping[str, Any], console: Console) -> Path:
    """The path, or the first with a number after it that does not exist, or that holds this run, stopped half-way."""
    candidate, number = path, 1
    while candidate.exists():
        if is_unfinished(candidate, config):
            say(console, f"Going on with the run in {candidate}, which was stopped; --out names another folder.")
            break
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def end_interrupted(console: Console, folder: Path) -> NoReturn:
    """End a command that kept what it had when Ctrl-C was pressed.

    Raises:
        KeyboardInterrupt: Always, for exit code 130.
    """
    say(console, f"This is not all: the same command goes on, with --out {folder} too.")
    raise KeyboardInterrupt


class ShowTraining:
    """Shows the events of an experiment: a bar while it trains, a line a measurement where there are no bars.

    Use it in a ``with`` block, which ends the bar.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None

    def __enter__(self) -> ShowTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event.kind == "train":
            if self._bar is None:
                self._bar = Bar(self._console.is_terminal and is_rank_0()).__enter__()
                self._bar.begin("training", event.steps)
            self._bar.at(event.step, event.steps, f"training, loss {event.loss:.3f}")
            return
        self._stop()  # measurements have bars of their own
        if not self._console.is_terminal:
            what = f"measuring at step {event.step} of {event.steps}" if event.kind == "measure" else "training is done"
            say(self._console, f"  {what}")

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
