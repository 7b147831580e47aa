"""Gradients on demand: parameters whose gradients a test chooses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def parameters(*shapes: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes
    ]


def gradients(shape: Sequence[int], steps: int, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gradients with a direction in common, of falling size, as in training."""
    generator = torch.Generator().manual_seed(seed)
    drift = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    noise = [torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for _ in range(steps)]
    return [((0.3 * drift + piece) * 0.9**t).to(dtype) for t, piece in enumerate(noise)]


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], history: Sequence[Sequence[Tensor]]) -> None:
    """Make one step for each set of gradients."""
    for step in zip(*history, strict=True):
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def copies(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]
