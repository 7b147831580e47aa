"""Checks of arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from kronscope.errors import OptionError

__all__ = ["count", "one_of", "whole"]


def count(name: str, number: Any) -> int:
    """Return a whole number of 1 or more.

    Raises:
        OptionError: it is something else.

    >>> count("draws", 3)
    3
    """
    if (found := whole(name, number)) < 1:
        raise OptionError(f"{name} must be a whole number of 1 or more, got {number!r}.")
    return found


def whole(name: str, number: Any) -> int:
    """Return a whole number, NumPy's included, as an int.

    Raises:
        OptionError: it is something else; True and False are.
    """
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise OptionError(f"{name} must be a whole number, got {number!r}.")
    return operator.index(number)


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Check that a value is among the allowed ones.

    Raises:
        OptionError: it is not.
    """
    if value not in (known := tuple(allowed)):
        raise OptionError(f"{name} must be one of {known}, got {value!r}.")
