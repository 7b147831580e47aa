"""Where a warning belongs: at the line of the user's own code."""

from __future__ import annotations

import sys

__all__ = ["callers_level", "is_called_from"]


# Our functions, and what they are called through: contextlib where one is a context manager.
_OURS = ("torch", "kronscope", "contextlib")


def callers_level() -> int:
    """Return the ``stacklevel`` with which a warning is shown at the line that called into torch and kronscope."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level


def is_called_from(module: str) -> bool:
    """Whether a module, or one inside it, is among the callers.

    >>> is_called_from("torch.distributed.checkpoint")
    False
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == module or name.startswith(f"{module}."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
