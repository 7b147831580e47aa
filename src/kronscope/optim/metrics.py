"""A few numbers about the last step, cheap enough to be taken in every run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kronscope.optim.stacks import Member

__all__ = ["Direction", "Progress", "Put", "UpdateLog", "flat"]

Put = Callable[[Sequence[tuple[Member, Tensor]]], None]


class Direction(NamedTuple):
    """How updates and gradients lie to each other.

    Attributes:
        step: The step they were measured at.
        rms: Root mean square of the updates' entries, before the learning rate.
        cosine: Cosine of all updates and all gradients.
        worst_cosine: The least cosine of a layer.
        worst_layer: Its name.
    """

    step: int
    rms: float
    cosine: float
    worst_cosine: float
    worst_layer: str


class Progress(NamedTuple):
    """What the last step did.

    Attributes:
        step: Its number.
        milliseconds: Time between its beginning and its end, on the host.
        roots: Roots (for SOAP: eigenbases) that this process took.
        fallbacks: How many of them the solver failed to take at the first attempt.
    """

    step: int
    milliseconds: float
    roots: int
    fallbacks: int


class UpdateLog:
    """Updates and gradients of a step, as sums that are read when somebody asks.

    Args:
        step: The step.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._grads: dict[tuple[Tensor, int], Tensor] = {}
        # appended to by threads: parameter, number of entries, and (uᵀg, uᵀu, gᵀg), where the update is
        self._sums: list[tuple[Tensor, int, Tensor]] = []

    def expect(self, members: Sequence[Member], grads: Sequence[Tensor]) -> None:
        """Take note of the gradients (count, ...) of each member's blocks."""
        for member, one in zip(members, grads, strict=True):
            self._grads[member.param, member.tile_index] = one

    def listening(self, put: Put) -> Put:
        """Return a function that looks at updates before it hands them on."""

        def look(updates: Sequence[tuple[Member, Tensor]]) -> None:
            for member, update in updates:
                grads = self._grads.pop((member.param, member.tile_index)).to(update.dtype)
                sums = torch.stack([(update * grads).sum(), update.square().sum(), grads.square().sum()])
                self._sums.append((member.param, update.numel(), sums))
            put(updates)

        return look

    def direction(self, name: Callable[[Tensor], str]) -> Direction | None:
        """Read the sums; None if this process formed no update.

        Args:
            name: Returns a parameter's name.
        """
        if not self._sums:
            return None
        layers: dict[Tensor, list[float]] = {}
        for param, _, sums in self._sums:
            total = layers.setdefault(param, [0.0, 0.0, 0.0])
            for place, value in enumerate(sums.tolist()):
                total[place] += value
        cosines = {param: _cosine(*total) for param, total in layers.items()}
        worst = min(cosines, key=cosines.__getitem__)
        inner, updates, grads = (sum(column) for column in zip(*layers.values(), strict=True))
        return Direction(
            self._step,
            math.sqrt(updates / sum(numel for _, numel, _ in self._sums)),
            _cosine(inner, updates, grads),
            cosines[worst],
            name(worst),
        )


def flat(
    skipped_steps: int, progress: Progress, direction: Direction | None, *, lost_roots: int = 0
) -> dict[str, float]:
    """Return one dictionary of floats, with the same names always; NaN where nothing was measured.

    >>> found = flat(2, Progress(0, 0.0, 0, 0), None)
    >>> found["skipped_steps"], found["step"], found["cosine"]
    (2.0, 0.0, nan)
    """
    seen = direction or Direction(0, math.nan, math.nan, math.nan, "")
    return {
        "skipped_steps": float(skipped_steps),
        "lost_roots": float(lost_roots),
        **{name: float(value) for name, value in progress._asdict().items()},
        "measured_step": float(seen.step),
        "update_rms": seen.rms,
        "cosine": seen.cosine,
        "worst_cosine": seen.worst_cosine,
    }


def _cosine(inner: float, first: float, second: float) -> float:
    size = math.sqrt(first * second)
    return inner / size if size > 0 else 0.0
