"""What can be asked of an optimizer: its plan, its state as operators, and a few numbers about its last step."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from kronscope.errors import StateError
from kronscope.kron.devices import ordinary_tensors
from kronscope.kron.operators import Operator
from kronscope.kron.rescues import RETRIED, Rescue
from kronscope.optim.budgets import in_words
from kronscope.optim.diagnostics import Diagnostics, diagnose, fresh_products
from kronscope.optim.explain import Explanation, explain_plan
from kronscope.optim.live import live_operator
from kronscope.optim.metrics import Direction, Progress, UpdateLog, flat
from kronscope.optim.naming import plain_name
from kronscope.optim.planned import PlannedOptimizer

__all__ = ["InspectedOptimizer"]


class InspectedOptimizer(PlannedOptimizer):
    """The part of :class:`KroneckerOptimizer` that answers questions; it changes nothing."""

    _progress: Progress | None = None
    _updates: UpdateLog | None = None
    _rescues: Mapping[Rescue, int] = MappingProxyType({})
    # the learning rates of the last step, by group; a group that is newer has none
    _last_rates: Sequence[float | Tensor] = ()
    metrics_every: int = 10
    """Look at updates and gradients at the first step and every so many, for :meth:`metrics`; 0 for never."""

    @ordinary_tensors()
    def operator(self, param: Tensor | str) -> Operator:
        r"""Return the curvature matrix that a parameter's preconditioner stands for at this moment.

        For Shampoo it is :math:`L \otimes R / \operatorname{tr} L` of the present factors, without eps and damping,
        whatever the exponent: what ``approx.get("shampoo2")`` fits to the gradients seen so far, with weights
        :math:`(1-\beta_2)\beta_2^{T-t}/(1-\beta_2^T)`, or one under sums, where none is left out. KL-Shampoo
        has its own factors, SOAP an :class:`~kronscope.kron.EigenbasisDiagonal`; several blocks are block-diagonal, and
        without factors it is a diagonal. If several processes share the work, all of them must call this, and all get
        the same operator.

        Args:
            param: A parameter of this optimizer that has had a gradient, or its name.

        Returns:
            The operator, which :func:`kronscope.cosine` compares with a matrix.

        Raises:
            StateError: it is not one of this optimizer's, or has had no gradient yet.
        """
        self._check_plan()
        param = self._asked_for(param)
        state = self.state.get(param, {})
        if "step" not in state:
            why = "is frozen, and has" if self._layouts[param].frozen else "has"
            raise StateError(f"{self._name(param)} {why} had no gradient yet; call operator() after its first step.")
        group = next(g for g in self.param_groups if any(param is p for p in g["params"]))
        return live_operator(param, self._placement.whole(param, state), self._layouts[param], self._hyper(group))

    def _asked_for(self, param: Tensor | str) -> Tensor:
        """Return a parameter of this optimizer, which may be asked for by name."""
        if isinstance(param, Tensor):
            if param in self._layouts:
                return param
            raise StateError(
                f"operator() was given a tensor of shape {tuple(param.shape)} that is not a parameter of this "
                f"optimizer; pass the parameter itself, model.fc.weight, or its name."
            )
        if not isinstance(param, str):
            raise StateError(f"operator() takes a parameter or its name, got {type(param).__name__}.")
        by_name = {name: one for one, name in self._names().items()}
        if param in by_name or plain_name(param) in by_name:
            return by_name[param if param in by_name else plain_name(param)]
        if not any("param_names" in group for group in self.param_groups):
            raise StateError(
                f"operator() was asked for {param!r}, but this optimizer was given parameters without names; pass the "
                f"parameter itself, or make the optimizer from the model: {type(self).__name__}(model, ...)."
            )
        near = difflib.get_close_matches(param, by_name, 3, 0.5) or list(by_name)[:3]
        raise StateError(f"operator() was asked for {param!r}, which this optimizer does not have; it has {near}, ...")

    @ordinary_tensors()
    def explain(self, *, rows: bool = False, step_seconds: float | None = None) -> Explanation:
        """Return the plan for each parameter, with its memory and time beside AdamW's; also before the first step.

        Args:
            rows: Whether ``print`` shows a line for each parameter instead of a summary by shape. The returned object
                has the ``rows`` in any case.
            step_seconds: Seconds of a forward and backward pass of yours; the plan then says which share of a step the
                optimizer is expected to take.

        Returns:
            The plan; print it.

        Raises:
            OptionError: ``step_seconds`` is not a positive number.
        """
        self._check_plan()
        names = self._names()
        return explain_plan(
            [
                (names[param], param, self._layouts[param], hyper)
                for group in self.param_groups
                for hyper in (self._hyper(group),)
                for param in group["params"]
            ],
            self._placement.describe,
            rows=rows,
            step_seconds=step_seconds,
            budgets=in_words(self.param_groups, self._layouts, self.rule),
        )

    @ordinary_tensors()
    def diagnostics(self, *, gather: bool = False, quick: bool = False) -> Diagnostics:
        """Return the state of every preconditioner: condition, rank, age and residual of its roots, size of a step.

        It waits for other processes only with ``gather``. If processes divide the state (sharded parameters, or
        ``parallel="divided"``), it has only the parameters whose blocks this process works on.

        Args:
            gather: Have all parameters; all processes must then call it, and all get the same answer.
            quick: Leave out the step size, which takes as long as a step without roots, and bound SOAP's condition.

        Returns:
            One row for each parameter; print it for a table.
        """
        self._check_plan()
        names = self._names()
        groups = [
            {**group, "lr": self._last_rates[index]} if index < len(self._last_rates) else group
            for index, group in enumerate(self.param_groups)
        ]
        entries = [
            (names[param], param, self._share(param), hyper, group)
            for group in groups
            for hyper in (self._hyper(group),)
            for param in group["params"]
        ]
        found = diagnose(entries, self.state, self.skipped_steps, self._placement, gather=gather, quick=quick)
        return replace(found, fallbacks=sum(self._rescues.values()), lost_roots=self._lost_roots)

    @property
    def _lost_roots(self) -> int:
        return sum(number for rescue, number in self._rescues.items() if rescue.outcome != RETRIED)

    @ordinary_tensors()
    def _fresh_products(self, param: Tensor) -> tuple[float, float, float]:
        """Compare a parameter's update with that of fresh roots, as far as this process has its blocks."""
        group = next(group for group in self.param_groups if any(param is one for one in group["params"]))
        return fresh_products(param, self.state[param], self._share(param), self._hyper(group), group)

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        return max(int(group["skipped_steps"]) for group in self.param_groups)

    def metrics(self) -> dict[str, float]:
        """Return a few numbers about the last step, for a log; of this process, and without asking any other.

        ``step``, ``milliseconds`` (on the host, without the closure), ``roots`` (taken by this process),
        ``fallbacks`` (roots that the solver failed to take at the first attempt); and of the whole run ``lost_roots``
        (those that no attempt could take: the one before, or the identity, stands in) and ``skipped_steps``. Of
        preconditioned parameters, as far as this process forms their updates, and of the last step that was looked at
        (``metrics_every``, ``measured_step``): ``update_rms`` (before the learning rate), ``cosine`` of updates
        and gradients, ``worst_cosine`` of a layer, whose name is ``worst_layer``.

        The names are always the same. Before this process's first step there are no milliseconds, roots and fallbacks
        (0), and ``step`` is that of the state. Where no update was looked at, ``measured_step`` is 0 and the last four
        are NaN: before the first step, with ``metrics_every = 0``, and where this process preconditions nothing.

        >>> import torch, kronscope
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = kronscope.Shampoo(model.named_parameters(), lr=1e-2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.metrics()["roots"], optimizer.worst_layer
        (2.0, 'weight')
        """
        done = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        progress = self._progress or Progress(done, 0.0, 0, 0)
        return flat(self.skipped_steps, progress, self._direction(), lost_roots=self._lost_roots)

    @property
    def worst_layer(self) -> str:
        """Name of the layer whose update agrees least with its gradient; empty before the first step."""
        direction = self._direction()
        return "" if direction is None else direction.worst_layer

    def _direction(self) -> Direction | None:
        return None if self._updates is None else self._updates.direction(self._name)
