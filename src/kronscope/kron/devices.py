"""What devices cannot do, and what is done instead: float64 and decompositions on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from kronscope.support.default_device import default_device

__all__ = ["has_float64", "host_if_narrow", "on_host_if_missing", "ordinary_tensors", "wide"]

# Device types and functions that were found missing, so that each is tried once.
_missing: set[tuple[str, str]] = set()


def has_float64(device: torch.device) -> bool:
    """Whether a device has double precision; Apple's GPUs have not.

    >>> has_float64(torch.device("cpu")), has_float64(torch.device("mps"))
    (True, False)
    """
    return device.type != "mps"


def host_if_narrow(device: torch.device) -> torch.device:
    """Return where float64 numbers of a device are kept: there, or on the CPU if it has no float64."""
    return device if has_float64(device) else torch.device("cpu")


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, where it is, or on the host if its device has no float64."""
    return tensor.to(host_if_narrow(tensor.device)).double()


def on_host_if_missing(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Call a function of matrices; on the CPU, where their device does not have it, and its answer goes back.

    Some devices (MPS before torch 2.13, others still) lack decompositions. A step must not fail there when half of its
    state has changed already.

    Args:
        function: Returns a tensor, or a named tuple of them.
        tensors: On one device.
        options: Further arguments.
    """
    device = tensors[0].device
    key = (device.type, str(getattr(function, "__name__", function)))
    if key not in _missing:
        try:
            return function(*tensors, **options)
        except NotImplementedError:
            if device.type == "cpu":
                raise
            _missing.add(key)
    found = function(*(tensor.cpu() for tensor in tensors), **options)
    if isinstance(found, Tensor):
        return found.to(device)
    return type(found)(part.to(device) for part in found)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make new tensors, where no device is said, on the CPU, and such that can be changed at any time.

    A program may have set another default device, or be in inference mode, whose tensors cannot be changed outside it.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            # leaving it enables gradients
            stack.enter_context(torch.no_grad())
        if default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
