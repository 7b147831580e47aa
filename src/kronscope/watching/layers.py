"""What a step does to each layer: norms that any optimizer has, and the state of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronscope.errors import LayerError
from kronscope.gradients.matrices import LayerSpec, Segment, matrix_shape, resolve_layers, unwrap
from kronscope.optim.base import KroneckerOptimizer
from kronscope.support.processes import ALONE, Processes

__all__ = ["FRESH", "WatchedLayers", "innermost", "steps_taken"]

# Where wrappers keep what they wrap: Accelerate and Lightning; timm's Lookahead.
_INNER = ("optimizer", "_optimizer", "_base_optimizer")

# Numbers of a layer whose roots are old.
FRESH = ("fresh_cosine", "fresh_length")
# A root is old when more than this part of its factor came after it. After a run's first step that is so everywhere; it
# is worth a look only where roots are taken so seldom that it stays so, or were not taken for as many steps.
_UNSEEN, _LONG = 0.7, 50


def innermost(optimizer: object) -> object:
    """Return what is inside a framework's wrappers around an optimizer; an optimizer as it is.

    >>> inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    >>> innermost(inner) is inner
    True
    """
    while (
        inside := next((i for name in _INNER if (i := getattr(optimizer, name, None)) is not None), None)
    ) is not None:
        optimizer = inside
    return optimizer


def steps_taken(optimizer: Optimizer) -> int:
    """Return how many steps an optimizer has taken, by its own count; 0 where it keeps none, as SGD does.

    >>> steps_taken(torch.optim.Adam([nn.Parameter(torch.ones(1))]))
    0
    """
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    skipped = optimizer.skipped_steps if isinstance(optimizer, KroneckerOptimizer) else 0
    return max(counts) + skipped if counts else 0


class WatchedLayers:
    """The layers that are watched, as the optimizer trains them.

    Args:
        optimizer: The optimizer.
        model: The model whose parameters it trains.
        layers: As for :func:`kronscope.measure`; None takes every matrix that the optimizer trains and that is not
            frozen.
        processes: The processes that train together.

    Attributes:
        shapes: The (m, n) of each layer by its name.

    Raises:
        LayerError: a layer does not exist, is no matrix, or is not trained by this optimizer.

    >>> model = nn.Linear(3, 2)
    >>> WatchedLayers(torch.optim.SGD(model.parameters(), lr=0.1), model, None).shapes
    {'weight': (2, 3)}
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        layers: Sequence[str] | str | None,
        processes: Processes = ALONE,
    ) -> None:
        self._optimizer, self._processes = optimizer, processes
        model = unwrap(model)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._specs: list[LayerSpec] = []
        for spec in resolve_layers(model, [layers] if isinstance(layers, str) else layers):
            missing = [name for name in spec.parameters if id(self._parameters[name]) not in trained]
            # beside an adapter the frozen layers are most of the model
            frozen = layers is None and not any(self._parameters[name].requires_grad for name in spec.parameters)
            if frozen:
                continue
            if not missing:
                self._specs.append(spec)
            elif layers is not None:
                raise LayerError(f"layer {spec.name!r}: the optimizer does not train {missing[0]!r}; leave it out.")
        if not self._specs:
            raise LayerError("the optimizer trains no matrix of this model: there is no layer to watch.")
        self.shapes = {spec.name: spec.shape for spec in self._specs}
        self._before: list[list[Tensor]] = []
        self._all, self._trained = layers is None, trained

    def newcomers(self) -> list[str]:
        """Names of matrices that the optimizer trains by now and did not when watching began; each is named once."""
        if not self._all:
            return []
        now = {id(param) for group in self._optimizer.param_groups for param in group["params"]} - self._trained
        self._trained |= now
        return [name for name, param in self._parameters.items() if id(param) in now and param.dim() > 1]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the layers as they are before a step."""
        self._before = [[part.clone() for part in self._parts(spec)] for spec in self._specs]

    @torch.no_grad()
    def numbers(self) -> dict[str, list[float | None]]:
        """Return named numbers of each layer, in their order, after the step that :meth:`keep` came before."""
        norms: list[Tensor] = []
        for spec, before in zip(self._specs, self._before, strict=True):
            changes = [now - then for now, then in zip(self._parts(spec), before, strict=True)]
            norms += [_norm(before), _norm(changes), self._gradient(spec)]
        self._before = []
        values = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
        weights, changes, gradients = values[0::3], values[1::3], values[2::3]
        found: dict[str, list[float | None]] = {
            "gradient_norm": [_known(value) for value in gradients],
            "weight_norm": [_known(value) for value in weights],
            "update_ratio": [_known(d / w) if w > 0 else None for d, w in zip(changes, weights, strict=True)],
        }
        return found | self._state()

    def _state(self) -> dict[str, list[float | None]]:
        """What our optimizers know of their factors; the worst of a parameter's blocks."""
        optimizer = self._optimizer
        if not isinstance(optimizer, KroneckerOptimizer):
            return {}
        rows = {row.name: row for row in optimizer.diagnostics(gather=self._processes.world_size > 1, quick=True).rows}
        names = optimizer._names()
        found: dict[str, list[float | None]] = {}
        for number in ("condition", "effective_rank", "staleness", "residual"):
            found[number] = []
            for spec in self._specs:
                row = rows.get(names[self._parameters[spec.segments[0].parameter]]) if len(spec.segments) == 1 else None
                # a parameter without factors has no roots that could be old
                has = row is not None and row.effective_rank is not None
                found[number].append(_known(getattr(row, number)) if has else None)
        return found | self._fresh(found["staleness"], found["residual"])

    def _fresh(self, ages: Sequence[float | None], residuals: Sequence[float | None]) -> dict[str, list[float | None]]:
        """What old roots do to the step of a layer: of those whose schedule lets roots grow old, the worst."""
        optimizer = self._optimizer
        assert isinstance(optimizer, KroneckerOptimizer)
        old = []
        for place, (age, residual) in enumerate(zip(ages, residuals, strict=True)):
            if age and residual and self._is_old(self._parameters[self._specs[place].segments[0].parameter], int(age)):
                old.append((residual, place))
        if not old:
            return {}
        place = max(old)[1]
        own = optimizer._fresh_products(self._parameters[self._specs[place].segments[0].parameter])
        inner, stored, fresh = (sum(parts) for parts in zip(*self._processes.all_gather_object(own), strict=True))
        if not (stored > 0 and fresh > 0):
            return {}
        found: dict[str, list[float | None]] = {name: [None] * len(self._specs) for name in FRESH}
        found["fresh_cosine"][place] = _known(inner / math.sqrt(stored * fresh))
        found["fresh_length"][place] = _known(math.sqrt(fresh / stored))
        return found

    def _is_old(self, parameter: Tensor, age: int) -> bool:
        r"""Whether a root has not seen most of what its factor is made of, and will go on so by its schedule.

        Of a mean with :math:`\beta_2` after :math:`t` steps, :math:`(1 - \beta_2^a) / (1 - \beta_2^t)` came in the last
        :math:`a` steps; of a sum :math:`a / t`.
        """
        optimizer = self._optimizer
        assert isinstance(optimizer, KroneckerOptimizer)
        group = next(group for group in optimizer.param_groups if any(parameter is one for one in group["params"]))
        hyper, step = optimizer._hyper(group), max(int(optimizer.state[parameter]["step"]), age)
        period = hyper.refresh.period
        if hyper.is_sum:
            return age / step > _UNSEEN and max(age, period) >= _LONG
        unseen = (1 - hyper.beta2**age) / (1 - hyper.beta2**step)
        return unseen > _UNSEEN and (1 - hyper.beta2**period > _UNSEEN or age >= _LONG)

    def _parts(self, spec: LayerSpec) -> list[Tensor]:
        """The parts of parameters that a layer is made of."""
        return [_cut(self._parameters[segment.parameter].detach(), segment) for segment in spec.segments]

    def _gradient(self, spec: LayerSpec) -> Tensor:
        """The norm of a layer's gradient; NaN where it has none."""
        parts = []
        for segment in spec.segments:
            grad = self._parameters[segment.parameter].grad
            if grad is None:
                return torch.tensor(math.nan)
            parts.append(_cut(grad.detach().to_dense() if grad.is_sparse else grad.detach(), segment))
        norm = _norm(parts)
        # a gradient scaler leaves the division to optimizers that are fused
        scale = getattr(self._optimizer, "grad_scale", None)
        return norm / scale.to(norm) if isinstance(scale, Tensor) else norm


def _cut(tensor: Tensor, segment: Segment) -> Tensor:
    # a sharded parameter that is whole stays as it is
    return tensor if segment.shape == matrix_shape(tensor) else segment.of(tensor)


def _norm(parts: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of several tensors as one, in single precision at least; sharded ones are added up."""
    norms: list[Tensor] = []
    for part in parts:
        norm: Any = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _known(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
