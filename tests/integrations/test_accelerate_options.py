"""What people switch on in Accelerate and in plain loops, tried with our optimizers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import kronscope as ks
from tests.integrations.launch import launch
from tests.integrations.tiny import FAMILIES, assert_same, network, points, weights

# accelerate and torch warn of each other's deprecations
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_trains(accelerate_runs: ModuleType, family: str) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    running = accelerate_runs.accelerator(mixed_precision="bf16")
    model = network().float()
    model, optimizer = running.prepare(model, FAMILIES[family](ks.param_groups(model), lr=1e-2))
    inputs, targets = points().tensors
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(inputs.float()), targets)
        running.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    AcceleratorState._reset_state()
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_that_the_gradient_scaler_refuses_changes_nothing(family: str) -> None:
    """A loss scaled to infinity: the scaler leaves the step out, halves its scale and goes on."""
    model = network().float()
    optimizer = FAMILIES[family](ks.param_groups(model), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    inputs, targets = points().tensors

    def step(factor: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale(factor * nn.functional.cross_entropy(model(inputs.float()), targets)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    step()
    before, scale = weights(model), scaler.get_scale()
    step(float("inf"))
    assert_same(weights(model), before)
    assert scaler.get_scale() < scale
    assert optimizer.skipped_steps == 0  # the scaler's skip, not ours
    step()
    assert any(bool((value != before[name]).any()) for name, value in weights(model).items())


def test_parameters_without_a_gradient_on_any_process(accelerate_runs: ModuleType, tmp_path: Path) -> None:
    """`find_unused_parameters` with a branch that no process takes in some steps."""
    found = launch(accelerate_runs.unused, 2, tmp_path / "found.pt")
    assert_same(found["after"], accelerate_runs.unused()["after"], 1e-9)
    assert found["moved"] == [True, False, True]
