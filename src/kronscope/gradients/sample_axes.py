"""Which positions of an activation belong to which sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SampleAxis", "candidate_axes", "fitting_axes"]


@dataclass(frozen=True)
class SampleAxis:
    """The dimension of an activation along which the samples lie, alone or interleaved with other positions.

    Attributes:
        dim: The dimension.
        outer: With s entries per sample along it: ``sample * s + entry`` if true, ``entry * samples + sample`` if not.

    >>> sequence_first = torch.arange(6).reshape(3, 2, 1)
    >>> SampleAxis(1, True).arrange(sequence_first, 2, samples=2)[:, :, 0]
    tensor([[0, 2, 4],
            [1, 3, 5]])
    """

    dim: int
    outer: bool

    def fits(self, shape: Sequence[int], samples: int) -> bool:
        """Whether an activation of this shape can be split so."""
        return self.dim < len(shape) and shape[self.dim] % samples == 0

    def arrange(self, x: Tensor, leading: int, samples: int) -> Tensor:
        """Bring the samples to the front and flatten what remains of the leading dimensions.

        Args:
            x: An activation ``(*leading, *features)``.
            leading: How many leading dimensions there are.
            samples: How many samples.

        Returns:
            A tensor ``(samples, positions, *features)``.
        """
        entries = x.shape[self.dim] // samples
        sizes = (samples, entries) if self.outer else (entries, samples)
        split: Tensor = x.unflatten(self.dim, sizes).movedim(self.dim + (not self.outer), 0)
        return split.flatten(1, leading)


def candidate_axes(leading: Sequence[int], samples: int) -> list[SampleAxis]:
    """All axes that sizes allow, the most usual first."""
    every = [SampleAxis(dim, outer) for outer in (True, False) for dim in range(len(leading))]
    # With one entry per sample both orders are the same.
    return [axis for axis in every if axis.fits(leading, samples) and (axis.outer or leading[axis.dim] != samples)]


def fitting_axes(
    axes: Sequence[SampleAxis], masses: Tensor, picks: Sequence[int], samples: int, tolerance: float
) -> list[SampleAxis]:
    """Keep the axes under which each sample's gradients lie at its own positions.

    Args:
        axes: What to choose from.
        masses: ``(len(picks), *leading)``: the size of the gradients when only the outputs of one sample are pulled
            back. Samples do not mix, so all of it must lie at positions of that sample.
        picks: Which samples those were.
        samples: How many samples the batch has.
        tolerance: The share of the largest mass that counts as zero.
    """
    kept = []
    for axis in axes:
        if not axis.fits(masses.shape[1:], samples):
            continue
        split = torch.stack([axis.arrange(mass, mass.dim(), samples).sum(1) for mass in masses])
        own = split[torch.arange(len(picks)), torch.as_tensor(picks)]
        foreign = split.sum(1) - own
        if bool((foreign <= tolerance * own.max()).all()):
            kept.append(axis)
    return kept
