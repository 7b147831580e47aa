"""Training in a folder that a test names, in processes that it kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kronscope.paper import scaled
from kronscope.runs import Run
from tests.paper.looping import train

SETTINGS = scaled("digits-resnet", steps=30, batch=32, measure_at=[0, 7, 20, 30], seed=3)
LAYER = "resnet.encoder.stages.0.layers.1.layer.0.convolution.weight"


class GradientSum:
    """Stands in for a gradient history: its state depends on every step so far."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.weight = model.get_parameter(LAYER)
        self.total = torch.zeros_like(self.weight, dtype=torch.float64)
        optimizer.register_step_pre_hook(self._record)

    def _record(self, *_: Any) -> None:
        assert self.weight.grad is not None
        self.total += self.weight.grad.double() ** 2

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total.copy_(state_dict["total"])


def work(folder: Path) -> None:
    """Train in ``folder`` from wherever it stands, and write results."""
    dataset = SETTINGS.load_data()
    with Run.start(folder, SETTINGS.config(dataset), resume=True) as run:
        watchers: dict[str, GradientSum] = {}

        def start(model: nn.Module, optimizer: Optimizer) -> dict[str, GradientSum]:
            watchers["sum"] = GradientSum(model, optimizer)
            return watchers

        def measure(step: int, model: nn.Module) -> None:
            if run.stored(f"step-{step}") is None:
                weight = model.get_parameter(LAYER).detach()
                values = [float(weight.double().norm()), float(watchers["sum"].total.sum())]
                run.store(f"step-{step}", {"values": [value.hex() for value in values]})

        train(SETTINGS, dataset, run=run, on_start=start, on_measure=measure, checkpoint_seconds=0.0)
        run.finish()
