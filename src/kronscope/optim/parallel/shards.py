"""Which part of a parameter each process holds: everything, or a range of one dimension."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kronscope.errors import DistributedError
from kronscope.optim.blocks import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = ["Shards", "check_not_flattened", "is_dtensor", "local_gradient", "local_tensor", "mesh_ranks", "shards_of"]


@dataclass(frozen=True)
class Shards:
    """A tensor cut along one dimension.

    Attributes:
        dim: The dimension.
        ranges: Start and stop of each process's part; several processes may hold the same one.
        copies: Which copy of the tensor each process's part belongs to; 0 unless it is also replicated.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]

    def in_view(self, name: str, layout: Layout) -> Shards:
        """Return the same cut of the shape that a parameter is preconditioned in.

        Raises:
            DistributedError: the parts are no rectangles there.

        >>> from kronscope.optim.blocks import LayoutOptions, plan_layout
        >>> conv = plan_layout((8, 4, 3, 3), LayoutOptions())
        >>> Shards(1, ((0, 2), (2, 4)), (0, 0)).in_view("conv", conv)
        Shards(dim=1, ranges=((0, 18), (18, 36)), copies=(0, 0))
        """
        step = math.prod(layout.shape[self.dim + 1 :])
        # a dimension of one element fits where others do: those come first
        for dim, size in sorted(enumerate(layout.view), key=lambda pair: pair[1] == 1):
            below = math.prod(layout.view[dim + 1 :])
            # the dimension is the slowest of those merged into this one of the view
            if below * size == step * layout.shape[self.dim] and step % below == 0:
                scale = step // below
                return Shards(dim, tuple((a * scale, b * scale) for a, b in self.ranges), self.copies)
        raise DistributedError(
            f"{name} {layout.shape} is sharded along dimension {self.dim}, which is not the first of the dimensions "
            f"merged into {layout.view}; shard dimension 0 or 1, or use view='modes' or method='adam' for it."
        )


def is_dtensor(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is a DTensor; does not import what nobody has imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_not_flattened(params: Iterable[Tensor], name: Callable[[Tensor], str]) -> None:
    """Refuse parameters that FSDP1 has flattened: nothing says any more what was a matrix.

    Args:
        params: The parameters.
        name: Returns a parameter's name.

    Raises:
        DistributedError: one of them is.
    """
    for param in params:
        if getattr(param, "_fsdp_flattened", False):
            raise DistributedError(
                f"{name(param)} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters, so that no "
                f"matrices are left to precondition. Use FSDP2: torch.distributed.fsdp.fully_shard(model) before the "
                f"optimizer is made, or fsdp_version=2 in Accelerate and Transformers."
            )


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, sharing its memory."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor


def local_gradient(param: Tensor) -> Tensor | None:
    """Return what this process holds of a gradient, laid out as the parameter is."""
    grad = param.grad
    if grad is None or not is_dtensor(param):
        return grad
    assert is_dtensor(grad)
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad.to_local()


def mesh_ranks(param: DTensor) -> tuple[int, ...]:
    """Return the global ranks that a DTensor lives on."""
    return tuple(int(rank) for rank in param.device_mesh.mesh.flatten().tolist())


def shards_of(name: str, param: Tensor, ranks: Sequence[int]) -> Shards | None:
    """Return how a parameter is cut; None if every process holds all of it.

    Args:
        name: Its name, for errors.
        param: The parameter.
        ranks: The global ranks of the processes, in order.

    Raises:
        DistributedError: it is cut in a way that is not supported.
    """
    if not is_dtensor(param):
        return None
    mesh: Any = param.device_mesh
    cuts = [(i, p) for i, p in enumerate(param.placements) if not p.is_replicate() and mesh.size(i) > 1]
    if not cuts:
        return None
    if len(cuts) > 1 or type(cuts[0][1]).__name__ != "Shard":
        raise DistributedError(
            f"{name} has the placements {tuple(param.placements)}; a parameter may be replicated along any number of "
            f"mesh dimensions but sharded along one only. Use fully_shard on a one-dimensional mesh, or on (replicate, "
            f"shard), or tensor parallelism without fully_shard; or give this parameter to another optimizer."
        )
    where, placement = cuts[0]
    dim = placement.dim % param.ndim  # type: ignore[attr-defined]
    size, parts = param.shape[dim], mesh.size(where)
    chunk = -(-size // parts)
    ranges, copies = [], []
    for rank in ranks:
        place = (mesh.mesh == rank).nonzero()[0].tolist()
        start = min(chunk * place[where], size)
        ranges.append((start, min(start + chunk, size)))
        others = [(i, mesh.size(j)) for j, i in enumerate(place) if j != where]
        copy = 0
        for index, count in others:
            copy = copy * count + index
        copies.append(copy)
    return Shards(dim, tuple(ranges), tuple(copies))
