"""Persistent stacks: the state of all equal blocks of all parameters in one tensor each.

A parameter's own state holds views into the stacks, so saving, loading and looking at it works as for any optimizer,
while a step makes one call per stack instead of one per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kronscope.kron.triangles import Triangle, saves_half, unpack
from kronscope.optim.block_math import short_first
from kronscope.optim.block_state import MOMENTS, Blocks, Tensors
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Hyper

__all__ = [
    "Member",
    "Stack",
    "add_missing",
    "block_key",
    "build_stacks",
    "factor_dtype",
    "in_form_for",
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

    def due(self, mode: int, residue: int, period: int, rows: slice) -> Tensor | None:
        """Return which blocks of ``rows``, counted from its first, have the phase ``residue`` in a mode; None for none.

        Phases may be those of a longer period that was in force before.
        """
        key = (mode, residue, period, rows.start, rows.stop)
        if key not in self._due:
            index = (self.phase[rows, mode] % period == residue).nonzero().flatten()
            self._due[key] = index if index.numel() else None
        return self._due[key]

    def rows_of(self, index: Tensor) -> Tensor | slice:
        """Return indices of the CPU as they are best used on the blocks' device: a slice is no copy, and no waiting."""
        if self.device.type == "cpu":
            return index
        numbers = tuple(index.tolist())
        if numbers == tuple(range(numbers[0], numbers[0] + len(numbers))):
            return slice(numbers[0], numbers[0] + len(numbers))
        if numbers not in self._rows:
            self._rows[numbers] = index.to(self.device)
        return self._rows[numbers]


def initial_state(param: Tensor, layout: Layout, hyper: Hyper) -> Tensors:
    """Make the state of one preconditioned parameter."""
    state: Tensors = {"step": torch.zeros((), dtype=torch.float32)}
    dtype = factor_dtype(param)
    for index, tile in enumerate(layout.tiles):
        packs = hyper.rule.packs and saves_half(param.device)
        blocks = Blocks(tile.block, tile.modes, tile.count, dtype, param.device, packs)
        for name, tensor in hyper.rule.new_state(blocks, hyper).items():
            state[block_key(index, name)] = tensor
        # every process knows all phases, to find the emptiest step for parameters added later
        state[block_key(index, "phase")] = torch.zeros(tile.total, len(tile.block), dtype=torch.int64)
        state[block_key(index, "refreshed")] = torch.zeros(tile.count, len(tile.block), dtype=torch.int64)
    return state


def add_missing(state: Tensors, param: Tensor, layout: Layout, hyper: Hyper) -> None:
    """Make what an option changed during the run needs, for example a momentum buffer, in the form of the device."""
    state.update(in_form_for(param.device, state, layout, hyper))
    names = [block_key(index, name) for index, tile in enumerate(layout.tiles) for name in new_state_names(tile, hyper)]
    if any(name not in state for name in names):
        for name, tensor in initial_state(param, layout, hyper).items():
            state.setdefault(name, tensor)


def in_form_for(device: torch.device, state: Tensors, layout: Layout, hyper: Hyper) -> Tensors:
    """Return a parameter's state with symmetric matrices in the form they are kept in on a device.

    That is whole ones on accelerators, and triangles where these are quicker: on CPUs, and in what is saved.
    """
    found = dict(state)
    for index, tile in enumerate(layout.tiles):
        for name, like in _new_state(tile, hyper, packs=saves_half(device)).items():
            key = block_key(index, name)
            if name.startswith(("factor", "root")) and key in state and state[key].ndim != like.ndim:
                stored = state[key]
                found[key] = unpack(stored) if stored.ndim == 2 else Triangle(stored.shape[-1]).pack(stored)
    return found


def build_stacks(entries: Sequence[tuple[Tensor, Layout, int, Hyper]], state: dict[Tensor, Tensors]) -> list[Stack]:
    """Put the state of all parameters into stacks and leave views of them in ``state``.

    Args:
        entries: Parameter, layout, the first group with its options, and the options.
        state: Each parameter's state; its tensors are replaced by views.
    """
    stacks: dict[tuple[Any, ...], Stack] = {}
    for param, layout, group, hyper in entries:
        for index, tile in enumerate(layout.tiles):
            if tile.count == 0:
                continue
            names = tuple(new_state_names(tile, hyper))
            key = (tile.block, tile.modes, group, factor_dtype(param), param.device, names)
            stack = stacks.setdefault(key, Stack(tile.block, tile.modes, group))
            stack.members.append(Member(param, layout, index, group, stack.count))
    for key, stack in stacks.items():
        for name in key[-1]:
            stack.tensors[name] = _joined(stack, name, state)
        stack.refreshed = _joined(stack, "refreshed", state)
        stack.phase = torch.cat(
            [_own(member.tile, state[member.param][block_key(member.tile_index, "phase")]) for member in stack.members]
        )
    return list(stacks.values())


def new_state_names(tile: Tile, hyper: Hyper) -> list[str]:
    """Return the names of the tensors a tile has."""
    return list(_new_state(tile, hyper, packs=True))


def _new_state(tile: Tile, hyper: Hyper, *, packs: bool) -> Tensors:
    """Return tensors without data, and without blocks, as a tile's state has them."""
    packs = packs and hyper.rule.packs
    blocks = Blocks(tile.block, tile.modes, 0, torch.float32, torch.device("meta"), packs)
    return hyper.rule.new_state(blocks, hyper)


def _own(tile: Tile, rows: Tensor) -> Tensor:
    """Return the rows, one per block of a tile, of the blocks this process works on."""
    return rows if tile.owned is None else rows[slice(*tile.owned)]


def _joined(stack: Stack, name: str, state: dict[Tensor, Tensors]) -> Tensor:
    """Copy one tensor of all members into a stack, and leave views of the stack in their places."""
    pieces = [state[member.param][block_key(member.tile_index, name)] for member in stack.members]
    whole = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).contiguous()
    if name in MOMENTS:
        whole = short_first(whole)
    for member in stack.members:
        state[member.param][block_key(member.tile_index, name)] = whole[member.start : member.stop]
    return whole
