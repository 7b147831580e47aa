"""The gradients that an optimizer is about to use, as matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronscope.errors import LayerError
from kronscope.gradients.matrices import LayerSpec, resolve_layers, unwrap

__all__ = ["OptimizerGradients"]


class OptimizerGradients:
    """Gradients of chosen layers, as they stand just before the optimizer's step.

    Args:
        optimizer: The optimizer.
        model: The model whose parameters it trains.
        layers: As for :func:`kronscope.measure`; None takes every matrix.

    Attributes:
        names: Names of the layers.
        shapes: Their (m, n).
        dtypes: For each the parameter's type, but at least float32.
        sharded: Whether a gradient is gathered from several processes, so that all of them must call :meth:`read`.

    Raises:
        LayerError: A layer does not exist, is no matrix, or is not trained by this optimizer.

    >>> model = nn.Linear(3, 2)
    >>> gradients = OptimizerGradients(torch.optim.SGD(model.parameters(), lr=0.1), model, None)
    >>> gradients.names, gradients.shapes, gradients.read()[0].tolist()
    (['weight'], [(2, 3)], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, layers: Sequence[str] | str | None) -> None:
        self._optimizer = optimizer
        model = unwrap(model)
        self._specs = resolve_layers(model, [layers] if isinstance(layers, str) else layers)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for spec in self._specs:
            for name in spec.parameters:
                if id(self._parameters[name]) not in trained:
                    raise LayerError(f"layer {spec.name!r}: the optimizer does not train {name!r}; leave it out.")
        self.names = [spec.name for spec in self._specs]
        self.shapes = [spec.shape for spec in self._specs]
        self.dtypes = [self._dtype(spec) for spec in self._specs]
        self.sharded = any(
            hasattr(self._parameters[name], "full_tensor") for spec in self._specs for name in spec.parameters
        )

    def read(self) -> list[Tensor]:
        """Copy the gradients; a parameter without one counts as zero, as the optimizer will skip it."""
        with torch.no_grad():
            grads = [self._matrix(spec) for spec in self._specs]
            # a gradient scaler leaves the division to optimizers that are fused
            scale = getattr(self._optimizer, "grad_scale", None)
            return [grad / scale.to(grad) for grad in grads] if isinstance(scale, Tensor) else grads

    def before_each_step(self, action: Callable[[], None]) -> Any:
        """Call ``action`` before each step, once the gradients are there; return the handle that removes it.

        A step with a closure computes its gradients itself: the action then follows the first call of the closure.
        """

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            closure = kwargs.get("closure") if "closure" in kwargs else next(iter(args[1:]), None)
            if closure is None:
                action()
                return None
            state = {"waiting": True}

            def acting() -> Any:
                loss = closure()
                if state.pop("waiting", False):
                    action()
                return loss

            if "closure" in kwargs:
                return args, {**kwargs, "closure": acting}
            return (args[0], acting, *args[2:]), kwargs

        return self._optimizer.register_step_pre_hook(hook)

    def will_be_skipped(self) -> bool:
        """Whether a gradient scaler has found infinities and makes a fused optimizer skip this step."""
        found = getattr(self._optimizer, "found_inf", None)
        return isinstance(found, Tensor) and bool(found)

    def _dtype(self, spec: LayerSpec) -> torch.dtype:
        dtype = torch.float32
        for name in spec.parameters:
            dtype = torch.promote_types(dtype, self._parameters[name].dtype)
        return dtype

    def _matrix(self, spec: LayerSpec) -> Tensor:
        parts = []
        for segment in spec.segments:
            parameter = self._parameters[segment.parameter]
            grad = parameter.grad
            whole = torch.zeros_like(parameter) if grad is None else grad.detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            whole = whole.to_dense() if whole.is_sparse else whole
            parts.append(segment.of(whole))
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        return rows.to(dtype=torch.promote_types(rows.dtype, torch.float32), copy=True)
