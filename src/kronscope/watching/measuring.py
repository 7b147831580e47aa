"""Cosines of a live run, on a budget: measured when the time spent so far allows it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from kronscope.errors import DataError, KronscopeError, LayerError, MemoryBudgetError, OptionError
from kronscope.gradients.losses import LossFunction, read_loss
from kronscope.gradients.matrices import resolve_layers
from kronscope.kron import Operator
from kronscope.measures.measure import measure
from kronscope.measures.operators import OperatorSource, given_operators
from kronscope.measures.rows import Row
from kronscope.support.processes import Processes
from kronscope.watching.plain import is_sharded, plain_copy

__all__ = ["Measuring"]


# What one record may take for its cosines, in seconds, and what all may take before the budget counts.
LONGEST = 2.0
# Where exact labels need more columns for each sample, matrices are estimated, to this standard error.
MOST_COLUMNS, ACCURACY = 64, 0.05


@dataclass
class Measuring:
    r"""Measures the live preconditioner, the optimal product and Shampoo² against the Gauss–Newton matrix.

    Layers take turns, as many in one record as take :data:`LONGEST` seconds or less, but one at least. With :math:`t`
    seconds of training so far, :math:`s` seconds of measuring and a turn of :math:`c` seconds, the next one is made
    when :math:`s + c \le b\,t`, where :math:`b` is ``budget``.

    Args:
        optimizer: The optimizer whose live operators are measured.
        model: The model.
        loss: The loss.
        data: Batches ``(inputs, targets)``.
        layers: Names of the layers.
        budget: The fraction of training's time.
        processes: The processes that measure together.
        max_samples: Use only the first samples.
        forward: ``(model, inputs) -> outputs``.

    Raises:
        OptionError: the loss has no Gauss–Newton matrix here, or the budget is not positive.
        DataError: the data can be iterated only once.
    """

    optimizer: Optimizer
    model: nn.Module
    loss: LossFunction
    data: Iterable[Any]
    layers: list[str]
    budget: float
    processes: Processes
    max_samples: int | None = None
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    seconds: float = field(default=0.0, init=False)
    # of one layer, as far as it is known
    cost: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        read_loss(self.loss, curved=True)
        if hasattr(self.data, "__next__"):
            raise DataError("data must be iterable more than once: give a list or a DataLoader, not an iterator.")
        if not self.budget > 0:
            raise OptionError(f"budget must be a positive fraction of training's time, got {self.budget!r}.")

    def rows(self, step: int, training: float, warn: Callable[[str], None]) -> list[Row]:
        """Measure the layers whose turn it is, after ``training`` seconds.

        Args:
            step: The step.
            training: Seconds of training so far.
            warn: Called with what could not be measured.

        Raises:
            KeyboardInterrupt: somebody pressed Ctrl-C, which a measurement takes for a wish to end early.
        """
        found: list[Row] = []
        turns = 0
        while count := self.processes.broadcast_object(self._affordable(training, turns)):
            names = self.layers[:count]
            # to the end of the queue, whatever becomes of them
            self.layers = self.layers[count:] + names
            turns += count
            try:
                found += self._measured(names, step)
            except (LayerError, MemoryBudgetError) as error:
                if count > 1:  # one by one, to find the one at fault
                    self.cost = None
                    break
                self.layers.remove(names[0])
                turns -= 1
                warn(f"{names[0]} is no longer measured: {error}")
            except KronscopeError as error:
                warn(f"no cosines at step {step}: {error}")
                break
        return found

    def _affordable(self, training: float, turns: int) -> int:
        """How many layers may be measured now, after some have had their turn in this record."""
        left = len(self.layers) - turns
        if left <= 0 or self.cost is None:
            return min(max(left, 0), 1)
        if math.isinf(self.budget):
            return left
        batch = min(left, max(1, int(LONGEST / self.cost)) - turns)
        credit = max(self.budget * training, LONGEST) - self.seconds
        return max(batch, 0) if self.cost * batch <= credit else 0

    def _measured(self, names: list[str], step: int) -> Sequence[Row]:
        started = time.perf_counter()
        model, live = self.model, cast("OperatorSource", self.optimizer)
        if is_sharded(model):
            live = self._operators(names)
            model = plain_copy(model)
        try:
            results = measure(
                model,
                self.loss,
                self.data,
                layers=names,
                approximations=("optimal", "shampoo2"),
                operators={"live": live},
                max_samples=self.max_samples,
                forward=self.forward,
                step=step,
                max_columns=MOST_COLUMNS,
                accuracy=ACCURACY,
                progress=False,
                distributed=self.processes.distributed,
            )
        finally:
            taken = time.perf_counter() - started
            self.seconds += taken
            self.cost = max(taken / len(names), 1e-9)
        if results.partial:
            raise KeyboardInterrupt
        return results.rows

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
