"""timm: our optimizers by name from its registry, with its own groups, schedules and averages."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kronscope as ks
from tests.integrations import timm_runs
from tests.integrations.launch import launch
from tests.integrations.timm_runs import SAVED, made, vision_transformer
from tests.integrations.tiny import assert_same, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # timm's own, of torch
FAMILIES: dict[str, Any] = {
    "kronscope-shampoo": ks.Shampoo,
    "kronscope-soap": ks.SOAP,
    "kronscope-klshampoo": ks.KLShampoo,
}


def steps(model: Any, optimizer: Any, first: int, last: int, scheduler: Any = None) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        images, labels = torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step_update(step + 1)


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_the_registry_makes_our_optimizers(timm: ModuleType, name: str, family: Any) -> None:
    model = vision_transformer(timm)
    optimizer = made(timm, model, name, weight_decay=0.05)
    assert type(optimizer).__name__ == family.__name__
    plan = {row.name: row.method for row in optimizer.explain().rows}
    assert plan["head.weight"] == "AdamW (head)"
    assert plan["pos_embed"] == "AdamW (embedding)"
    assert not plan["blocks.0.mlp.fc1.weight"].startswith("AdamW")
    decays = {
        param_name: group["weight_decay"] for group in optimizer.param_groups for param_name in group["param_names"]
    }
    assert decays["blocks.0.mlp.fc1.weight"] == 0.05
    assert decays["blocks.0.mlp.fc1.bias"] == decays["pos_embed"] == 0.0  # the model says so itself


def test_registering_twice_changes_nothing(timm: ModuleType) -> None:
    names = ks.integrations.timm.register()
    assert ks.integrations.timm.register() == names
    assert set(names) <= set(timm.optim.list_optimizers())


def test_layer_decay_is_timms(timm: ModuleType) -> None:
    model = vision_transformer(timm)
    optimizer = made(timm, model, "kronscope-soap", weight_decay=0.05, layer_decay=0.5)
    scales = {name: group["lr_scale"] for group in optimizer.param_groups for name in group["param_names"]}
    assert scales["head.weight"] == 1.0
    assert scales["blocks.0.mlp.fc1.weight"] == 0.5 * scales["blocks.1.mlp.fc1.weight"]
    scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=10, t_in_epochs=False)
    scheduler.step_update(5)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rates["blocks.0.mlp.fc1.weight"] == pytest.approx(0.5 * rates["blocks.1.mlp.fc1.weight"])


@pytest.mark.parametrize("name", FAMILIES)
def test_resuming_changes_no_bit(timm: ModuleType, name: str) -> None:
    whole, resumed = vision_transformer(timm), vision_transformer(timm)
    optimizer = made(timm, whole, name)
    scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, t_in_epochs=False)
    steps(whole, optimizer, 0, 3, scheduler)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    steps(whole, optimizer, 3, 6, scheduler)
    resumed.load_state_dict(saved[0])
    again = made(timm, resumed, name)
    again.load_state_dict(saved[1])
    other = timm.scheduler.CosineLRScheduler(again, t_initial=10, warmup_t=2, t_in_epochs=False)
    other.step_update(3)
    steps(resumed, again, 3, 6, other)
    assert_same(weights(resumed), weights(whole))


def test_lookahead_and_averages_work_around_ours(timm: ModuleType) -> None:
    model = vision_transformer(timm)
    before = weights(model)
    averaged = timm.utils.ModelEmaV3(model, decay=0.5)
    optimizer = made(timm, model, "lookahead_kronscope-klshampoo")
    assert type(ks.integrations.unwrap(optimizer)) is ks.KLShampoo
    steps(model, optimizer, 0, 7)
    averaged.update(model)
    moved = weights(model)
    assert all(bool((moved[name] != value).any()) for name, value in before.items() if name != "pos_embed")
    for name, value in weights(averaged.module).items():
        torch.testing.assert_close(value, (before[name] + moved[name]) / 2)


# Sums over another number of processes, in float64.
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def processes(timm: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes found, and the folder that the first of them saved to."""
    folder = tmp_path_factory.mktemp("timm")
    return launch(timm_runs.together, 2, folder / "found.pt", folder=str(folder)), folder


@pytest.mark.parametrize("name", FAMILIES)
def test_two_processes_train_as_one_and_resume_what_rank_0_saved(processes: Any, tmp_path: Path, name: str) -> None:
    found = processes[0][name]
    assert_same(found["whole"], timm_runs.train(str(tmp_path), name), ROUNDING)
    assert_same(found["resumed"], found["whole"], ROUNDING)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_resumes_what_two_saved(processes: Any, tmp_path: Path, name: str) -> None:
    found, folder = processes
    saved = folder / name / f"checkpoint-{SAVED}.pth.tar"
    resumed = timm_runs.train(str(tmp_path), name, resume=str(saved))
    assert_same(resumed, found[name]["whole"], ROUNDING)
