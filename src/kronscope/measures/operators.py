"""Operators that are there already, measured beside those that are fitted: an optimizer's live ones, or one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronscope.errors import DataError, KronscopeError, OptionError
from kronscope.gradients.matrices import LayerSpec, matrix_shape, unwrap
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Diagonal, Operator
from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.kron.devices import wide
from kronscope.kron.restriction import restricted

__all__ = ["Given", "OperatorSource", "check_operators", "given_operators"]

OperatorSource = Optimizer | Mapping[str, Operator]
# What torch's optimizers call their second moments.
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")


class Given:
    """An operator in the place of a fit, or the reason why there is none for a layer.

    Args:
        name: What its rows are called.
        operator: The operator; None where there is none.
        reason: Why.
    """

    in_shampoo_basis: ClassVar[bool] = False
    kronecker: ClassVar[bool] = False
    fits_truth: ClassVar[bool] = False
    uses_batches: ClassVar[bool] = False

    def __init__(self, name: str, operator: Operator | None, reason: str = "") -> None:
        self.name = self.title = name
        self.operator, self.reason = operator, reason

    def fit(self, stream: GradientStream) -> Operator:
        """Return the operator.

        Raises:
            DataError: there is none for this layer.
        """
        if self.operator is None:
            raise DataError(self.reason)
        if tuple(self.operator.shape) != stream.shape:
            raise DataError(f"{self.name} acts on {tuple(self.operator.shape)} matrices, the layer is {stream.shape}")
        return self.operator


def check_operators(operators: Any, taken: set[str]) -> None:
    """Check what was given as ``operators``.

    Raises:
        OptionError: it is no mapping of names to optimizers or to operators of layers, or a name is a fit's.
    """
    if not isinstance(operators, Mapping):
        raise OptionError(
            f"operators must map names to optimizers or to {{layer: operator}}, got {type(operators).__name__}."
        )
    for name, source in operators.items():
        if not isinstance(name, str) or not name:
            raise OptionError(f"operators needs names of rows as keys, got {name!r}.")
        if name in taken:
            raise OptionError(f"operators calls one {name!r}, and so is an approximation; pick another name.")
        known = isinstance(source, Optimizer) or (
            isinstance(source, Mapping) and all(isinstance(item, Operator) for item in source.values())
        )
        if not known:
            raise OptionError(
                f"operators[{name!r}] must be an optimizer or map layers to operators, got {type(source).__name__}."
            )


def given_operators(
    operators: Mapping[str, OperatorSource], model: nn.Module, specs: list[LayerSpec]
) -> dict[str, list[Given]]:
    """Return the operators of each layer; a mapping that does not name a layer has none for it.

    Raises:
        OptionError: a mapping names a layer that is not measured.
    """
    parameters = dict(unwrap(model).named_parameters(remove_duplicate=False))
    layers = {spec.name for spec in specs}
    found: dict[str, list[Given]] = {spec.name: [] for spec in specs}
    for name, source in operators.items():
        if isinstance(source, Optimizer):
            for spec in specs:
                found[spec.name].append(_live(name, source, spec, parameters))
            continue
        for layer, operator in source.items():
            if layer not in layers:
                measured = ", ".join(sorted(layers)[:5])
                raise OptionError(f"operators[{name!r}] names {layer!r}, but these layers are measured: {measured}.")
            found[layer].append(Given(name, operator))
    return found


def _live(name: str, optimizer: Optimizer, spec: LayerSpec, parameters: Mapping[str, Tensor]) -> Given:
    """What an optimizer holds for a layer: for parts of parameters, what it does to these; nothing between two."""
    blocks: list[tuple[Tensor, Operator]] = []
    places = torch.arange(spec.shape[0] * spec.shape[1]).view(spec.shape)
    row = 0
    for segment in spec.segments:
        weight, parameter = parameters[segment.parameter], segment.parameter
        if not any(weight is own for group in optimizer.param_groups for own in group["params"]):
            return Given(name, None, f"{parameter} is not among the parameters of {name}")
        try:
            whole = _of_parameter(name, optimizer, parameter, weight)
            part = restricted(whole, (segment.start, segment.stop), (segment.first, segment.last))
        except KronscopeError as error:
            return Given(name, None, str(error).rstrip("."))
        blocks.append((places[row : row + segment.shape[0]], part))
        row += segment.shape[0]
    return Given(name, blocks[0][1] if len(blocks) == 1 else BlockDiagonal(spec.shape, blocks))


def _of_parameter(name: str, optimizer: Optimizer, parameter: str, weight: Tensor) -> Operator:
    """What an optimizer holds for a whole parameter.

    Raises:
        DataError: it holds nothing that is an operator.
    """
    live = getattr(optimizer, "operator", None)
    if callable(live):
        operator: Operator = live(weight)
        return operator
    state = optimizer.state.get(weight, {})
    for key in _SECOND_MOMENTS:
        if key in state:
            moment = state[key].detach()
            # of a sharded parameter all processes have a part
            moment = moment.full_tensor() if hasattr(moment, "full_tensor") else moment
            return Diagonal(wide(moment).reshape(matrix_shape(weight)))
    if not state:
        kind = type(optimizer).__name__
        raise DataError(f"{name} has no state of {parameter}: {kind} keeps none, or needs a step first")
    raise DataError(f"{type(optimizer).__name__} keeps no second moment of {parameter}")
