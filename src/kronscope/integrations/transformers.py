"""Transformers' Trainer: an optimizer with the right groups, and callbacks that log its metrics and watch the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kronscope.errors import OptionError
from kronscope.integrations.wrapped import last_metrics
from kronscope.optim import param_groups
from kronscope.optim.base import KroneckerOptimizer
from kronscope.support.callers import callers_level
from kronscope.watching import Watch, watch

__all__ = ["MetricsCallback", "WatchCallback", "log_metrics", "optimizer"]


def optimizer(
    family: type[KroneckerOptimizer],
    args: TrainingArguments,
    *,
    groups: Callable[[nn.Module], list[dict[str, Any]]] = param_groups,
    **options: Any,
) -> tuple[Callable[[], Callable[..., Optimizer]], dict[str, Any]]:
    """Return what Trainer's argument ``optimizer_cls_and_kwargs`` takes, so that parameters have names and roles.

    If Trainer were given the class alone, it would hand over tensors without names, and embeddings and heads would be
    preconditioned. Learning rate and weight decay are those of the training arguments; betas and eps are not, since
    Adam's defaults do not suit these optimizers.

    Args:
        family: :class:`~kronscope.Shampoo`, :class:`~kronscope.SOAP` or :class:`~kronscope.KLShampoo`.
        args: The training arguments.
        groups: A function that makes groups from the model, for example ``partial(ks.param_groups, overrides=…)``.
        options: Further options of the optimizer; ``lr`` and ``weight_decay`` take precedence over the training
            arguments.

    Returns:
        A class and its keyword arguments.

    >>> import kronscope as ks
    >>> make, options = optimizer(ks.KLShampoo, TrainingArguments("out", learning_rate=1e-3, report_to=[]), refresh=20)
    >>> make()(nn.Linear(3, 2), **options).param_groups[0]["lr"], options["refresh"]
    (0.001, 20)
    """

    def build(model: nn.Module, **chosen: Any) -> Optimizer:
        return family(groups(model), **chosen)

    return lambda: build, {"lr": args.learning_rate, "weight_decay": args.weight_decay, **options}


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # of type Any where transformers is not analysed
    """Hands the optimizer's metrics to a logger whenever Trainer logs its training loss; on the first process only.

    If the optimizer is not one of ours there is nothing to log: the callback warns once, and training goes on.

    Args:
        log: A callable ``(step, {name: float})``, for example one of :mod:`kronscope.integrations.loggers`.

    >>> from kronscope.integrations.loggers import CSV
    >>> callback = MetricsCallback(CSV("metrics.csv"))  # Trainer(..., callbacks=[callback])
    """

    def __init__(self, log: Callable[[int, Mapping[str, float]], object]) -> None:
        self._log = log
        self._warned = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        optimizer: object = None,
        **kwargs: Any,
    ) -> None:
        """Log after a training record; evaluation's and our own have no ``loss``."""
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        try:
            values = last_metrics(optimizer)
        except OptionError as error:
            if not self._warned:
                warnings.warn(f"no metrics are logged: {error}", stacklevel=callers_level())
            self._warned = True
            return
        self._log(state.global_step, values)


class WatchCallback(TrainerCallback):  # type: ignore[misc]  # as above
    """Watches the run of a Trainer, whatever its optimizer; a run that is resumed goes on in the same folder.

    On every process of a distributed run; the first one writes and logs. The training loss that Trainer logs is in the
    records.

    Args:
        every: Steps from one record to the next.
        options: For :func:`kronscope.watch`: ``loss`` and ``data``, ``layers``, ``path``, ``log``, ``budget``, ...

    Attributes:
        watch: The :class:`kronscope.Watch`, once training has begun.

    >>> from kronscope.integrations.loggers import CSV
    >>> callback = WatchCallback(every=50, path="out/watch", log=CSV("out/watch.csv"))
    """

    def __init__(self, every: int = 100, **options: Any) -> None:
        self._every, self._options = every, options
        self.watch: Watch | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Begin, or go on at the step of the checkpoint that was loaded."""
        self.watch = watch(optimizer, model, self._every, start=state.global_step, **self._options)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take note of the training loss."""
        if self.watch is not None and isinstance(loss := (logs or {}).get("loss"), float):
            self.watch.note(loss=loss)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let go of the folder."""
        if self.watch is not None:
            self.watch.detach()


def log_metrics(trainer: Trainer) -> MetricsCallback:
    """Let a Trainer log the optimizer's metrics to everything it reports to, and into ``trainer.state.log_history``.

    Args:
        trainer: The trainer.

    Returns:
        The callback, which ``trainer.remove_callback`` takes.

    >>> class Recording:  # stands for transformers.Trainer
    ...     def add_callback(self, callback):
    ...         self.callback = callback
    >>> trainer = Recording()
    >>> log_metrics(trainer) is trainer.callback
    True
    """
    callback = MetricsCallback(lambda step, values: trainer.log(dict(values)))
    trainer.add_callback(callback)
    return callback
