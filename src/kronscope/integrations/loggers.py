"""Callables ``(step, {name: float})`` that write to TensorBoard, Weights & Biases or a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kronscope.errors import MissingExtraError, OptionError

__all__ = ["CSV", "TensorBoard", "WandB"]


class CSV:
    """Append to a CSV file with the columns step, name and value.

    One line per value, because names may come and go during a run; ``pandas.read_csv(path).pivot(index="step",
    columns="name", values="value")`` makes the wide table. Every call leaves a whole file behind.

    Args:
        path: The file; created with its folder, continued where it exists.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = CSV(f"{folder}/run/metrics.csv")
    ...     log(10, {"milliseconds": 2.5})
    ...     print(log.path.read_text())
    step,name,value
    10,milliseconds,2.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Append a step's values."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists() or self.path.stat().st_size == 0
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(("step", "name", "value"))
            writer.writerows((step, name, float(value)) for name, value in values.items())


class TensorBoard:
    """Write numbers to TensorBoard.

    Args:
        where: A folder, or a ``SummaryWriter`` that is open already.

    Raises:
        MissingExtraError: tensorboard is not installed.

    >>> class Writer:  # stands for torch.utils.tensorboard.SummaryWriter
    ...     def add_scalar(self, name, value, step):
    ...         print(step, name, value)
    ...     def flush(self):
    ...         pass
    >>> TensorBoard(Writer())(10, {"milliseconds": 2.5})
    10 milliseconds 2.5
    """

    def __init__(self, where: Any) -> None:
        if isinstance(where, str | os.PathLike):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingExtraError("TensorBoard needs the package tensorboard: pip install tensorboard") from error
            where = SummaryWriter(log_dir=os.fspath(where))
        self.writer = where

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's values, and flush: a run that is killed keeps them."""
        for name, value in values.items():
            self.writer.add_scalar(name, float(value), step)
        self.writer.flush()


class WandB:
    """Write numbers to a Weights & Biases run, also to an offline one.

    They have an axis of their own, ``kronscope/logged_step``, because W&B drops values whose step is behind its own
    counter, and that counter belongs to the training loop.

    Args:
        run: What ``wandb.init`` returned; None takes the run that is active.

    Raises:
        MissingExtraError: wandb is not installed.
        OptionError: no run is active.

    >>> class WandbRun:  # stands for what wandb.init returns
    ...     def define_metric(self, name, step_metric=None):
    ...         pass
    ...     def log(self, values):
    ...         print(values)
    >>> WandB(WandbRun())(10, {"milliseconds": 2.5})
    {'milliseconds': 2.5, 'kronscope/logged_step': 10}
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise MissingExtraError("WandB needs the package wandb: pip install wandb") from error
            run = wandb.run
            if run is None:
                raise OptionError('no W&B run is active; call wandb.init() first (mode="offline" needs no network).')
        self.run = run
        self._known: set[str] = set()

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step's values."""
        for name in values.keys() - self._known:
            self.run.define_metric(name, step_metric="kronscope/logged_step")
            self._known.add(name)
        self.run.log({**{name: float(value) for name, value in values.items()}, "kronscope/logged_step": step})
