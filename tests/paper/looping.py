"""Training to the end, with functions for what tests do on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.optim import Optimizer

from kronscope.paper import Settings, Training
from kronscope.paper.data import Dataset
from kronscope.paper.training import Stateful
from kronscope.runs import Run


def train(
    settings: Settings,
    dataset: Dataset,
    *,
    run: Run | None = None,
    on_start: Callable[[nn.Module, Optimizer], Mapping[str, Stateful]] = lambda model, optimizer: {},
    on_measure: Callable[[int, nn.Module], object] = lambda step, model: None,
    progress: Callable[[int, int, float, float], object] = lambda step, steps, loss, seconds_left: None,
    checkpoint_seconds: float = 60.0,
) -> nn.Module:
    with Training(settings, dataset, run, checkpoint_seconds=checkpoint_seconds) as training:
        for name, watcher in on_start(training.model, training.optimizer).items():
            training.include(name, watcher)
        for event in training.events():
            if event.kind == "measure":
                on_measure(event.step, training.model)
            elif event.kind == "train":
                progress(event.step, event.steps, event.loss, event.seconds_left)
    return training.model
