"""Training a workload with measurements along the way; a killed run goes on as if nothing had happened.

A step depends only on the state before it, the seed and its own number: the order of the data and the random
numbers of a step are functions of both. So the state after a step is all a checkpoint has to hold.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from kronscope.errors import NonFiniteError
from kronscope.paper.data import Dataset, batch_indices, derive_seed
from kronscope.paper.models import logits
from kronscope.paper.scale import Settings
from kronscope.paper.shared import AnyRun, processes_of

__all__ = ["Progress", "Stateful", "train"]


class Stateful(Protocol):
    """Something whose state belongs into a checkpoint, for example a gradient history."""

    def state_dict(self) -> dict[str, Any]:
        """Its state as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to such a state."""
        ...


class Progress(Protocol):
    """Called after every step."""

    def __call__(self, step: int, steps: int, loss: float, seconds_left: float) -> None:
        """Steps done, steps in all, the loss of the last step, and the estimate of the time left."""
        ...


def train(
    settings: Settings,
    dataset: Dataset,
    *,
    run: AnyRun | None = None,
    on_start: Callable[[nn.Module, Optimizer], Mapping[str, Stateful] | None] | None = None,
    on_measure: Callable[[int, nn.Module], None] | None = None,
    progress: Progress | None = None,
    checkpoint_seconds: float = 60.0,
) -> nn.Module:
    r"""Train a workload: :math:`\theta_{t+1} = \text{optimizer}(\theta_t, \nabla \ell_{B_t}(\theta_t))`.

    Here :math:`\ell_{B_t}` is the loss on batch :math:`B_t`, which ``settings.seed`` and :math:`t` decide.

    Args:
        settings: What to train, from :func:`~kronscope.paper.scale.scaled` and
            :meth:`~kronscope.paper.scale.Settings.on`.
        dataset: The data.
        run: Where to log and checkpoint; training goes on from its latest checkpoint. None keeps nothing. Processes
            that share a run take every step alike, on the whole batch, so that it is the run of one.
        on_start: Called once with model and optimizer, before the first step of this session: the place to
            attach hooks. What it returns is saved with every checkpoint and restored from it.
        on_measure: Called with the number of steps done and the model, at each of ``settings.measure_at``, in
            training mode. A checkpoint is written first, so a kill during a long measurement costs no
            more than that; it is then called for the same step again, so what it keeps should be kept by
            step, with :meth:`Run.store <kronscope.paper.runs.Run.store>`.
        progress: Called after every step.
        checkpoint_seconds: Write a checkpoint when the last one is older than this.

    Returns:
        The trained model.

    Raises:
        NonFiniteError: The loss is not a number any more.

    >>> from kronscope.paper import scale
    >>> settings = scale.scaled("digits-linear", steps=3)
    >>> dataset = settings.load_data()
    >>> steps = []
    >>> model = train(settings, dataset, on_measure=lambda step, model: steps.append(step))
    >>> steps == list(settings.measure_at)
    True
    """
    device = torch.device(settings.device)
    with _repeatable(device):
        session = _Session(settings, dataset, run, on_start)
        began, first = time.monotonic(), session.step
        measuring = 0.0
        while True:
            if on_measure is not None and session.step in settings.measure_at:
                session.save()
                started = time.monotonic()
                on_measure(session.step, session.model)
                session.model.train()
                measuring += time.monotonic() - started
            if session.step >= settings.steps:
                break
            loss = session.advance()
            session.save(older_than=checkpoint_seconds)
            if progress is not None:
                each = (time.monotonic() - began - measuring) / (session.step - first)
                progress(session.step, settings.steps, loss, each * (settings.steps - session.step))
        session.save()
        return session.model


class _Session:
    """Model, optimizer and what watches them, after ``step`` steps."""

    def __init__(
        self,
        settings: Settings,
        dataset: Dataset,
        run: AnyRun | None,
        on_start: Callable[[nn.Module, Optimizer], Mapping[str, Stateful] | None] | None,
    ) -> None:
        self.settings, self.dataset, self.run = settings, dataset, run
        self.model = settings.build_model(dataset).train()
        self.loss = settings.definition.loss().to(settings.device)
        self.optimizer = settings.definition.make_optimizer(self.model)
        checkpoint = run.latest() if run is not None else None
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint.state["model"])
            self.optimizer.load_state_dict(checkpoint.state["optimizer"])
        self.watchers = dict((on_start(self.model, self.optimizer) if on_start is not None else None) or {})
        if checkpoint is not None:
            for name, watcher in self.watchers.items():
                watcher.load_state_dict(checkpoint.state["watchers"][name])
        self.step = 0 if checkpoint is None else checkpoint.step
        self._saved_step = -1 if checkpoint is None else checkpoint.step
        self._saved_at = time.monotonic()

    def advance(self) -> float:
        """One training step."""
        settings = self.settings
        _seed(derive_seed(settings.seed, "step", self.step), torch.device(settings.device))
        chosen = batch_indices(len(self.dataset), settings.batch, settings.seed, self.step)
        inputs, targets = (tensor.to(settings.device) for tensor in self.dataset.batch(chosen))
        self.optimizer.zero_grad()
        loss = self.loss(logits(self.model, inputs), targets)
        value = float(loss.detach())
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"The loss of {settings.workload} is {value} at step {self.step + 1}: training has diverged. "
                f"A larger batch (--batch) or another seed (--seed) may help; the learning rate is given."
            )
        loss.backward()
        self.optimizer.step()
        self.step += 1
        if self.run is not None:
            self.run.log(self.step, loss=value)
        return value

    def save(self, *, older_than: float = 0.0) -> None:
        """Write a checkpoint, unless this step has one or the last one is recent enough."""
        if self.run is None or self._saved_step == self.step:
            return
        due = time.monotonic() - self._saved_at >= older_than
        # clocks differ: rank 0 decides for all
        if not processes_of(self.run).broadcast_object(due):
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "watchers": {name: watcher.state_dict() for name, watcher in self.watchers.items()},
        }
        self.run.checkpoint(self.step, state)
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
