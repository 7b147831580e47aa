"""Columns to pull back, the random numbers some of them need, and what a loss must be able to say about its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = ["LABEL_MODES", "Columns", "Draws", "OutputLoss", "Weights", "largest_entries", "mixed_units", "unit_columns"]

LABEL_MODES = ("exact", "sampled", "mixed", "real")


@dataclass(frozen=True)
class Columns:
    """Vectors to pull back, one tensor shaped like the outputs per column, made when asked for.

    >>> [column.item() for column in Columns(2, lambda index: torch.tensor(float(index)))]
    [0.0, 1.0]
    """

    count: int
    make: Callable[[int], Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        """Make one column after the other."""
        return (self.make(index) for index in range(self.count))


@dataclass(frozen=True)
class Draws:
    """Random numbers that depend on the seed and the sample's number only, not on how the data is cut into chunks.

    Philox is counter-based: the sample's number is the upper part of the counter, so samples never overlap.

    Attributes:
        seed: The seed.
        samples: Numbers of the samples.
        count: Draws per sample.
        fixed: For ``mixed`` columns: how many exact ones come before the draws.

    >>> both = Draws(0, torch.tensor([4, 7])).uniform((3,))
    >>> torch.equal(both[1:], Draws(0, torch.tensor([7])).uniform((3,)))
    True
    """

    seed: int
    samples: Tensor
    count: int = 1
    fixed: int = 0

    def signs(self, number: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Signs ±1 of one draw, shape ``(samples, size)``."""
        words = -(-size // 64)
        # the generator's own `bytes`, which are these words' lowest bytes first, take twice as long
        drawn = b"".join(
            generator.bit_generator.random_raw(words).astype("<u8", copy=False).tobytes()
            for generator in self._generators(number)
        )
        rows = np.frombuffer(drawn, np.uint8).reshape(-1, 8 * words)
        return torch.from_numpy(np.unpackbits(rows, axis=1, count=size)).to(dtype).mul_(2).sub_(1)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Uniform numbers in [0, 1), shape ``(samples, *shape)``, float64."""
        return self._each(lambda generator: generator.random(shape))

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers, shape ``(samples, *shape)``, float64."""
        return self._each(lambda generator: generator.standard_normal(shape))

    def _each(self, draw: Callable[[np.random.Generator], np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack([draw(generator) for generator in self._generators()]))

    def _generators(self, number: int = 0) -> Iterator[np.random.Generator]:
        """One generator, put to where each sample begins: three times as fast as making one for each sample."""
        bits = np.random.Philox(key=self.seed % 2**64)
        generator, start = np.random.Generator(bits), bits.state
        for sample in self.samples.tolist():
            start["state"]["counter"][:] = (0, 0, number, sample)
            bits.state = start
            yield generator


class OutputLoss(Protocol):
    """A loss, seen from the model's outputs."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise LabelError if targets do not fit the outputs."""

    def doubt(self, targets: Tensor) -> str:
        """Why another loss may be meant for targets that fit, or nothing."""

    def terms(self, targets: Tensor) -> int:
        """The number of terms the loss sums over, in the sample with most of them."""

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """The number of exact columns for outputs of this shape (samples first) and this many terms."""

    def kept_bytes(self, outputs: torch.Size) -> int:
        """Memory for each sample's exact or mixed columns until all are made, beyond some copies of the outputs."""

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Columns whose outer products sum up to the Hessian of each sample's loss."""

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Gradients for labels drawn from the model's own distribution, scaled to the Hessian in expectation."""

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """The largest exact columns, then random ± sums of all others, scaled to the Hessian in expectation."""

    def column_sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Squared lengths (samples, columns) of the exact columns, in any order."""

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """The gradient of each sample's loss."""


@dataclass(frozen=True)
class Weights:
    """Weights of a loss; equal, and of equal text, if the numbers are.

    Attributes:
        shape: Their shape.
        values: The numbers, one row after the other.

    >>> Weights.of(torch.tensor([1.0, 2.5]))
    Weights(shape=(2,), values=(1.0, 2.5))
    """

    shape: tuple[int, ...]
    values: tuple[float, ...]

    @staticmethod
    def of(tensor: Tensor) -> Weights:
        """Take the numbers of a tensor."""
        return Weights(tuple(tensor.shape), tuple(tensor.detach().double().flatten().tolist()))

    def to(self, device: torch.device) -> Tensor:
        """The numbers as a float64 tensor."""
        return torch.tensor(self.values, dtype=torch.float64, device=device).reshape(self.shape)


def mixed_units(sizes: Tensor, outputs: Tensor, draws: Draws) -> Columns:
    """The largest entries as columns of their own, then random signs on the others."""
    largest = largest_entries(sizes, draws.fixed)

    def column(index: int) -> Tensor:
        if index < draws.fixed:
            at = largest[:, index : index + 1]
            values = torch.zeros_like(sizes).scatter_(1, at, sizes.gather(1, at))
        else:
            signs = draws.signs(index - draws.fixed, sizes.shape[1]).to(sizes.device) * draws.count**-0.5
            values = (sizes * signs).scatter_(1, largest, 0.0)
        return values.reshape(outputs.shape)

    return Columns(draws.fixed + draws.count, column)


def largest_entries(sizes: Tensor, count: int) -> Tensor:
    """Where the largest entries of each sample are; fewer than asked for where there are fewer."""
    return sizes.topk(min(count, sizes.shape[1]), dim=1).indices


def unit_columns(values: Tensor) -> Columns:
    """Column d holds every sample's d-th value and zero elsewhere."""
    flat = values.reshape(values.shape[0], -1)

    def column(index: int) -> Tensor:
        whole = torch.zeros_like(flat)
        whole[:, index] = flat[:, index]
        return whole.reshape(values.shape)

    return Columns(flat.shape[1], column)
