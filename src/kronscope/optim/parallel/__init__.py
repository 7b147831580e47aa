"""Who works on which blocks: the seam between the mathematics of a step and the processes that share it.

One process needs nothing of torch.distributed. Several divide the blocks of all parameters by what they cost; where
every process holds the parameters whole (DDP), each changes its share and gathers the rest; where parameters are
DTensors (FSDP2, HSDP, tensor parallelism), gradients travel to the owners of blocks and updates back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from kronscope.errors import DistributedError, OptionError
from kronscope.optim.parallel.placement import Exchange, Placement, Planned, Ranges
from kronscope.optim.parallel.shards import is_dtensor, mesh_ranks
from kronscope.optim.parallel.single import SingleProcess

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Exchange", "Placement", "Planned", "Ranges", "SingleProcess", "choose_group"]


def choose_group(
    params: Sequence[tuple[str, Tensor]], parallel: str, process_group: ProcessGroup | None
) -> ProcessGroup | None:
    """Return the processes that share the work on some parameters; None for a process of its own.

    Args:
        params: Named parameters.
        parallel: ``"auto"``, ``"single"`` or ``"replicated"``.
        process_group: The processes, where the caller decides.

    Raises:
        OptionError: the option does not fit the parameters or the surroundings.
        DistributedError: parameters live on different meshes.
    """
    if parallel not in ("auto", "single", "replicated"):
        raise OptionError(f"parallel must be 'auto', 'single' or 'replicated', got {parallel!r}.")
    ready = dist.is_available() and dist.is_initialized()
    meshes = {mesh_ranks(param): (name, param.device_mesh) for name, param in params if is_dtensor(param)}
    if meshes and parallel != "auto":
        name = next(iter(meshes.values()))[0]
        raise OptionError(f"parallel={parallel!r} was given, but {name} is a DTensor; use parallel='auto'.")
    if parallel == "single":
        return None
    if not ready:
        if parallel == "replicated" or process_group is not None:
            raise OptionError(
                f"parallel={parallel!r} needs torch.distributed; call torch.distributed.init_process_group first."
            )
        return None
    if len(meshes) > 1:
        (first, _), (second, _) = list(meshes.values())[:2]
        raise DistributedError(
            f"{first} and {second} live on different processes ({' and '.join(map(str, list(meshes)[:2]))}); make one "
            f"optimizer for the parameters of each mesh."
        )
    if meshes:
        ((ranks, (name, mesh)),) = meshes.items()
        group = process_group if process_group is not None else _mesh_group(mesh, ranks)
        if sorted(dist.get_process_group_ranks(group)) != sorted(ranks):
            raise OptionError(f"process_group does not consist of the processes {ranks} that {name} lives on.")
        return group
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None
    return group if dist.get_world_size(group) > 1 else None


def _mesh_group(mesh: Any, ranks: tuple[int, ...]) -> Any:
    if mesh.ndim == 1:
        return mesh.get_group()
    if sorted(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    # only the processes of the mesh take part: others may be doing something else
    return dist.new_group(list(ranks), use_local_synchronization=True)
