"""The plan of a whole model: what each parameter is for, and how it is treated within the memory there is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kronscope.errors import OptionError
from kronscope.optim.blocks import (
    DEFAULT_FLOOR,
    Layout,
    LayoutOptions,
    default_allowance,
    factor_bytes,
    fit_budget,
    frozen_layout,
    plan_layout,
)
from kronscope.optim.naming import is_place, place_names
from kronscope.optim.roles import EXPERTS, LIKE_A_TABLE, like_tables, roles_in, roles_of
from kronscope.optim.rules import Rule
from kronscope.optim.stacks import factor_dtype
from kronscope.support.callers import callers_level

__all__ = [
    "add_roles",
    "as_groups",
    "check_lists",
    "is_trained",
    "list_once",
    "listed",
    "name_alike",
    "plan_layouts",
]


def as_groups(params: Any) -> Any:
    """Turn what a constructor was given into groups whose parameters can be gone through twice.

    A module gives one group of all its named parameters, with their roles. What torch refuses is left to it.

    Raises:
        OptionError: it is a list of modules, a module without parameters or with lazy ones, or nothing to go through.
    """
    if isinstance(params, nn.Module):
        named = list(params.named_parameters())
        if not named:
            raise OptionError(f"the {type(params).__name__} given has no parameters; pass the model that is to train.")
        _check_shaped(named)
        roles = roles_in(params)
        return [{"params": named, "roles": [roles[param] for _, param in named]}]
    if isinstance(params, Tensor):
        return params
    if not isinstance(params, Iterable):
        raise OptionError(
            f"an optimizer takes a model, model.named_parameters(), or groups of parameters; "
            f"got {type(params).__name__}."
        )
    entries = list(params)
    if any(isinstance(entry, nn.Module) for entry in entries):
        raise OptionError(
            "a list of modules was given; pass one module, such as nn.ModuleList([first, second]), so that every "
            "parameter has a name of its own, or groups: [*ks.param_groups(first), *ks.param_groups(second)]."
        )
    if not entries or not isinstance(entries[0], dict):
        return [{"params": entries}] if entries else entries
    for group in entries:
        if isinstance(group, dict) and not isinstance(group.get("params", ()), Tensor | list | set):
            group["params"] = list(group["params"])
    return entries


def _check_shaped(params: Iterable[Any]) -> None:
    """Refuse parameters, or pairs with their names, whose shape is not known yet.

    Raises:
        OptionError: a parameter is lazy.
    """
    for entry in params:
        if is_lazy(entry[1] if isinstance(entry, tuple) else entry):
            name = f"{entry[0]!r}" if isinstance(entry, tuple) else "one of the parameters"
            raise OptionError(
                f"{name} is lazy and has no shape yet; call the model once, with a batch of data, before you make the "
                f"optimizer."
            )


def is_trained(param: Tensor) -> bool:
    """Whether a parameter takes part in training: it wants a gradient, or was given one."""
    return param.requires_grad or param.grad is not None


def listed(group: dict[str, Any]) -> list[Any]:
    """Return the parameters of a group as given, perhaps with names, and let them be gone through again."""
    given = group.get("params", ())
    entries = [given] if isinstance(given, Tensor) else list(given)
    if not isinstance(given, Tensor | set):
        group["params"] = entries
    return entries


def name_alike(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Make groups agree on having names, which torch insists on: where only some have, the others get places.

    Raises:
        OptionError: a parameter is lazy.
    """
    entries = listed(group)
    _check_shaped(entries)
    named = "param_names" in group or (bool(entries) and isinstance(entries[0], tuple))
    if not groups or not entries or named == ("param_names" in groups[0]):
        return
    if named:
        for index, other in enumerate(groups):
            other["param_names"] = place_names(index, other["params"])
    elif all(isinstance(param, Tensor) for param in entries):
        group["params"] = list(zip(place_names(len(groups), entries), entries, strict=True))


def check_lists(group: Mapping[str, Any]) -> None:
    """Refuse a group that torch has taken in if it does not say a name, or a role, of each parameter.

    Raises:
        OptionError: ``roles`` or ``param_names`` is no list of as many strings as there are parameters.
    """
    count = len(group["params"])
    for name in ("param_names", "roles"):
        value = group.get(name, [""] * count)
        is_list = isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
        if not is_list or len(value) != count:
            found = f"{len(value)} of them" if is_list else repr(value)
            raise OptionError(
                f"{name!r} of a group must be a list of strings, one for each of its {count} parameters; got {found}."
            )


def list_once(group: dict[str, Any]) -> None:
    """Keep the first of each parameter in a group that torch has taken in, and warned of if one is there twice."""
    first = {param: place for place, param in reversed(list(enumerate(group["params"])))}
    kept = sorted(first.values())
    if len(kept) == len(group["params"]):
        return
    for name in ("param_names", "roles"):
        if name in group:
            group[name] = [group[name][place] for place in kept]
    group["params"] = [group["params"][place] for place in kept]


def add_roles(groups: Sequence[dict[str, Any]], method: str, kind: str, *, whole: bool) -> None:
    """Set ``group["roles"]`` where it is missing; warns where a name would have mattered and is not known.

    Args:
        groups: Groups that torch has taken in.
        method: The constructor's ``method``, for groups that do not say.
        kind: The name of the optimizer's class, for the warning.
        whole: Whether these are all of a model's parameters, so that the last matrix may be its head.
    """
    fresh = [group for group in groups if "roles" not in group]
    members = [
        (name, param)
        for group in fresh
        for name, param in zip(group.get("param_names") or [""] * len(group["params"]), group["params"], strict=True)
    ]
    found = roles_of([name for name, _ in members], [param for _, param in members], last=whole)
    roles = {param: role for (_, param), role in zip(members, found, strict=True)}
    silent = [param for name, param in members if not roles[param] and not _says_something(name)]
    for param in like_tables(silent):
        roles[param] = LIKE_A_TABLE
    for group in fresh:
        group["roles"] = [roles[param] for param in group["params"]]
    open_to_roles = [group for group in fresh if group.get("method", method) == "auto"]
    if not _warn_of_tables([p for group in open_to_roles for p in group["params"]], roles, kind):
        _warn_of_no_names(open_to_roles, roles, kind)


def _says_something(name: str) -> bool:
    """Whether a name holds a word for the layer, and not only its place."""
    return any(not part.isdigit() for part in name.split(".")[:-1])


def _ways(kind: str) -> str:
    return (
        f"Pass the model itself, {kind}(model, ...), or model.named_parameters(), or groups from "
        f"kronscope.param_groups(model), so that every embedding and head is known"
    )


def _warn_of_no_names(groups: Sequence[dict[str, Any]], roles: Mapping[Tensor, str], kind: str) -> None:
    """Warn where several matrices without names are preconditioned: by custom one of them is an embedding or a head."""
    unnamed = [group for group in groups if all(map(is_place, group.get("param_names", ())))]
    matrices = [p for group in unnamed for p in group["params"] if p.ndim > 1 and not roles[p]]
    if len(matrices) > 1:
        warnings.warn(
            f"{kind} was given parameters without names, and preconditions all {len(matrices)} matrices among them, "
            f"also embeddings and heads, which do better with AdamW. {_ways(kind)}; or, where all are "
            f"meant, put the matrices into a group with method='kronecker'.",
            UserWarning,
            stacklevel=callers_level(),
        )


def _warn_of_tables(params: Sequence[Tensor], roles: Mapping[Tensor, str], kind: str) -> bool:
    """Warn of tables that were recognised by their shape alone; return whether there are any."""
    shapes = [" x ".join(map(str, param.shape)) for param in params if roles[param] == LIKE_A_TABLE]
    if shapes:
        several = len(shapes) > 1
        warnings.warn(
            f"{kind} does not know the names of its parameters, and {'some look' if several else 'one looks'} like an "
            f"embedding or a head by shape ({', '.join(shapes[:4])}{', ...' if len(shapes) > 4 else ''}): "
            f"{'they get' if several else 'it gets'} AdamW. {_ways(kind)}; or put what is none into a group with "
            f"method='kronecker'.",
            UserWarning,
            stacklevel=callers_level(),
        )
    return bool(shapes)


class _Pool:
    """Parameters that share a memory budget."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.used = self.numel = self.size = 0
        self.entries: list[tuple[Tensor, LayoutOptions, int]] = []

    def count(self, param: Tensor, layout: Layout, size: int) -> None:
        """Count a parameter that was planned before."""
        self.used += factor_bytes(layout, size)
        self._note(param, size)

    def want(self, param: Tensor, options: LayoutOptions, size: int) -> None:
        """Ask for a parameter's layout."""
        self.entries.append((param, options, size))
        self._note(param, size)

    def _note(self, param: Tensor, size: int) -> None:
        self.numel += param.numel()
        self.size = max(self.size, size)

    def plan(self) -> dict[Tensor, Layout]:
        """Decide the layouts asked for."""
        if self.limit is not None:
            left = max(float(self.limit) - self.used, 0.0)
            layouts = [plan_layout(param.shape, options, size, left) for param, options, size in self.entries]
            _, options, sizes = zip(*self.entries, strict=True)
            return self._by_param(fit_budget(layouts, options, left, sizes))
        layouts = self._default(DEFAULT_FLOOR)
        wanted = self.used + sum(factor_bytes(x, size) for x, (_, _, size) in zip(layouts, self.entries, strict=True))
        if wanted > default_allowance(self.numel, self.size):
            # many small matrices add up: what is allowed in any case is allowed once, not for each
            layouts = self._default(0.0)
        return self._by_param(layouts)

    def _default(self, floor: float) -> list[Layout]:
        return [plan_layout(param.shape, options, size, floor=floor) for param, options, size in self.entries]

    def _by_param(self, layouts: Sequence[Layout]) -> dict[Tensor, Layout]:
        return {param: layout for (param, _, _), layout in zip(self.entries, layouts, strict=True)}


def plan_layouts(
    groups: Sequence[dict[str, Any]],
    known: Mapping[Tensor, Layout],
    shared: float | None,
    rule: Rule,
    trained: Callable[[Tensor], bool] = is_trained,
) -> dict[Tensor, Layout]:
    """Decide the layouts of all parameters that have none yet.

    Groups with the constructor's memory budget share it, those with another have it for themselves. Parameters that
    are frozen need nothing, and are planned when they are not.

    Args:
        groups: All parameter groups, with roles.
        known: The layouts there are.
        shared: The constructor's memory budget.
        rule: The optimizer's family.
        trained: Whether a parameter takes part in training.

    Raises:
        OptionError: an option does not fit a parameter.
    """
    pools: dict[int, _Pool] = {}
    found: dict[Tensor, Layout] = {}
    for index, group in enumerate(groups):
        limit = group["memory_budget"]
        pool = pools.setdefault(-1 if limit == shared else index, _Pool(limit))
        own = rule.for_group(group)
        kept = own.matrices(group["solver"])
        base = layout_options_of(group)
        for param, role in zip(group["params"], group["roles"], strict=True):
            size = kept * torch.finfo(factor_dtype(param)).bits // 8
            given = own.layout(tuple(param.shape))
            if param in known:
                pool.count(param, known[param], size)
            elif not trained(param):
                found[param] = frozen_layout(param.shape)
            elif given is not None:
                found[param] = given
            else:
                pool.want(param, _for_role(base, role), size)
    for pool in pools.values():
        if pool.entries:
            found.update(pool.plan())
    for group in groups:
        _check_exponents(group, [found[param] for param in group["params"] if param in found])
    return found


def layout_options_of(group: Mapping[str, Any]) -> LayoutOptions:
    """Return what a group says about layouts."""
    split = group["split"]
    return LayoutOptions(
        method=group["method"],
        view=group["view"],
        merge=group["merge"],
        split=tuple(split) if isinstance(split, list) else split,
        block_size=group["block_size"],
        # sums are Adagrad's and the original Shampoo's, which have no blocks; and who gives a budget means to spend it
        cuts=float(group["betas"][1]) < 1 and group["memory_budget"] is None,
    )


def _for_role(options: LayoutOptions, role: str) -> LayoutOptions:
    if role != EXPERTS:
        return replace(options, role=role) if role else options
    return replace(options, view="experts") if options.view == "matrix" else options


def _check_exponents(group: Mapping[str, Any], layouts: Sequence[Layout]) -> None:
    exponent = group["exponent"]
    if isinstance(exponent, tuple | list) and len(exponent) > 1:
        for layout in layouts:
            # the positions of a kernel that is kept apart belong to its columns
            sides = 2 if layout.tiles and layout.tiles[0].factored == (True, True, False) else len(layout.view)
            if layout.tiles and sides != len(exponent):
                raise OptionError(
                    f"{len(exponent)} exponents were given, but a parameter of shape {layout.shape} has "
                    f"{sides} factors; give one number, or make a group of its own."
                )
