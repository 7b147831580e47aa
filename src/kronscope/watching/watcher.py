"""Watch a training run: hooks around the optimizer's step that change nothing."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kronscope.errors import KronscopeError, OptionError, RunError
from kronscope.gradients.losses import LossFunction
from kronscope.measures import Results
from kronscope.measures.rows import Row
from kronscope.measures.schema import to_plain
from kronscope.optim.base import KroneckerOptimizer
from kronscope.runs import Run
from kronscope.support.callers import callers_level
from kronscope.support.checks import count, whole
from kronscope.support.processes import Processes, find_processes
from kronscope.watching.clock import StepClock
from kronscope.watching.findings import findings
from kronscope.watching.layers import WatchedLayers, innermost, steps_taken
from kronscope.watching.measuring import Measuring
from kronscope.watching.records import FILE, WatchRecords

if TYPE_CHECKING:
    import pandas as pd
    from torch.distributed import ProcessGroup

__all__ = ["Watch", "watch"]

Log = Callable[[int, Mapping[str, float]], object]


def watch(
    optimizer: Optimizer,
    model: nn.Module,
    every: int = 100,
    loss: LossFunction | None = None,
    data: Iterable[Any] | None = None,
    layers: Sequence[str] | str | None = None,
    path: str | os.PathLike[str] | None = None,
    log: Log | None = None,
    *,
    budget: float = 0.1,
    max_samples: int | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    start: int | None = None,
    distributed: bool | ProcessGroup | None = None,
) -> Watch:
    """Watch a training run, whatever its optimizer; training is unchanged to the bit, random numbers included.

    Every ``every`` steps a record is made of each layer: the norm of its gradient, the size of its step relative to the
    weights, and for our optimizers condition, effective rank, age and error of the roots. With ``loss`` and ``data``
    also the cosines of the live preconditioner (ours, or the second moments of torch's optimizers), of the optimal
    Kronecker product and of Shampoo² with the Gauss–Newton matrix, as often as ``budget`` allows.

    With ``path`` the records are in a folder, which ``kronscope watch PATH`` shows while the run goes on. A run that
    was killed goes on in the same folder: ``ks.watch`` is called again, after the checkpoint was loaded.

    Args:
        optimizer: Any torch optimizer, or a framework's wrapper around one.
        model: The model whose parameters it trains.
        every: Steps from one record to the next.
        loss: The loss, as for :func:`kronscope.measure`; given together with ``data``.
        data: Batches ``(inputs, targets)`` to measure on, as for :func:`kronscope.measure`. A few dozen samples do.
        layers: Names, globs, row ranges and stacks as for :func:`kronscope.measure`; None takes every matrix that the
            optimizer trains and that is not frozen.
        path: A folder for the records.
        log: Called with the step and named numbers for each record; ``ks.integrations.loggers`` has some.
        budget: The fraction of training's time that measuring cosines may take, at every moment of the run; a first
            look at the layers may take half a second before. What a measurement will take is predicted from smaller
            ones. Where measuring all layers takes longer, they take turns, and records in between have no cosines; the
            page and ``print(watch)`` say when the next ones are due. ``math.inf`` measures all layers for every record.
        max_samples: Measure on the first samples of the data only.
        forward: ``(model, inputs) -> outputs`` for models with their own conventions, for measuring.
        start: Steps taken before. None: what the optimizer has counted; where it counts none, as SGD, what the
            folder has recorded.
        distributed: None takes all processes if torch.distributed is initialised, and all of them must call this, each
            with its own part of the data; False this one alone; or a process group.

    Returns:
        The watch; a context manager, or call its ``detach``.

    Raises:
        OptionError: an argument is not among the allowed values.
        LayerError: a layer does not exist, is no matrix, or is not trained by this optimizer.
        DataError: the data can be iterated only once.
        RunError: the folder holds another run, or is in use.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(optimizer, model, every=2) as watching:
    ...     for _ in range(4):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 3)).sum().backward()
    ...         optimizer.step()
    >>> [record["step"] for record in watching.records]
    [2, 4]
    """
    inner = innermost(optimizer)
    if not isinstance(inner, Optimizer):
        raise OptionError(f"watch needs a torch optimizer, got {type(optimizer).__name__}.")
    if (loss is None) != (data is None):
        raise OptionError("loss and data are given together, or neither: cosines need both.")
    processes = find_processes(distributed)
    processes.barrier("ks.watch")
    with processes.failing_together():
        every = count("every", every)
        start = None if start is None else whole("start", start)
        watched = WatchedLayers(inner, model, layers, processes)
        measuring = None
        if loss is not None and data is not None:
            measuring = Measuring(inner, model, loss, data, watched.shapes, budget, processes, max_samples, forward)
    run, records = None, WatchRecords(watched.shapes)
    if path is not None:
        run = _open(path, inner, watched, processes)
        records = processes.on_rank_0(lambda: WatchRecords.load(path))
    return Watch(inner, watched, every, records, run, measuring, log, start, processes)


def _open(path: str | os.PathLike[str], optimizer: Optimizer, watched: WatchedLayers, processes: Processes) -> Run:
    """Take the folder; one of another kind is refused with a word about where to go instead."""

    def check() -> None:
        folder = Path(path)
        if (folder / "config.json").exists() and Run.open(folder).config.get("command") != "watch":
            raise RunError(
                f"{folder} belongs to something else; give watching a folder of its own, such as {folder / 'watch'}."
            )

    processes.on_rank_0(check)
    shapes = {name: list(shape) for name, shape in watched.shapes.items()}
    config = {"command": "watch", "optimizer": type(optimizer).__name__, "layers": shapes}
    return Run.start(path, config, resume=True, processes=processes)


class Watch:
    """Watches a run until :meth:`detach`; made by :func:`watch`.

    Whatever goes wrong while watching ends the watch with a warning, never the run.

    Attributes:
        every: Steps from one record to the next.
        step: Steps taken, those before a resumption included.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> watching = watch(optimizer, model, every=1)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> watching.detach()
    >>> watching.to_pandas()["layer"].tolist(), watching.step
    (['weight'], 1)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layers: WatchedLayers,
        every: int,
        records: WatchRecords,
        run: Run | None,
        measuring: Measuring | None,
        log: Log | None,
        start: int | None,
        processes: Processes,
    ) -> None:
        self.every = every
        self._optimizer, self._layers, self._measuring, self._log = optimizer, layers, measuring, log
        self._records, self._run, self._processes = records, run, processes
        self._lines = run.appending(FILE) if run is not None and processes.rank == 0 else None
        taken = steps_taken(optimizer) if start is None else start
        # an optimizer without a count of its own may yet turn out to have one, after its first step
        self._certain = start is not None or taken > 0
        self.step = taken if self._certain else records.last_step
        self._notes: dict[str, float] = {}
        self._clock = StepClock()
        self._started = False
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before()),
            optimizer.register_step_post_hook(lambda *_: self._after()),
        ]

    # ------------------------------------------------------------------ ending

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end("finished" if kind is None else f"ended by {kind.__name__}")

    def detach(self) -> None:
        """Stop watching and let go of the folder; a second call does nothing. What is recorded stays."""
        self._end("finished")

    def _end(self, how: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._lines is not None and self._run is not None:
            if self._started:
                self._write({"event": "end", "step": self.step, "how": how, "time": round(time.time(), 1)})
            try:
                results = self.results
                if results.rows:
                    results.save(self._run.results_path)
            except (OSError, KronscopeError) as error:
                self._warn(f"the cosines are not written as results, they are in the records: {error}")
        if self._lines is not None:
            self._lines.close()
        self._lines = None
        if self._run is not None:
            self._run.close()
            self._run = None

    # ------------------------------------------------------------------ what was found

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records so far, by ascending step; those of a run that was resumed included."""
        return self._records.records

    @property
    def results(self) -> Results:
        """The cosines measured so far (``live``, ``optimal``, ``shampoo2``); empty without ``loss`` and ``data``."""
        return self._records.results

    @property
    def warnings(self) -> list[str]:
        """What the last record warns of, the gravest first."""
        return list(self.records[-1]["warnings"]) if self.records else []

    def to_pandas(self) -> pd.DataFrame:
        """A line for each layer and recorded step: norms, what the optimizer knows, and ``cosine_live``, ..."""
        return self._records.to_pandas()

    def note(self, **numbers: float) -> None:
        """Put numbers of your own, such as the loss, into the next record.

        Args:
            numbers: By name; of several under one name the last is taken.
        """
        self._notes |= {name: float(value) for name, value in numbers.items()}

    def __repr__(self) -> str:
        """Say how far it is, and when the next cosines are due."""
        due = self.records[-1].get("measuring", "") if self.records else ""
        layers, records = len(self._records.layers), len(self.records)
        facts = f"{layers} layer{'s' * (layers != 1)}, step {self.step}, {records} record{'s' * (records != 1)}"
        return f"<Watch: {facts}; next {due}>" if due else f"<Watch: {facts}>"

    # ------------------------------------------------------------------ the hooks

    def _before(self) -> None:
        if not self._certain or (self.step + 1) % self.every == 0:
            self._guarded(self._layers.keep)

    def _after(self) -> None:
        self._clock.tick()
        self.step += 1
        if not self._certain:
            self.step = steps_taken(self._optimizer) or self.step
            self._certain = True
        if not self._started:
            self._started = True
            self._add({"event": "start", "step": self.step - 1, "every": self.every, "time": round(time.time(), 1)})
        if self.step % self.every == 0:
            self._guarded(self._record)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Do what may fail without ending the run, on all processes together, and count the time."""
        self._clock.pause()
        try:
            with self._processes.failing_together():
                action()
        except Exception as error:  # noqa: BLE001  # a run must not end because somebody looks at it
            self._end(f"ended by {type(error).__name__}")
            self._warn(f"watching ends at step {self.step}, training goes on: {type(error).__name__}: {error}")
        finally:
            self._clock.go_on()

    def _record(self) -> None:
        record: dict[str, Any] = {"step": self.step, "time": round(time.time(), 1), "layers": self._layers.numbers()}
        if new := self._layers.newcomers():
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            self._warn(f"the optimizer now trains {new[0]}{more} too, which is not watched: call ks.watch again for it")
        numbers = dict(self._notes)
        self._notes = {}
        if isinstance(self._optimizer, KroneckerOptimizer):
            known = self._optimizer.metrics()
            numbers["skipped_steps"] = known["skipped_steps"]
            numbers["optimizer_seconds"] = known.get("milliseconds", 0.0) / 1e3
        training, measuring, rows = self._clock.training, self._measuring, list[Row]()
        if measuring is not None:
            rows = measuring.rows(self.step, training, self._clock.step_seconds, self._warn)
            record["measuring"] = self._due(measuring)
            numbers["measuring_seconds"] = measuring.seconds
        record["cosines"] = [to_plain(row) for row in rows]
        numbers["training_seconds"] = training
        numbers["watching_seconds"] = self._clock.watching
        record["run"] = numbers
        last = self.records[-1] if self.records else None
        record["warnings"] = findings(list(self._records.layers), record, last)
        self._add(record)
        if self._log is not None and self._processes.rank == 0:
            self._pass_on(self._log, record, rows)

    def _due(self, measuring: Measuring) -> str:
        """Say when the next cosines come, and why not before."""
        due, clock = measuring.due, self._clock
        if due is None:
            return ""
        left = max(0.0, due.training - clock.training)
        steps = math.ceil(left / clock.step_seconds) if clock.step_seconds > 0 else 0
        step = self.every * max(self.step // self.every + 1, math.ceil((self.step + steps) / self.every))
        return (
            f"at about step {step:,} {due.what}, which takes about {due.seconds:.2g} s. Measuring may use "
            f"{100 * measuring.budget:.3g} % of training's time: {measuring.budget * clock.training:.2g} s until now, "
            f"of which {measuring.seconds:.2g} s are used"
        )

    def _pass_on(self, log: Log, record: Mapping[str, Any], rows: Sequence[Row]) -> None:
        found = {f"kronscope/{name}": value for name, value in record["run"].items()}
        for number, values in record["layers"].items():
            pairs = zip(self._records.layers, values, strict=True)
            found |= {f"kronscope/{number}/{layer}": value for layer, value in pairs if value is not None}
        cosines = [row for row in rows if not math.isnan(row.cosine)]
        found |= {f"kronscope/cosine_{row.approximation}/{row.layer}": row.cosine for row in cosines}
        try:
            log(self.step, found)
        except Exception as error:  # noqa: BLE001  # as above
            self._log = None
            self._warn(f"nothing more is logged: the logger failed with {type(error).__name__}: {error}")

    def _add(self, line: Mapping[str, Any]) -> None:
        self._records.add(line)
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._lines is None:
            return
        try:
            self._lines.append(line)
        except OSError as error:
            self._lines.close()
            self._lines = None
            self._warn(f"no more records are written, they are kept in memory: {error.strerror}")

    def _warn(self, text: str) -> None:
        if self._processes.rank != 0:
            return
        level = callers_level()
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=level)
        except RuntimeWarning:
            # where warnings are errors this one is shown all the same, but ends no training
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn(text, RuntimeWarning, stacklevel=level)
