"""Seeing every use of a weight: operations are watched, not modules.

A weight may be used by a module, by several, as a slice, or from a plain function. What counts is the operation: while
:class:`UseRecorder` is active, each linear map, convolution or table lookup whose weight argument is a watched
parameter (or rows of it, or its transpose) is noted with its input and with the place in the autograd graph where the
gradient of its output arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from kronscope.gradients.matrices import matrix_shape
from kronscope.gradients.uses import ConvUse, EmbeddingUse, LinearUse, Place, ProductUse, Use

__all__ = ["UseRecorder"]


class UseRecorder(TorchFunctionMode):
    """Notes the uses of parameters while active.

    Args:
        parameters: The parameters to watch, by name.
        samples: The number of samples in the batch.
        expanded: ``(parameter, ordinal)`` of uses whose output is the same for all samples (such as position
            embeddings): their output gets a sample dimension by broadcasting, so that gradients arrive per sample.

    Attributes:
        uses: The uses in the order they happened.
        depends_on_data: Whether values were looked at or used as indices, so that other samples may be computed
            in another way.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], samples: int, expanded: Collection[tuple[str, int]] = ()
    ) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.depends_on_data = False
        self._samples = samples
        self._expanded = frozenset(expanded)
        self._counts: Counter[str] = Counter()
        self._by_storage: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in parameters.items():
            self._by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and note it if its weight is watched."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and _attention is not None:
            with self:
                return _attention(*args, **kwargs)
        self.depends_on_data |= _looks_at_values(func, args)
        output = func(*args, **kwargs)
        read = _READERS.get(func)
        if read is None or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        try:
            call = read(*args, **kwargs)
        except (TypeError, AttributeError):  # a form of the call that the reader does not know, such as out=
            return output
        found = None if call is None else self._find(call.weight)
        if call is None or found is None or call.inputs.layout is not torch.strided:
            return output
        name, start, rows, transposed = found
        ordinal = self._counts[name]
        inputs = call.inputs.detach()
        if (name, ordinal) in self._expanded:
            output = _with_sample_dim(output, output.shape[0] == 1, self._samples)
            inputs = _with_sample_dim(inputs, inputs.shape[0] == 1, self._samples)
        operands = tuple(
            get_gradient_edge(operand).node
            for operand in (*args, *kwargs.values())
            if isinstance(operand, Tensor) and operand is not call.weight and operand.requires_grad
        )
        edge = get_gradient_edge(output)
        place = Place(name, start, rows, ordinal, inputs, inputs._version, edge, operands, output.shape)
        use = call.build(place, transposed)
        if use is not None:
            self._counts[name] += 1
            self.uses.append(use)
        return output

    def _find(self, weight: object) -> tuple[str, int, int, bool] | None:
        """The parameter a tensor is a view of: name, first row, number of rows, whether transposed."""
        # A detached view has no gradient, hence is no use.
        if not isinstance(weight, Tensor) or not weight.requires_grad or weight.layout is not torch.strided:
            return None
        for name, parameter in self._by_storage.get(weight.untyped_storage().data_ptr(), ()):
            found = _rows_within(weight, parameter)
            if found is not None:
                return name, *found
        return None


def _rows_within(view: Tensor, parameter: Tensor) -> tuple[int, int, bool] | None:
    """Read a view as rows of a parameter: first row, number of rows, whether transposed; None if it is neither."""
    if view.dtype != parameter.dtype or view.numel() == 0:
        return None
    rows, columns = matrix_shape(parameter)
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    for transposed in (False, True):
        candidate = view.t() if transposed and view.dim() == 2 else view
        if matrix_shape(candidate)[1:] != (columns,):
            continue
        same = candidate.shape[1:] == parameter.shape[1:] and candidate.stride() == parameter.stride()
        dense = candidate.is_contiguous() and parameter.is_contiguous()
        if not (same or dense):
            continue
        step = columns if dense else parameter.stride(0)
        start, rest = divmod(offset, step) if step else (0, offset)
        if rest == 0 and start >= 0 and start + candidate.shape[0] <= rows:
            return start, candidate.shape[0], transposed
    return None


_LOOKING = {
    *("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "nonzero", "argwhere"),
    *("masked_select", "unique", "unique_consecutive", "bincount", "topk", "sort", "argsort"),
    *("gather", "take", "take_along_dim", "index_select"),
}


def _looks_at_values(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether an operation may let values decide which positions are computed, or in which order."""
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) for part in index)
    return getattr(func, "__name__", "") in _LOOKING


def _with_sample_dim(x: Tensor, has_one: bool, samples: int) -> Tensor:
    return x.expand(samples, *x.shape[1:]) if has_one else x.unsqueeze(0).expand(samples, *x.shape)


@dataclass(frozen=True)
class _Call:
    """An operation's weight and input, and how to make a use of them."""

    weight: object
    inputs: Tensor
    build: Callable[[Place, bool], Use | None]


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Call | None:
    if input.dim() < 2 or weight.dim() != 2:
        return None
    return _Call(weight, input, lambda place, transposed: (ProductUse if transposed else LinearUse)(place))


def _read_matmul(input: Tensor, other: Tensor, **_: Any) -> _Call | None:
    if input.dim() < 2 or other.dim() != 2:
        return None
    return _Call(other, input, lambda place, transposed: (LinearUse if transposed else ProductUse)(place))


def _read_mm(input: Tensor, mat2: Tensor, **_: Any) -> _Call | None:
    return _read_matmul(input, mat2)


def _read_addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **_: Any
) -> _Call | None:
    return _read_matmul(mat1, mat2) if alpha == 1 else None


def _read_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Call | None:
    if scale_grad_by_freq or input.dim() == 0:
        return None
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    return _Call(weight, input, lambda place, transposed: None if transposed else EmbeddingUse(place, padding))


def _read_conv(spatial: int) -> Callable[..., _Call | None]:
    def per_dim(value: int | tuple[int, ...] | list[int]) -> tuple[int, ...]:
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * spatial if len(values) == 1 else values

    def read(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Call:
        kernel, gaps = tuple(weight.shape[2:]), per_dim(dilation)
        if padding == "same":
            # An odd total goes to the end, as torch does it.
            totals = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
            widths = tuple((total // 2, total - total // 2) for total in totals)
        else:
            widths = tuple((width, width) for width in per_dim(0 if padding == "valid" else padding))

        def build(place: Place, transposed: bool) -> Use | None:
            return None if transposed else ConvUse(place, kernel, per_dim(stride), widths, gaps, groups)

        return _Call(weight, input, build)

    return read


_READERS: dict[Callable[..., Any], Callable[..., _Call | None]] = {
    F.linear: _read_linear,
    F.embedding: _read_embedding,
    F.conv1d: _read_conv(1),
    F.conv2d: _read_conv(2),
    F.conv3d: _read_conv(3),
    torch.addmm: _read_addmm,
    Tensor.addmm: _read_addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _read_matmul),
    **dict.fromkeys((torch.mm, Tensor.mm), _read_mm),
}


def _without_override_check(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a torch function that does not hand itself to the active mode, so that its inner calls are seen."""
    if not isinstance(function, FunctionType):
        return None
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Where this is impossible, attention is not seen, the coverage check says so, and the general back end takes over.
_attention = _without_override_check(F.multi_head_attention_forward)
