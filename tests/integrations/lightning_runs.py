"""Training with Lightning, on one process or many; started by the tests, and by torchrun for them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import kronscope as ks
from tests.integrations.tiny import FAMILIES, network, points, weights

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
BATCH, STEPS, SAVED = 8, 6, 3


class Classifier(LightningModule):  # type: ignore[misc]
    """A small network with a schedule, as the page for Lightning shows."""

    def __init__(self, family: str, **options: Any) -> None:
        super().__init__()
        self.network = network()
        self.family, self.options = family, options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.network(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = FAMILIES[self.family](ks.param_groups(self), lr=1e-2, weight_decay=0.01, **self.options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(processes: int, rank: int = 0) -> DataLoader[Any]:
    """The same samples in each global batch, whatever the number of processes; an epoch is one of them.

    A resumed run takes up its data where Lightning thinks it was, which with AdamW too is not always where it was.
    """
    data = points(BATCH)
    sampler: DistributedSampler[Any] = DistributedSampler(data, processes, rank, shuffle=False)
    return DataLoader(data, BATCH // processes, sampler=sampler)


def trainer(folder: str, processes: int = 1, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": processes,
        "strategy": "ddp" if processes > 1 else "auto",
        "max_steps": STEPS,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
        "logger": False,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "callbacks": [ModelCheckpoint(folder, every_n_epochs=SAVED, save_top_k=-1, filename="{step}")],
    }
    return Trainer(**{**settings, **options})


def train(
    folder: str, family: str, processes: int = 1, resume: str | None = None, rank: int = 0, **options: Any
) -> dict[str, Tensor]:
    """Train from the start or from a checkpoint and return the weights."""
    module = Classifier(family)
    trainer(folder, processes, **options).fit(module, loader(processes, rank), ckpt_path=resume)
    return weights(module)


def together(folder: str) -> dict[str, dict[str, Any]]:
    """On two processes: a whole run that saves half-way, and one that resumes from there."""
    import os

    rank = int(os.environ["RANK"])
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        whole = train(f"{folder}/{family}", family, 2, rank=rank)
        saved = f"{folder}/{family}/step={SAVED}.ckpt"
        found[family] = {"whole": whole, "resumed": train(f"{folder}/{family}-again", family, 2, saved, rank)}
    return found
