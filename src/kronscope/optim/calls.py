"""What a step asks of a family for a whole stack: as it is, or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kronscope.optim.block_state import Tensors
from kronscope.optim.config import Hyper
from kronscope.optim.rules import Moments

__all__ = ["PLAIN", "Calls", "Compiled", "Plain"]

# Graphs of one function: one for each shape of block and for each set of options, and two where a step is first seen.
_MOST_GRAPHS = 1024


class Calls(Protocol):
    """The parts of a step that are the same operations every time, so that they can be compiled; roots are not."""

    @property
    def in_threads(self) -> bool:
        """Whether threads may call them side by side."""
        ...

    def accumulate(self, state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Moments:
        """Take gradients into factors and moments; see :meth:`Rule.accumulate`."""
        ...

    def direction(self, state: Tensors, moments: Moments, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
        """Form the updates; see :meth:`Rule.direction`."""
        ...


class Plain:
    """The family's own methods."""

    in_threads = True

    def accumulate(self, state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Moments:
        """Take gradients into factors and moments."""
        return hyper.rule.accumulate(state, grads, modes, hyper, step)

    def direction(self, state: Tensors, moments: Moments, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
        """Form the updates."""
        return hyper.rule.direction(state, moments, modes, hyper, step)


PLAIN = Plain()


class Compiled:
    """The same as whole graphs of ``torch.compile``.

    Args:
        options: What ``torch.compile`` takes.
    """

    # a graph uses all threads itself
    in_threads = False

    def __init__(self, **options: Any) -> None:
        self._accumulate = torch.compile(_accumulate, fullgraph=True, **options)
        self._direction = torch.compile(_direction, fullgraph=True, **options)

    def accumulate(self, state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Moments:
        """Take gradients into factors and moments."""
        _fix_shapes(grads, *state.values())
        with _many_graphs():
            moments: Moments = self._accumulate(state, grads, _flags(modes, grads), hyper, step)
        return moments

    def direction(self, state: Tensors, moments: Moments, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
        """Form the updates."""
        _fix_shapes(*state.values(), *(tensor for tensor in moments if tensor is not None))
        with _many_graphs():
            update: Tensor = self._direction(state, moments, _flags(modes, moments.mean), hyper, step)
        return update


def _fix_shapes(*tensors: Tensor) -> None:
    """Compile for these very shapes; otherwise torch tries one graph for all, and sorts strides it does not know.

    Steps are numbers too, but have one graph for all.
    """
    from torch._dynamo import mark_static

    for tensor in tensors:
        mark_static(tensor)


def _many_graphs() -> Any:
    """Return a context in which a function may have a graph for every shape of block; torch gives up after eight."""
    from torch._dynamo import config

    return config.patch(recompile_limit=_MOST_GRAPHS, accumulated_recompile_limit=_MOST_GRAPHS)


def _flags(modes: Sequence[int], blocks: Tensor) -> tuple[bool, ...]:
    """Return which modes have a factor: torch takes numbers that differ between blocks for unknowns, but not these."""
    return tuple(mode in modes for mode in range(blocks.ndim - 1))


def _modes(flags: Sequence[bool]) -> list[int]:
    return [mode for mode, has_factor in enumerate(flags) if has_factor]


def _accumulate(state: Tensors, grads: Tensor, flags: Sequence[bool], hyper: Hyper, step: int) -> Moments:
    return hyper.rule.accumulate(state, grads, _modes(flags), hyper, step)


def _direction(state: Tensors, moments: Moments, flags: Sequence[bool], hyper: Hyper, step: int) -> Tensor:
    return hyper.rule.direction(state, moments, _modes(flags), hyper, step)
