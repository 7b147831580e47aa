"""What the state of equal blocks is made of: tensors only, each with the block's index first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.kron.triangles import Triangle, is_packed

__all__ = ["MOMENTS", "Blocks", "Tensors"]

Tensors = dict[str, Tensor]

# State of the blocks' own shape: kept with short modes inside, in memory, as a step wants it.
MOMENTS = ("exp_avg", "exp_avg_sq", "graft_sq", "momentum")

# Unpacking a root costs 6 % of the product where the block has 1024 columns, and 25 % where it has 256.
_PACKED_ROOT = 512
_PACKED_COLUMNS = 1024


@dataclass(frozen=True)
class Blocks:
    """Equal blocks that state is to be made for.

    Attributes:
        block: Their shape.
        modes: The modes that have a factor.
        count: How many they are.
        dtype: The type of their state.
        device: Where it is.
        packs: Store large factors, and roots where it costs next to nothing, as lower triangles (B, d (d + 1) / 2).
    """

    block: Sequence[int]
    modes: Sequence[int]
    count: int
    dtype: torch.dtype
    device: torch.device
    packs: bool = True

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros (B, *shape)."""
        return torch.zeros(self.count, *shape, dtype=self.dtype, device=self.device)

    def moment(self) -> Tensor:
        """Return a moment of the blocks' shape that has seen nothing."""
        return self.zeros(*self.block)

    def factor(self, mode: int) -> Tensor:
        """Return factors of one mode that have seen nothing."""
        size = self.block[mode]
        return self.zeros(Triangle(size).numel) if self.packs and is_packed(size) else self.zeros(size, size)

    def identity(self, mode: int) -> Tensor:
        """Return identity matrices (B, d, d) of one mode's size."""
        if self.device.type == "meta":
            return self.zeros(self.block[mode], self.block[mode])
        return self._repeated(torch.eye(self.block[mode], dtype=self.dtype, device=self.device))

    def root(self, mode: int, value: float) -> Tensor:
        """Return roots of one mode that are ``value`` times the identity."""
        if self.device.type == "meta":
            # without numbers to pack, the shape is all there is
            packed = self.packs and self._packs_root(mode)
            return self.zeros(Triangle(self.block[mode]).numel) if packed else self.identity(mode)
        root = torch.eye(self.block[mode], dtype=self.dtype, device=self.device).mul_(value)
        if self.packs and self._packs_root(mode):
            return self._repeated(Triangle(self.block[mode]).pack(root.unsqueeze(0))[0])
        return self._repeated(root)

    def _repeated(self, one: Tensor) -> Tensor:
        return one.repeat(self.count, *[1] * one.ndim)

    def _packs_root(self, mode: int) -> bool:
        """Whether unpacking a root at every step, which moves d² numbers, is small beside the product with it."""
        size = self.block[mode]
        return size >= _PACKED_ROOT and math.prod(self.block) >= _PACKED_COLUMNS * size
