"""Samples in groups, whatever order they come in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["random_groups"]

# Recorded steps are shared out within runs of about so many.
_RUN = 16


def random_groups(count: int, groups: int, *, along_time: bool = False) -> Tensor:
    """Return a group (N,) for each sample, 0 to groups-1, of sizes that differ by at most one; the same every time.

    Drawn at random, since data have patterns: with every second sample in one half, images that alternate with their
    mirror images, or two classes that take turns, make two halves that have little to do with each other.

    Args:
        count: Number of samples N.
        groups: Number of groups.
        along_time: Share samples out among neighbours, so that every group has as much of each part of a run.

    >>> random_groups(9, 3).bincount().tolist()
    [3, 3, 3]
    """
    places = torch.arange(count)
    keys = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if along_time:
        keys += places.div(max(1, _RUN // groups) * groups, rounding_mode="floor")
    return torch.empty_like(places).index_copy_(0, keys.argsort(), places % groups)
