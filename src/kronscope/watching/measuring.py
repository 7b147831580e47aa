"""Cosines of a live run, on a budget: measured when the time spent so far allows what they will take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from kronscope.errors import DataError, KronscopeError, LayerError, MemoryBudgetError, OptionError
from kronscope.gradients.data import Batches
from kronscope.gradients.forward import Forward, common_device
from kronscope.gradients.guard import RandomStates, generators_of, untouched
from kronscope.gradients.losses import LossFunction, read_loss
from kronscope.gradients.matrices import resolve_layers, unwrap
from kronscope.kron import Operator
from kronscope.measures import Results
from kronscope.measures.measure import measure
from kronscope.measures.operators import OperatorSource, given_operators
from kronscope.measures.rows import Row
from kronscope.support.processes import Processes
from kronscope.watching.costs import Costs
from kronscope.watching.plain import is_sharded, plain_copy

__all__ = ["Due", "Measuring"]


# Seconds after which no further layer is begun in one record: a run should not stand still for long.
LONGEST = 2.0
# Seconds that a first look at the layers may take in all, however short the training was.
FIRST_LOOK = 0.5
# What is predicted is multiplied by this.
SAFETY = 1.5
# A first measurement has all samples if they are few, else one, or as many as take so many seconds of forward passes;
# the next ones have eight times as many, until it is all of them.
_FEW, _FIRST_PASSES, _GROWTH = 4, 0.05, 8
# Seconds of a forward pass below which it is made again.
_SHORT = 0.005
# Where exact labels need more columns for each sample, matrices are estimated, first from so many, and from twice as
# many while the standard error is larger than this.
MOST_COLUMNS, FIRST_COLUMNS, ACCURACY = 64, 16, 0.05


@dataclass(frozen=True)
class Due:
    """What is measured next.

    Attributes:
        what: In words.
        seconds: About how long it will take; counted with a margin.
        training: Seconds of training after which the budget allows it.
    """

    what: str
    seconds: float
    training: float


@dataclass(frozen=True)
class _Turn:
    """What one call measures; samples None are all, and no layers stand for a forward pass of one sample."""

    names: tuple[str, ...]
    samples: int | None
    columns: int
    seconds: float
    first: bool = False

    @property
    def what(self) -> str:
        if not self.names:
            return "a forward pass of one sample, to see how long measuring takes"
        if self.samples is not None:
            return f"a trial on {self.samples} sample{'s' * (self.samples != 1)}, to see how long measuring takes"
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"cosines of {self.names[0]}{more}"


@dataclass
class Measuring:
    r"""Measures the live preconditioner, the optimal product and Shampoo² against the Gauss–Newton matrix.

    With :math:`t` seconds of training so far, :math:`s` seconds of measuring and a turn that is predicted to take
    :math:`c` seconds, the turn is made when

    .. math:: s + 1.5\,c \le \max(b\,t, f) ,

    where :math:`b` is ``budget``, and :math:`f` is :data:`FIRST_LOOK` for layers that have not been measured yet, and
    else zero. The first turn is a forward pass of one sample, which is taken to be as long as a step of training; the
    second the cheapest layer on one or a few samples, predicted from that pass by
    :class:`~kronscope.watching.costs.Costs`; the next ones have eight times as many, until it is all of them. Then
    layers take turns, the cheapest first, as many in one record as take :data:`LONGEST` seconds or less, but one at
    least. Rows of fewer samples than there are are not kept: they are cosines with another matrix.

    Args:
        optimizer: The optimizer whose live operators are measured.
        model: The model.
        loss: The loss.
        data: Batches ``(inputs, targets)``.
        shapes: The (m, n) of each layer.
        budget: The fraction of training's time.
        processes: The processes that measure together.
        max_samples: Use only the first samples.
        forward: ``(model, inputs) -> outputs``.

    Attributes:
        seconds: What measuring has taken.
        due: What is measured next; None if nothing is left to be measured.

    Raises:
        OptionError: the loss has no Gauss–Newton matrix here, or the budget is not positive.
        DataError: the data can be iterated only once.
    """

    optimizer: Optimizer
    model: nn.Module
    loss: LossFunction
    data: Iterable[Any]
    shapes: Mapping[str, tuple[int, int]]
    budget: float
    processes: Processes
    max_samples: int | None = None
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    seconds: float = field(default=0.0, init=False)
    due: Due | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        read_loss(self.loss, curved=True)
        if hasattr(self.data, "__next__"):
            raise DataError("data must be iterable more than once: give a list or a DataLoader, not an iterator.")
        if not self.budget > 0:
            raise OptionError(f"budget must be a positive fraction of training's time, got {self.budget!r}.")
        self._costs = Costs(self.shapes)
        self._samples = _count_samples(self.data)
        self._exact = FIRST_COLUMNS  # columns of each sample with exact labels, once they are known
        self._reached = 0
        self._seen: dict[str, int] = {}  # layers that were measured on all samples, with the columns they need
        self._queue = list(self.shapes)
        if not math.isinf(self.budget):
            self._queue.sort(key=self._costs.operations)

    def rows(self, step: int, training: float, step_seconds: float, warn: Callable[[str], None]) -> list[Row]:
        """Measure what the budget allows, after ``training`` seconds.

        Args:
            step: The step.
            training: Seconds of training so far.
            step_seconds: What a step of training takes.
            warn: Called with what could not be measured.

        Raises:
            KeyboardInterrupt: somebody pressed Ctrl-C, which a measurement takes for a wish to end early.
        """
        found: list[Row] = []
        had: set[str] = set()
        began, alone = self.seconds, False
        while self._queue:
            turn = self._next(training, step_seconds, had, self.seconds - began, alone)
            turn = self.processes.broadcast_object(turn)
            if turn is None:
                break
            # to the end of the queue, whatever becomes of them
            if turn.names and turn.samples is None:
                self._queue = [name for name in self._queue if name not in turn.names] + list(turn.names)
                had.update(turn.names)
            try:
                found += self._make(turn, step)
            except (LayerError, MemoryBudgetError) as error:
                if len(turn.names) > 1:  # one by one, to find the one at fault
                    had.difference_update(turn.names)
                    alone = True
                    continue
                for name in turn.names:
                    self._queue.remove(name)
                warn(f"{', '.join(turn.names)} is no longer measured: {error}")
            except KronscopeError as error:
                warn(f"no cosines at step {step}: {error}")
                break
        self.due = self._due(step_seconds)
        return found

    # ------------------------------------------------------------------ what is next

    def _next(self, training: float, step_seconds: float, had: set[str], spent: float, alone: bool) -> _Turn | None:
        """What may be measured now, after the layers that had their turn in this record took ``spent`` seconds."""
        waiting = [name for name in self._queue if name not in had]
        if not waiting:
            return None
        if math.isinf(self.budget):
            return _Turn(tuple(waiting[:1] if alone else waiting), None, MOST_COLUMNS, 0.0)
        turn = self._turn(waiting, step_seconds)
        if self.seconds + SAFETY * turn.seconds > self._allowed(training, turn):
            return None
        if spent and spent + turn.seconds > LONGEST:
            return None
        # more of them with the same passes through the model
        for name in waiting[1:] if self._costs_known and not alone else ():
            names = (*turn.names, name)
            larger = self._priced(names, None, turn.columns, first=turn.first and name not in self._seen)
            if self._columns(name) != turn.columns or spent + larger.seconds > LONGEST:
                break
            if self.seconds + SAFETY * larger.seconds > self._allowed(training, larger):
                break
            turn = larger
        return turn

    def _allowed(self, training: float, turn: _Turn) -> float:
        return max(self.budget * training, FIRST_LOOK if turn.first else 0.0)

    @property
    def _costs_known(self) -> bool:
        return self._reached > 0 and self._reached >= self._whole

    @property
    def _whole(self) -> float:
        """The samples there are, as far as it is known."""
        return math.inf if self._samples is None else self._samples

    def _turn(self, waiting: Sequence[str], step_seconds: float) -> _Turn:
        """The next turn, whether there is time for it or not."""
        if self._costs.forward is None:
            return _Turn((), 1, 1, step_seconds, first=True)
        if self._costs_known:
            return self._priced(waiting[:1], None, self._columns(waiting[0]), first=waiting[0] not in self._seen)
        samples = self._reached * _GROWTH
        if not samples:
            samples = max(_FEW, int(_FIRST_PASSES / (self._costs.forward * min(self._exact, FIRST_COLUMNS))))
            samples = samples if samples >= self._whole or samples > _FEW else 1
        cheapest = min(waiting, key=self._costs.operations)
        columns = FIRST_COLUMNS if self._exact > MOST_COLUMNS else self._exact
        if samples >= self._whole:
            return self._priced([cheapest], None, columns, first=True)
        return self._priced([cheapest], samples, columns, first=True)

    def _priced(self, names: Sequence[str], samples: int | None, columns: int, *, first: bool) -> _Turn:
        count = self._count(samples)
        return _Turn(tuple(names), samples, columns, self._costs.predict(names, count * columns), first)

    def _count(self, samples: int | None) -> int:
        """How many samples a turn has, as far as it is known."""
        return int(min(self._whole, samples)) if samples is not None else self._samples or self._reached

    def _columns(self, name: str) -> int:
        """Columns of each sample for a layer: all there are, or as many as it needs."""
        return self._exact if self._exact <= MOST_COLUMNS else self._seen.get(name, FIRST_COLUMNS)

    def _due(self, step_seconds: float) -> Due | None:
        if math.isinf(self.budget) or not self._queue:
            return None
        turn = self._turn(self._queue, step_seconds)
        needed = self.seconds + SAFETY * turn.seconds
        return Due(turn.what, turn.seconds, 0.0 if needed <= self._allowed(0.0, turn) else needed / self.budget)

    # ------------------------------------------------------------------ doing it

    def _make(self, turn: _Turn, step: int) -> Sequence[Row]:
        started = time.perf_counter()
        model = plain_copy(self.model) if is_sharded(self.model) else self.model
        try:
            if not turn.names:
                self._pass_forward(model)
                return []
            results = self._measured(turn, model, step)
        finally:
            taken = time.perf_counter() - started
            self.seconds += taken
        if results.partial:
            raise KeyboardInterrupt
        rows = results.rows
        samples = max((row.samples for row in rows), default=self._count(turn.samples))
        self._costs.learn(turn.names, max(1, samples * turn.columns), taken, rows)
        self._reached = max(self._reached, samples)
        if turn.samples is not None and samples >= turn.samples and samples < self._whole:
            return []
        # all there are
        self._samples = self._reached = samples
        for name in turn.names:
            enough = all(_accurate(row) for row in rows if row.layer == name)
            self._seen[name] = turn.columns if enough else min(2 * turn.columns, MOST_COLUMNS)
        return rows

    def _pass_forward(self, model: nn.Module) -> None:
        """One sample through the model, to see how long that takes and how many columns its outputs have."""
        loss = read_loss(self.loss, curved=True)
        states = RandomStates(generators_of(self.data))
        try:
            with self.processes.failing_together(), untouched(model, ()), torch.no_grad():
                model = unwrap(model)
                batch = next(iter(Batches(self.data, 1))).to(common_device(model))
                through, passes = Forward(model, self.forward), list[float]()
                # a short one may have waited for others' work
                while sum(passes) < _SHORT and len(passes) < 3:
                    started = time.perf_counter()
                    outputs = through.outputs(batch)
                    passes.append(time.perf_counter() - started)
                self._costs.forward = max(min(passes), 1e-9)
                self._exact = max(1, loss.exact_columns(outputs.shape, loss.terms(batch.targets)))
        finally:
            states.restore()
        found = self.processes.all_gather_object((self._exact, self._samples))
        self._exact = max(exact for exact, _ in found)
        counts = [count for _, count in found if count is not None]
        self._samples = sum(counts) if len(counts) == len(found) else None
        if self.max_samples is not None:
            self._samples = min(self._samples or self.max_samples, self.max_samples)

    def _measured(self, turn: _Turn, model: nn.Module, step: int) -> Results:
        names = list(turn.names)
        live = cast("OperatorSource", self.optimizer)
        if model is not self.model:
            live = self._operators(names)
        # on a budget exactly so many columns as the time was counted for; else as many as it takes
        accuracy = ACCURACY if math.isinf(self.budget) else math.inf
        samples = turn.samples if turn.samples is None else max(turn.samples, self.processes.world_size)
        return measure(
            model,
            self.loss,
            self.data,
            layers=names,
            approximations=("optimal", "shampoo2"),
            operators={"live": live},
            max_samples=self.max_samples if samples is None else samples,
            forward=self.forward,
            step=step,
            max_columns=turn.columns if self._exact > MOST_COLUMNS else MOST_COLUMNS,
            accuracy=accuracy,
            progress=False,
            distributed=self.processes.distributed,
        )

    def _operators(self, names: list[str]) -> dict[str, Operator]:
        """What the optimizer holds for sharded layers, as whole operators; for that all processes are here."""
        specs = resolve_layers(self.model, names)
        found = given_operators({"live": self.optimizer}, self.model, specs)
        whole: dict[str, Operator] = {}
        for spec in specs:
            given = found[spec.name][0].operator
            if given is not None:
                whole[spec.name] = given
        return whole


def _accurate(row: Row) -> bool:
    """Whether a row's error is as small as it should be, or none; NaN for the cosine says that columns did not do."""
    return math.isnan(row.stderr) or (row.stderr <= ACCURACY and not math.isnan(row.cosine))


def _count_samples(data: Iterable[Any]) -> int | None:
    """How many samples there are, if that is known without reading them."""
    if isinstance(data, DataLoader):
        sampler: Any = data.sampler
        return len(sampler) if hasattr(sampler, "__len__") else None
    if not isinstance(data, (list, tuple)):
        return None
    targets = [item[1] for item in data if isinstance(item, (list, tuple)) and len(item) == 2]
    if len(targets) < len(data) or not all(isinstance(each, Tensor) and each.dim() for each in targets):
        return None
    return sum(each.shape[0] for each in targets) or None
