"""Transformers' Trainer: whole runs equal resumed ones, on one process and across numbers of processes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kronscope as ks
from tests.integrations.launch import launch
from tests.integrations.tiny import FAMILIES, assert_same, language_model

# transformers, accelerate and torch warn of each other's deprecations
pytestmark = pytest.mark.filterwarnings("ignore")
# Sums over another number of processes, in float64; the weights are of the order of 0.1.
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def processes(trainer_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes found, and the folder they saved to."""
    folder = tmp_path_factory.mktemp("trainer")
    return launch(trainer_runs.together, 2, folder / "found.pt", folder=str(folder)), folder


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_on_one_process_changes_no_bit(trainer_runs: ModuleType, tmp_path: Path, family: str) -> None:
    whole = trainer_runs.train(str(tmp_path / "whole"), family)
    saved = tmp_path / "whole" / f"checkpoint-{trainer_runs.SAVED}"
    assert_same(trainer_runs.train(str(tmp_path / "again"), family, resume=str(saved)), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_as_one(trainer_runs: ModuleType, processes: Any, tmp_path: Path, family: str) -> None:
    assert_same(processes[0][family]["whole"], trainer_runs.train(str(tmp_path), family), ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_resume_what_rank_0_saved(processes: Any, family: str) -> None:
    found = processes[0][family]
    assert_same(found["resumed"], found["whole"], ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_resumes_what_two_saved(
    trainer_runs: ModuleType, processes: Any, tmp_path: Path, family: str
) -> None:
    found, folder = processes
    saved = folder / family / f"checkpoint-{trainer_runs.SAVED}"
    resumed = trainer_runs.train(str(tmp_path), family, resume=str(saved), ignore_data_skip=False)
    assert_same(resumed, found[family]["whole"], ROUNDING)


def test_two_processes_resume_what_one_saved(trainer_runs: ModuleType, tmp_path: Path) -> None:
    whole = trainer_runs.train(str(tmp_path / "whole"), "kl")
    saved = tmp_path / "whole" / f"checkpoint-{trainer_runs.SAVED}"
    options = {"folder": str(tmp_path / "again"), "family": "kl", "processes": 2, "resume": str(saved)}
    assert_same(launch(trainer_runs.train, 2, tmp_path / "found.pt", **options), whole, ROUNDING)


def test_the_helper_recognises_embeddings_and_heads(trainer_runs: ModuleType, tmp_path: Path) -> None:
    running = trainer_runs.trainer(str(tmp_path), "kl")
    plan = {row.name: row.method for row in running.create_optimizer().explain().rows}
    assert plan["model.embed_tokens.weight"] == "AdamW (embedding)"
    assert plan["lm_head.weight"] == "AdamW (head)"
    assert plan["model.layers.0.mlp.up_proj.weight"].startswith("KL-Shampoo")
    groups = running.optimizer.param_groups
    assert {group["lr"] for group in groups} == {1e-2}
    assert {(param.ndim > 1, group["weight_decay"]) for group in groups for param in group["params"]} == {
        (True, 0.01),
        (False, 0.0),
    }


def test_options_take_precedence_over_the_arguments(trainer_runs: ModuleType, tmp_path: Path) -> None:
    made, options = ks.integrations.transformers.optimizer(
        ks.SOAP, trainer_runs.arguments(str(tmp_path)), lr=0.5, refresh=3, groups=lambda model: model.named_parameters()
    )
    (group,) = made()(language_model(), **options).param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.01)


def test_metrics_are_in_the_log_of_the_trainer(trainer_runs: ModuleType, tmp_path: Path) -> None:
    running = trainer_runs.trainer(str(tmp_path), "kl", max_steps=3, logging_steps=1)
    callback = ks.integrations.transformers.log_metrics(running)
    running.train()
    found = [record for record in running.state.log_history if any(name.startswith("kronscope/") for name in record)]
    assert [record["step"] for record in found] == [1, 2, 3]
    losses = [record for record in running.state.log_history if "loss" in record]
    assert len(losses) == 3  # our records do not take the place of the trainer's own
    expected = ks.integrations.last_metrics(running.optimizer)
    assert {name: value for name, value in found[-1].items() if name.startswith("kronscope/")} == expected
    running.remove_callback(callback)


def test_metrics_go_to_a_logger(trainer_runs: ModuleType, tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    running = trainer_runs.trainer(str(tmp_path), "soap", max_steps=4, logging_steps=2)
    running.add_callback(ks.integrations.transformers.MetricsCallback(lambda *record: seen.append(record)))
    running.train()
    assert [step for step, _ in seen] == [2, 4]
    assert all(isinstance(value, float) for _, values in seen for value in values.values())
