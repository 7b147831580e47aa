"""How often a root or a basis could not be taken at the first attempt: a count of the whole process."""

from __future__ import annotations

import threading

__all__ = ["note_rescues", "rescues"]

_lock = threading.Lock()
_count = 0


def note_rescues(number: int) -> None:
    """Count matrices for which a safety net was needed; from any thread.

    >>> before = rescues()
    >>> note_rescues(2)
    >>> rescues() - before
    2
    """
    global _count  # noqa: PLW0603  # threads share it, and the callers between here and who asks need not know
    with _lock:
        _count += number


def rescues() -> int:
    """Return the count so far."""
    return _count
