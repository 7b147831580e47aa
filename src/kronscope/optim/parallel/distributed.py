"""Several processes: a plan of who works on what, made alike on all of them, and the exchanges that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from kronscope.errors import StateError
from kronscope.kron.devices import wide
from kronscope.optim.blocks import Layout
from kronscope.optim.parallel.agreement import Agreement, check_same_plan, described
from kronscope.optim.parallel.division import Division, is_common, tile_of
from kronscope.optim.parallel.placement import Apply, Exchange, Planned, Ranges, Tensors
from kronscope.optim.parallel.replicated import ReplicatedExchange, segments_of
from kronscope.optim.parallel.scattered import Holders, Scattered
from kronscope.optim.parallel.sharded import ShardedExchange, routes_of
from kronscope.optim.parallel.shards import is_dtensor, local_gradient, local_tensor, shards_of
from kronscope.optim.stacks import Member
from kronscope.optim.step import LocalRoots
from kronscope.support.callers import is_called_from
from kronscope.support.processes import GroupProcesses

__all__ = ["Distributed"]


class Distributed:
    """The placement of a run in several processes, each of which keeps the state of its own blocks.

    Replicated and sharded parameters may be mixed; the blocks of both are divided over all processes.

    Args:
        group: The processes.
        saves_parts: Hand out this process's part of the state to anyone who asks; False if who asks may take it for
            the whole, because the parameters are.
    """

    roots = LocalRoots()

    def __init__(self, group: dist.ProcessGroup, *, saves_parts: bool = True) -> None:
        self.group, self._saves_parts = group, saves_parts
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.division = Division(self.size)
        self._agreement = Agreement(group)
        self._plans: dict[tuple[Tensor, ...], tuple[Any, Any]] = {}

    @property
    def ranges(self) -> Ranges:
        """The range of each process."""
        return self.division.ranges

    def compare(self, groups: Sequence[dict[str, Any]], names: Mapping[Tensor, str]) -> None:
        """Ask all processes whether they have the same groups.

        Raises:
            DistributedError: they have not.
        """
        check_same_plan(described(groups, names), self.group)

    def add(self, entries: Sequence[Planned], ranges: Ranges | None = None) -> None:
        """Divide the work on more parameters; what was divided before stays as it is.

        Args:
            entries: The parameters.
            ranges: How the work was divided in the run that is being restored; None to decide now.

        Raises:
            DistributedError: a parameter is cut in a way that is not supported.
            StateError: the run that is being restored had another number of processes.
        """
        if any(len(by_process) != self.size for tiles in (ranges or {}).values() for by_process in tiles):
            raise StateError("an optimizer was copied from a run of another number of processes; use state_dict().")
        ranks = dist.get_process_group_ranks(self.group)
        cuts = {entry.param: shards_of(entry.name, entry.param, ranks) for entry in entries}
        self.division.add(entries, cuts, ranges)
        self._agreement.names.update({entry.param: entry.name for entry in entries})
        self._plans.clear()

    # --- what this process does -----------------------------------------------------------------------------------

    def share(self, param: Tensor, layout: Layout) -> Layout:
        """Return a layout whose tiles say which blocks this process works on."""
        owned = [ranges[self.rank] for ranges in self.ranges[param]] if layout.tiles else []
        tiles = tuple(replace(tile, owned=rows) for tile, rows in zip(layout.tiles, owned, strict=True))
        return replace(layout, tiles=tiles)

    def held(self, param: Tensor) -> Tensor:
        """Return the part of an elementwise parameter whose state this process keeps."""
        mine = local_tensor(param.detach())
        if self.division.cuts[param] is not None:
            return mine
        start, stop = self.ranges[param][0][self.rank]
        if mine.ndim:
            return mine[start:stop]
        return mine if stop > start else mine.new_empty(0)

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient as far as this process has it."""
        return local_gradient(param)

    def agreed(self, params: Sequence[Tensor], finite: Mapping[Tensor, bool]) -> dict[Tensor, bool]:
        """Ask all processes which gradients are there and finite; at the first step also whether they are the same.

        Raises:
            GradientError: a parameter has a gradient on some processes only.
            DistributedError: parameters or gradients that should be the same are not, or a process does not answer.
        """
        return self._agreement.on_gradients(params, finite, lambda param: self.division.cuts[param] is None)

    def open(
        self, active: Mapping[Tensor, int], groups: Sequence[dict[str, Any]], apply: Apply, *, whole: bool = False
    ) -> Exchange:
        """Begin a step: gradients of sharded parameters start to travel."""
        # all processes must go through the parameters in the same order
        params = tuple(param for param in self.ranges if param in active)
        if params not in self._plans:
            uncut = [param for param in params if self.division.cuts[param] is None]
            cut = [param for param in params if param in self.division.views]
            self._plans[params] = (
                segments_of(uncut, self.division.layouts, self.ranges),
                routes_of(cut, self.division.layouts, self.division.views, self.ranges, self.rank, self.size),
            )
        buffers, routes = self._plans[params]
        return _Both(
            ShardedExchange(routes, self.group, active, groups, apply),
            ReplicatedExchange(buffers, self.group, active, groups, apply),
            {param for param in params if self.division.cuts[param] is None},
        )

    # --- state ----------------------------------------------------------------------------------------------------

    def check_saving(self) -> None:
        """Refuse to hand out one process's part of the state of replicated parameters, but to who collects all parts.

        Who trains with replicated parameters saves what one process has, and would lose the rest without noticing.

        Raises:
            StateError: the state was asked for, and not by torch.distributed.checkpoint.
        """
        if not self._saves_parts and not is_called_from("torch.distributed.checkpoint"):
            raise StateError(
                f"with parallel='divided' each of the {self.size} processes has a part of the state, so the "
                f"state_dict() of one of them is not enough to resume from. Make the optimizer with parallel='auto', "
                f"where every process has all of it; or save with torch.distributed.checkpoint (get_state_dict on all "
                f"processes); or call state_dict(part=True) on each process, for the same process of as many to load."
            )

    def packed(self, param: Tensor, state: Tensors) -> Tensors:
        """Return a parameter's state with each tensor saying which part of the whole it is."""
        return {name: self._packed(param, name, tensor) for name, tensor in state.items()}

    def _packed(self, param: Tensor, name: str, tensor: Tensor) -> Tensor:
        if is_common(name):
            return tensor
        cut = self.division.cuts[param]
        if cut is not None and self.division.layouts[param].is_elementwise:
            from torch.distributed.tensor import DTensor

            assert is_dtensor(param)
            return DTensor.from_local(
                tensor, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        if self.size == 1:
            return tensor
        ranges = self.ranges[param][tile_of(name)]
        shape = (ranges[-1][1], *tensor.shape[1:]) if not self.division.layouts[param].is_elementwise else param.shape
        return Scattered(tensor, shape, ranges, self.rank, Holders(self._mesh(param), self.group))

    def unpacked(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        """Return this process's part of a saved tensor: of a whole one, or of one that several processes saved.

        Raises:
            StateError: it holds other rows than this process works on.
        """
        if is_common(name):
            return value
        if isinstance(value, Scattered):
            ranges = self.ranges[param][tile_of(name)]
            if value.row_range != ranges[self.rank]:
                raise StateError(
                    f"{self._agreement.names[param]}: the saved {name!r} holds rows {value.row_range}, this process "
                    f"works on {ranges[self.rank]}; to load the states of other processes use "
                    f"torch.distributed.checkpoint."
                )
            return value.rows
        cut = self.division.cuts[param]
        if cut is not None and self.division.layouts[param].is_elementwise:
            assert is_dtensor(param)
            if is_dtensor(value) and value.placements == param.placements:
                return value.to_local()
            whole = value.full_tensor() if is_dtensor(value) else value
            start, stop = cut.ranges[self.rank]
            return whole.narrow(cut.dim, start, stop - start)
        whole = value.full_tensor() if is_dtensor(value) else value
        start, stop = self.ranges[param][tile_of(name)][self.rank]
        return whole[start:stop] if whole.ndim else (whole if stop > start else whole.new_empty(0))

    def whole(self, param: Tensor, state: Tensors) -> Tensors:
        """Return a parameter's state with whole tensors; every process must ask at the same time."""
        packed = self.packed(param, state)
        return {name: value.full_tensor() if is_dtensor(value) else value for name, value in packed.items()}

    def everyone(self, value: object) -> list[Any]:
        """Return the values of all processes, in order."""
        return GroupProcesses(self.group).all_gather_object(value)

    def is_counted(self, param: Tensor) -> bool:
        """Whether this process's part of an elementwise parameter's state is not also another's."""
        cut = self.division.cuts[param]
        return cut is None or cut.copies[self.rank] == 0

    def square_norm(self, param: Tensor, *, alone: bool = False) -> float:
        """Return the squares of the parameter's entries that this process counts, when all are summed.

        With ``alone``, nothing will be: NaN unless this process holds, and works on, the whole parameter.
        """
        if alone:
            ranges = self.ranges[param]
            if self.division.cuts[param] is not None or any(r[self.rank] != (0, r[-1][1]) for r in ranges):
                return math.nan
            return float(wide(local_tensor(param).detach()).square().sum())
        counted = self.is_counted(param) if self.division.cuts[param] is not None else self.rank == 0
        return float(wide(local_tensor(param).detach()).square().sum()) if counted else 0.0

    def _mesh(self, param: Tensor) -> Any:
        if is_dtensor(param):
            return param.device_mesh
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, param.device.type)

    def describe(self, sizes: Mapping[Tensor, Mapping[str, int]]) -> str:
        """Say who does what, keeps what and receives what."""
        return self.division.summary(sizes)


class _Both:
    """A step on replicated and sharded parameters."""

    def __init__(self, sharded: ShardedExchange, replicated: ReplicatedExchange, whole: set[Tensor]) -> None:
        self._sharded, self._replicated, self._whole = sharded, replicated, whole

    def _of(self, param: Tensor) -> ShardedExchange | ReplicatedExchange:
        return self._replicated if param in self._whole else self._sharded

    def part(self, param: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._of(param).part(param)

    def blocks(self, member: Member) -> Tensor:
        return self._of(member.param).blocks(member)

    def put(self, updates: Sequence[tuple[Member, Tensor]]) -> None:
        for exchange in (self._sharded, self._replicated):
            exchange.put([(member, update) for member, update in updates if self._of(member.param) is exchange])

    def sends(self, param: Tensor) -> bool:
        return param in self._whole

    def gather(self) -> None:
        self._sharded.gather()
        self._replicated.gather()

    def finish(self) -> None:
        self._sharded.finish()
        self._replicated.finish()
