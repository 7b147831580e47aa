"""A data set in memory (or decoded on demand), and the order in which training sees it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kronscope.errors import DataError, OptionError
from kronscope.support.processes import ALONE, Processes

__all__ = [
    "Dataset",
    "Images",
    "Normalization",
    "SampleBatches",
    "TensorImages",
    "batch_indices",
    "derive_seed",
]


class Images(Protocol):
    """Raw images by index: in memory, or read from files when asked for."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """The images at ``indices``, ``(k, channels, height, width)``, in their raw units."""
        ...


@dataclass(frozen=True)
class TensorImages:
    """Images held in one tensor ``(N, channels, height, width)``, as bytes to save memory."""

    pixels: Tensor

    def __post_init__(self) -> None:
        if self.pixels.ndim != 4:
            raise DataError(f"Images need (N, channels, height, width), got shape {tuple(self.pixels.shape)}.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Tensor) -> Tensor:
        """The images at ``indices``."""
        return self.pixels[indices]


@dataclass(frozen=True)
class Normalization:
    r"""Raw units to what the model sees: ``(x / scale − mean) / std``, mean and std per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0

    def __call__(self, raw: Tensor) -> Tensor:
        """Standardise raw images ``(k, channels, height, width)`` to float32."""
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return raw.to(torch.float32).div_(self.scale).sub_(mean).div_(std)


@dataclass(frozen=True)
class Dataset:
    """Training images with their labels.

    Args:
        name: The name it is loaded by, for example ``cifar-10``.
        title: What results call it, for example ``CIFAR-10``.
        images: The raw images.
        targets: ``(N,)`` int64 class numbers, or ``(N, 1)`` float32 for a single logit.
        classes: Number of classes, or 1 for a single logit.
        normalization: Applied to every batch. There is no augmentation.
        flatten: Give the model vectors instead of images.
        held_out: Images of the same kind that are never trained on, where they are published and were found.
    """

    name: str
    title: str
    images: Images
    targets: Tensor
    classes: int
    normalization: Normalization
    flatten: bool = False
    held_out: Dataset | None = None

    def __post_init__(self) -> None:
        if len(self.images) == 0:
            raise DataError(f"{self.title} has no images.")
        if len(self.images) != len(self.targets):
            raise DataError(f"{self.title} has {len(self.images)} images but {len(self.targets)} labels.")

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def channels(self) -> int:
        """Colour channels of an image."""
        return self.images.shape[0]

    @property
    def image_size(self) -> int:
        """Height (and width) of an image in pixels."""
        return self.images.shape[1]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised float32 inputs and targets at ``indices``."""
        inputs = self.normalization(self.images.read(indices))
        return (inputs.flatten(1) if self.flatten else inputs), self.targets[indices]

    def sample(self, count: int, seed: int, *, batch: int = 256, processes: Processes = ALONE) -> SampleBatches:
        """``count`` training samples chosen by ``seed``, as a re-iterable of batches for measuring.

        Of several processes (``processes``) each gets its part of them.
        """
        if count < processes.world_size:
            raise OptionError(f"samples must be at least {processes.world_size}, got {count}.")
        indices = _permutation(len(self), derive_seed(seed, "samples"))[:count]
        share = processes.share_of(len(indices))
        return SampleBatches(self, indices[share.start : share.stop], batch)

    def describe(self) -> dict[str, Any]:
        """What a run records about its data: title, sizes, normalisation, a fingerprint of the content."""
        return {
            "name": self.name,
            "title": self.title,
            "images": len(self),
            "shape": list(self.images.shape),
            "classes": self.classes,
            "mean": list(self.normalization.mean),
            "std": list(self.normalization.std),
            "scale": self.normalization.scale,
            "augmentation": "none",
            "fingerprint": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        """A checksum of all labels and up to 64 evenly spaced images: other data gives another one."""
        checksum = hashlib.sha256(repr((len(self), self.images.shape)).encode())
        checksum.update(self.targets.contiguous().numpy().tobytes())
        chosen = torch.linspace(0, len(self) - 1, min(64, len(self)), dtype=torch.float64).long()
        checksum.update(self.images.read(chosen).contiguous().numpy().tobytes())
        return checksum.hexdigest()[:16]


@dataclass(frozen=True)
class SampleBatches:
    """A fixed choice of samples in fixed batches; iterating again gives the same."""

    dataset: Dataset
    indices: Tensor
    batch: int

    @property
    def num_samples(self) -> int:
        """How many samples there are in all batches together."""
        return len(self.indices)

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.indices.split(self.batch):
            yield self.dataset.batch(part)


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A seed of its own for every purpose, so that no two streams of random numbers are the same.

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
    True
    """
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def batch_indices(num_samples: int, batch: int | None, seed: int, step: int) -> Tensor:
    """Which samples training step ``step`` (from 0) sees: a pure function, so resuming needs no loader state.

    Every epoch is a fresh permutation; a last batch that would be too small is dropped.

    Args:
        num_samples: Size of the data set.
        batch: Samples in a batch, or None for all of them.
        seed: The run's seed.
        step: Number of the step, counted from 0.

    Raises:
        OptionError: The batch is larger than the data set.

    >>> both = [batch_indices(10, 5, seed=0, step=step) for step in (0, 1)]
    >>> sorted(torch.cat(both).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if batch is None:
        return torch.arange(num_samples)
    if not 1 <= batch <= num_samples:
        raise OptionError(
            f"A batch needs between 1 and {num_samples} samples (the size of the data set), got {batch}; "
            f"choose another batch size (--batch)."
        )
    epoch, position = divmod(step, num_samples // batch)
    order = _permutation(num_samples, derive_seed(seed, "order", epoch))
    return order[position * batch : (position + 1) * batch]


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int) -> Tensor:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
