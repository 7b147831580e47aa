"""What became of roots and bases that could not be taken at the first attempt: noted from any thread, told once."""

from __future__ import annotations

import math
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = [
    "FAILURES",
    "IDENTITY",
    "KEPT",
    "RETRIED",
    "BadAnswerError",
    "Rescue",
    "Rescues",
    "lost_places",
    "note_lost",
    "note_rescues",
    "recorded_rescues",
]

# What a decomposition raises: LAPACK a LinAlgError, CUDA's solvers and a full memory other RuntimeErrors, NumPy a
# ValueError. Other errors are mistakes in a solver's code, which its author should see.
FAILURES = (RuntimeError, ArithmeticError, ValueError)

# What became of a matrix: a second attempt worked, the root or basis of before stays, or there was none to keep.
RETRIED, KEPT, IDENTITY = "retried", "kept", "identity"

_DONE = {
    RETRIED: "a second attempt, in float64 where the device has it, worked",
    KEPT: "the one before stays until the next refresh",
    IDENTITY: "the identity is used instead until the next refresh",
}
_WORDS = 200


class BadAnswerError(ArithmeticError):
    """A decomposition ended without an error, but its answer is none; the text says why, without numbers."""

    @classmethod
    def of(cls, residual: float) -> BadAnswerError:
        """Return the one that a residual shows.

        >>> BadAnswerError.of(float("nan"))
        BadAnswerError('NaN or infinity was returned')
        """
        return cls("a wrong answer was returned" if math.isfinite(residual) else "NaN or infinity was returned")


@dataclass(frozen=True)
class Rescue:
    """One kind of rescue.

    Attributes:
        outcome: What became of the matrix: :data:`RETRIED`, :data:`KEPT` or :data:`IDENTITY`.
        reason: Why it was needed, in words; without numbers, which would make every one a kind.
        is_expected: Whether the solver was meant to need it now and then, so that nobody need be told.
        detail: More about the first of its kind, such as the text of an error.
    """

    outcome: str
    reason: str
    is_expected: bool = False
    detail: str = field(default="", compare=False)

    @classmethod
    def after(cls, outcome: str, error: Exception) -> Rescue:
        """Return the rescue that an error made necessary.

        >>> Rescue.after(KEPT, RuntimeError("cusolver error: 7"))
        Rescue(outcome='kept', reason='RuntimeError', is_expected=False, detail='cusolver error: 7')
        """
        if isinstance(error, BadAnswerError):
            return cls(outcome, str(error))
        text = str(error).strip().splitlines()
        return cls(outcome, type(error).__name__, detail=text[0][:_WORDS] if text else "")

    def text(self, number: int) -> str:
        """Return a warning about so many matrices.

        >>> Rescue(RETRIED, "NaN was returned").text(2)[:71]
        'the root or eigenbasis of 2 factor(s) could not be taken (NaN was retur'
        """
        why = f"{self.reason}: {self.detail}" if self.detail else self.reason
        hint = "" if self.outcome == RETRIED else " Gradients near overflow, or a diverging loss, are the usual reason."
        return f"the root or eigenbasis of {number} factor(s) could not be taken ({why}); {_DONE[self.outcome]}.{hint}"


class Rescues:
    """The rescues of a piece of work, which may be done by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Rescue] = Counter()

    def note(self, rescue: Rescue, number: int) -> None:
        """Count matrices."""
        with self._lock:
            self._counts[rescue] += number

    @property
    def counts(self) -> dict[Rescue, int]:
        """How many matrices there were of each kind."""
        return dict(self._counts)


_record: ContextVar[Rescues | None] = ContextVar("kronscope_rescues", default=None)


@contextmanager
def recorded_rescues() -> Iterator[Rescues]:
    """Count rescues inside, also in threads that were started by ``in_threads``; nothing warns by itself there.

    >>> with recorded_rescues() as rescues:
    ...     note_rescues(Rescue(KEPT, "NaN was returned"), 2)
    >>> sum(rescues.counts.values())
    2
    """
    rescues = Rescues()
    token = _record.set(rescues)
    try:
        yield rescues
    finally:
        _record.reset(token)


def note_rescues(rescue: Rescue, number: int = 1) -> None:
    """Count matrices for which a safety net was needed; where nobody counts, warn of those that are lost."""
    if number == 0:
        return
    rescues = _record.get()
    if rescues is not None:
        rescues.note(rescue, number)
    elif rescue.outcome == IDENTITY:
        warnings.warn(rescue.text(number), RuntimeWarning, stacklevel=2)


_lost: ContextVar[list[int] | None] = ContextVar("kronscope_lost", default=None)


@contextmanager
def lost_places() -> Iterator[list[int]]:
    """Collect the places, in the stack of matrices that is treated inside, of those that end without a new root.

    >>> with lost_places() as lost:
    ...     note_lost(3)
    >>> lost
    [3]
    """
    lost: list[int] = []
    token = _lost.set(lost)
    try:
        yield lost
    finally:
        _lost.reset(token)


def note_lost(place: int) -> None:
    """Note that a matrix has no new root or basis; where nobody collects them, nothing happens."""
    lost = _lost.get()
    if lost is not None:
        lost.append(place)
