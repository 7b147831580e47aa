"""Training with Transformers' Trainer, on one process or many; started by the tests, and by torchrun for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Trainer, TrainingArguments

import kronscope as ks
from tests.integrations.tiny import FAMILIES, Sentences, language_model, weights

BATCH, STEPS, SAVED = 8, 6, 3


def arguments(folder: str, processes: int = 1, **options: Any) -> TrainingArguments:
    """A schedule with a warm-up, clipped gradients, weight decay, and a checkpoint half-way."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // processes,
        "max_steps": STEPS,
        "save_steps": SAVED,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(folder, **{**settings, **options})


def trainer(folder: str, family: str, processes: int = 1, model: Any = None, **options: Any) -> Trainer:
    """A Trainer as the page for it shows."""
    chosen = arguments(folder, processes, **options)
    return Trainer(
        language_model() if model is None else model,
        chosen,
        train_dataset=Sentences(),
        eval_dataset=Sentences(8),
        optimizer_cls_and_kwargs=ks.integrations.transformers.optimizer(FAMILIES[family], chosen),
    )


def train(folder: str, family: str, processes: int = 1, resume: str | None = None, **options: Any) -> dict[str, Tensor]:
    """Train from the start or from a checkpoint and return the weights."""
    running = trainer(folder, family, processes, **options)
    running.train(resume_from_checkpoint=resume)
    return weights(running.model)


def together(folder: str, **options: Any) -> dict[str, dict[str, Any]]:
    """On two processes: a whole run that saves half-way, and one that resumes from there."""
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        whole = train(f"{folder}/{family}", family, 2, **options)
        saved = f"{folder}/{family}/checkpoint-{SAVED}"
        found[family] = {"whole": whole, "resumed": train(f"{folder}/{family}-again", family, 2, saved, **options)}
    return found
