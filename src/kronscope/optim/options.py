"""A parameter group's options: checked when a group is added, read anew at every step."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.roots import RootSolver
from kronscope.optim.blocks import Layout, LayoutOptions, fit_budget, plan_layout
from kronscope.optim.config import Graft, Hyper, parse_refresh, parse_scale
from kronscope.optim.groups import role_of
from kronscope.optim.solvers import CostModel
from kronscope.optim.stacks import factor_dtype

__all__ = ["checked_group", "hyper_of", "layouts_of", "structure_of"]


def checked_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group with names turned into objects.

    Raises:
        OptionError: an option has a value that is not allowed; the text names it.
    """
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise OptionError(f"a tensor learning rate must have one element, got shape {tuple(lr.shape)}.")
    else:
        _check("lr", lr, 0.0, math.inf)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise OptionError(f"betas must be a pair, got {betas!r}.")
    _check("betas[0]", betas[0], 0.0, 1.0, open_end=True)
    _check("betas[1]", betas[1], 0.0, 1.0)
    for name in ("eps", "weight_decay", "damping"):
        _check(name, group[name], 0.0, math.inf)
    _check("momentum", group["momentum"], 0.0, 1.0, open_end=True)
    if group["nesterov"] and not group["momentum"] > 0:
        raise OptionError("nesterov needs momentum > 0.")
    if not (isinstance(group["start"], int) and group["start"] >= 1) and group["start"] != math.inf:
        raise OptionError(f"start must be a whole number of at least 1, or math.inf for never, got {group['start']!r}.")
    if not isinstance(group["power_rounds"], int) or group["power_rounds"] < 1:
        raise OptionError(f"power_rounds must be a whole number of at least 1, got {group['power_rounds']!r}.")
    _choice("decay", group["decay"], ("decoupled", "coupled", "cautious"))
    _choice("nonfinite", group["nonfinite"], ("skip", "raise"))
    exponents = group["exponent"] if isinstance(group["exponent"], tuple | list) else (group["exponent"],)
    if not exponents or not all(isinstance(e, int | float) and math.isfinite(e) for e in exponents):
        raise OptionError(f"exponent must be a finite number, or one for each factor, got {group['exponent']!r}.")
    budget = group["memory_budget"]
    if budget is not None and not (isinstance(budget, int | float) and budget >= 0):
        raise OptionError(f"memory_budget must be a number of bytes or None, got {budget!r}.")
    solver = CostModel() if group["solver"] == "auto" else group["solver"]
    if not isinstance(solver, RootSolver):
        raise OptionError(f"solver must be 'auto' or a root solver such as Eigh(), got {solver!r}.")
    parsed = {"refresh": parse_refresh(group["refresh"]), "scale": parse_scale(group["scale"]), "solver": solver}
    return {**group, **parsed}


def hyper_of(group: dict[str, Any], family: Literal["shampoo", "soap", "kl"]) -> Hyper:
    """Read a group's options as they are now; schedulers may have changed them."""
    exponent = group["exponent"]
    beta1, beta2 = group["betas"]
    return Hyper(
        family=family,
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
        published=bool(group.get("reference", False)),
    )


def layouts_of(group: dict[str, Any]) -> list[Layout]:
    """Decide the layout of each parameter of a group; sets ``group["roles"]`` where it is missing.

    Raises:
        OptionError: an option does not fit a parameter.
    """
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
    sizes = [torch.finfo(factor_dtype(param)).bits // 8 for param in params]
    layouts = [plan_layout(p.shape, option, size) for p, option, size in zip(params, options, sizes, strict=True)]
    if group["memory_budget"] is not None:
        layouts = fit_budget(layouts, options, int(group["memory_budget"]), max(sizes, default=4))
    exponent = group["exponent"]
    if isinstance(exponent, tuple | list) and len(exponent) > 1:
        for layout in layouts:
            if layout.tiles and len(layout.view) != len(exponent):
                raise OptionError(
                    f"{len(exponent)} exponents were given, but a parameter of shape {layout.shape} has "
                    f"{len(layout.view)} factors; give one number, or make a group of its own."
                )
    return layouts


def structure_of(hyper: Hyper) -> tuple[object, ...]:
    """Return what decides which tensors a block's state has."""
    graft = hyper.scale.kind != "sgd" if isinstance(hyper.scale, Graft) else False
    return hyper.beta1 > 0, hyper.momentum > 0, graft, hyper.solver.is_warm


def _check(name: str, value: object, least: float, most: float, *, open_end: bool = False) -> None:
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    if not number or not least <= value <= most or (open_end and value == most):  # type: ignore[operator]
        end = f"below {most}" if open_end else f"at most {most}"
        raise OptionError(f"{name} must be a number of at least {least} and {end}, got {value!r}.")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
