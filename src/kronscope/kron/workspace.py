"""How much memory a temporary result may take: as much as is good for speed, or less inside a limit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

__all__ = ["give_back", "limited_workspace", "work_bytes"]

_LIMIT: ContextVar[int | None] = ContextVar("kronscope workspace", default=None)
_KEPT: ContextVar[_Kept | None] = ContextVar("kronscope kept memory", default=None)
# Less would mean products of single numbers.
_LEAST = 1 << 20


def work_bytes(best: int) -> int:
    """Return how many bytes one temporary may take, where ``best`` is what speed alone would ask for.

    >>> work_bytes(1 << 27) == 1 << 27
    True
    >>> with limited_workspace(1 << 24):
    ...     work_bytes(1 << 27) == 1 << 24
    True
    """
    limit = _LIMIT.get()
    if limit is None:
        return best
    give_back()
    return min(best, max(limit, _LEAST))


@contextmanager
def limited_workspace(limit: int, resident: int | None = None) -> Iterator[None]:
    """Let temporaries take no more than ``limit`` bytes each, as far as they can be cut.

    Args:
        limit: Bytes of one temporary.
        resident: By how many bytes the process may grow before freed memory goes back to the system; None for never.
    """
    tokens = _LIMIT.set(limit), _KEPT.set(None if resident is None else _Kept(resident))
    try:
        yield
    finally:
        _LIMIT.reset(tokens[0])
        _KEPT.reset(tokens[1])


def give_back() -> None:
    """Give freed memory back to the system, if the process has grown beyond the limit that it is inside of.

    The C library keeps what is freed, and where blocks of many sizes come and go it keeps several times what is in use.
    """
    kept = _KEPT.get()
    if kept is not None:
        kept.look()


class _Kept:
    """How far the process has grown since a limit began, and since memory was given back the last time."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._start = self._last = _resident()

    def look(self) -> None:
        """Give memory back where that is worth it: pages that are needed again cost time."""
        now = _resident()
        if now - self._start > self._allowed and now - self._last > self._allowed // 8:
            _trim()(0)
            self._last = _resident()


def _resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    # asked before every temporary: a file object and its decoding would take four times as long
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            pages = os.read(file, 256).split()[1]
        finally:
            os.close(file)
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@cache
def _trim() -> Callable[[int], object]:
    """The C library's function that gives memory back; elsewhere than in glibc one that does nothing."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda _: None
    return found
