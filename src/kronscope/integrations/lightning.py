"""Lightning: a callback that logs the optimizer's metrics."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from kronscope.errors import OptionError
from kronscope.integrations.wrapped import PREFIX, find, last_metrics

__all__ = ["MetricsCallback"]


class MetricsCallback(Callback):  # type: ignore[misc]  # of type Any where lightning is not installed
    """Logs the metrics of our optimizers to the trainer's loggers, every ``trainer.log_every_n_steps`` steps.

    They are in ``trainer.callback_metrics`` too. If there are several optimizers, each name contains the optimizer's
    place in ``configure_optimizers``: ``kronscope/0/…``.

    Raises:
        OptionError: when training starts, if none of the optimizers is ours.

    >>> isinstance(MetricsCallback(), Callback)  # Trainer(callbacks=[MetricsCallback()])
    True
    """

    def __init__(self) -> None:
        self._logged = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a trainer that has no optimizer of ours."""
        if not any(find(optimizer) for optimizer in trainer.optimizers):
            raise OptionError(
                f"MetricsCallback logs Shampoo, SOAP and KLShampoo, but configure_optimizers returned "
                f"{[type(optimizer).__name__ for optimizer in trainer.optimizers]}; return one of ours or leave it out."
            )
        self._logged = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log after a batch whose step is due; with accumulated gradients not every batch has a step."""
        step = trainer.global_step
        if step == self._logged or step % trainer.log_every_n_steps:
            return
        self._logged = step
        values: dict[str, float] = {}
        for place, optimizer in enumerate(trainer.optimizers):
            if find(optimizer) is not None:
                found = last_metrics(optimizer)
                if len(trainer.optimizers) > 1:
                    found = {f"{PREFIX}{place}/{name.removeprefix(PREFIX)}": value for name, value in found.items()}
                values.update(found)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
