"""Measuring leaves no trace: everything a capture touches is put back, also after an error or Ctrl-C."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kronscope.kron.precision import exact_products

__all__ = ["RandomStates", "generators_of", "untouched"]


class RandomStates:
    """A snapshot of every random number generator that a model or its data may use.

    >>> before = RandomStates()
    >>> first = torch.rand(()).item()
    >>> before.restore()
    >>> torch.rand(()).item() == first
    True
    """

    def __init__(self, generators: Collection[torch.Generator] = ()) -> None:
        self._torch = torch.random.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        self._numpy = np.random.get_state()  # noqa: NPY002  # the global state is what must be kept
        self._python = random.getstate()
        self._generators = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Set all generators back to where they were."""
        torch.random.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)
        for generator, state in self._generators:
            generator.set_state(state)


def generators_of(data: object) -> list[torch.Generator]:
    """The generators that belong to a ``DataLoader`` and its samplers."""
    if not isinstance(data, DataLoader):
        return []
    owners = [data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


@contextmanager
def untouched(model: nn.Module, targets: Collection[nn.Parameter]) -> Iterator[None]:
    """Put the model in eval mode, let only ``targets`` require gradients, and restore everything at the end.

    Restored are: training flags, attributes, buffers and their values, ``requires_grad``, ``.grad``, tensor hooks of
    parameters (switched off inside: they change gradients, not the loss), random states, grad mode, autocast (off
    inside), TF32 products (off inside), compilation (off inside) and the fast path of attention (off inside: it has no
    gradients).
    """
    undo: list[Callable[[], None]] = [RandomStates().restore]
    with ExitStack() as contexts:
        contexts.callback(_run_all, undo)
        undo.extend(_module_state(module) for module in model.modules())
        # Direct assignment instead of eval(): modules may override train() with side effects, such as merging weights.
        for module in model.modules():
            module.training = False
        wanted = {id(parameter) for parameter in targets}
        for parameter in model.parameters():
            undo.append(_parameter_state(parameter))
            if parameter.is_leaf and parameter.is_floating_point():
                parameter.requires_grad_(id(parameter) in wanted)
            if getattr(parameter, "_backward_hooks", None):
                parameter._backward_hooks = None
        fast_path = torch.backends.mha.get_fastpath_enabled()
        undo.append(lambda: torch.backends.mha.set_fastpath_enabled(fast_path))
        torch.backends.mha.set_fastpath_enabled(False)
        for kind in {"cpu", *(parameter.device.type for parameter in model.parameters())}:
            if torch.amp.is_autocast_available(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        contexts.enter_context(exact_products())
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.enable_grad())
        # Nothing is compiled unless this module, which takes a second to import, is already there.
        if "torch._dynamo" in sys.modules:
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _run_all(actions: list[Callable[[], None]]) -> None:
    """Run every action, last first, even if some fail."""
    with ExitStack() as stack:
        for action in actions:
            stack.callback(action)


_OWN_TABLES = ("_parameters", "_buffers", "_modules")


def _module_state(module: nn.Module) -> Callable[[], None]:
    attributes = {key: value for key, value in vars(module).items() if key not in _OWN_TABLES}
    # A scripted module has no dictionary of its own; its buffers are then restored by value.
    table: Any = module._buffers
    own: dict[str, Tensor | None] = table if isinstance(table, dict) else {}
    entries = dict(own)
    values = [(buffer, buffer.detach().clone(), _version(buffer)) for buffer in module.buffers(recurse=False)]
    # An embedding with max_norm rescales its own weight in the forward pass.
    rescaled = getattr(module, "max_norm", None) is not None
    weights = [(p, p.detach().clone()) for p in module.parameters(recurse=False)] if rescaled else []

    def restore() -> None:
        current = vars(module)
        for key in [key for key in current if key not in attributes and key not in _OWN_TABLES]:
            del current[key]
        current.update(attributes)
        for name in [name for name in own if name not in entries]:
            del own[name]
        own.update(entries)
        for buffer, value, version in values:
            if _version(buffer) != version or version is None:
                buffer.detach().copy_(value)
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)

    return restore


def _parameter_state(parameter: nn.Parameter) -> Callable[[], None]:
    requires_grad, grad = parameter.requires_grad, parameter.grad
    hooks: Any = getattr(parameter, "_backward_hooks", None)

    def restore() -> None:
        if parameter.is_leaf and parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
        if parameter.grad is not grad:
            parameter.grad = grad
        if hooks and parameter._backward_hooks is not hooks:
            parameter._backward_hooks = hooks

    return restore


def _version(tensor: Tensor) -> int | None:
    """The in-place counter; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version
