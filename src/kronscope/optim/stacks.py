"""Persistent stacks: the state of all equal blocks of all parameters in one tensor each.

A parameter's own state holds views into the stacks, so saving, loading and looking at it works as for any optimizer,
while a step makes one call per stack instead of one per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kronscope.kron.triangles import Triangle, saves_half, unpack
from kronscope.optim.block_math import short_inside
from kronscope.optim.block_state import MOMENTS, Blocks, Tensors
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Hyper
from kronscope.optim.periods import Place

__all__ = [
    "Member",
    "Stack",
    "block_key",
    "build_stacks",
    "due_at",
    "factor_dtype",
    "in_form_for",
    "initial_notes",
    "initial_state",
]


def factor_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state: its own, but at least float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def block_key(tile: int, name: str) -> str:
    """Return the key of a tile's tensor in the state of its parameter."""
    return f"tile{tile}.{name}"


@dataclass(frozen=True)
class Member:
    """The blocks of one tile of one parameter inside a stack."""

    param: Tensor
    layout: Layout
    tile_index: int
    group: int
    start: int

    @property
    def tile(self) -> Tile:
        """The tile."""
        return self.layout.tiles[self.tile_index]

    @property
    def stop(self) -> int:
        """One past its last block."""
        return self.start + self.tile.count

    def blocks(self, tensor: Tensor) -> Tensor:
        """Return this tile's blocks of a tensor of the parameter's shape."""
        return self.tile.extract(tensor.reshape(self.layout.view))


@dataclass
class Stack:
    """Equal blocks with equal options.

    Attributes:
        block: The blocks' shape.
        modes: The modes that have a factor.
        group: The first parameter group with these options.
        members: Where the blocks come from, in order.
        tensors: State, one row per block.
        phase: Residue (B, modes) of the step at which a root is refreshed; on the CPU.
        refreshed: Step (B, modes) of the last refresh, 0 for never; on the CPU.
    """

    block: tuple[int, ...]
    modes: tuple[int, ...]
    group: int
    members: list[Member] = field(default_factory=list)
    tensors: Tensors = field(default_factory=dict)
    phase: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    refreshed: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    _due: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)
    _rows: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.members[-1].stop if self.members else 0

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return next(iter(self.tensors.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the state."""
        return next(iter(self.tensors.values())).dtype

    def due(self, mode: int, place: Place, rows: slice, apart: int) -> Tensor | None:
        """Return which blocks of ``rows``, counted from its first, are due in a mode; None for none."""
        key = (mode, *place, rows.start, rows.stop)
        if key not in self._due:
            index = due_at(place, self.phase[rows], mode, self.modes, apart)
            self._due[key] = index if index.numel() else None
        return self._due[key]

    def rows_of(self, index: Tensor) -> Tensor | slice:
        """Return indices of the CPU as they are best used on the blocks' device: a slice is no copy, and no waiting."""
        numbers = tuple(index.tolist())
        if numbers == tuple(range(numbers[0], numbers[0] + len(numbers))):
            return slice(numbers[0], numbers[0] + len(numbers))
        if self.device.type == "cpu":
            return index
        if numbers not in self._rows:
            self._rows[numbers] = index.to(self.device)
        return self._rows[numbers]


def due_at(place: Place, phases: Tensor, mode: int, modes: Sequence[int], apart: int) -> Tensor:
    """Return the blocks whose turn it is in a mode.

    Args:
        place: Where the step is in its period.
        phases: Phases (B, modes), which may be those of a longer period.
        mode: The mode.
        modes: The modes that have factors.
        apart: Steps between the turns of two sides of a block, in the first steps.
    """
    phase = phases[:, modes[0]] + apart * modes.index(mode) if place.first else phases[:, mode]
    return (phase % place.period == place.turn).nonzero().flatten()


def initial_state(param: Tensor, layout: Layout, hyper: Hyper) -> Tensors:
    """Make the state of one preconditioned parameter."""
    state = initial_notes(layout)
    for index, tile in enumerate(layout.tiles):
        for name, tensor in _new_state(tile, param, hyper).items():
            state[block_key(index, name)] = tensor
    _put_in_order(state, layout, hyper)
    return state


def initial_notes(layout: Layout) -> Tensors:
    """Make the part of it that is no stack's: how many steps it took, and when its roots are taken and were."""
    state: Tensors = {"step": torch.zeros((), dtype=torch.float32)}
    for index, tile in enumerate(layout.tiles):
        # every process knows all phases, to find the emptiest step for parameters added later
        state[block_key(index, "phase")] = torch.zeros(tile.total, len(tile.block), dtype=torch.int64)
        state[block_key(index, "refreshed")] = torch.zeros(tile.count, len(tile.block), dtype=torch.int64)
    return state


def in_form_for(device: torch.device, state: Tensors, layout: Layout, hyper: Hyper) -> Tensors:
    """Return a parameter's state with symmetric matrices in the form they are kept in on a device.

    That is whole ones on accelerators, and triangles where these are quicker: on CPUs, and in what is saved.
    """
    found = dict(state)
    for index, tile in enumerate(layout.tiles):
        symmetric = block_key(index, "factor"), block_key(index, "root")
        if not any(key.startswith(symmetric) for key in state):
            continue
        for name, ndim in _new_tensors(tile.block, tile.modes, hyper, packs=saves_half(device)):
            key = block_key(index, name)
            if key.startswith(symmetric) and key in state and state[key].ndim != ndim:
                stored = state[key]
                found[key] = unpack(stored) if stored.ndim == 2 else Triangle(stored.shape[-1]).pack(stored)
    return found


def build_stacks(entries: Sequence[tuple[Tensor, Layout, int, Hyper]], state: dict[Tensor, Tensors]) -> list[Stack]:
    """Put the state of all parameters into stacks and leave views of them in ``state``; what is missing is made.

    A parameter may have no more than :func:`initial_notes`, or lack what an option changed during the run needs, for
    example a momentum buffer.

    Args:
        entries: Parameter, layout, the first group with its options, and the options.
        state: Each parameter's state; its tensors are replaced by views.
    """
    stacks: dict[tuple[Any, ...], Stack] = {}
    hypers: dict[int, Hyper] = {}
    for param, layout, group, hyper in entries:
        hypers[group] = hyper
        state[param].update(in_form_for(param.device, state[param], layout, hyper))
        for index, tile in enumerate(layout.tiles):
            if tile.count == 0:
                for name, tensor in _new_state(tile, param, hyper).items():
                    state[param].setdefault(block_key(index, name), tensor)
                continue
            names = _names(len(tile.block), tile.modes, hyper)
            key = (tile.block, tile.modes, group, factor_dtype(param), param.device, names)
            if key not in stacks:
                stacks[key] = Stack(tile.block, tile.modes, group)
            stack = stacks[key]
            stack.members.append(Member(param, layout, index, group, stack.count))
    for (*_, names), stack in stacks.items():
        new: Tensors = {}
        if any(block_key(m.tile_index, name) not in state[m.param] for m in stack.members for name in names):
            new = _new_state(stack.members[0].tile, stack.members[0].param, hypers[stack.group], stack.count)
        for name in names:
            stack.tensors[name] = _joined(stack, name, state, new.get(name))
        stack.refreshed = _joined(stack, "refreshed", state)
        stack.phase = torch.cat(
            [_own(member.tile, state[member.param][block_key(member.tile_index, "phase")]) for member in stack.members]
        )
    for param, layout, _, hyper in entries:
        _put_in_order(state[param], layout, hyper)
    return list(stacks.values())


def _put_in_order(state: Tensors, layout: Layout, hyper: Hyper) -> None:
    """Sort a parameter's tensors as :func:`initial_state` has them: processes that save together ask for each in turn.

    Without it, one that has no block of a tile would have another order.
    """
    wanted = ["step"]
    for index, tile in enumerate(layout.tiles):
        names = _names(len(tile.block), tile.modes, hyper)
        wanted += [block_key(index, name) for name in (*names, "phase", "refreshed")]
    found = {key: state[key] for key in wanted if key in state} | state
    state.clear()
    state.update(found)


def _new_state(tile: Tile, param: Tensor, hyper: Hyper, count: int | None = None) -> Tensors:
    """Make the state of a tile's blocks, or of as many blocks like them."""
    packs = hyper.rule.packs and saves_half(param.device)
    number = tile.count if count is None else count
    blocks = Blocks(tile.block, tile.modes, number, factor_dtype(param), param.device, packs)
    return hyper.rule.new_state(blocks, hyper)


@lru_cache(maxsize=1024)
def _new_tensors(
    block: tuple[int, ...], modes: tuple[int, ...], hyper: Hyper, *, packs: bool
) -> tuple[tuple[str, int], ...]:
    """Return the names of the tensors that a tile has, and their numbers of dimensions."""
    blocks = Blocks(block, modes, 0, torch.float32, torch.device("meta"), packs and hyper.rule.packs)
    return tuple((name, tensor.ndim) for name, tensor in hyper.rule.new_state(blocks, hyper).items())


def _names(dims: int, modes: tuple[int, ...], hyper: Hyper) -> tuple[str, ...]:
    """Return the names of a tile's tensors, which are the same whatever its size."""
    return tuple(name for name, _ in _new_tensors((1,) * dims, modes, hyper, packs=True))


def _own(tile: Tile, rows: Tensor) -> Tensor:
    """Return the rows, one per block of a tile, of the blocks this process works on."""
    return rows if tile.owned is None else rows[slice(*tile.owned)]


def _joined(stack: Stack, name: str, state: dict[Tensor, Tensors], new: Tensor | None = None) -> Tensor:
    """Copy one tensor of all members into a stack, and leave views of the stack in their places.

    Args:
        stack: The stack.
        name: The tensor's name.
        state: Each parameter's state.
        new: The tensor as it is for blocks that have had no gradient; taken for members that have none.
    """
    keys = [(state[member.param], block_key(member.tile_index, name)) for member in stack.members]
    if new is not None and not any(key in own for own, key in keys):
        whole = new
    else:
        pieces = [
            new[member.start : member.stop] if new is not None and key not in own else own[key]
            for member, (own, key) in zip(stack.members, keys, strict=True)
        ]
        whole = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).contiguous()
    if name in MOMENTS:
        whole = short_inside(whole)
    for member, (own, key) in zip(stack.members, keys, strict=True):
        own[key] = whole[member.start : member.stop]
    return whole
