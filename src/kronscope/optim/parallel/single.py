"""Processes that keep everything, and the one that is on its own: what they have they need not exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from kronscope.errors import StateError
from kronscope.kron.devices import wide
from kronscope.optim.apply import prepared_gradient
from kronscope.optim.blocks import Layout
from kronscope.optim.parallel.placement import Apply, Planned, Ranges, Tensors, apply_by_group
from kronscope.optim.stacks import Member
from kronscope.optim.step import DEVICE_PORTION, LocalRoots

__all__ = ["LocalExchange", "SingleProcess", "Whole"]


class Whole:
    """What placements have in common in which every process keeps the whole state; to be derived from."""

    @property
    def ranges(self) -> Ranges:
        """Nothing is divided."""
        return {}

    def share(self, param: Tensor, layout: Layout) -> Layout:
        """Return the layout: all blocks."""
        return layout

    def held(self, param: Tensor) -> Tensor:
        """Return the parameter."""
        return param

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient."""
        return param.grad

    def check_saving(self) -> None:
        """Do nothing: the state of any process is the whole."""

    def packed(self, param: Tensor, state: Tensors) -> Tensors:
        """Return the state as it is."""
        return state

    def unpacked(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        """Return the saved tensor, whole also where several processes saved it."""
        full = getattr(value, "full_tensor", None)
        return value if full is None else full()

    def whole(self, param: Tensor, state: Tensors) -> Tensors:
        """Return the state as it is."""
        return state

    def is_counted(self, param: Tensor) -> bool:
        """Return True: nothing is added to what this process has."""
        return True

    def square_norm(self, param: Tensor, *, alone: bool = False) -> float:
        """Return the sum of the parameter's squares."""
        return float(wide(param.detach()).square().sum())

    def everyone(self, value: object) -> list[Any]:
        """Return the value of this process, which stands for all."""
        return [value]


@final
class SingleProcess(Whole):
    """The placement of a run in one process."""

    roots = LocalRoots()

    def compare(self, groups: Sequence[dict[str, Any]], names: Mapping[Tensor, str]) -> None:
        """Do nothing: there is nobody to ask."""

    def add(self, entries: Sequence[Planned], ranges: Ranges | None = None) -> None:
        """Do nothing: all work is this process's.

        Raises:
            StateError: the run that is being restored was one of several processes'.
        """
        if ranges:
            raise StateError("a process that shared its work with others was copied to one that is on its own.")

    def open(
        self, active: Mapping[Tensor, int], groups: Sequence[dict[str, Any]], apply: Apply, *, whole: bool = False
    ) -> LocalExchange:
        """Begin a step; nothing can fail that another process does, so parameters may step as updates come."""
        return LocalExchange(active, groups, apply, at_once=not whole)

    def agreed(self, params: Sequence[Tensor], finite: Mapping[Tensor, bool]) -> dict[Tensor, bool]:
        """Return the answer of this process."""
        return dict(finite)

    def describe(self, sizes: Mapping[Tensor, Mapping[str, int]]) -> str:
        """Return nothing."""
        return ""


class LocalExchange:
    """A step of one process: gradients are where they are needed, and updates too.

    Args:
        active: The parameters that take part, and their groups.
        groups: All parameter groups.
        apply: Changes parameters.
        at_once: Step on a CPU when an update is there, while it is in its cache; False to step when all are.
    """

    def __init__(
        self, active: Mapping[Tensor, int], groups: Sequence[dict[str, Any]], apply: Apply, *, at_once: bool
    ) -> None:
        self._active, self._groups, self._apply, self._at_once = active, groups, apply, at_once
        self._updates: dict[Tensor, dict[int, Tensor]] = {}
        self._kept = 0
        self._layouts: dict[Tensor, Layout] = {}

    def part(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parameter and its gradient."""
        assert param.grad is not None
        return param, param.grad

    def blocks(self, member: Member) -> Tensor:
        """Cut the gradient into blocks."""
        param = member.param
        assert param.grad is not None
        return member.blocks(prepared_gradient(param, param.grad, self._groups[self._active[param]]))

    def sends(self, param: Tensor) -> bool:
        """Return False: nothing is sent."""
        return False

    def gather(self) -> None:
        """Do nothing: everything is here."""

    def put(self, updates: Sequence[tuple[Member, Tensor]]) -> None:
        """Keep the updates until all are there, or step at once; an accelerator with as few calls as fit its memory."""
        ready = []
        for member, update in updates:
            param, layout = member.param, member.layout
            if self._at_once and param.device.type == "cpu" and len(layout.tiles) == 1:
                ready.append((param, param, _assembled(layout, {0: update})))
            else:
                self._updates.setdefault(param, {})[member.tile_index] = update
                self._layouts[param] = layout
                self._kept += update.numel()
        apply_by_group(ready, self._active, self._groups, self._apply)
        if self._at_once and self._kept > DEVICE_PORTION:
            self._step_with(
                {p: tiles for p, tiles in self._updates.items() if len(tiles) == len(self._layouts[p].tiles)}
            )

    def finish(self) -> None:
        """Put the tiles together and step."""
        self._step_with(self._updates)

    def _step_with(self, updates: Mapping[Tensor, dict[int, Tensor]]) -> None:
        kept = [(param, param, _assembled(self._layouts[param], tiles)) for param, tiles in updates.items()]
        self._updates = {param: tiles for param, tiles in self._updates.items() if param not in updates}
        self._kept = sum(update.numel() for tiles in self._updates.values() for update in tiles.values())
        apply_by_group(kept, self._active, self._groups, self._apply)


def _assembled(layout: Layout, tiles: dict[int, Tensor]) -> Tensor:
    """Put the updates of a parameter's tiles together."""
    if layout.is_whole:
        return tiles[0].reshape(layout.shape)
    if len(layout.tiles) == 1:
        return layout.tiles[0].joined(tiles[0]).reshape(layout.shape)
    out = next(iter(tiles.values())).new_empty(layout.view)
    for index, blocks in tiles.items():
        layout.tiles[index].insert(out, blocks)
    return out.reshape(layout.shape)
