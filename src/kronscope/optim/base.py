"""What the three optimizers share: state, what can be asked of it, and the order of work within a step."""

from __future__ import annotations

import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from kronscope.errors import DistributedError, NonFiniteError, StateError
from kronscope.kron.devices import ordinary_tensors
from kronscope.kron.precision import full_precision
from kronscope.kron.rescues import Rescue, recorded_rescues
from kronscope.optim.advice import default_arguments
from kronscope.optim.apply import check_fits, check_has_data, check_supported, finite_gradients, what_is_not_finite
from kronscope.optim.calls import PLAIN, Calls, Compiled
from kronscope.optim.config import Hyper
from kronscope.optim.elementwise import elementwise_state, elementwise_step
from kronscope.optim.inspected import InspectedOptimizer
from kronscope.optim.loading import (
    check_loaded,
    decoded_groups,
    encoded_group,
    hooks_off,
    loaded_tensors,
    on_device,
    placed,
    read_hypers,
    replaced_options,
    warn_of_replaced,
)
from kronscope.optim.matching import matched
from kronscope.optim.metrics import Progress, Put, UpdateLog
from kronscope.optim.options import (
    checked_group,
    layout_options,
    structure_of,
)
from kronscope.optim.parallel import Exchange, SingleProcess
from kronscope.optim.parallel.shards import local_tensor
from kronscope.optim.planning import is_trained
from kronscope.optim.schedule import assign_phases
from kronscope.optim.stacks import Member, build_stacks, factor_dtype, initial_notes
from kronscope.optim.step import Portion, portions, take_step
from kronscope.support.callers import callers_level
from kronscope.support.signals import signals_held

__all__ = ["KroneckerOptimizer"]

_WARNED = " Further ones of this kind are only counted: see metrics() and diagnostics()."


class KroneckerOptimizer(InspectedOptimizer):
    """Base of :class:`Shampoo`, :class:`SOAP` and :class:`KLShampoo`; not to be made directly.

    A step is: check the gradients, take them into factors and moments, refresh the roots that are due, form the
    updates, apply them. Blocks of equal shape and options are treated together.
    """

    fast_products: bool = False
    """Let Gram matrices and updates be formed in TF32 (or bf16) where torch is set to allow it; roots never are."""

    _calls: Calls = PLAIN

    # --- the step -------------------------------------------------------------------------------------------------

    _failure = ""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        A signal that comes meanwhile, such as that of Ctrl-C, waits until the step is whole; a second Ctrl-C does not.

        Args:
            closure: Reevaluates the model and returns the loss; called with gradients enabled.

        Raises:
            DistributedError: processes do not fit together, or one of them died or hangs.
            StateError: an earlier step failed half-way, and nothing was loaded since; or a parameter has another shape
                than its state.
            GradientError: a gradient is sparse or complex or of another shape than its parameter, or a parameter is on
                the meta device.
            NonFiniteError: a gradient is not finite and the option ``nonfinite`` is ``"raise"``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def compile(self, **options: Any) -> None:
        """Compile what a step does with whole stacks: gradients into factors and moments, and the updates.

        Roots are taken as before. The first steps compile, one graph for each shape of blocks. Numbers change by
        rounding. A copy of the optimizer, or one that is loaded, is not compiled.

        Args:
            options: What ``torch.compile`` takes: ``backend``, ``mode``, ``dynamic``.

        >>> import torch, kronscope
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = kronscope.Shampoo(model, lr=1e-2)
        >>> optimizer.compile(backend="eager")
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        """
        self._calls = Compiled(**options)

    @_disable_dynamo
    @ordinary_tensors()
    def _step(self) -> None:
        if self._failure:
            raise StateError(
                f"an earlier step failed half-way, and parameters and state, or what processes have of them, may not "
                f"fit together: {self._failure} Load a checkpoint, of model and optimizer (on all processes), before "
                f"the next step."
            )
        self._check_plan(ask=True)
        # before options are read: what a budget allows depends on all that is trained
        self._thaw()
        hypers = self._known_hypers()
        active = self._active()
        if not active:
            return
        started = time.perf_counter()
        with signals_held(), recorded_rescues() as rescues:
            number, roots = self._take(active, hypers)
            milliseconds = 1e3 * (time.perf_counter() - started)
            self._progress = Progress(number, milliseconds, roots, sum(rescues.counts.values()))
            # a scheduler changes them before anybody looks at the step
            rates = [group["lr"] for group in self.param_groups]
            self._last_rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
            fresh = self._note(rescues.counts)
        for rescue in fresh:
            warnings.warn(rescue.text(self._rescues[rescue]) + _WARNED, RuntimeWarning, stacklevel=callers_level())

    def _note(self, counts: Mapping[Rescue, int]) -> list[Rescue]:
        """Add to the rescues of the run; return the kinds that are new and should be told."""
        fresh = [rescue for rescue in counts if rescue not in self._rescues and not rescue.is_expected]
        total = Counter(self._rescues)
        total.update(counts)
        self._rescues = total
        return fresh

    def _take(self, active: dict[Tensor, int], hypers: list[Hyper]) -> tuple[int, int]:
        """Take the step of some parameters; return its number, and how many roots this process took.

        If it fails where nothing was changed yet, or at the first step of all of them, whose state can be made again,
        nothing is changed. Later on that would take a copy of the whole state.
        """
        fresh = [param for param in active if "step" not in self.state.get(param, {})]
        can_undo = True
        try:
            with full_precision({param.device.type for param in active}, products=not self.fast_products):
                self._initialise(active, hypers)
                exchange = self._placement.open(active, self.param_groups, self._apply, whole=len(fresh) == len(active))
                can_undo = len(fresh) == len(active)
                torch._foreach_add_([self.state[param]["step"] for param in active], 1)
                number = int(self.state[next(iter(active))]["step"])
                # what is sent is a copy, and is changed while gradients travel
                self._step_elementwise(exchange, [param for param in active if exchange.sends(param)], active, hypers)
                roots = self._step_stacks(exchange, active, hypers, number)
                exchange.gather()
                # after all that another process may fail at: parameters change together or not at all
                can_undo = False
                self._step_elementwise(
                    exchange, [param for param in active if not exchange.sends(param)], active, hypers
                )
                exchange.finish()
                return number, roots
        except BaseException as error:
            if isinstance(error, DistributedError) or not can_undo:
                self._failure = str(error) if isinstance(error, DistributedError) else f"{error!r}."
            else:
                for param in fresh:
                    self.state.pop(param, None)
                self._stacks_for = self._updates = None
            raise

    def _active(self) -> dict[Tensor, int]:
        """Return the parameters that take part in this step and their groups; none if the step is to be skipped."""
        groups = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        grads = {}
        for param in groups:
            grad = self._placement.gradient(param)
            if grad is not None:
                check_supported(grad, partial(self._name, param))
                check_fits(param, partial(self._name, param))
                grads[param] = grad
            else:
                check_has_data(param, partial(self._name, param))
        here = dict(zip(grads, finite_gradients(list(grads.values())), strict=True))
        finite = self._placement.agreed(list(groups), here)
        if all(finite.values()):
            return {param: groups[param] for param in finite}
        bad = [param for param, good in finite.items() if not good]
        what = what_is_not_finite({self._name(param): local_tensor(param.detach()) for param in bad})
        if any(group["nonfinite"] == "raise" for group in self.param_groups):
            raise NonFiniteError(f"{what}; nothing was changed. Look at the loss and the learning rate.")
        for group in self.param_groups:
            group["skipped_steps"] += 1
        text = f"{what}; this step is skipped (number {self.skipped_steps})."
        warnings.warn(text, RuntimeWarning, stacklevel=callers_level())
        return {}

    def _initialise(self, active: dict[Tensor, int], hypers: list[Hyper]) -> None:
        """Make the state of parameters that have their first gradient, and the stacks if anything changed."""
        fresh = [param for param in active if "step" not in self.state[param]]
        if fresh:
            earlier = self._planned_states(hypers, set(fresh))
            for param in fresh:
                layout = self._layouts[param]
                if layout.is_elementwise:
                    self.state[param] = elementwise_state(self._placement.held(param), factor_dtype(param))
                else:
                    self.state[param] = initial_notes(self._share(param))
            newcomers = [(self.state[param], self._layouts[param], hypers[active[param]]) for param in fresh]
            assign_phases(earlier, newcomers)
        # groups with equal options share stacks, named after the first of them
        first = [hypers.index(hyper) for hyper in hypers]
        types = [(param.dtype, param.device) for param in self._layouts]
        wanted = (first, [structure_of(hyper) for hyper in hypers], types)
        if fresh or self._stacks_for != wanted:
            self._build(first, hypers)
            self._stacks_for = wanted

    def _build(self, first: list[int], hypers: list[Hyper]) -> None:
        entries = []
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if "step" not in self.state.get(param, {}):
                    continue
                # the model may have been moved, or its dtype changed, since the state was made
                self.state[param] = placed(self.state[param], param)
                if self._layouts[param].is_elementwise:
                    continue
                entries.append((param, self._share(param), first[index], hypers[index]))
        self._stacks = build_stacks(entries, self.state)

    def _step_elementwise(
        self, exchange: Exchange, chosen: list[Tensor], active: dict[Tensor, int], hypers: list[Hyper]
    ) -> None:
        elementwise = [param for param in chosen if self._layouts[param].is_elementwise]
        for index, group in enumerate(self.param_groups):
            params = [param for param in elementwise if active[param] == index]
            parts = [(param, part) for param in params if (part := exchange.part(param)) is not None]
            if parts:
                elementwise_step(
                    [part for _, (part, _) in parts],
                    [grad for _, (_, grad) in parts],
                    [self.state[param] for param, _ in parts],
                    hypers[index],
                    group,
                )

    def _step_stacks(self, exchange: Exchange, active: dict[Tensor, int], hypers: list[Hyper], number: int) -> int:
        put: Put = exchange.put
        # a process that has seen nothing yet, as after loading, looks at once
        is_due = self._updates is None or (self.metrics_every and number % self.metrics_every == 0)
        log = UpdateLog(number) if self.metrics_every and is_due else None
        if log is not None:
            self._updates, put = log, log.listening(put)
        work: list[Portion] = []
        # roots of another exponent are not merely old: they are all taken anew
        powers = {index: hyper.exponents for index, hyper in enumerate(hypers)}
        anew = {index for index, power in powers.items() if self._powers.get(index, power) != power}
        self._powers = powers
        for stack in self._stacks:
            cohorts: dict[int, list[Member]] = {}
            for member in stack.members:
                if member.param in active:
                    cohorts.setdefault(int(self.state[member.param]["step"]), []).append(member)
            for step, members in cohorts.items():
                for portion in portions(stack, members):
                    grads = [exchange.blocks(member) for member in portion]
                    if log is not None:
                        log.expect(portion, grads)
                    is_anew = stack.group in anew
                    hyper = hypers[stack.group]
                    work.append(Portion(stack, portion, grads, hyper, step, anew=is_anew, calls=self._calls))
        return take_step(work, put, self._placement.roots)

    def _apply(self, params: list[Tensor], targets: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        """Change ``targets``: the parameters, or the parts or copies of them that this process changes."""
        steps = [int(self.state[param]["step"]) for param in params]
        self.rule.for_group(group).apply(targets, updates, group, steps)

    # --- state ----------------------------------------------------------------------------------------------------

    @_disable_dynamo
    @ordinary_tensors()
    def state_dict(self, *, part: bool = False) -> dict[str, Any]:
        """Return the state: tensors, and options as plain values; ``torch.load(weights_only=True)`` reads it.

        Args:
            part: With ``parallel="divided"`` each process has a part of the state, and is asked for it only by
                torch.distributed.checkpoint; True is for a file of this process's own.

        Raises:
            StateError: this process has only a part of the state, and nothing says that it is meant.
        """
        self._check_plan()
        if not part:
            self._placement.check_saving()
        if self._failure:
            warnings.warn(
                "the last step failed half-way, so this state is neither that before it nor that after it; resume from "
                "an earlier one.",
                RuntimeWarning,
                stacklevel=callers_level(),
            )
        packed = self._packed()
        params = [(param, self._hyper(group)) for group in self.param_groups for param in group["params"]]
        packed["state"] = {
            key: self._placement.packed(param, on_device(tensors, param, self._share(param), hyper))
            for key, tensors in packed["state"].items()
            for param, hyper in (params[key],)
        }
        packed["param_groups"] = [encoded_group(group) for group in packed["param_groups"]]
        return packed

    def _packed(self) -> dict[str, Any]:
        """Return torch's state dict; parameters that were taken out of their group are not in it."""
        every = self.state
        kept = {param: every[param] for group in self.param_groups for param in group["params"] if param in every}
        try:
            self.state = defaultdict(dict, kept)
            return super().state_dict()
        finally:
            self.state = every

    @_disable_dynamo
    @ordinary_tensors()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its tensors are copied, and have at least float32 whatever the parameters have.

        Parameters are found by their names where both sides have names, whatever their order and that of the groups;
        else by their places. Options come with the state, but for those that decide what it looks like (``block_size``
        and its like): it must fit this optimizer's. Where another option than a rate differs from this optimizer's, a
        warning says so.

        Raises:
            StateError: it does not fit; the text names the parameter and says why. Nothing is changed.
        """
        self._check_plan()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        state_dict = matched(state_dict, self.param_groups, is_trained)
        decoded = decoded_groups(state_dict["param_groups"], self.param_groups, self.rule)
        state_dict = {**state_dict, "param_groups": decoded}
        hypers = read_hypers(self._hyper, self.param_groups, decoded)
        thawed = self._thawed_in(state_dict)
        layouts = {**self._layouts, **self._found_layouts(thawed)} if thawed else self._layouts
        names = list(self._names().values())
        check_loaded(state_dict, self.param_groups, layouts, hypers, names)
        usual = {**default_arguments(type(self).__init__), **self.rule.fixed}
        replaced = replaced_options(self.param_groups, decoded, checked_group(usual, self.rule))
        with signals_held():
            self._thaw_loaded(thawed)
            tensors = loaded_tensors(state_dict, self.param_groups, self._placement.unpacked)
            with hooks_off(self):
                # torch would cast factors to the parameters' dtype
                super().load_state_dict({**state_dict, "state": {}})
            self.state.update(tensors)
            self._failure, self._progress, self._updates = "", None, None
        warn_of_replaced(replaced)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: tensors of their own, not views of stacks."""
        self._check_plan()
        packed = super().__getstate__()
        packed["state"] = {
            param: {name: tensor.clone() for name, tensor in tensors.items()} for param, tensors in self.state.items()
        }
        if self._process_group is not None:
            raise DistributedError(
                "an optimizer that was given a process_group cannot be copied; use its state_dict()."
            )
        packed["_parallel"], packed["_process_group"] = self._parallel, None
        packed["ranges"] = self._placement.ranges
        packed["layouts"] = self._layouts
        packed |= {name: self.__dict__[name] for name in ("fast_products", "metrics_every") if name in self.__dict__}
        return packed

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, and plan anew; torch also calls this to load a state, which leaves the division of work alone."""
        planned = state.get("layouts", self.__dict__.get("_layouts", {}))
        self._last_rates = ()
        self._forget_plan()
        is_copy = "ranges" in state
        super().__setstate__({name: value for name, value in state.items() if name not in ("ranges", "layouts")})
        restored = self.state
        self.state = defaultdict(dict)
        self.state.update(restored)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._planned_with.append((group, layout_options(group)))
        self._layouts.update(planned)
        self._plan()
        if is_copy:
            self._placement, self._placed, self._compared = SingleProcess(), False, True
            # a copy is the same as the original, and may be made by one process alone
            self._place(self.param_groups, state["ranges"], ask=False)
