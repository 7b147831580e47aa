"""A parameter group's options: checked when a group is added, read anew at every step."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.roots import SOLVER_MEMBERS, RootSolver
from kronscope.optim.config import (
    DEFAULT_REFRESH,
    Budget,
    Graft,
    Hyper,
    Norm,
    Refresh,
    Scale,
    parse_refresh,
    parse_scale,
)
from kronscope.optim.periods import Schedule
from kronscope.optim.rules import Rule
from kronscope.optim.solvers import CostModel

__all__ = [
    "LAYOUT_OPTIONS",
    "OBJECTS",
    "check_layout_options",
    "check_rates",
    "checked_group",
    "hyper_of",
    "layout_options",
    "structure_of",
]

# Options that are objects, which a group may also spell in words.
OBJECTS = ("refresh", "scale", "solver")
# Options that decide what a state looks like.
LAYOUT_OPTIONS = ("method", "view", "merge", "split", "block_size", "memory_budget")


def checked_group(group: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """Return the options of a group with names turned into objects.

    Raises:
        OptionError: an option has a value that is not allowed; the text names it.
    """
    family, rule = rule, rule.for_group(group)
    check_rates(group)
    _check_numbers(group)
    if group["nesterov"] and not group["momentum"] > 0:
        raise OptionError("nesterov needs momentum > 0.")
    if not (isinstance(group["start"], int) and group["start"] >= 1) and group["start"] != math.inf:
        raise OptionError(f"start must be a whole number of at least 1, or math.inf for never, got {group['start']!r}.")
    if not isinstance(group["power_rounds"], int) or group["power_rounds"] < 1:
        raise OptionError(f"power_rounds must be a whole number of at least 1, got {group['power_rounds']!r}.")
    _choice("decay", group["decay"], ("decoupled", "coupled", "cautious"))
    _choice("nonfinite", group["nonfinite"], ("skip", "raise"))
    budget = group["memory_budget"]
    if budget is not None and not (isinstance(budget, int | float) and budget >= 0):
        raise OptionError(f"memory_budget must be a number of bytes or None, got {budget!r}.")
    solver = CostModel() if isinstance(group["solver"], str) and group["solver"] == "auto" else group["solver"]
    if not isinstance(solver, RootSolver):
        missing = [name for name in SOLVER_MEMBERS if not hasattr(solver, name)]
        raise OptionError(
            f"solver must be 'auto' or a root solver such as Eigh(), got {solver!r}, which has no "
            f"{', '.join(missing)}; kronscope.kron.roots.RootSolver says what these are."
        )
    refresh, scale = parse_refresh(group["refresh"]), parse_scale(group["scale"])
    if refresh == family.default_refresh:
        # what the signature shows stands for the variant's own; by value, for copies have another object
        refresh = rule.default_refresh
    every = group["statistics"]
    if every is None:
        every = _usual_statistics(group, rule, refresh, scale)
    elif not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(f"statistics must be a whole number of steps of at least 1, or None, got {every!r}.")
    checked = {**group, "refresh": refresh, "scale": scale, "solver": solver, "statistics": every}
    rule.check_fixed(checked)
    rule.check_options(checked)
    return checked


def _usual_statistics(group: Mapping[str, Any], rule: Rule, refresh: Refresh, scale: Scale) -> int:
    """Return how many steps apart gradients are taken into the factors, where nobody says it.

    Each of them, where factors are sums, where they decide how long a step is, and where roots follow every step.
    """
    is_free = (rule.has_own_length or isinstance(scale, Graft | Norm)) and group["betas"][1] < 1
    return rule.default_statistics if is_free and (isinstance(refresh, Budget) or refresh.period > 1) else 1


def hyper_of(group: dict[str, Any], rule: Rule, schedule: Schedule = DEFAULT_REFRESH) -> Hyper:
    """Read a group's options as they are now; schedulers and people may have changed them.

    Args:
        group: The group.
        rule: The optimizer's family.
        schedule: What stands in for a :class:`~kronscope.Budget`, which only the whole plan can tell.

    Raises:
        OptionError: an option has a value that is not allowed; the text names it.
    """
    group = checked_group(group, rule)
    beta1, beta2 = group["betas"]
    return Hyper(
        rule=rule.for_group(group),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        exponents=tuple(float(e) for e in _exponents(group)),
        scale=group["scale"],
        refresh=schedule if isinstance(group["refresh"], Budget) else group["refresh"],
        damping=float(group["damping"]),
        start=group["start"],
        power_rounds=group["power_rounds"],
        momentum=float(group["momentum"]),
        nesterov=bool(group["nesterov"]),
        solver=group["solver"],
        statistics=group["statistics"],
    )


def _exponents(group: dict[str, Any]) -> Sequence[Any]:
    exponent = group["exponent"]
    return exponent if isinstance(exponent, tuple | list) else (exponent,)


def check_rates(group: dict[str, Any]) -> None:
    """Check what schedulers change at every step, and the rest of the options does not depend on.

    Raises:
        OptionError: one of them is not allowed.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        # its value is not looked at: it may live on another device
        if lr.ndim:
            raise OptionError(f"a tensor learning rate must be a single number, torch.tensor(1e-3), got {lr!r}.")
    else:
        _check("lr", lr, 0.0, sys.float_info.max)
    _check("weight_decay", group["weight_decay"], 0.0, math.inf)


def _check_numbers(group: dict[str, Any]) -> None:
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise OptionError(f"betas must be a pair, got {betas!r}.")
    _check("betas[0]", betas[0], 0.0, 1.0, open_end=True)
    _check("betas[1]", betas[1], 0.0, 1.0)
    for name in ("eps", "damping"):
        _check(name, group[name], 0.0, math.inf)
    _check("momentum", group["momentum"], 0.0, 1.0, open_end=True)
    exponents = _exponents(group)
    if not exponents or not all(isinstance(e, int | float) and math.isfinite(e) for e in exponents):
        raise OptionError(f"exponent must be a finite number, or one for each factor, got {group['exponent']!r}.")


def structure_of(hyper: Hyper) -> tuple[object, ...]:
    """Return what decides which tensors a block's state has."""
    graft = hyper.scale.kind != "sgd" if isinstance(hyper.scale, Graft) else False
    return hyper.beta1 > 0, hyper.momentum > 0, graft, hyper.solver.is_warm


def layout_options(group: dict[str, Any]) -> tuple[object, ...]:
    """Return what decides the layouts of a group."""
    return tuple(group[name] for name in LAYOUT_OPTIONS)


def check_layout_options(groups: Sequence[dict[str, Any]], planned: Sequence[tuple[object, ...]]) -> None:
    """Refuse layout options that were changed after the plan was made from them.

    Raises:
        OptionError: one was; the text names it.
    """
    for group, options in zip(groups, planned, strict=True):
        for name, now, then in zip(LAYOUT_OPTIONS, layout_options(group), options, strict=True):
            if now != then:
                raise OptionError(
                    f"{name} cannot be changed from {then!r} to {now!r} once an optimizer exists: it decides what the "
                    f"state looks like. Set it back, and make another optimizer with it."
                )


def _check(name: str, value: object, least: float, most: float, *, open_end: bool = False) -> None:
    number = isinstance(value, numbers.Real | Tensor) and not isinstance(value, bool)
    if not number or not least <= value <= most or (open_end and value == most):  # type: ignore[operator]
        end = f"below {most}" if open_end else "finite" if most > 1 else f"at most {most}"
        raise OptionError(f"{name} must be a number of at least {least} and {end}, got {value!r}.")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
