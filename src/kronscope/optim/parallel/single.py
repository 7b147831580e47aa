"""One process: it works on every block, and has nothing to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

__all__ = ["SingleProcess"]

T = TypeVar("T")


@dataclass(frozen=True)
class SingleProcess:
    """The placement of a run in one process."""

    def mine(self, work: Sequence[T]) -> list[T]:
        """Return the pieces of work this process does."""
        return list(work)

    def exchanged(self, updates: Tensor) -> Tensor:
        """Return the updates of all processes."""
        return updates

    def finite_everywhere(self, finite: bool) -> bool:
        """Tell whether the gradients are finite on every process."""
        return finite
