"""Parameters as matrices: which parts of which parameters make up a layer.

A parameter of two or more dimensions is a matrix with its first dimension as rows; all others are flattened into
columns. A layer is a part of such a matrix, or several of them stacked:

======================================  ==============================================================
``"fc.weight"``                         a whole parameter
``"fc"``                                the module's only matrix
``"blocks.*.weight"``                   every matrix whose name fits the pattern
``"attn.in_proj_weight[0:1024]"``       a range of rows
``"fc.weight[:, 0:64]"``                a range of columns
``"fc.weight[0:64, 0:64]"``             a block
``"fc.weight[0:512/8]"``                eight layers: equal parts of these rows; ``[/8]`` of all, ``[:, /8]`` of columns
``"attn[heads]"``                       a layer for every head of every projection of an attention module
``"attn.q.weight[heads=8]"``            a layer for every head of a projection
``"q.weight+k.weight"``                 rows stacked, each part may be a range
======================================  ==============================================================
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kronscope.errors import LayerError, ModelError
from kronscope.gradients.heads import head_cut, projections

__all__ = ["LayerSpec", "Segment", "check_plain", "matrix_shape", "resolve_layers", "unwrap"]

_RANGE = r"(?:-?\d*:-?\d*)?(?:/\d+)?"
_PART = re.compile(rf"^(?P<name>.+)\[\s*(?P<rows>{_RANGE})\s*(?:,\s*(?P<cols>{_RANGE})\s*)?\]$")
_HEADS = re.compile(r"^(?P<name>.+)\[\s*heads\s*(?:=\s*(?P<count>\d+)\s*)?\]$")
_WRAPPER_PREFIX = re.compile(r"^(?:_orig_mod\.|module\.)+")


class Segment(NamedTuple):
    """Rows ``start:stop`` and columns ``first:last`` of a parameter seen as a matrix.

    Attributes:
        parameter: The parameter's name.
        start: Its first row.
        stop: One past its last row.
        first: Its first column.
        last: One past its last column.

    >>> Segment("fc.weight", 0, 4, 2, 5).shape
    (4, 3)
    """

    parameter: str
    start: int
    stop: int
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and columns it has."""
        return self.stop - self.start, self.last - self.first

    def of(self, tensor: Tensor, leading: int = 0) -> Tensor:
        """Cut it out of a tensor ``(*leading, *parameter shape)``: ``(*leading, rows, columns)``."""
        matrix = tensor.flatten(leading + 1)
        return matrix.narrow(leading, self.start, self.stop - self.start)[..., self.first : self.last]

    def overlaps(self, other: Segment) -> bool:
        """Whether both have an entry in common."""
        rows = self.start < other.stop and other.start < self.stop
        return self.parameter == other.parameter and rows and self.first < other.last and other.first < self.last


@dataclass(frozen=True)
class LayerSpec:
    """One matrix to measure: parts of parameters, stacked.

    Attributes:
        name: What the user called it.
        segments: Its parts, from top to bottom.
        shape: Rows and columns of the stack.

    >>> spec = LayerSpec("q+k", (Segment("q", 0, 2, 0, 4), Segment("k", 1, 2, 0, 4)), (3, 4))
    >>> spec.parameters
    ('q', 'k')
    >>> [(row, start, length) for row, start, length, _ in spec.overlaps("k", 0, 8)]
    [(2, 1, 1)]
    """

    name: str
    segments: tuple[Segment, ...]
    shape: tuple[int, int]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters it is made of, each once."""
        return tuple(dict.fromkeys(segment.parameter for segment in self.segments))

    def is_whole(self, parameter: Tensor) -> bool:
        """Whether it is all of one parameter, and nothing else."""
        return len(self.segments) == 1 and self.shape == matrix_shape(parameter)

    def overlaps(self, parameter: str, start: int, stop: int) -> Iterator[tuple[int, int, int, Segment]]:
        """Where rows ``start:stop`` of a parameter lie in this layer.

        Returns:
            For each part of the layer with some of these rows: the first row in the layer, the first row in the
            parameter, how many there are, and the part, which says which columns.
        """
        row = 0
        for segment in self.segments:
            low, high = max(segment.start, start), min(segment.stop, stop)
            if segment.parameter == parameter and low < high:
                yield row + low - segment.start, low, high - low, segment
            row += segment.shape[0]

    def gather(self, gradients: Mapping[str, Tensor], leading: int = 0) -> Tensor:
        """Cut and stack gradients of whole parameters into gradients of this layer.

        Args:
            gradients: For every parameter of the layer a tensor ``(*leading, *parameter shape)``.
            leading: The number of leading dimensions.

        Returns:
            A tensor ``(*leading, rows, columns)``.
        """
        parts = [segment.of(gradients[segment.parameter], leading) for segment in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=leading)


def unwrap(model: nn.Module) -> nn.Module:
    """Look through ``torch.compile``, ``DistributedDataParallel`` and ``DataParallel``.

    >>> unwrap(nn.DataParallel(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    wrappers: tuple[type[nn.Module], ...] = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "module" if isinstance(model, wrappers) else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_plain(name: str, parameter: Tensor) -> None:
    """Refuse a parameter of which this process holds a part only.

    Raises:
        ModelError: it is sharded; the text says how to measure the model.
    """
    if hasattr(parameter, "placements"):
        raise ModelError(
            f"Parameter {name!r} is sharded over processes (DTensor). Measure a plain copy of the model with the full "
            f"state: torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            f"options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))."
        )


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter seen as a matrix.

    >>> matrix_shape(torch.zeros(8, 3, 5, 5))
    (8, 75)
    """
    return parameter.shape[0], math.prod(parameter.shape[1:])


def resolve_layers(model: nn.Module, layers: str | Sequence[str] | None = None) -> list[LayerSpec]:
    """Turn layer names, patterns, ranges, heads and stacks into matrices of the model.

    Args:
        model: The model whose parameters are meant.
        layers: ``None`` for every parameter of two or more dimensions, or names as in the module's table.

    Returns:
        The layers in the order asked for, each once. All names of a shared parameter lead to the same parameter.

    Raises:
        LayerError: A name is unknown (the nearest ones are listed), is not a matrix, or has a wrong range.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Flatten(), nn.Linear(8, 2))
    >>> [(layer.name, layer.shape) for layer in resolve_layers(model)]
    [('0.weight', (8, 75)), ('2.weight', (2, 8))]
    >>> resolve_layers(model, ["0.weight[2:6, :50]"])[0].segments
    (Segment(parameter='0.weight', start=2, stop=6, first=0, last=50),)
    >>> [layer.name for layer in resolve_layers(model, ["0.weight[/2]"])]
    ['0.weight[0:4]', '0.weight[4:8]']
    """
    table = _Table(unwrap(model))
    if layers is None:
        specs = [table.whole(name) for name in table.canonical if table.is_matrix(name)]
        if not specs:
            raise LayerError("The model has no parameter of two or more dimensions, so there is no matrix to measure.")
        return specs
    found: dict[str, LayerSpec] = {}
    if not isinstance(layers, Iterable):
        raise LayerError(f"layers must be a name, a list of names or None for every matrix, got {layers!r}.")
    for request in [layers] if isinstance(layers, str) else layers:
        if not isinstance(request, str):
            raise LayerError(
                f"A layer is a parameter name or pattern (str), got {type(request).__name__}; "
                "see model.named_parameters() for the names."
            )
        for spec in table.resolve(request):
            found.setdefault(spec.name, spec)
    if not found:
        raise LayerError("No layers were asked for; pass None for every matrix, or at least one name.")
    return list(found.values())


class _Table:
    """The parameters of a model by every name they have."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, parameter in self.parameters.items():
            first.setdefault(id(parameter), name)
        self.canonical = {first[id(parameter)]: parameter for parameter in self.parameters.values()}
        self.alias = {name: first[id(parameter)] for name, parameter in self.parameters.items()}
        self.modules = dict(model.named_modules(remove_duplicate=False))

    def is_matrix(self, name: str) -> bool:
        parameter = self.parameters[name]
        if is_lazy(parameter):
            raise ModelError(f"Parameter {name!r} is lazy and has no shape yet; run one batch through the model first.")
        return parameter.dim() >= 2 and parameter.numel() > 0 and parameter.is_floating_point()

    def whole(self, name: str, label: str | None = None) -> LayerSpec:
        rows, columns = matrix_shape(self.parameters[name])
        return LayerSpec(label or name, (Segment(self.alias[name], 0, rows, 0, columns),), (rows, columns))

    def resolve(self, request: str) -> list[LayerSpec]:
        parts = [request] if request in self.parameters else [part.strip() for part in request.split("+")]
        if len(parts) == 1:
            return self.resolve_part(parts[0])
        columns = [self.stackable(part, request) for part in parts]
        counts = {len(column) for column in columns if len(column) > 1}
        if len(counts) > 1:
            raise LayerError(
                f"The parts of the stack {request!r} are cut into {sorted(counts)} layers; cut them equally often."
            )
        count = max(counts, default=1)
        stacks = zip(*(column * (count // len(column)) for column in columns), strict=True)
        return [self.stacked(stack, request if count == 1 else "+".join(one.name for one in stack)) for stack in stacks]

    def stackable(self, part: str, request: str) -> list[LayerSpec]:
        """The layers of one part of a stack: one, or the equal parts of one parameter."""
        matches = self.resolve_part(part)
        if len({match.parameters for match in matches}) != 1:
            names = ", ".join(match.name for match in matches[:5])
            raise LayerError(
                f"Part {part!r} of the stack {request!r} must be one parameter, but fits {len(matches)}: {names}."
            )
        return matches

    def stacked(self, stack: Sequence[LayerSpec], name: str) -> LayerSpec:
        segments = tuple(segment for one in stack for segment in one.segments)
        widths = {one.shape[1] for one in stack}
        if len(widths) > 1:
            raise LayerError(f"The parts of the stack {name!r} must have equally many columns, got {sorted(widths)}.")
        for place, segment in enumerate(segments):
            if any(segment.overlaps(other) for other in segments[:place]):
                raise LayerError(
                    f"The stack {name!r} takes entries of {segment.parameter!r} twice; make its parts disjoint."
                )
        return LayerSpec(name, segments, (sum(segment.shape[0] for segment in segments), widths.pop()))

    def resolve_part(self, part: str) -> list[LayerSpec]:
        if part not in self.parameters:
            if (heads := _HEADS.match(part)) is not None:
                return self.heads(heads["name"], heads["count"])
            match = _PART.match(part)
            # "[0-9]" is a pattern, and so is "[]"
            if match is not None and (match["rows"] or match["cols"]):
                names = self.names(match["name"])
                return [spec for name in names for spec in self.cut(name, match["rows"], match["cols"], part)]
        return [self.whole(name, name) for name in self.names(part)]

    def cut(self, name: str, rows: str, cols: str | None, part: str) -> list[LayerSpec]:
        """The blocks that ranges of rows and columns mean."""
        height, width = matrix_shape(self.parameters[name])
        return [
            self.block(name, *row, *col)
            for row in _ranges(rows, height, f"The rows of {part!r}", f"{name} has {height} rows")
            for col in _ranges(cols or "", width, f"The columns of {part!r}", f"{name} has {width} columns")
        ]

    def block(self, name: str, start: int, stop: int, first: int, last: int) -> LayerSpec:
        height, width = matrix_shape(self.parameters[name])
        text = ":" if (start, stop) == (0, height) and (first, last) != (0, width) else f"{start}:{stop}"
        text += "" if (first, last) == (0, width) else f", {first}:{last}"
        segment = Segment(self.alias[name], start, stop, first, last)
        return LayerSpec(f"{name}[{text}]", (segment,), segment.shape)

    def heads(self, request: str, count: str | None) -> list[LayerSpec]:
        """Every head of a projection, or of all projections of attention modules."""
        found: list[LayerSpec] = []
        for name in self.attention(request):
            shape = matrix_shape(self.parameters[name])
            side, length = head_cut(name, shape, self.modules, int(count) if count else None)
            for at in range(0, shape[side], length):
                ranges = ((at, at + length), (0, shape[1])) if side == 0 else ((0, shape[0]), (at, at + length))
                found.append(self.block(name, *ranges[0], *ranges[1]))
        return found

    def attention(self, request: str) -> list[str]:
        """The projections that a name, a module's name or a pattern of either means."""
        if request not in self.parameters and request not in self.modules:
            request = _WRAPPER_PREFIX.sub("", request)
        if request in self.parameters:
            return [self.checked(request)]
        matrices = [name for name in self.canonical if self.is_matrix(name)]
        modules = [name for name in self.modules if name and (name == request or fnmatchcase(name, request))]
        inside = {name for module in modules for name in projections(module, matrices)}
        if inside:
            return [name for name in matrices if name in inside]
        return self.names(request)

    def names(self, request: str) -> list[str]:
        """Parameter names of a name, a module's name, or a pattern; each parameter once."""
        for name in (request, _WRAPPER_PREFIX.sub("", request)):
            if name in self.parameters:
                return [self.checked(name)]
            if name in self.modules and name:
                return [self.only_matrix(name)]
        if any(character in request for character in "*?["):
            matches = [name for name in self.parameters if fnmatchcase(name, request)]
            matrices: dict[str, str] = {}
            for name in matches:
                if self.is_matrix(name):
                    matrices.setdefault(self.alias[name], name)
            if matrices:
                return list(matrices.values())
            if matches:
                raise LayerError(
                    f"{request!r} fits only parameters of fewer than two dimensions ({', '.join(matches[:5])}); "
                    "only matrices can be measured."
                )
        raise LayerError(f"Unknown layer {request!r}. {self.nearest(request)}")

    def checked(self, name: str) -> str:
        if not self.is_matrix(name):
            parameter = self.parameters[name]
            raise LayerError(
                f"Parameter {name!r} of shape {tuple(parameter.shape)} and {parameter.dtype} is not a matrix; "
                "a layer needs two or more dimensions and a floating-point type."
            )
        return name

    def only_matrix(self, module: str) -> str:
        own = [f"{module}.{name}" for name, _ in self.modules[module].named_parameters(recurse=False)]
        below = [f"{module}.{name}" for name, _ in self.modules[module].named_parameters()]
        for names in (own, below):
            matrices = [name for name in names if self.is_matrix(name)]
            if len(matrices) == 1:
                return matrices[0]
            if matrices:
                raise LayerError(
                    f"Module {module!r} has several matrices: {', '.join(matrices[:8])}. Name one of them, "
                    f"or use the pattern '{module}.*'."
                )
        raise LayerError(f"Module {module!r} has no parameter of two or more dimensions.")

    def nearest(self, request: str) -> str:
        matrices = [name for name in self.parameters if self.is_matrix(name)]
        close = difflib.get_close_matches(request, [*matrices, *filter(None, self.modules)], n=4, cutoff=0.4)
        names = close or matrices[:4]
        if not names:
            return "The model has no matrices."
        return f"The nearest names are: {', '.join(names)}."


def _ranges(text: str, size: int, what: str, has: str) -> list[tuple[int, int]]:
    """The ranges of ``0:size`` that a text such as ``-64:`` or ``0:512/8`` means, from a parameter's point of view."""
    bounds, _, parts = text.strip().partition("/")
    start, _, stop = bounds.partition(":")
    low, high = int(start or 0), int(stop or size)
    low, high = low + size * (low < 0), high + size * (high < 0)
    if not 0 <= low < high <= size:
        raise LayerError(f"{what} must lie within 0:{size} and not be empty ({has}).")
    count = int(parts or 1)
    if count < 1 or (high - low) % count:
        raise LayerError(f"{what} cannot be cut into {count} equal parts: they are {high - low} ({has}).")
    step = (high - low) // count
    return [(at, at + step) for at in range(low, high, step)]
