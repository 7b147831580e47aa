"""Parameter groups, and the plan that is made of them: who preconditions what, and on which process."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from kronscope.errors import OptionError, StateError
from kronscope.optim.advice import check_group_names
from kronscope.optim.blocks import Layout
from kronscope.optim.budgets import budgeted
from kronscope.optim.config import Budget, Hyper, parse_refresh
from kronscope.optim.loading import placed
from kronscope.optim.naming import place_names, plain_names
from kronscope.optim.options import (
    OBJECTS,
    check_layout_options,
    check_rates,
    checked_group,
    hyper_of,
    layout_options,
)
from kronscope.optim.parallel import Placement, Planned, Ranges, SingleProcess, check_not_flattened, choose_placement
from kronscope.optim.periods import Schedule
from kronscope.optim.planning import (
    add_roles,
    as_groups,
    check_lists,
    is_trained,
    list_once,
    listed,
    name_alike,
    plan_layouts,
)
from kronscope.optim.rules import Rule
from kronscope.optim.stacks import Stack
from kronscope.optim.swaps import kept_states, replaced
from kronscope.optim.undoing import all_or_nothing
from kronscope.support.callers import callers_level

__all__ = ["PlannedOptimizer"]


class PlannedOptimizer(Optimizer):
    """The part of :class:`KroneckerOptimizer` that knows its groups and plans for them; it makes no step.

    Parameters may be added, thaw, or be swapped for others in their places; the plan follows.
    """

    rule: ClassVar[Rule]
    _layouts: dict[Tensor, Layout]
    _frozen: list[Tensor]
    _stacks: list[Stack]
    _stacks_for: object
    _planned_with: list[tuple[dict[str, Any], tuple[object, ...]]]
    _powers: dict[int, tuple[float, ...]]
    _schedules: dict[Budget, Schedule]
    _hypers: dict[int, tuple[dict[str, object], Hyper]]
    _placement: Placement
    _places: list[Tensor]
    _placed: bool
    _compared: bool

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._forget_plan()
        self._placement, self._placed = SingleProcess(), False
        defaults = dict(defaults)
        self._parallel, self._process_group = defaults.pop("parallel"), defaults.pop("process_group")
        super().__init__(as_groups(params), {**defaults, **self.rule.fixed})
        add_roles(self.param_groups, defaults["method"], type(self).__name__, whole=True)
        self._plan()
        self._place(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also in the middle of a run; they start at their own step 1.

        Whatever is raised, nothing is added, and the group given is as it was.

        Raises:
            OptionError: an option of the group is not allowed, or misspelt, or a parameter is lazy.
            DistributedError: the processes' groups differ.
        """
        check_group_names(param_group, self.defaults, type(self).__name__)
        checked = checked_group({**self.defaults, **param_group}, self.rule)
        listed(param_group)
        with all_or_nothing(self, param_group):
            name_alike(param_group, self.param_groups)
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            check_lists(group)
            list_once(group)
            if "param_names" in group:
                group["param_names"] = plain_names(group["param_names"])
            group.update({name: checked[name] for name in (*OBJECTS, "statistics")})
            group.setdefault("skipped_steps", 0)
            group["family"] = self.rule.name
            if self._placed:
                # the constructor's own groups are planned together, when all are there
                add_roles([group], self.defaults["method"], type(self).__name__, whole=False)
                self._plan()
                self._place([group])
            self._planned_with.append((group, layout_options(group)))
            self._stacks_for = None

    def _plan(self, thawed: Container[Tensor] = ()) -> None:
        """Decide the layouts of all parameters that have none, and of those that are no longer frozen.

        Args:
            thawed: Parameters that count as trained, whatever they say of themselves.
        """
        self._layouts.update(self._found_layouts(thawed))
        self._schedules, self._hypers = {}, {}
        self._frozen = [param for param, layout in self._layouts.items() if layout.frozen]
        self._places = [param for group in self.param_groups for param in group["params"]]

    def _found_layouts(self, thawed: Container[Tensor] = ()) -> dict[Tensor, Layout]:
        """Return the layouts that :meth:`_plan` decides upon."""
        known = {param: layout for param, layout in self._layouts.items() if not layout.frozen}
        return plan_layouts(
            self.param_groups,
            known,
            self.defaults["memory_budget"],
            self.rule,
            lambda param: param in thawed or is_trained(param),
        )

    def _thaw(self) -> None:
        """Plan the parameters that were frozen and are not any more."""
        thawed = [param for param in self._frozen if is_trained(param)]
        if thawed:
            with all_or_nothing(self):
                self._plan()
                self._place(self.param_groups, only=set(thawed))

    def _thawed_in(self, saved: dict[str, Any]) -> set[Tensor]:
        """Return the parameters that are frozen here but were not in the run that was saved."""
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        pairs = zip(params, keys, strict=False)
        return {param for param, key in pairs if self._layouts[param].frozen and key in saved["state"]}

    def _thaw_loaded(self, thawed: set[Tensor]) -> None:
        """Plan the parameters of :meth:`_thawed_in`."""
        if thawed:
            self._plan(thawed)
            # a state may be loaded by one process at a time
            self._place(self.param_groups, only=thawed, ask=False)

    def _place(
        self,
        groups: list[dict[str, Any]],
        ranges: Ranges | None = None,
        only: set[Tensor] | None = None,
        *,
        ask: bool = True,
    ) -> None:
        """Decide who works on the parameters of some groups, or on some of them; on frozen ones nobody does.

        Args:
            groups: The groups.
            ranges: How the work was divided before; None to decide now.
            only: Leave out all other parameters.
            ask: Compare all groups with the other processes', which must be here too.
        """
        names = self._names()
        entries = [
            Planned(names[param], param, self._layouts[param], hyper)
            for group in groups
            for hyper in (self._hyper(group),)
            for param in group["params"]
            if not self._layouts[param].frozen and (only is None or param in only)
        ]
        if not self._placed:
            check_not_flattened(names, self._name)
            named = [(name, param) for param, name in names.items()]
            self._placement = choose_placement(named, self._parallel, self._process_group)
            self._placed = True
        if ask:
            self._compare()
        self._placement.add(entries, ranges)

    def _compare(self) -> None:
        names = {param: name for param, name in self._names().items() if not self._layouts[param].frozen}
        self._placement.compare(self.param_groups, names)
        self._compared = True

    def _check_plan(self, *, ask: bool = False) -> None:
        """Refuse changed layout options; plan anew where the groups hold other tensors or shapes than were planned.

        Accelerate, for one, puts the sharded parameters of FSDP2 into the groups of a finished optimizer.

        Args:
            ask: All processes are here, and may be asked.
        """
        if len(self.param_groups) != len(self._planned_with):
            self._leave_out_groups()
        check_layout_options(self.param_groups, [options for _, options in self._planned_with])
        params = [param for group in self.param_groups for param in group["params"]]
        if any(param not in self._layouts for param in params):
            self._plan_anew(replaced(self._places, params), ask=ask)
        if ask:
            # FSDP1 may have flattened them where they are
            check_not_flattened(params, self._name)
        if self._have_new_shapes(params):
            self._plan_anew({param: param for param in params}, ask=ask)
        if ask and not self._compared:
            self._compare()

    def _have_new_shapes(self, params: Iterable[Tensor]) -> bool:
        """Tell whether the data of planned parameters has other shapes now, as after a vocabulary has grown.

        Raises:
            StateError: one of them has a state, which fits the old shape alone.
        """
        layouts = self._layouts
        changed = [p for p in params if p.shape != layouts[p].shape and not layouts[p].frozen]
        for param in changed:
            if "step" in self.state.get(param, {}):
                raise StateError(
                    f"{self._name(param)} has shape {tuple(param.shape)}, but its state was made for "
                    f"{layouts[param].shape}: its data was replaced. Nothing was changed. Make a new optimizer; or let "
                    f"this parameter start anew, with optimizer.state.pop(parameter)."
                )
        return bool(changed)

    def _leave_out_groups(self) -> None:
        """Follow groups that were taken out of ``param_groups``; the states of their parameters stay."""
        here = {id(group) for group in self.param_groups}
        planned = [(group, options) for group, options in self._planned_with if id(group) in here]
        if len(planned) != len(self.param_groups):
            raise OptionError(
                f"param_groups has {len(self.param_groups)} groups, of which {len(planned)} were planned; groups are "
                f"added with add_param_group()."
            )
        self._planned_with, self._stacks_for = planned, None
        self._plan()

    def _plan_anew(self, places: Mapping[Tensor, Tensor], *, ask: bool) -> None:
        """Plan for parameters that stand in the places of planned ones, and take over the states that fit.

        Args:
            places: What :func:`replaced` returns.
            ask: All processes are here, and may be asked.
        """
        planned_with = self._planned_with
        states = kept_states(places, self.state, self._placement, ask=ask)
        with all_or_nothing(self):
            layouts = {new: self._layouts[old] for new, old in places.items() if new.shape == self._layouts[old].shape}
            self._forget_plan()
            self._layouts, self._planned_with = dict(layouts), planned_with
            self._plan()
            self._placement, self._placed = SingleProcess(), False
            # one process alone may notice first, so the others are asked in the next step
            self._place(self.param_groups, ask=False)
        self._compared, self.state = False, defaultdict(dict)
        for param, tensors in states.items():
            if param in layouts:
                part = {name: self._placement.unpacked(param, name, tensor) for name, tensor in tensors.items()}
                self.state[param] = placed(part, param, copy=True)
            else:
                shape = tuple(places[param].shape)
                text = f"{self._name(param)} stands in the place of one of shape {shape}; it starts anew."
                warnings.warn(text, RuntimeWarning, stacklevel=callers_level())

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        refresh = parse_refresh(group["refresh"])
        return hyper_of(group, self.rule, *([self._scheduled(refresh)] if isinstance(refresh, Budget) else []))

    def _scheduled(self, budget: Budget) -> Schedule:
        """Return the schedule that keeps a budget, by the counted costs of the whole plan."""
        if budget not in self._schedules:
            self._schedules[budget] = budgeted(budget, self.param_groups, self._layouts, self.rule)
        return self._schedules[budget]

    def _known_hypers(self) -> list[Hyper]:
        """Return :meth:`_hyper` of all groups, which takes its time, from the last step's where nothing changed."""
        names = [name for name in self.defaults if name not in ("lr", "weight_decay")]
        read = [{name: _seen(group[name]) for name in names} for group in self.param_groups]
        for group, options in zip(self.param_groups, read, strict=True):
            check_rates(group)
            known = self._hypers.get(id(group))
            # schedulers cycle betas, on which no cost depends
            if known is not None and any(known[0][name] != options[name] for name in names if name != "betas"):
                # what a budget allows follows from the options of all groups
                self._schedules, self._hypers = {}, {}
        hypers = []
        for group, options in zip(self.param_groups, read, strict=True):
            known = self._hypers.get(id(group))
            if known is None or known[0] != options:
                self._hypers[id(group)] = known = options, self._hyper(group)
            hypers.append(known[1])
        return hypers

    def _share(self, param: Tensor) -> Layout:
        """Return the part of a parameter's layout that this process works on."""
        return self._placement.share(param, self._layouts[param])

    def _planned_states(self, hypers: list[Hyper], but: set[Tensor]) -> list[tuple[dict[str, Tensor], Layout, Hyper]]:
        return [
            (self.state[param], self._layouts[param], hyper)
            for group, hyper in zip(self.param_groups, hypers, strict=True)
            for param in group["params"]
            if param not in but and self._layouts[param].tiles and "step" in self.state.get(param, {})
        ]

    def _names(self) -> dict[Tensor, str]:
        """Return the name of each parameter, or its place."""
        found = {}
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or place_names(index, group["params"])
            for place, param in enumerate(group["params"]):
                found[param] = str(names[place])
        return found

    def _name(self, param: Tensor) -> str:
        return self._names().get(param, "a parameter")

    def _forget_plan(self) -> None:
        self._layouts = {}
        self._frozen = []
        self._planned_with = []
        self._stacks = []
        self._stacks_for = None
        self._powers = {}
        self._schedules = {}
        self._hypers = {}


def _seen(value: object) -> object:
    """Return an option such that it compares unequal once it has been changed in place."""
    if isinstance(value, list | tuple):
        return tuple(map(_seen, value))
    if isinstance(value, Tensor):
        # another device would have to be waited for
        return value.tolist() if value.device.type == "cpu" else (value, value._version)
    return value
