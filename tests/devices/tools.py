"""Optimizers on the CPU and on pretended devices, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.devices.pretend import Machine
from tests.optim.tools import gradients, parameters

# Where each parameter is, in turn.
PLACES = {"cuda:0": ("cuda:0",), "two devices": ("cuda:0", "cuda:1"), "mps": ("mps",)}
# 264: large enough for triangles on the CPU; (6, 4, 3, 3) for more than two modes. Of three equal matrices, two are
# treated together where they take turns on two devices, and one is elsewhere.
SHAPES = [(8, 6), (8, 6), (8, 6), (7,), (264, 3), (6, 4, 3, 3), ()]


def dtype_of(places: Sequence[str]) -> torch.dtype:
    return torch.float32 if "mps" in places else torch.float64


def placed(machine: Machine | None, values: Sequence[Tensor], places: Sequence[str]) -> list[Tensor]:
    return [_at(machine, value, places[i % len(places)]) for i, value in enumerate(values)]


def _at(machine: Machine | None, value: Tensor, place: str | torch.device) -> Tensor:
    return value.clone() if machine is None else machine.place(value.clone(), place)


def run(
    make: Callable[[list[nn.Parameter]], Any],
    machine: Machine | None,
    places: Sequence[str] = ("cpu",),
    *,
    steps: int = 5,
    dtype: torch.dtype = torch.float64,
    shapes: Sequence[Sequence[int]] = SHAPES,
) -> tuple[Any, list[nn.Parameter]]:
    """Make an optimizer, and take steps with gradients that depend on nothing but shape and step.

    Without a machine it is on the CPU.
    """
    start = [param.detach() for param in parameters(*shapes, dtype=dtype)]
    params = [nn.Parameter(value) for value in placed(machine, start, places)]
    optimizer = make(params)
    history = [gradients(shape, steps, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    for grads in zip(*history, strict=True):
        step(machine, optimizer, params, grads)
    return optimizer, params


def step(machine: Machine | None, optimizer: Any, params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = _at(machine, grad, param.device)
    optimizer.step()


def values(params: Sequence[Tensor]) -> list[Tensor]:
    return [param.detach().cpu() for param in params]


def close(first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float) -> bool:
    return all((one - two).norm() <= tolerance * (two.norm() + 1e-6) for one, two in zip(first, second, strict=True))
