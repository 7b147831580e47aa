"""
Watch a run in Lightning
========================

Watch a Lightning run, stop it, and go on in the same folder.

Run it::

    python examples/lightning_watch.py

Needs lightning. ``kronscope watch FOLDER`` shows a run's folder; here it is a temporary one.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kronscope as ks


class Classifier(LightningModule):  # type: ignore[misc]
    """A perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.network(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """Use Shampoo."""
        return ks.Shampoo(ks.param_groups(self), lr=3e-3)


def fit(folder: str, epochs: int, checkpoint: str | None = None) -> tuple[ks.Watch, list[float]]:
    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    data = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32)
    callback = ks.integrations.lightning.WatchCallback(every=4, path=f"{folder}/watch")
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Classifier()
    trainer.fit(module, data, ckpt_path=checkpoint)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    assert callback.watch is not None
    return callback.watch, module.losses


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        _, losses = fit(folder, 3)
        print(f"step {len(losses)}: loss {losses[-1]:.4f}")
        watch, more = fit(folder, 6, f"{folder}/last.ckpt")
        print(f"step {len(losses) + len(more)}: loss {more[-1]:.4f}")
        steps = [record["step"] for record in watch.records]
        print("records of one run:" if steps == list(range(4, 49, 4)) else "records are missing:", steps)
        print(watch.to_pandas().tail(3)[["step", "layer", "gradient_norm", "update_ratio"]].to_string(index=False))


if __name__ == "__main__":
    main()
