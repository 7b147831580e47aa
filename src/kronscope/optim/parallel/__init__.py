"""Who works on which blocks: the seam between the mathematics of a step and the processes that share it.

One process needs nothing of torch.distributed. Where several hold the same parameters (DDP), each keeps the whole
state, so that what one of them saves is enough, and they divide the roots. Where parameters are DTensors (FSDP2, HSDP,
tensor parallelism) the blocks are divided by what they cost, gradients travel to their owners and updates back.
Replicated parameters can be divided so too, on request: each process changes its share and gathers the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from kronscope.errors import DistributedError, OptionError
from kronscope.optim.parallel.copied import Copied
from kronscope.optim.parallel.placement import Exchange, Placement, Planned, Ranges
from kronscope.optim.parallel.shards import check_not_flattened, is_dtensor, mesh_ranks
from kronscope.optim.parallel.single import SingleProcess

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Exchange",
    "Placement",
    "Planned",
    "Ranges",
    "SingleProcess",
    "check_not_flattened",
    "choose_group",
    "choose_placement",
]


def choose_placement(
    params: Sequence[tuple[str, Tensor]], parallel: str, process_group: ProcessGroup | None
) -> Placement:
    """Return who works on some parameters; arguments and errors are those of :func:`choose_group`."""
    group = choose_group(params, parallel, process_group)
    if group is None:
        return SingleProcess()
    if parallel == "divided" or any(is_dtensor(param) for _, param in params):
        # imported where it is used: DTensors take a while to import
        from kronscope.optim.parallel.distributed import Distributed

        return Distributed(group, saves_parts=parallel != "divided")
    return Copied(group)


def choose_group(
    params: Sequence[tuple[str, Tensor]], parallel: str, process_group: ProcessGroup | None
) -> ProcessGroup | None:
    """Return the processes that share the work on some parameters; None for a process of its own.

    Args:
        params: Named parameters.
        parallel: ``"auto"``, ``"single"``, ``"replicated"`` or ``"divided"``.
        process_group: The processes, where the caller decides.

    Raises:
        OptionError: the option does not fit the parameters or the surroundings.
        DistributedError: parameters live on different meshes.
    """
    if parallel not in ("auto", "single", "replicated", "divided"):
        raise OptionError(f"parallel must be 'auto', 'single', 'replicated' or 'divided', got {parallel!r}.")
    ready = dist.is_available() and dist.is_initialized()
    meshes = {mesh_ranks(param): (name, param.device_mesh) for name, param in params if is_dtensor(param)}
    if meshes and parallel != "auto":
        name = next(iter(meshes.values()))[0]
        raise OptionError(f"parallel={parallel!r} was given, but {name} is a DTensor; use parallel='auto'.")
    if parallel == "single":
        return None
    if not ready:
        if parallel != "auto" or process_group is not None:
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
