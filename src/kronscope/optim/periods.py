"""When roots are taken: schedules, small frozen objects that check themselves.

The names of what decides which factor is refreshed at which step are in :mod:`kronscope.optim.schedule`.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kronscope.errors import OptionError

__all__ = [
    "DEFAULT_REFRESH",
    "SLOWER_REFRESH",
    "Adaptive",
    "Budget",
    "Every",
    "Refresh",
    "Schedule",
    "Warmup",
    "parse_refresh",
]


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r}.")


class Place(NamedTuple):
    """Where a step is in a period, in the course of which each root is taken once.

    Attributes:
        turn: Its number in the period, from 0.
        period: The number of steps of the period.
        first: Whether it is one of the first steps, in which the turns of a block's sides depend on each other.
    """

    turn: int
    period: int
    first: bool = False


class _Steady(ABC):
    """A schedule of one period: all roots at the first step, then each once in a period."""

    @property
    @abstractmethod
    def period(self) -> int:
        """Number of steps over which the work is spread."""

    @property
    def first_steps(self) -> int:
        """Number of steps at the beginning that have a period of their own: one."""
        return 1

    @property
    def first_passes(self) -> float:
        """How often each root is taken in these: once."""
        return 1.0

    def place_at(self, step: int) -> Place:
        """Return where a factor's ``step``, counted from 1, is in its period."""
        return Place(0, 1) if step == 1 else Place((step - 1) % self.period, self.period)

    def period_at(self, step: int) -> int:
        """Return the period that is in force at a factor's ``step``, counted from 1."""
        return self.place_at(step).period


@dataclass(frozen=True)
class Every(_Steady):
    """Take each root once every ``steps`` steps; at the first step, all of them.

    Attributes:
        steps: The period.
        spread: Spread the roots over the steps of a period, so that all steps take about equally long. False takes all
            roots in the same step, which is faster where many processes share them: a step ends when the slowest ends.

    Raises:
        OptionError: ``steps`` is not a whole number of at least 1.

    >>> Every(4).period_at(1), Every(4).period_at(2)
    (1, 4)
    """

    steps: int = 10
    spread: bool = True

    def __post_init__(self) -> None:
        """Check the period."""
        _whole("Every(steps)", self.steps, 1)

    @property
    def period(self) -> int:
        """Number of steps over which the work is spread."""
        return self.steps


@dataclass(frozen=True)
class Warmup:
    """Take each root once every ``within`` of the first steps, then once every ``every`` steps.

    Factors change quickly at the beginning, and a root that has not seen a direction yet amplifies it too much. With
    ``within=1`` every root is taken at each of the first steps, which then take several times as long as the later
    ones. With more, the first roots too are spread over steps, block by block: both sides of a block take theirs
    together, or with KL-Shampoo, where one side needs the other's, one after the other. Until a block has its first
    root, its step is a tenth of the graft's where ``scale`` is one, else that of a root of the identity; SOAP's is
    Adam's. The second roots should follow soon: the first have seen one gradient.

    Attributes:
        first: Number of steps at the beginning.
        every: The period afterwards.
        spread: As for :class:`Every`.
        within: The period in the first steps, or several, one after the other, of which the last one is repeated.

    Raises:
        OptionError: a number is not a whole number of at least 1, or ``within`` exceeds ``first``.

    >>> schedule = Warmup(first=20, every=10, within=5)
    >>> schedule.period_at(20), schedule.period_at(21)
    (5, 10)
    >>> [Warmup(10, 10, within=(2, 3, 5)).period_at(step) for step in (1, 3, 6, 11)]
    [2, 3, 5, 10]
    """

    first: int = 10
    every: int = 10
    spread: bool = True
    within: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("first", "every"):
            _whole(f"Warmup({name})", getattr(self, name), 1)
        if isinstance(self.within, list):
            # as saved states have it
            object.__setattr__(self, "within", tuple(self.within))
        for period in self._periods or (0,):
            _whole("Warmup(within)", period, 1)
        if sum(self._periods) > self.first:
            raise OptionError(
                f"Warmup(within={self.within}) is the period in the first {self.first} steps, and cannot be longer."
            )

    @property
    def _periods(self) -> tuple[int, ...]:
        return self.within if isinstance(self.within, tuple) else (self.within,)

    @property
    def period(self) -> int:
        """Number of steps over which the work is spread, after the first ones."""
        return self.every

    @property
    def first_steps(self) -> int:
        """Number of steps at the beginning that have periods of their own."""
        return self.first

    @property
    def first_passes(self) -> float:
        """How often each root is taken in these."""
        *others, last = self._periods
        return len(others) + (self.first - sum(others)) / last

    def place_at(self, step: int) -> Place:
        """Return where a factor's ``step``, counted from 1, is in its period."""
        if step > self.first:
            return Place((step - 1) % self.every, self.every)
        *others, last = self._periods
        begin = 1
        for period in others:
            if step < begin + period:
                return Place(step - begin, period, first=True)
            begin += period
        return Place((step - begin) % last, last, first=True)

    def period_at(self, step: int) -> int:
        """Return the period that is in force at a factor's ``step``, counted from 1."""
        return self.place_at(step).period


@dataclass(frozen=True)
class Adaptive(_Steady):
    """Take a root anew when it no longer fits its factor.

    Every ``check`` steps the residual of each root is computed, the one that ``optimizer.diagnostics()`` shows, and the
    root is taken anew if it exceeds ``tolerance``. Computing it takes a few matrix-vector products for each factor, and
    on a GPU one synchronisation.

    Attributes:
        tolerance: Relative residual that is still accepted.
        check: Steps between two looks at a factor.
        spread: Spread the looks over the steps, as for :class:`Every`.

    Raises:
        OptionError: a number is out of range.

    >>> Adaptive(tolerance=0.05, check=5).period
    5
    """

    tolerance: float = 0.1
    check: int = 1
    spread: bool = True

    def __post_init__(self) -> None:
        """Check both numbers."""
        _whole("Adaptive(check)", self.check, 1)
        if not 0 < self.tolerance < math.inf:
            raise OptionError(f"Adaptive(tolerance) must be positive, got {self.tolerance}.")

    @property
    def period(self) -> int:
        """Number of steps over which the looks are spread."""
        return self.check


@dataclass(frozen=True)
class Budget:
    r"""Take roots as often as a share of the run's time allows.

    With :math:`C_k` the cost of a step of the whole model if each root is taken once every :math:`k` steps, and
    :math:`W` that of a forward and backward pass, the period is the least whole number :math:`k \ge 1` for which

    .. math:: \frac{C_k}{C_k + W} \le \text{share} ,

    at most ``longest``, which is also taken where the plain step alone is over the share; ``explain()`` says so. The
    first :math:`2k` steps take each root once every :math:`\lceil k/2 \rceil` steps. Costs are multiply-adds that are
    counted from the shapes for one process, so that a run repeats bit for bit on any machine.

    Attributes:
        share: The optimizer's share of a step's time.
        work: Multiply-adds :math:`W` of a forward and backward pass; :meth:`of_seconds` works it out from a time. None
            counts three for each trained number and each of ``rows``.
        rows: Rows of a batch that meet each weight, where ``work`` is None: tokens, or pictures times positions.
        longest: The longest period.

    Raises:
        OptionError: a number is out of range.

    >>> Budget(share=0.1, rows=8192).counted_work(1_000_000)
    24576000000.0
    """

    share: float = 0.2
    work: float | None = None
    rows: int = 1024
    longest: int = 100

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.share < 1:
            raise OptionError(f"Budget(share) must be between 0 and 1, got {self.share}; 0.2 is a fifth of a step.")
        if self.work is not None and not 0 < self.work < math.inf:
            raise OptionError(
                f"Budget(work) must be the multiply-adds of a forward and backward pass, or None, got {self.work}; "
                f"Budget.of_seconds works it out from a time."
            )
        _whole("Budget(rows)", self.rows, 1)
        _whole("Budget(longest)", self.longest, 1)

    @classmethod
    def of_seconds(cls, seconds: float, share: float = 0.2, *, rate: float, longest: int = 100) -> Budget:
        """Return the budget for a forward and backward pass that takes so long.

        Args:
            seconds: Seconds of a forward and backward pass.
            share: The optimizer's share of a step's time.
            rate: Multiply-adds of a matrix product in a second: ``optimizer.explain().rate`` on this machine. It is an
                argument because it is a measurement: with the same number a run repeats.
            longest: The longest period.

        Raises:
            OptionError: a number is out of range.

        >>> Budget.of_seconds(0.05, rate=2e10).work
        1000000000.0
        """
        if not 0 < seconds < math.inf or not 0 < rate < math.inf:
            raise OptionError(f"Budget.of_seconds needs positive seconds and rate, got {seconds} and {rate}.")
        return cls(share, seconds * rate, longest=longest)

    def counted_work(self, numbers: int) -> float:
        """Return the multiply-adds of a forward and backward pass of a model with so many trained numbers."""
        return float(3 * numbers * self.rows) if self.work is None else float(self.work)

    def schedule(self, cost: Callable[[int], float], numbers: int) -> Warmup:
        """Return the schedule that keeps the budget.

        Args:
            cost: Returns the cost of a step with a period; it falls with it.
            numbers: Numbers of the model that a forward pass multiplies with.

        >>> Budget(share=0.5, work=100.0).schedule(lambda period: 50 + 300 / period, 1)
        Warmup(first=12, every=6, spread=True, within=3)
        """
        allowed = self.counted_work(numbers) * self.share / (1 - self.share)
        periods = range(1, self.longest + 1)
        place = bisect.bisect_left(periods, True, key=lambda period: cost(period) <= allowed)
        period = min(place + 1, self.longest)
        return Warmup(first=2 * period, every=period, within=-(-period // 2))


Schedule = Every | Warmup | Adaptive
Refresh = Schedule | Budget

# Each root three times in twenty steps, later twice: by counting the first twenty steps take at most 1.5 times as long
# as later ones, and a third of all roots in a step hardly makes it twice as long as the mean of the twenty. Roots of
# one gradient harm if they stay: (1, 7, 12) ends far worse (docs/optimizer-trials.md).
DEFAULT_REFRESH = Warmup(20, 10, within=(3, 3, 14))
# The same for families whose first roots can wait, or cost more.
SLOWER_REFRESH = Warmup(20, 10, within=(4, 4, 12))


def parse_refresh(value: object) -> Refresh:
    """Turn an int, ``"auto"`` or an object into a schedule.

    Raises:
        OptionError: it is none of these.

    >>> parse_refresh(5)
    Every(steps=5, spread=True)
    """
    if isinstance(value, Every | Warmup | Adaptive | Budget):
        return value
    if isinstance(value, str) and value == "auto":
        return Budget()
    if isinstance(value, int) and not isinstance(value, bool):
        return Every(value)
    raise OptionError(f"refresh must be an int, 'auto', Every, Warmup, Adaptive or Budget, got {value!r}.")
