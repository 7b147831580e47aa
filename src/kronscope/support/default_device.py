"""Our own tensors are made on the host, whatever ``torch.set_default_device`` says; a user's model sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["default_device", "host_by_default", "users_default"]

_outside: ContextVar[torch.device | None] = ContextVar("_outside", default=None)


def default_device() -> torch.device:
    """Return where new tensors are made (``torch.get_default_device`` of torch 2.8 fails once it was set to None)."""
    return torch.empty(0).device


@contextmanager
def host_by_default() -> Iterator[None]:
    """Make new tensors on the CPU unless they are told where."""
    default = default_device()
    if default.type == "cpu":
        yield
        return
    token = _outside.set(default)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _outside.reset(token)


@contextmanager
def users_default() -> Iterator[None]:
    """Inside of :func:`host_by_default`, go back to the default device of before."""
    default = _outside.get()
    if default is None:
        yield
        return
    with torch.device(default):
        yield
