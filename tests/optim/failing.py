"""Decompositions that fail on purpose: that raise, or return NaN, or something wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

KINDS = ("LinAlgError", "RuntimeError", "NaN", "skewed", "turned", "garbage", "values")
FUNCTIONS = ("eigh", "qr", "cholesky_ex", "solve_triangular")


def spoilt(found: Any, kind: str) -> Any:
    """What a decomposition found, with one of its parts changed."""
    if isinstance(found, Tensor):
        return _spoilt(found, kind)
    parts = list(found)
    # eigh: values, vectors; qr: vectors, triangle; cholesky_ex: triangle, info
    place = 0 if kind == "values" or (len(parts) == 2 and parts[1].ndim < 2) else _vectors_in(parts)
    parts[place] = _spoilt(parts[place], kind)
    return type(found)(parts)


def _vectors_in(parts: list[Tensor]) -> int:
    return 1 if parts[0].ndim < parts[1].ndim else 0


def _spoilt(tensor: Tensor, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    if kind == "NaN":
        return torch.full_like(tensor, float("nan"))
    if kind == "skewed":
        return tensor + 0.05 * noise
    if kind == "turned":
        return tensor.flip(-1)
    if kind == "values":
        return tensor * 3 + 0.1
    return noise


class Failures:
    """How often decompositions were called, and how often they failed."""

    def __init__(self, kind: str, is_hit: Callable[[int, Tensor], bool]) -> None:
        self.kind, self.is_hit = kind, is_hit
        self.calls = self.hits = 0
        self._lock = threading.Lock()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(matrix: Tensor, *args: Any, **options: Any) -> Any:
            with self._lock:
                number, self.calls = self.calls, self.calls + 1
                hit = self.is_hit(number, matrix)
                self.hits += hit
            if not hit:
                return function(matrix, *args, **options)
            if self.kind == "LinAlgError":
                raise LinAlgError(f"linalg: (Batch element {number}): failed to converge (error code: {number})")
            if self.kind == "RuntimeError":
                raise RuntimeError(f"cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, call {number}")
            return spoilt(function(matrix, *args, **options), self.kind)

        return call


@contextmanager
def failing(
    kind: str, when: Callable[[int, Tensor], bool] = lambda number, matrix: True, functions: tuple[str, ...] = FUNCTIONS
) -> Iterator[Failures]:
    """Let decompositions fail.

    Args:
        kind: How.
        when: Which calls do, given their number and their matrix.
        functions: Which functions of torch.linalg.
    """
    failures = Failures(kind, when)
    with ExitStack() as patches:
        for name in functions:
            patches.enter_context(mock.patch.object(torch.linalg, name, failures.around(getattr(torch.linalg, name))))
        yield failures
