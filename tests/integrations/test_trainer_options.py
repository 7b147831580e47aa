"""What people switch on in Transformers' Trainer, tried with our optimizers; resumed runs stay equal to whole ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kronscope as ks
from kronscope.integrations import unwrap
from tests.integrations.tiny import FAMILIES, assert_same, language_model, weights

# transformers, accelerate and torch warn of each other's deprecations
pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated gradients": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "bf16 autocast": {"bf16": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "no clipping": {"max_grad_norm": 0.0},
    "constant rate": {"lr_scheduler_type": "constant"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
    "one checkpoint kept": {"save_total_limit": 1, "save_steps": 3, "max_steps": 5},
}


def train(runs: ModuleType, folder: Path, family: str, resume: Path | None = None, **options: Any) -> Any:
    model = language_model(torch.float32 if options.get("bf16") else torch.float64)
    running = runs.trainer(str(folder), family, model=model, **options)
    running.train(resume_from_checkpoint=None if resume is None else str(resume))
    return running


@pytest.mark.parametrize("name", OPTIONS)
def test_resuming_changes_no_bit(trainer_runs: ModuleType, tmp_path: Path, name: str) -> None:
    family = list(FAMILIES)[list(OPTIONS).index(name) % len(FAMILIES)]
    options = OPTIONS[name]
    whole = train(trainer_runs, tmp_path / "whole", family, **{**options, "save_total_limit": None})
    saved = tmp_path / "whole" / f"checkpoint-{trainer_runs.SAVED}"
    again = train(trainer_runs, tmp_path / "again", family, saved, **options)
    assert_same(weights(again.model), weights(whole.model))
    assert any(bool((value != weights(language_model())[name]).any()) for name, value in weights(whole.model).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulated_gradients_are_those_of_the_larger_batch(
    trainer_runs: ModuleType, tmp_path: Path, family: str
) -> None:
    parts = train(trainer_runs, tmp_path / "a", family, **OPTIONS["accumulated gradients"])
    assert_same(weights(parts.model), trainer_runs.train(str(tmp_path / "b"), family), 1e-9)


def test_the_best_model_is_loaded_at_the_end(trainer_runs: ModuleType, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "save_total_limit": 1,
    }
    # the loss falls, so that with the largest as the best one an earlier checkpoint is kept and loaded
    options |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "greater_is_better": True}
    done = train(trainer_runs, tmp_path, "kl", **options)
    losses = {r["step"]: r["eval_loss"] for r in done.state.log_history if "eval_loss" in r}
    best = max(losses, key=lambda step: losses[step])
    assert best < trainer_runs.STEPS
    assert done.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert done.evaluate()["eval_loss"] == pytest.approx(losses[best])


def test_a_compiled_model_trains_as_a_plain_one(trainer_runs: ModuleType, tmp_path: Path) -> None:
    compiled = train(trainer_runs, tmp_path / "a", "kl", torch_compile=True, torch_compile_backend="aot_eager")
    plan = {row.name: row.method for row in unwrap(compiled.optimizer).explain().rows}
    assert plan["lm_head.weight"] == "AdamW (head)"
    assert_same(weights(compiled.model), trainer_runs.train(str(tmp_path / "b"), "kl"), 1e-9)


def test_layers_that_thaw_during_a_run_train_and_resume(trainer_runs: ModuleType, tmp_path: Path) -> None:
    """Frozen for the first step, after the optimizer was made; thawed at step 2, saved at step 3."""
    from transformers import TrainerCallback

    class Thaw(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            for param in model.model.layers[0].parameters():
                param.requires_grad_(state.global_step >= 1)

    def run(folder: Path, resume: Path | None = None) -> dict[str, torch.Tensor]:
        running = trainer_runs.trainer(str(folder), "shampoo")
        running.add_callback(Thaw())
        running.train(resume_from_checkpoint=None if resume is None else str(resume))
        return weights(running.model)

    whole = run(tmp_path / "whole")
    assert_same(run(tmp_path / "again", tmp_path / "whole" / f"checkpoint-{trainer_runs.SAVED}"), whole)
    before = weights(language_model())
    assert all(bool((whole[name] != value).any()) for name, value in before.items() if "proj" in name)


@pytest.mark.filterwarnings("default")
def test_the_bare_class_warns_of_a_table_without_a_name(trainer_runs: ModuleType, tmp_path: Path) -> None:
    running = trainer_runs.trainer(str(tmp_path), "kl", model=language_model(vocab_size=10000, hidden_size=128))
    running.optimizer_cls_and_kwargs = (ks.KLShampoo, {"lr": 1e-3})
    with pytest.warns(UserWarning, match="Pass the model itself"):
        running.create_optimizer()


def test_checkpoints_hold_tensors_only(trainer_runs: ModuleType, tmp_path: Path) -> None:
    trainer_runs.train(str(tmp_path), "soap")
    saved = tmp_path / f"checkpoint-{trainer_runs.SAVED}"
    state = torch.load(saved / "optimizer.pt", weights_only=True)
    assert state["param_groups"]
    assert json.loads((saved / "trainer_state.json").read_text(encoding="utf-8"))["global_step"] == trainer_runs.SAVED


@pytest.mark.filterwarnings("default")
def test_metrics_of_another_optimizer_are_a_warning_and_not_the_end(trainer_runs: ModuleType, tmp_path: Path) -> None:
    running = trainer_runs.trainer(str(tmp_path), "kl", logging_steps=1)
    running.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"lr": 1e-3})
    ks.integrations.transformers.log_metrics(running)
    with pytest.warns(UserWarning, match="no metrics are logged"):
        running.train()
    assert running.state.global_step == trainer_runs.STEPS
