"""State tensors in a state dict of several processes: the whole's shape, and the rows this process has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from kronscope.errors import DistributedError, StateError
from kronscope.optim.parallel.assign import Range
from kronscope.optim.parallel.collectives import gather_flat

__all__ = ["Holders", "Scattered"]


@dataclass(frozen=True)
class Holders:
    """The processes that share a tensor.

    Attributes:
        mesh: A mesh of them.
        group: Their group.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> Holders:
        # a copied tensor belongs to the same processes, and they cannot be copied
        return self


class Scattered(DTensor):
    """A tensor of which each process has a range of rows, of any length.

    A DTensor's shards are equally long; the blocks of an optimizer are not equally many on every process. This one
    tells :mod:`torch.distributed.checkpoint` its range, so a checkpoint holds whole tensors in pieces and can be loaded
    by any number of processes, in any mode. Elsewhere it stands for a replicated DTensor: what is copied into it is the
    whole, of which it takes its rows, and :meth:`full_tensor` is the whole.

    Args:
        rows: The rows of this process; shared, not copied.
        shape: Shape of the whole.
        ranges: The range of rows of each process.
        rank: This process's place among them.
        holders: The processes, in the order of ``ranges``; None for a tensor that was read from a file.
    """

    _local_tensor: Tensor  # DTensor's name for it, by which torch 2.8 stages checkpoints
    _ranges: tuple[Range, ...]
    _rank: int
    _holders: Holders | None

    @staticmethod
    def __new__(
        cls: type[Scattered],
        rows: Tensor,
        shape: Sequence[int],
        ranges: Sequence[Range],
        rank: int,
        holders: Holders | None = None,
    ) -> Scattered:
        """Make the outside, which has the shape of the whole."""
        made: Scattered = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=rows.dtype, device=rows.device
        )
        made._local_tensor, made._ranges, made._rank = rows, tuple(tuple(pair) for pair in ranges), rank  # type: ignore[misc]
        made._holders = holders
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    # --- what this process has ------------------------------------------------------------------------------------

    @property
    def rows(self) -> Tensor:
        """The rows of this process."""
        return self._local_tensor

    @property
    def row_range(self) -> Range:
        """Their range; a 0-D tensor counts as one row."""
        return self._ranges[self._rank]

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """Gather the whole; every process must ask at the same time."""
        if self._holders is None:
            raise DistributedError(
                f"this state tensor was read from a file and holds rows {self.row_range} of {len(self)} only; use "
                f"torch.distributed.checkpoint to save states that other processes can load."
            )
        width = math.prod(self.shape[1:])
        sizes = [width * (stop - start) for start, stop in self._ranges]
        group = self._holders.group
        pieces = gather_flat(self._local_tensor.reshape(-1), sizes, group, "gathering the optimizer's state")
        return torch.cat(pieces).view(self.shape)

    # --- torch.distributed.checkpoint -----------------------------------------------------------------------------

    def _chunk(self) -> ChunkStorageMetadata | None:
        start, stop = self.row_range
        if start == stop:
            return None
        if not self.ndim:
            return ChunkStorageMetadata(torch.Size(), torch.Size())
        offsets = torch.Size([start] + [0] * (self.ndim - 1))
        return ChunkStorageMetadata(offsets, torch.Size([stop - start, *self.shape[1:]]))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Tell what this process writes."""
        chunk = self._chunk()
        if chunk is None:
            return []
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Tell what this process reads."""
        chunk = self._chunk()
        return [] if chunk is None else [chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return where it is read to and written from."""
        return self._local_tensor

    # --- standing for a replicated DTensor ------------------------------------------------------------------------

    @property
    def device_mesh(self) -> Any:
        """A mesh of the processes."""
        return None if self._holders is None else self._holders.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Replicated: what is copied into it is the whole."""
        return tuple(Replicate() for _ in range(1 if self._holders is None else self._holders.mesh.ndim))

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """Return the whole as a replicated DTensor; every process must ask at the same time."""
        return DTensor.from_local(self.full_tensor(), self.device_mesh, self.placements, run_check=False)

    def to_local(self, *, grad_placements: object = None) -> Scattered:
        """Return itself, into which the whole may be copied."""
        return self

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Scattered:
        """Take this process's rows of a whole tensor, or of another with the same ranges."""
        if isinstance(source, Scattered):
            if source.row_range != self.row_range or source.shape != self.shape:
                raise StateError("a scattered state tensor can be copied only from one with the same rows.")
            self._local_tensor.copy_(source._local_tensor, non_blocking=non_blocking)
        else:
            start, stop = self.row_range
            if stop > start:
                self._local_tensor.copy_(source[start:stop] if self.ndim else source, non_blocking=non_blocking)
        return self

    def _with(self, rows: Tensor) -> Scattered:
        return Scattered(rows, self.shape, self._ranges, self._rank, self._holders)

    def to(self, *args: Any, **kwargs: Any) -> Scattered:
        """Return it with its rows moved or cast."""
        return self._with(self._local_tensor.to(*args, **kwargs))

    def cpu(self, *args: Any, **kwargs: Any) -> Scattered:
        """Return it with its rows on the CPU."""
        return self._with(self._local_tensor.cpu())

    def new_empty(self, *size: Any, **kwargs: Any) -> Scattered:
        """Return one without rows, for those who copy its attributes afterwards."""
        return self._with(self._local_tensor.new_empty(0, **kwargs))

    def clone(self, **kwargs: Any) -> Scattered:
        """Return it with its rows copied."""
        return self._with(self._local_tensor.clone())

    def detach(self) -> Scattered:
        """Return it, sharing its rows."""
        return self._with(self._local_tensor.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> Scattered:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # files know neither meshes nor groups
        return Scattered, (self._local_tensor, tuple(self.shape), self._ranges, self._rank)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Scattered(shape={tuple(self.shape)}, rows={self.row_range}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise DistributedError(
            f"{func} was called on a piece of a distributed optimizer's state; take .rows for this process's part or "
            f".full_tensor() (on every process) for the whole."
        )


torch.serialization.add_safe_globals([Scattered])
