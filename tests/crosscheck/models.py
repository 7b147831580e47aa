"""Small models that BackPACK and curvlinops can follow, with data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kronscope.gradients import Recorder, resolve_layers
from kronscope.gradients.stream import GradientStream


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 2 * 2, 3)
    ).double()


class Sequence(nn.Module):
    """A linear layer shared over positions, averaged before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 3, bias=False)
        self.head = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.shared(x)).mean(1))
        return logits


def inputs_of(model: nn.Module, count: int = 7) -> Tensor:
    first = next(model.parameters())
    if isinstance(model, Sequence):
        return normal(0, count, 3, 4)
    return normal(0, count, 2, 4, 4) if first.dim() == 4 else normal(0, count, 5)


def targets_of(loss: nn.Module, count: int = 7) -> Tensor:
    if isinstance(loss, nn.CrossEntropyLoss):
        return torch.arange(count) % 3
    return normal(1, count, 3) if isinstance(loss, nn.MSELoss) else (normal(1, count, 3) > 0).double()


def stream_of(model: nn.Module, loss: nn.Module, data: list[Any], layer: str, **options: Any) -> GradientStream:
    recorder = Recorder(model, loss, data, resolve_layers(model, [layer]))
    return recorder.streams(options.pop("labels", "exact"), **options)[layer]
