"""How long training has taken, apart from watching it."""

from __future__ import annotations

import time

__all__ = ["StepClock"]

# A pause between two steps counts as training up to so many average steps: a notebook may stand still overnight.
_LONGEST_STEP = 20


class StepClock:
    """Adds up the time from one step to the next, and apart from it that of watching.

    The first step does not count: what came before it is setting up, and compiling may be part of it.

    Attributes:
        training: Seconds of training, watching left out.
        watching: Seconds of watching.
    """

    def __init__(self) -> None:
        self.training = self._watched = 0.0
        self._steps = 0
        self._made = time.perf_counter()
        self._last: float | None = None
        self._paused_at: float | None = None
        self._paused = 0.0

    @property
    def step_seconds(self) -> float:
        """The average step of training; after the first one all the time before it."""
        if self._steps:
            return self.training / self._steps
        return 0.0 if self._last is None else self._last - self._made

    @property
    def watching(self) -> float:
        """Seconds of watching, those of a pause that is going on included."""
        now = 0.0 if self._paused_at is None else time.perf_counter() - self._paused_at
        return self._watched + now

    def tick(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        if self._last is not None:
            step = max(now - self._last - self._paused, 0.0)
            if self._steps > 1:
                step = min(step, _LONGEST_STEP * self.step_seconds)
            self.training += step
            self._steps += 1
        self._last, self._paused = now, 0.0

    def pause(self) -> None:
        """Watching begins."""
        self._paused_at = time.perf_counter()

    def go_on(self) -> None:
        """Watching ends."""
        if self._paused_at is not None:
            taken = time.perf_counter() - self._paused_at
            self._watched += taken
            self._paused += taken
        self._paused_at = None
