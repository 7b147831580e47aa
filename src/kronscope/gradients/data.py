"""Batches in, chunks out: the data is checked, counted, and watched for changes between sweeps."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from kronscope.errors import DataError, OptionError
from kronscope.gradients.guard import RandomStates, generators_of

__all__ = ["Batch", "Batches", "checksum", "map_tensors", "tensors_of"]

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# A hash of this many entries takes well under a millisecond and still sees every sample of usual batches.
_FINGERPRINT_ENTRIES = 1 << 18


@dataclass(frozen=True)
class Batch:
    """Some consecutive samples.

    Attributes:
        inputs: What the model takes; the first dimension of every tensor is the samples.
        targets: What the loss takes besides the outputs.
        first: The number of the first sample, counted over the whole data.
    """

    inputs: Any
    targets: Tensor
    first: int

    @property
    def size(self) -> int:
        """How many samples."""
        return self.targets.shape[0]

    @property
    def samples(self) -> Tensor:
        """The numbers of the samples."""
        return torch.arange(self.first, self.first + self.size)

    def describe(self) -> str:
        """The samples' numbers, to be read."""
        return f"{self.first} to {self.first + self.size - 1}" if self.size > 1 else str(self.first)

    def take(self, index: slice | Tensor) -> Batch:
        """Some of the samples; with a tensor of indices their numbers are no longer consecutive and start at 0."""
        first = self.first + (index.start or 0) if isinstance(index, slice) else 0
        return Batch(map_tensors(lambda t: t[index] if t.dim() else t, self.inputs), self.targets[index], first)

    def to(self, device: torch.device | None) -> Batch:
        """Move to a device; tensors made in inference mode become ordinary ones."""

        def move(tensor: Tensor) -> Tensor:
            moved = tensor if device is None else tensor.to(device)
            return moved.clone() if moved.is_inference() else moved.detach()

        return Batch(map_tensors(move, self.inputs), move(self.targets), self.first)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor in nested dictionaries, tuples and lists.

    >>> map_tensors(lambda t: t + 1, {"x": (torch.zeros(1), 3)})
    {'x': (tensor([1.]), 3)}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor in nested dictionaries, tuples and lists."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


class Batches:
    """The user's data, checked once and then swept as often as needed.

    The first sweep counts samples and remembers a fingerprint of every batch; later sweeps compare. Random numbers
    the data uses come from a stream of their own, so that the global ones stay as they are.

    Args:
        data: A re-iterable of pairs ``(inputs, targets)``.
        max_samples: Use only the first samples.
        note: Called with every batch of the first sweep.

    Raises:
        DataError: Empty, one-shot, shuffling, or not made of pairs.
        OptionError: ``max_samples`` is not positive.

    >>> batches = Batches([(torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(3, 2), torch.zeros(3))], max_samples=4)
    >>> batches.num_samples, [batch.size for batch in batches]
    (4, [3, 1])
    """

    def __init__(
        self, data: Iterable[Any], max_samples: int | None = None, note: Callable[[Batch], None] | None = None
    ) -> None:
        _check_container(data)
        if max_samples is not None and max_samples < 1:
            raise OptionError(f"max_samples must be a positive integer or None, got {max_samples!r}.")
        self._data = data
        self._limit = max_samples
        # the number of the first sample: where several processes share the data, those of earlier ones come before
        self.first = 0
        self._random: RandomStates | None = None
        self._fingerprints: list[int] | None = None
        found: list[int] = []
        total = 0
        for batch in self._sweep(found):
            total += batch.size
            if note is not None:
                note(batch)
        if total == 0:
            raise DataError("The data is empty: it must give at least one batch (inputs, targets).")
        self._fingerprints = found
        self.num_samples = total

    def __iter__(self) -> Iterator[Batch]:
        """Sweep once more."""
        return self._sweep([])

    def _sweep(self, found: list[int]) -> Iterator[Batch]:
        first, start = 0, self.first
        for number, item in enumerate(self._items()):
            batch = _checked_pair(item, number, start + first)
            found.append(_fingerprint(batch))
            known = self._fingerprints
            if known is not None and (number >= len(known) or known[number] != found[-1]):
                raise DataError(_CHANGED.format(number=number))
            if self._limit is not None:
                batch = batch.take(slice(0, self._limit - first))
            if batch.size:
                yield batch
            first += batch.size
            if self._limit is not None and first >= self._limit:
                break
        if self._fingerprints is not None and len(found) < len(self._fingerprints):
            raise DataError(_CHANGED.format(number=len(found)))

    def _items(self) -> Iterator[Any]:
        """The raw batches; while the data runs, its own random state is in place."""
        iterator = self._drawn(lambda: iter(self._data))
        while True:
            try:
                item = self._drawn(lambda: next(iterator))
            except StopIteration:
                return
            yield item

    def _drawn(self, action: Callable[[], Any]) -> Any:
        generators = generators_of(self._data)
        outside = RandomStates(generators)
        try:
            if self._random is not None:
                self._random.restore()
            return action()
        finally:
            self._random = RandomStates(generators)
            outside.restore()


_CHANGED = (
    "Batch {number} differs from what it was in the first sweep, so the data gives other samples or another order each "
    "time. Pass a DataLoader with shuffle=False and without random augmentation, or a list of batches: "
    "data = list(loader)."
)


def _check_container(data: object) -> None:
    if isinstance(data, Tensor):
        raise DataError("The data is one tensor; pass a list of batches, for example [(inputs, targets)].")
    if hasattr(data, "__next__"):
        raise DataError(
            f"The data is a {type(data).__name__}, which can be iterated only once, but it is needed several times; "
            "pass a list of batches (data = list(iterator)) or a DataLoader."
        )
    if isinstance(data, Mapping) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise DataError(
            f"The data must be an iterable of batches (inputs, targets), got {type(data).__name__}; "
            "pass a DataLoader or a list of batches."
        )
    if isinstance(data, DataLoader):
        inner = getattr(data.batch_sampler, "sampler", None)
        for sampler in (data.sampler, data.batch_sampler, inner):
            if isinstance(sampler, _SHUFFLING):
                raise DataError(
                    f"The DataLoader shuffles ({type(sampler).__name__}), but every sweep must see the same order; "
                    "pass shuffle=False, or a list of batches: data = list(loader)."
                )


def _checked_pair(item: Any, number: int, first: int) -> Batch:
    if isinstance(item, Tensor) or not isinstance(item, (tuple, list)) or len(item) != 2:
        shown = f"{type(item).__name__} of length {len(item)}" if hasattr(item, "__len__") else type(item).__name__
        raise DataError(
            f"Batch {number} must be a pair (inputs, targets), got a {shown}; "
            "wrap a single batch in a list: [(inputs, targets)]."
        )
    inputs, targets = item
    if isinstance(targets, Tensor) and targets.dim() == 0:
        raise DataError(
            f"Batch {number} is a single sample: its targets have no dimension for samples. Wrap a dataset in a "
            "DataLoader: DataLoader(dataset, batch_size=256)."
        )
    if not isinstance(targets, Tensor):
        raise DataError(
            f"The targets of batch {number} must be a tensor with samples as first dimension, "
            f"got {type(targets).__name__}; use a DataLoader or torch.as_tensor."
        )
    tensors = [tensor for tensor in tensors_of(inputs) if tensor.dim()]
    if not tensors:
        raise DataError(
            f"The inputs of batch {number} contain no tensor with a first dimension, got {type(inputs).__name__}; "
            "pass a tensor, a tuple or a dictionary of tensors."
        )
    sizes = [tensor.shape[0] for tensor in tensors]
    if any(size != targets.shape[0] for size in sizes):
        raise DataError(
            f"In batch {number} the first dimensions differ: inputs {sizes}, targets {targets.shape[0]}; "
            "the first dimension of every tensor must be the samples."
        )
    return Batch(inputs, targets, first)


def _fingerprint(batch: Batch) -> int:
    """A checksum of shapes and of evenly spaced entries."""
    value = 0
    for tensor in [*tensors_of(batch.inputs), batch.targets]:
        value = checksum(tensor, value)
    return value


def checksum(tensor: Tensor, value: int = 0) -> int:
    """A checksum of a tensor's shape, type and evenly spaced entries, going on from another one.

    >>> checksum(torch.zeros(2)) == checksum(torch.zeros(2)) != checksum(torch.ones(2))
    True
    """
    flat = tensor.detach().reshape(-1)
    # An odd step does not stay on one column of a matrix with an even number of columns.
    step = (flat.numel() // _FINGERPRINT_ENTRIES) | 1
    entries = flat[::step].contiguous().cpu()
    value = zlib.crc32(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), value)
    if entries.numel():
        value = zlib.crc32(entries.view(torch.uint8).numpy().tobytes(), value)
    return value
