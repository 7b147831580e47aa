"""How much memory a temporary result may take: as much as is good for speed, or less inside a limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["limited_workspace", "work_bytes"]

_LIMIT: ContextVar[int | None] = ContextVar("kronscope workspace", default=None)
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
    return best if limit is None else min(best, max(limit, _LEAST))


@contextmanager
def limited_workspace(limit: int) -> Iterator[None]:
    """Let temporaries take no more than ``limit`` bytes each, as far as they can be cut."""
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)
