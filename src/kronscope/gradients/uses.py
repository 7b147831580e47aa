r"""Uses of a weight: what each operation contributes to its gradient.

With input :math:`A` and output gradient :math:`B` (both one row per position), a use contributes :math:`B^\top A`. A
linear map and a convolution have the input on the column side; a product ``inputs @ weight`` and a table lookup on the
row side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from kronscope.gradients.sample_axes import SampleAxis

__all__ = ["ConvUse", "EmbeddingUse", "LinearUse", "Place", "ProductUse", "Use"]


@dataclass(frozen=True)
class Place:
    """Which weight was used, on what, and where its output's gradient arrives.

    Attributes:
        parameter: The parameter's name.
        start: First row of the parameter that was used.
        rows: How many rows were used.
        ordinal: How many uses of the parameter came before in this forward pass.
        inputs: The operation's input.
        version: The input's in-place counter when it was used.
        edge: Where the gradient of the output arrives.
        operands: Where the gradients of the operation's other operands than the weight go.
        shape: Shape of the output.
    """

    parameter: str
    start: int
    rows: int
    ordinal: int
    inputs: Tensor
    version: int
    edge: GradientEdge
    operands: tuple[Node, ...]
    shape: torch.Size

    @property
    def overwritten(self) -> bool:
        """Whether the input was changed in place after the use."""
        return self.inputs._version != self.version

    def input_key(self) -> tuple[Any, ...]:
        """Equal for two uses of one and the same input."""
        x = self.inputs
        return (x.data_ptr(), x.shape, x.stride(), self.version)


@dataclass(frozen=True)
class LinearUse:
    """``inputs @ weight.T``: the input is the column side, the output's gradient the row side."""

    place: Place
    input_is_cols = True

    def sample_dims(self) -> int:
        """How many leading dimensions may hold the samples."""
        return self.place.inputs.dim() - 1

    def positions(self, samples: int) -> int:
        """Positions per sample."""
        return self.place.shape[:-1].numel() // samples

    def key(self) -> tuple[Any, ...]:
        """Equal for uses whose input sides are the same."""
        return ("linear", *self.place.input_key())

    def input_side(self, axis: SampleAxis, samples: int) -> Tensor:
        """The input as (samples, positions, features)."""
        return axis.arrange(self.place.inputs, self.sample_dims(), samples)

    def grad_side(self, grad: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The output's gradient as (samples, positions, features)."""
        return axis.arrange(grad, self.sample_dims(), samples)

    def gradient(self, grad: Tensor, inputs: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The weight's gradient (samples, rows, columns), from :meth:`input_side` and the output's gradient."""
        return self.grad_side(grad, axis, samples).to(inputs.dtype).mT @ inputs


@dataclass(frozen=True)
class ProductUse:
    """``inputs @ weight``: the input is the row side, the output's gradient the column side."""

    place: Place
    input_is_cols = False

    def sample_dims(self) -> int:
        """How many leading dimensions may hold the samples."""
        return self.place.inputs.dim() - 1

    def positions(self, samples: int) -> int:
        """Positions per sample."""
        return self.place.shape[:-1].numel() // samples

    def key(self) -> tuple[Any, ...]:
        """Equal for uses whose gradient sides are the same: none but itself."""
        return ("product", self.place.parameter, self.place.ordinal)

    def input_side(self, axis: SampleAxis, samples: int) -> Tensor:
        """The input as (samples, positions, rows)."""
        return axis.arrange(self.place.inputs, self.sample_dims(), samples)

    def grad_side(self, grad: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The output's gradient as (samples, positions, columns)."""
        return axis.arrange(grad, self.sample_dims(), samples)

    def gradient(self, grad: Tensor, inputs: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The weight's gradient (samples, rows, columns)."""
        return inputs.mT @ self.grad_side(grad, axis, samples).to(inputs.dtype)


@dataclass(frozen=True)
class EmbeddingUse:
    """A table lookup: the row side is the one-hot input, the column side the output's gradient."""

    place: Place
    padding_idx: int | None
    input_is_cols = False

    def sample_dims(self) -> int:
        """How many leading dimensions may hold the samples."""
        return self.place.inputs.dim()

    def positions(self, samples: int) -> int:
        """Positions per sample."""
        return self.place.shape[:-1].numel() // samples

    def key(self) -> tuple[Any, ...]:
        """Equal for uses whose gradient sides are the same: none but itself."""
        return ("embedding", self.place.parameter, self.place.ordinal)

    def input_side(self, axis: SampleAxis, samples: int) -> Tensor:
        """One-hot rows (samples, positions, rows), zero at the padding index."""
        tokens = axis.arrange(self.place.inputs, self.sample_dims(), samples).long()
        rows = torch.zeros(*tokens.shape, self.place.rows, device=tokens.device)
        rows.scatter_(2, tokens.unsqueeze(2), 1.0)
        if self.padding_idx is not None:
            rows[..., self.padding_idx] = 0.0
        return rows

    def grad_side(self, grad: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The output's gradient as (samples, positions, columns)."""
        return axis.arrange(grad, self.sample_dims(), samples)

    def gradient(self, grad: Tensor, inputs: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The table's gradient (samples, rows, columns)."""
        tokens = axis.arrange(self.place.inputs, self.sample_dims(), samples).long()
        values = self.grad_side(grad, axis, samples)
        whole = values.new_zeros(samples, self.place.rows, values.shape[2])
        whole.scatter_add_(1, tokens.unsqueeze(2).expand_as(values), values)
        if self.padding_idx is not None:
            whole[:, self.padding_idx] = 0.0
        return whole


@dataclass(frozen=True)
class ConvUse:
    """A convolution: a linear map of every window of the input; groups count as further positions."""

    place: Place
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    input_is_cols = True

    def sample_dims(self) -> int:
        """Only the first dimension may hold the samples."""
        return 1

    def positions(self, samples: int) -> int:
        """Positions per sample."""
        spatial = len(self.kernel)
        return self.place.shape[: -spatial - 1].numel() * self.place.shape[-spatial:].numel() * self.groups // samples

    @property
    def window_size(self) -> int:
        """Numbers in one window: channels of a group times the kernel."""
        return self.place.inputs.shape[-len(self.kernel) - 1] // self.groups * math.prod(self.kernel)

    def key(self) -> tuple[Any, ...]:
        """Equal for uses whose input sides are the same; rows of a grouped convolution cannot be merged."""
        geometry = (self.kernel, self.stride, self.padding, self.dilation, self.groups)
        alone = (self.place.parameter, self.place.ordinal) if self.groups > 1 else ()
        return ("conv", *self.place.input_key(), geometry, alone)

    def windows(self, axis: SampleAxis, samples: int) -> Tensor:
        """The windows (samples, groups, positions, columns)."""
        x = self._batched(self.place.inputs)
        if any(low or high for low, high in self.padding):
            x = F.pad(x, [width for pair in reversed(self.padding) for width in pair])
        spatial = len(self.kernel)
        for number, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + number, gap * (size - 1) + 1, step)[..., ::gap]
        # (N, channels, *positions, *kernel) -> (N, groups, *positions, channels / groups, *kernel)
        x = x.reshape(x.shape[0], self.groups, -1, *x.shape[2:]).movedim(2, 2 + spatial)
        return self._by_sample(x.flatten(2 + spatial).flatten(2, 1 + spatial), axis, samples)

    def blocks(self, grad: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The output's gradient (samples, groups, positions, rows / groups)."""
        x = self._batched(grad).flatten(2).unflatten(1, (self.groups, -1)).mT
        return self._by_sample(x, axis, samples)

    def input_side(self, axis: SampleAxis, samples: int) -> Tensor:
        """The windows (samples, groups * positions, columns)."""
        return self.windows(axis, samples).flatten(1, 2)

    def grad_side(self, grad: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The output's gradient (samples, groups * positions, rows), zero outside the position's group."""
        blocks = self.blocks(grad, axis, samples)
        if self.groups == 1:
            return blocks.flatten(1, 2)
        _, groups, positions, rows = blocks.shape
        whole = blocks.new_zeros(samples, groups, positions, groups, rows)
        whole.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
        return whole.flatten(3).flatten(1, 2)

    def gradient(self, grad: Tensor, inputs: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """The weight's gradient (samples, rows, columns)."""
        windows = inputs.unflatten(1, (self.groups, -1))
        blocks = self.blocks(grad, axis, samples).to(inputs.dtype)
        return torch.matmul(blocks.mT, windows).flatten(1, 2)

    def _batched(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0) if x.dim() == len(self.kernel) + 1 else x

    def _by_sample(self, x: Tensor, axis: SampleAxis, samples: int) -> Tensor:
        """(N, groups, positions, features) with N = samples * s -> (samples, groups, s * positions, features)."""
        split = axis.arrange(x, 1, samples)
        merged: Tensor = split.movedim(1, 2).flatten(2, 3)
        return merged


Use = LinearUse | ProductUse | EmbeddingUse | ConvUse
