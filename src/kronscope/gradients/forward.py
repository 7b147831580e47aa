"""Calling a model on a batch and finding the logits in what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.errors import ModelError
from kronscope.gradients.data import Batch
from kronscope.support.default_device import users_default

__all__ = ["Forward", "ForwardFunction", "common_device"]

ForwardFunction = Callable[[nn.Module, Any], Any]


class Forward(nn.Module):
    """The model with one calling convention: a batch's inputs in, a tensor with samples first out.

    Being a module itself, it can be called with other parameters by ``torch.func.functional_call``; the names of the
    model's parameters then start with ``model.``.

    >>> Forward(nn.Linear(2, 3))(torch.zeros(4, 2)).shape
    torch.Size([4, 3])
    """

    def __init__(self, model: nn.Module, function: ForwardFunction | None = None) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, inputs: Any) -> Tensor:
        """Call the model and unwrap its logits."""
        with users_default():
            output = self._output(inputs)
        logits = output
        if isinstance(output, Mapping):
            logits = output.get("logits")
        elif not isinstance(output, Tensor):
            logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise ModelError(
                f"The model returned a {type(output).__name__} in which no logits were found; "
                "pass forward=lambda model, inputs: ... that returns them as a tensor (--forward on the command line)."
            )
        return logits

    def _output(self, inputs: Any) -> Any:
        if self._function is not None:
            return self._function(self.model, inputs)
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        if isinstance(inputs, (tuple, list)):
            return self.model(*inputs)
        return self.model(inputs)

    def outputs(self, batch: Batch) -> Tensor:
        """Call the model on a batch and check that the first dimension of the output is the samples."""
        logits: Tensor = self(batch.inputs)
        if logits.dim() == 0 or logits.shape[0] != batch.size or not logits.is_floating_point():
            raise ModelError(
                f"For {batch.size} samples the model must return floating-point outputs with samples first, "
                f"got {tuple(logits.shape)} of {logits.dtype}; pass forward=lambda model, inputs: ... to reshape them "
                "(--forward on the command line)."
            )
        return logits

    def precision(self, outputs: Tensor) -> torch.dtype:
        """The coarsest floating-point type among parameters and outputs: it decides how large rounding errors are."""
        types = {outputs.dtype, *(p.dtype for p in self.model.parameters() if p.is_floating_point())}
        return max(types, key=lambda dtype: torch.finfo(dtype).eps)


def common_device(model: nn.Module) -> torch.device | None:
    """The device of the parameters if there is exactly one."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None
