"""Lightning: callbacks that log the optimizer's metrics and watch a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from kronscope.errors import OptionError
from kronscope.integrations.wrapped import PREFIX, find, last_metrics
from kronscope.watching import Watch, watch

__all__ = ["MetricsCallback", "WatchCallback"]


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


class WatchCallback(Callback):  # type: ignore[misc]  # as above
    """Watches the run of a Lightning trainer, whatever its optimizer; a resumed run goes on in the same folder.

    Numbers go to the trainer's loggers, unless ``log`` says otherwise. On every process of a distributed run; the first
    one writes and logs.

    Args:
        every: Steps from one record to the next.
        optimizer: The place of the optimizer in ``configure_optimizers``, where there are several.
        options: For :func:`kronscope.watch`: ``loss`` and ``data``, ``layers``, ``path``, ``log``, ``budget``, ...

    Attributes:
        watch: The :class:`kronscope.Watch`, once training has begun.

    >>> callback = WatchCallback(every=50, path="out/watch")
    """

    def __init__(self, every: int = 100, optimizer: int = 0, **options: Any) -> None:
        self._every, self._place, self._options = every, optimizer, options
        self.watch: Watch | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or go on at the step of the checkpoint that was loaded."""

        def log(step: int, values: Mapping[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(dict(values), step=step)

        # of several optimizers each has its own steps, which the trainer's count adds up
        start = trainer.global_step if len(trainer.optimizers) == 1 else None
        options = {"log": log, "start": start, **self._options}
        self.watch = watch(trainer.optimizers[self._place], pl_module, self._every, **options)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the folder."""
        if self.watch is not None:
            self.watch.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of it when training fails, too."""
        self.on_train_end(trainer, pl_module)
