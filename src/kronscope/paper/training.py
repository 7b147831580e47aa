"""Training a workload with measurements along the way; a killed run goes on as if nothing had happened.

A step depends only on the state before it, the seed and its own number: the order of the data and the random
numbers of a step are functions of both. So the state after a step is all a checkpoint has to hold.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from kronscope.errors import NonFiniteError
from kronscope.paper.data import Dataset, batch_indices, derive_seed
from kronscope.paper.models import logits
from kronscope.paper.scale import Settings
from kronscope.runs import Run

__all__ = ["Event", "Stateful", "Training"]


class Stateful(Protocol):
    """Something whose state belongs into a checkpoint, for example a gradient history."""

    def state_dict(self) -> dict[str, Any]:
        """Its state as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to such a state."""
        ...


@dataclass(frozen=True)
class Event:
    """Something that happened in training, or is due.

    Args:
        kind: ``train`` after a step; ``measure`` where something shall be measured; ``trained`` after the last step.
        step: Steps done.
        steps: Steps in all.
        loss: The loss of the last step, with ``train``.
        seconds_left: An estimate of the training that is left, with ``train``.
    """

    kind: Literal["train", "measure", "trained"]
    step: int
    steps: int
    loss: float = float("nan")
    seconds_left: float = float("nan")


class Training:
    r"""A workload in training: :math:`\theta_{t+1} = \text{optimizer}(\theta_t, \nabla \ell_{B_t}(\theta_t))`.

    Here :math:`\ell_{B_t}` is the loss on batch :math:`B_t`, which ``settings.seed`` and :math:`t` decide. Use it in a
    ``with`` block, in which torch's kernels are repeatable and the random numbers are the run's own.

    Args:
        settings: What to train, from :func:`~kronscope.paper.scale.scaled` and
            :meth:`~kronscope.paper.scale.Settings.on`.
        dataset: The data.
        run: Where to log and checkpoint; training goes on from its latest checkpoint. None keeps nothing. Processes
            that share a run take every step alike, on the whole batch, so that it is the run of one.
        checkpoint_seconds: Write a checkpoint when the last one is older than this.

    Attributes:
        model: The model after ``step`` steps.
        optimizer: Its optimizer.
        step: Steps done.
        resumed: Whether it goes on from a checkpoint.

    >>> from kronscope.paper import scale
    >>> settings = scale.scaled("digits-linear", steps=3)
    >>> with Training(settings, settings.load_data()) as training:
    ...     print(*(f"{event.kind} {event.step}" for event in training.events()), sep=", ")
    measure 0, train 1, measure 1, train 2, measure 2, train 3, measure 3, trained 3
    """

    def __init__(
        self, settings: Settings, dataset: Dataset, run: Run | None = None, *, checkpoint_seconds: float = 60.0
    ) -> None:
        self._settings, self._dataset, self._run = settings, dataset, run
        self._checkpoint_seconds = checkpoint_seconds
        self.model = settings.build_model(dataset).train()
        self._loss = settings.definition.loss().to(settings.device)
        self.optimizer = settings.definition.make_optimizer(self.model)
        self._checkpoint = run.latest() if run is not None else None
        self.resumed = self._checkpoint is not None
        self.step, self._saved_step, self._saved_at = 0, -1, time.monotonic()
        if self._checkpoint is not None:
            self.model.load_state_dict(self._checkpoint.state["model"])
            self.optimizer.load_state_dict(self._checkpoint.state["optimizer"])
            self.step = self._saved_step = self._checkpoint.step
        self._watchers: dict[str, Stateful] = {}
        self._torch = contextlib.ExitStack()

    def __enter__(self) -> Training:
        self._torch.enter_context(_repeatable(torch.device(self._settings.device)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._torch.close()

    def include(self, name: str, watcher: Stateful) -> None:
        """Save the state of something else with every checkpoint; restore it first, if this training was resumed."""
        self._watchers[name] = watcher
        if self._checkpoint is not None:
            watcher.load_state_dict(self._checkpoint.state["watchers"][name])

    def events(self) -> Iterator[Event]:
        """Train to the end, and say what happens.

        At ``measure`` the model is in training mode and a checkpoint has been written, so a kill during a long
        measurement costs no more than that. The same event then comes again: what was measured should be kept by step.

        Raises:
            NonFiniteError: The loss is not a number any more.
        """
        steps = self._settings.steps
        began, first, measuring = time.monotonic(), self.step, 0.0
        while True:
            if self.step in self._settings.measure_at:
                self._save()
                started = time.monotonic()
                yield Event("measure", self.step, steps)
                self.model.train()
                measuring += time.monotonic() - started
            if self.step >= steps:
                break
            loss = self._advance()
            self._save(older_than=self._checkpoint_seconds)
            each = (time.monotonic() - began - measuring) / (self.step - first)
            yield Event("train", self.step, steps, loss, each * (steps - self.step))
        self._save()
        yield Event("trained", self.step, steps)

    def _advance(self) -> float:
        settings = self._settings
        _seed(derive_seed(settings.seed, "step", self.step), torch.device(settings.device))
        chosen = batch_indices(len(self._dataset), settings.batch, settings.seed, self.step)
        inputs, targets = (tensor.to(settings.device) for tensor in self._dataset.batch(chosen))
        self.optimizer.zero_grad()
        loss = self._loss(logits(self.model, inputs), targets)
        value = float(loss.detach())
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"The loss of {settings.workload} is {value} at step {self.step + 1}: training has diverged. "
                f"A smaller learning rate (--lr), a warm-up (--warmup) or a larger batch (--batch) may help."
            )
        loss.backward()
        if settings.warmup:
            for group in self.optimizer.param_groups:
                group["lr"] = settings.definition.lr * min(1.0, (self.step + 1) / settings.warmup)
        self.optimizer.step()
        self.step += 1
        if self._run is not None:
            self._run.log(self.step, loss=value)
        return value

    def _save(self, *, older_than: float = 0.0) -> None:
        """Write a checkpoint, unless this step has one or the last one is recent enough."""
        if self._run is None or self._saved_step == self.step:
            return
        due = time.monotonic() - self._saved_at >= older_than
        # clocks differ: rank 0 decides for all
        if not self._run.processes.broadcast_object(due):
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "watchers": {name: watcher.state_dict() for name, watcher in self._watchers.items()},
        }
        self._run.checkpoint(self.step, state)
        self._saved_step, self._saved_at = self.step, time.monotonic()


@contextlib.contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Repeatable kernels, and random numbers of our own; both as they were afterwards."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            # A measurement may use an operation that has no repeatable form: worth a warning, not a lost run.
            torch.use_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
