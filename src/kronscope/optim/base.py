"""What the three optimizers share: groups, state, and the order of work within a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from kronscope.errors import NonFiniteError, OptionError, StateError
from kronscope.kron.operators import Operator
from kronscope.kron.roots import RootSolver
from kronscope.optim.apply import apply_updates, check_supported, finite_gradients, full_precision, prepared_gradient
from kronscope.optim.blocks import Layout, LayoutOptions, fit_budget, plan_layout
from kronscope.optim.config import Adaptive, Every, Hyper, decode, encode, parse_refresh, parse_scale
from kronscope.optim.diagnostics import Diagnostics, diagnose
from kronscope.optim.elementwise import elementwise_state, elementwise_step
from kronscope.optim.explain import Explanation, explain_plan
from kronscope.optim.groups import role_of
from kronscope.optim.live import live_operator
from kronscope.optim.parallel import SingleProcess
from kronscope.optim.schedule import assign_phases, due_blocks
from kronscope.optim.stacks import Member, Stack, block_key, build_stacks, factor_dtype, initial_state
from kronscope.optim.state import check_loaded, load_tensors
from kronscope.optim.update import accumulate, direction, reference_update, refresh_roots

__all__ = ["KroneckerOptimizer"]


class KroneckerOptimizer(Optimizer):
    """Base of :class:`Shampoo`, :class:`SOAP` and :class:`KLShampoo`; not to be made directly.

    A step is: check the gradients, take them into factors and moments, refresh the roots that are due, form the
    updates, apply them. Blocks of equal shape and options are treated together.
    """

    family: ClassVar[Literal["shampoo", "soap", "kl"]]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._forget_plan()
        super().__init__(params, defaults)

    # --- groups ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also in the middle of a run; they start at their own step 1.

        Raises:
            OptionError: an option of the group is not allowed; nothing is added.
        """
        trial = {**self.defaults, **param_group}
        for name in ("lr", "betas"):
            _check_numbers(name, trial[name])
        trial["refresh"], trial["scale"] = parse_refresh(trial["refresh"]), parse_scale(trial["scale"])
        _check_group(trial)
        self._hyper(trial)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["refresh"], group["scale"] = trial["refresh"], trial["scale"]
        group.setdefault("skipped_steps", 0)
        try:
            self._plan_group(group)
        except OptionError:
            self.param_groups.pop()
            raise
        self._stacks_for = None

    def _plan_group(self, group: dict[str, Any]) -> None:
        """Decide the layout of each parameter of a group."""
        names = group.get("param_names", [""] * len(group["params"]))
        roles = group.setdefault("roles", [role_of(name) for name in names])
        split = group["split"]
        options = [
            LayoutOptions(
                method=group["method"],
                view=group["view"],
                merge=group["merge"],
                split=tuple(split) if isinstance(split, list) else split,
                block_size=group["block_size"],
                role=role,
            )
            for role in roles
        ]
        params = group["params"]
        layouts = [
            plan_layout(param.shape, option, torch.finfo(factor_dtype(param)).bits // 8)
            for param, option in zip(params, options, strict=True)
        ]
        if group["memory_budget"] is not None:
            layouts = fit_budget(layouts, options, int(group["memory_budget"]))
        self._layouts.update(zip(params, layouts, strict=True))

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        """Read a group's options as they are now; schedulers may have changed them."""
        exponent = group["exponent"]
        beta1, beta2 = group["betas"]
        return Hyper(
            family=self.family,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            exponents=tuple(float(e) for e in exponent) if isinstance(exponent, tuple | list) else (float(exponent),),
            scale=group["scale"],
            refresh=group["refresh"],
            damping=float(group["damping"]),
            start=group["start"],
            power_rounds=group["power_rounds"],
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            solver=group["solver"],
        )

    # --- the step -------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: Reevaluates the model and returns the loss; called with gradients enabled.

        Raises:
            GradientError: a gradient is sparse or complex.
            NonFiniteError: a gradient is not finite and the option ``nonfinite`` is ``"raise"``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @_disable_dynamo
    def _step(self) -> None:
        active = [
            (index, param)
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.grad is not None
        ]
        for _, param in active:
            check_supported(param.grad, self._name(param))
        if not active or not self._all_finite([param for _, param in active]):
            return
        hypers = [self._hyper(group) for group in self.param_groups]
        with full_precision({param.device.type for _, param in active}):
            self._initialise(active, hypers)
            torch._foreach_add_([self.state[param]["step"] for _, param in active], 1)
            self._step_elementwise(active, hypers)
            self._step_stacks({param for _, param in active}, hypers)

    def _all_finite(self, params: list[Tensor]) -> bool:
        finite = finite_gradients([param.grad for param in params if param.grad is not None])
        if self._placement.finite_everywhere(all(finite)):
            return True
        bad = [self._name(param) for param, good in zip(params, finite, strict=True) if not good]
        what = f"the gradient of {', '.join(bad[:3])}{' and others' if len(bad) > 3 else ''} is not finite"
        if any(group["nonfinite"] == "raise" for group in self.param_groups):
            raise NonFiniteError(f"{what}; nothing was changed. Look at the loss and the learning rate.")
        for group in self.param_groups:
            group["skipped_steps"] += 1
        warnings.warn(f"{what}; this step is skipped (number {self.skipped_steps}).", RuntimeWarning, stacklevel=5)
        return False

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        return max(group["skipped_steps"] for group in self.param_groups)

    def _initialise(self, active: Sequence[tuple[int, Tensor]], hypers: list[Hyper]) -> None:
        """Make the state of parameters that have their first gradient, and the stacks if anything changed."""
        fresh = [(index, param) for index, param in active if "step" not in self.state[param]]
        for index, param in fresh:
            layout = self._layouts[param]
            if layout.is_elementwise:
                self.state[param] = elementwise_state(param, factor_dtype(param))
            else:
                self.state[param] = initial_state(param, layout, hypers[index])
        # groups with equal options share stacks; which group is the first with a group's options
        first = [hypers.index(hyper) for hyper in hypers]
        if fresh:
            newcomers = [(param, self._layouts[param], hypers[index]) for index, param in fresh]
            assign_phases(newcomers, self._all_phases())
        shapes = tuple(first), tuple(_structure(hyper) for hyper in hypers)
        if fresh or self._stacks_for != shapes:
            self._build(first, hypers)
            self._stacks_for = shapes

    def _build(self, first: list[int], hypers: list[Hyper]) -> None:
        entries = []
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if self._layouts[param].is_elementwise or "step" not in self.state.get(param, {}):
                    continue
                self._add_missing(param, hypers[index])
                entries.append((param, self._layouts[param], first[index], hypers[index]))
        self._stacks = build_stacks(entries, self.state)

    def _add_missing(self, param: Tensor, hyper: Hyper) -> None:
        """Make what an option changed during the run needs, for example a momentum buffer."""
        wanted = initial_state(param, self._layouts[param], hyper)
        for name, tensor in wanted.items():
            self.state[param].setdefault(name, tensor)

    def _step_elementwise(self, active: Sequence[tuple[int, Tensor]], hypers: list[Hyper]) -> None:
        for index, group in enumerate(self.param_groups):
            params = [p for i, p in active if i == index and self._layouts[p].is_elementwise]
            params = self._placement.mine(params)
            if params:
                states = [self.state[param] for param in params]
                steps = [int(state["step"]) for state in states]
                elementwise_step(params, states, steps, hypers[index], group)

    def _step_stacks(self, active: set[Tensor], hypers: list[Hyper]) -> None:
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        updates: dict[int, dict[Tensor, dict[int, Tensor]]] = {}
        for stack in self._placement.mine(self._stacks):
            hyper = hypers[stack.group]
            cohorts: dict[int, list[Member]] = {}
            for member in stack.members:
                if member.param in active:
                    cohorts.setdefault(int(self.state[member.param]["step"]), []).append(member)
            for step, members in cohorts.items():
                grads = stack.gather(
                    lambda p: prepared_gradient(p, group_of[p]), members, factor_dtype(members[0].param)
                )
                update = self._placement.exchanged(self._update(stack, members, grads, hyper, step))
                offset = 0
                for member in members:
                    blocks = update[offset : offset + member.tile.count]
                    offset += member.tile.count
                    updates.setdefault(id(group_of[member.param]), {}).setdefault(member.param, {})[
                        member.tile_index
                    ] = blocks
        for group in self.param_groups:
            mine = updates.get(id(group), {})
            if mine:
                tensors = [_assembled(self._layouts[param], tiles) for param, tiles in mine.items()]
                self._apply(list(mine), tensors, group)

    def _apply(self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        apply_updates(params, updates, group)

    def _update(self, stack: Stack, members: list[Member], grads: Tensor, hyper: Hyper, step: int) -> Tensor:
        """Run the update of some members, all at the same step, on their part of the stack."""
        rows = torch.cat([torch.arange(member.start, member.stop) for member in members])
        partial = rows.numel() < stack.count
        state = {name: tensor[rows] for name, tensor in stack.tensors.items()} if partial else stack.tensors
        due = due_blocks(stack, rows if partial else None, state, hyper, step)
        if self.param_groups[stack.group]["foreach"]:
            mean = accumulate(state, grads, stack.factored, hyper, step)
            due = due_blocks(stack, rows if partial else None, state, hyper, step)
            for mode, index in enumerate(due):
                if index is not None:
                    refresh_roots(state, mode, index, hyper, step)
            update = direction(state, mean, stack.factored, hyper, step)
        else:
            flags = [set() if index is None else set(index.tolist()) for index in due]
            update = torch.stack(
                [
                    reference_update(
                        {name: tensor[row] for name, tensor in state.items()},
                        grads[row],
                        stack.factored,
                        hyper,
                        step,
                        [row in flag for flag in flags],
                    )
                    for row in range(rows.numel())
                ]
            )
        for mode, index in enumerate(due):
            if index is not None:
                stack.refreshed[rows[index], mode] = step
        if partial:
            for name, tensor in state.items():
                stack.tensors[name][rows] = tensor
        return update

    # --- looking --------------------------------------------------------------------------------------------------

    def operator(self, param: Tensor) -> Operator:
        r"""Return the live estimate of the curvature matrix that a parameter's preconditioner stands for.

        For Shampoo it is :math:`L \otimes R / \operatorname{tr} L` of the present factors, without eps or damping and
        whatever the exponent: what ``approx.get("shampoo2")`` fits on the gradients seen, with weights
        :math:`(1-\beta_2)\beta_2^{T-t}/(1-\beta_2^T)`, or one under sums. Blocks give a block-diagonal operator, a
        parameter without factors a diagonal one, SOAP an :class:`EigenbasisDiagonal`.

        Args:
            param: A parameter of this optimizer that has had a gradient.

        Raises:
            StateError: it is not one of this optimizer's, or has had no gradient yet.
        """
        if param not in self._layouts:
            raise StateError("operator() was given a tensor that is not a parameter of this optimizer.")
        state = self.state.get(param, {})
        if "step" not in state:
            raise StateError(f"{self._name(param)} has had no gradient yet; call operator() after the first step.")
        group = next(g for g in self.param_groups if any(param is p for p in g["params"]))
        return live_operator(param, state, self._layouts[param], self._hyper(group))

    def explain(self) -> Explanation:
        """Return the plan: for each parameter its view, blocks, solver, bytes, FLOPs and share of the step's cost.

        Works before the first step; ``print`` it for a table.
        """
        rows = []
        for group in self.param_groups:
            hyper = self._hyper(group)
            rows += [(self._name(param), param, self._layouts[param], hyper) for param in group["params"]]
        return explain_plan(rows)

    def diagnostics(self) -> Diagnostics:
        """Return the state of each parameter's preconditioner; ``print`` it for a table."""
        rows = []
        for group in self.param_groups:
            hyper = self._hyper(group)
            rows += [(self._name(p), p, self._layouts[p], hyper, group) for p in group["params"]]
        return diagnose(rows, self.state, self.skipped_steps)

    def _name(self, param: Tensor) -> str:
        for index, group in enumerate(self.param_groups):
            for position, candidate in enumerate(group["params"]):
                if candidate is param:
                    names = group.get("param_names")
                    return names[position] if names else f"group {index} parameter {position} {tuple(param.shape)}"
        return "a parameter"

    # --- state ----------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, and options as plain values; ``torch.load(weights_only=True)`` reads it."""
        packed = super().state_dict()
        packed["param_groups"] = [
            {name: encode(value) for name, value in group.items()} for group in packed["param_groups"]
        ]
        return packed

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its tensors are copied and keep their dtypes.

        Raises:
            StateError: it does not fit; the text names the parameter and says why. Nothing is changed.
        """
        state_dict = {
            **state_dict,
            "param_groups": [
                {name: decode(value) for name, value in group.items()} for group in state_dict["param_groups"]
            ],
        }
        names = [self._name(param) for group in self.param_groups for param in group["params"]]
        hypers = [self._hyper({**group, **saved}) for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False)]
        check_loaded(state_dict, self.param_groups, self._layouts, hypers, names)
        super().load_state_dict({**state_dict, "state": {}})
        load_tensors(state_dict, self.param_groups, self.state)
        self._stacks_for = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: tensors of their own, not views of stacks."""
        packed = super().__getstate__()
        packed["state"] = {
            param: {name: tensor.clone() for name, tensor in tensors.items()} for param, tensors in self.state.items()
        }
        return packed

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, and plan anew."""
        self._forget_plan()
        super().__setstate__(state)
        if not hasattr(self.state, "default_factory"):
            restored = self.state
            self.state = _fresh_state()
            self.state.update(restored)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._plan_group(group)

    def _forget_plan(self) -> None:
        self._layouts: dict[Tensor, Layout] = {}
        self._stacks: list[Stack] = []
        self._stacks_for: object = None
        self._placement = SingleProcess()

    def _all_phases(self) -> list[tuple[int, Tensor, Tensor]]:
        """Return (size, phases, refreshed) of every factor side that exists."""
        found = []
        for param, layout in self._layouts.items():
            for index, tile in enumerate(layout.tiles):
                key = block_key(index, "phase")
                if key in self.state.get(param, {}):
                    found += [(tile.block[mode], self.state[param][key], mode) for mode in tile.modes]
        return found  # type: ignore[return-value]
