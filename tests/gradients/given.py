"""Training runs whose gradients are given, recorded: what the tests of histories share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronscope as ks

SHAPE = (4, 5)


class Run:
    """A model whose gradients are given: step t puts the t-th of them in place."""

    def __init__(self, grads: Tensor, *, lr: float = 0.0) -> None:
        self.model = nn.Linear(SHAPE[1], SHAPE[0], bias=True).to(grads.dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.grads = grads

    def attach(self, **options: Any) -> ks.GradientHistory:
        options = {"layers": ["weight"], **options}
        return ks.GradientHistory.attach(self.optimizer, self.model, **options)

    def train(self, start: int = 0, stop: int | None = None) -> None:
        for grad in self.grads[start:stop]:
            self.model.weight.grad = grad.clone()
            self.optimizer.step()


def given_grads(steps: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(steps, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stored(history: ks.GradientHistory, layer: str = "weight") -> Tensor:
    return history.read(layer, 0, len(history))


def recorded(tmp_path: Path | None, grads: Tensor, **options: Any) -> ks.GradientHistory:
    run = Run(grads)
    history = run.attach(path=None if tmp_path is None else tmp_path / "history", **options)
    run.train()
    history.detach()
    return history
