"""peft: adapters train, what is frozen stays outside the plan, and runs resume."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kronscope as ks
from tests.integrations.launch import launch
from tests.integrations.tiny import FAMILIES, assert_same, needed, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's and transformers' own


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    return needed("peft")


def test_frozen_weights_are_outside_the_plan(peft_runs: ModuleType) -> None:
    model = peft_runs.adapted()
    plan = {row.name: row for row in ks.KLShampoo(ks.param_groups(model), lr=1e-3).explain().rows}
    assert plan.keys() == {name for name, param in model.named_parameters() if param.requires_grad}
    assert all("lora_" in name for name in plan)
    assert all(row.method.startswith("KL-Shampoo") for row in plan.values())


def test_heads_that_are_trained_whole_get_adamw(peft_runs: ModuleType) -> None:
    model = peft_runs.adapted(modules_to_save=["lm_head", "embed_tokens"])
    rows = ks.Shampoo(ks.param_groups(model), lr=1e-3).explain().rows
    plan = {row.name: row.method for row in rows if "modules_to_save" in row.name}
    assert len(plan) == 2
    assert set(plan.values()) == {"AdamW (head)", "AdamW (embedding)"}


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_in_the_trainer_changes_no_bit(peft_runs: ModuleType, tmp_path: Path, family: str) -> None:
    whole = peft_runs.train(str(tmp_path / "whole"), family)
    saved = tmp_path / "whole" / "checkpoint-3"
    assert_same(peft_runs.train(str(tmp_path / "again"), family, resume=str(saved)), whole)
    assert any(bool(value.any()) for name, value in whole.items() if "lora_B" in name)  # which start at zero


@pytest.fixture(scope="module")
def processes(peft_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes found, and the folder they saved to."""
    folder = tmp_path_factory.mktemp("peft")
    return launch(peft_runs.together, 2, folder / "found.pt", folder=str(folder)), folder


# The gradients of adapters have rank two and at first none: SOAP's bases are then as rounding has them, which differs
# between numbers of processes (docs/distributed.md, "How equal is equal"), so its runs are alike on as many only.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "soap"])
def test_two_processes_train_as_one_and_one_resumes_what_they_saved(
    peft_runs: ModuleType, processes: Any, tmp_path: Path, family: str
) -> None:
    found, folder = processes
    assert_same(found[family]["whole"], peft_runs.train(str(tmp_path / "one"), family), 1e-9)
    saved = folder / family / "checkpoint-3"
    resumed = peft_runs.train(str(tmp_path / "again"), family, resume=str(saved))
    assert_same(resumed, found[family]["whole"], 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_resume_what_rank_0_saved(processes: Any, family: str) -> None:
    found = processes[0][family]
    assert_same(found["resumed"], found["whole"], 1e-9)


def test_switching_adapters_keeps_each_ones_state(peft: ModuleType, peft_runs: ModuleType) -> None:
    """A second adapter is a group of its own; while it is off it has no gradient and nothing of it moves."""
    model = peft_runs.adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.double()
    model.set_adapter("second")
    second = [(name, param) for name, param in model.named_parameters() if ".second." in name]
    model.set_adapter("default")
    optimizer = ks.SOAP(ks.param_groups(model), lr=1e-2)
    optimizer.add_param_group({"params": second})
    tokens = torch.arange(12).view(2, 6)
    for active in ("default", "second", "default"):
        model.set_adapter(active)
        before = weights(model)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        moved = {name for name, value in weights(model).items() if bool((value != before[name]).any())}
        assert moved
        assert all(f".{active}." in name for name in moved)
