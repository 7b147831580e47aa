"""Text that comes from files, models and other libraries: on its way to a terminal, and what it says."""

from __future__ import annotations

import re

__all__ = ["printable", "wants_to_run"]

# Control characters but tab and newline, and those that change the direction of what follows.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""The text with everything a terminal would obey instead of show written out.

    The name of a layer may come from a file of a stranger, and an escape sequence in it could repaint the screen.

    >>> printable("fc\x1b[2J.weight")
    'fc\\x1b[2J.weight'
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def wants_to_run(error: Exception) -> bool:
    """Whether ``torch.load(weights_only=True)`` refused a file for what it would run, in the words of any version.

    >>> wants_to_run(ValueError("Trying to load unsupported GLOBAL posix.system whose module posix is blocked."))
    True
    """
    return any(words in str(error).lower() for words in ("unsupported global", "unsupported class", "is blocked"))
