"""Parameters as matrices: which rows of which parameters make up a layer.

A parameter of two or more dimensions is a matrix with its first dimension as rows; all others are flattened into
columns. A layer is a stack of row ranges of such matrices:

======================================  ==============================================================
``"fc.weight"``                         a whole parameter
``"fc"``                                the module's only matrix
``"blocks.*.weight"``                   every matrix whose name fits the pattern
``"attn.in_proj_weight[0:1024]"``       a range of rows
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

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kronscope.errors import LayerError, ModelError

__all__ = ["LayerSpec", "check_plain", "matrix_shape", "resolve_layers", "unwrap"]

_SLICE = re.compile(r"^(?P<name>[^\[\]]+)\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_WRAPPER_PREFIX = re.compile(r"^(?:_orig_mod\.|module\.)+")


@dataclass(frozen=True)
class LayerSpec:
    """One matrix to measure: row ranges of parameters, stacked.

    Attributes:
        name: What the user called it.
        segments: ``(parameter name, first row, one past the last row)`` from top to bottom.
        shape: Rows and columns of the stack.

    >>> spec = LayerSpec("q+k", (("q", 0, 2), ("k", 1, 2)), (3, 4))
    >>> spec.parameters
    ('q', 'k')
    >>> list(spec.overlaps("k", 0, 8))
    [(2, 1, 1)]
    """

    name: str
    segments: tuple[tuple[str, int, int], ...]
    shape: tuple[int, int]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters it takes rows from, each once."""
        return tuple(dict.fromkeys(name for name, _, _ in self.segments))

    def overlaps(self, parameter: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where rows ``start:stop`` of a parameter lie in this layer: ``(layer row, parameter row, length)``."""
        row = 0
        for name, first, last in self.segments:
            low, high = max(first, start), min(last, stop)
            if name == parameter and low < high:
                yield row + low - first, low, high - low
            row += last - first

    def gather(self, gradients: Mapping[str, Tensor], leading: int = 0) -> Tensor:
        """Cut and stack gradients of whole parameters into gradients of this layer.

        Args:
            gradients: For every parameter of the layer a tensor ``(*leading, *parameter shape)``.
            leading: The number of leading dimensions.

        Returns:
            A tensor ``(*leading, rows, columns)``.
        """
        parts = [
            gradients[name].flatten(leading + 1).narrow(leading, start, stop - start)
            for name, start, stop in self.segments
        ]
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
    """Turn layer names, patterns, row ranges and stacks into matrices of the model.

    Args:
        model: The model whose parameters are meant.
        layers: ``None`` for every parameter of two or more dimensions, or names as in the module's table.

    Returns:
        The layers in the order asked for, each once. All names of a shared parameter lead to the same parameter.

    Raises:
        LayerError: A name is unknown (the nearest ones are listed), is not a matrix, or has a wrong row range.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Flatten(), nn.Linear(8, 2))
    >>> [(layer.name, layer.shape) for layer in resolve_layers(model)]
    [('0.weight', (8, 75)), ('2.weight', (2, 8))]
    >>> resolve_layers(model, ["0.weight[2:6]"])[0].segments
    (('0.weight', 2, 6),)
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
        return LayerSpec(label or name, ((self.alias[name], 0, rows),), (rows, columns))

    def resolve(self, request: str) -> list[LayerSpec]:
        parts = [request] if request in self.parameters else [part.strip() for part in request.split("+")]
        if len(parts) == 1:
            return self.resolve_part(parts[0])
        segments: list[tuple[str, int, int]] = []
        widths = set()
        for part in parts:
            matches = self.resolve_part(part)
            if len(matches) != 1:
                names = ", ".join(match.name for match in matches[:5])
                raise LayerError(
                    f"Part {part!r} of the stack {request!r} must be one parameter, but fits {len(matches)}: {names}."
                )
            segments.extend(matches[0].segments)
            widths.add(matches[0].shape[1])
        if len(widths) > 1:
            raise LayerError(
                f"The parts of the stack {request!r} must have equally many columns, got {sorted(widths)}."
            )
        rows = sum(stop - start for _, start, stop in segments)
        spec = LayerSpec(request, tuple(segments), (rows, widths.pop()))
        for name, start, stop in segments:
            if sum(length for _, _, length in spec.overlaps(name, start, stop)) != stop - start:
                raise LayerError(f"The stack {request!r} takes rows of {name!r} twice; make its parts disjoint.")
        return [spec]

    def resolve_part(self, part: str) -> list[LayerSpec]:
        match = _SLICE.match(part)
        if match is None or part in self.parameters:
            return [self.whole(name, name) for name in self.names(part)]
        return [self.sliced(name, match["start"], match["stop"], part) for name in self.names(match["name"])]

    def sliced(self, name: str, start: str, stop: str, part: str) -> LayerSpec:
        rows, columns = matrix_shape(self.parameters[name])
        low, high = int(start or 0), int(stop or rows)
        low, high = low + rows * (low < 0), high + rows * (high < 0)
        if not 0 <= low < high <= rows:
            raise LayerError(
                f"The rows of {part!r} must lie within 0:{rows} and not be empty ({name} has {rows} rows)."
            )
        return LayerSpec(f"{name}[{low}:{high}]", ((self.alias[name], low, high),), (high - low, columns))

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
