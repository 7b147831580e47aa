"""peft: adapters train, what is frozen stays outside the plan, and runs resume."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kronscope as ks
from tests.integrations.tiny import FAMILIES, assert_same, language_model, needed, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's and transformers' own


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    return needed("peft")


def adapted(peft: ModuleType, **options: Any) -> Any:
    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    model = language_model()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**config)).double()


def test_frozen_weights_are_outside_the_plan(peft: ModuleType) -> None:
    model = adapted(peft)
    plan = {row.name: row for row in ks.KLShampoo(ks.param_groups(model), lr=1e-3).explain().rows}
    assert plan.keys() == {name for name, param in model.named_parameters() if param.requires_grad}
    assert all("lora_" in name for name in plan)
    assert all(row.method.startswith("KL-Shampoo") for row in plan.values())


def test_heads_that_are_trained_whole_get_adamw(peft: ModuleType) -> None:
    model = adapted(peft, modules_to_save=["lm_head", "embed_tokens"])
    rows = ks.Shampoo(ks.param_groups(model), lr=1e-3).explain().rows
    plan = {row.name: row.method for row in rows if "modules_to_save" in row.name}
    assert len(plan) == 2
    assert set(plan.values()) == {"AdamW (head)", "AdamW (embedding)"}


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_in_the_trainer_changes_no_bit(
    peft: ModuleType, trainer_runs: ModuleType, tmp_path: Path, family: str
) -> None:
    def train(folder: Path, resume: Path | None = None) -> dict[str, torch.Tensor]:
        running = trainer_runs.trainer(str(folder), family, model=adapted(peft))
        frozen = {name: value for name, value in weights(running.model).items() if "lora_" not in name}
        running.train(resume_from_checkpoint=None if resume is None else str(resume))
        found = weights(running.model)
        assert_same({name: found[name] for name in frozen}, frozen)
        return found

    whole = train(tmp_path / "whole")
    saved = tmp_path / "whole" / f"checkpoint-{trainer_runs.SAVED}"
    assert_same(train(tmp_path / "again", saved), whole)
    assert any(bool(value.any()) for name, value in whole.items() if "lora_B" in name)  # which start at zero


def test_switching_adapters_keeps_each_ones_state(peft: ModuleType) -> None:
    """A second adapter is a group of its own; while it is off it has no gradient and nothing of it moves."""
    model = adapted(peft)
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
