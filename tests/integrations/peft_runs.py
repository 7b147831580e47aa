"""Training adapters with Transformers' Trainer, on one process or many; started by tests and by torchrun."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.integrations import trainer_runs
from tests.integrations.tiny import FAMILIES, language_model, weights


def adapted(**options: Any) -> Any:
    """The small Llama with adapters, the same in every call."""
    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    model = language_model()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**config)).double()


def train(folder: str, family: str, processes: int = 1, resume: str | None = None) -> dict[str, Tensor]:
    """Train from the start or from a checkpoint and return the weights; what is frozen stays as it was."""
    running = trainer_runs.trainer(folder, family, processes, model=adapted())
    frozen = {name: value for name, value in weights(running.model).items() if "lora_" not in name}
    running.train(resume_from_checkpoint=resume)
    found = weights(running.model)
    assert all(torch.equal(found[name], value) for name, value in frozen.items())
    return found


def together(folder: str) -> dict[str, dict[str, Any]]:
    """On two processes: a whole run that saves half-way, and one that resumes from there."""
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        whole = train(f"{folder}/{family}", family, 2)
        saved = f"{folder}/{family}/checkpoint-{trainer_runs.SAVED}"
        found[family] = {"whole": whole, "resumed": train(f"{folder}/{family}-again", family, 2, saved)}
    return found
