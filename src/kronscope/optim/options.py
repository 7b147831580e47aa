"""A parameter group's options: checked when a group is added, read anew at every step."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.roots import CoupledNewton, Eigh, Ridge, RootSolver, WarmQR, root_order
from kronscope.optim.config import DEFAULT_REFRESH, Adaptive, Every, Graft, Hyper, Norm, parse_refresh, parse_scale
from kronscope.optim.solvers import CostModel

__all__ = [
    "CLASS_NAMES",
    "LAYOUT_OPTIONS",
    "OBJECTS",
    "Family",
    "check_layout_options",
    "check_rates",
    "checked_group",
    "copies_of",
    "fixed_options",
    "hyper_of",
    "layout_options",
    "structure_of",
]

# Options that are objects, which a group may also spell in words.
OBJECTS = ("refresh", "scale", "solver")
# Options that decide what a state looks like.
LAYOUT_OPTIONS = ("method", "view", "merge", "split", "block_size", "memory_budget")


Family = Literal["shampoo", "soap", "kl"]

# Options of the common state machine that an algorithm does not have, at the values that leave them out.
_FIXED: dict[str, dict[str, object]] = {
    "shampoo": {},
    "soap": {"exponent": -0.5, "damping": 0.0, "start": 1, "power_rounds": 1, "momentum": 0.0, "nesterov": False},
    # its whitening uses the roots that precondition, which are inverse square roots
    "kl": {"exponent": -0.5, "power_rounds": 1},
}
CLASS_NAMES = {"shampoo": "Shampoo", "soap": "SOAP", "kl": "KLShampoo"}


def fixed_options(family: Family) -> dict[str, object]:
    """Return the options that an algorithm does not have, with the values they count as."""
    return dict(_FIXED[family])


def checked_group(group: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the options of a group with names turned into objects.

    Raises:
        OptionError: an option has a value that is not allowed; the text names it.
    """
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
        raise OptionError(f"solver must be 'auto' or a root solver such as Eigh(), got {solver!r}.")
    refresh, scale = parse_refresh(group["refresh"]), parse_scale(group["scale"])
    if group.get("reference") and refresh is DEFAULT_REFRESH:
        refresh = Every(10)
    checked = {**group, "refresh": refresh, "scale": scale, "solver": solver}
    _check_family(checked, family)
    if family != "soap":
        _check_roots(checked)
    return checked


def hyper_of(group: dict[str, Any], family: Family) -> Hyper:
    """Read a group's options as they are now; schedulers and people may have changed them.

    Raises:
        OptionError: an option has a value that is not allowed; the text names it.
    """
    group = checked_group(group, family)
    beta1, beta2 = group["betas"]
    return Hyper(
        family=family,
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        exponents=tuple(float(e) for e in _exponents(group)),
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


def _check_family(group: dict[str, Any], family: Family) -> None:
    """Refuse what an algorithm does not have."""
    for name, value in _FIXED[family].items():
        if group[name] != value:
            raise OptionError(f"{CLASS_NAMES[family]} has no option {name!r}; leave it out.")
    if family == "kl" and group["betas"][1] == 1:
        raise OptionError("KL-Shampoo's factors are means: sums of whitened gradients have no meaning; use beta2 < 1.")
    if family != "soap":
        return
    if not isinstance(group["scale"], Norm | None):
        raise OptionError(f"SOAP has Adam's scale; scale must be None, 'norm' or Norm(rms), got {group['scale']!r}.")
    if not isinstance(group["solver"], Eigh | WarmQR | CostModel):
        raise OptionError(
            f"SOAP needs eigenvectors; solver must be 'auto', WarmQR() or Eigh(), got {group['solver']!r}."
        )
    if group["reference"]:
        if not isinstance(group["refresh"], Every) or group["betas"][1] == 1 or group["decay"] != "decoupled":
            raise OptionError("the published SOAP refreshes every k steps (an int), has betas[1] < 1, decoupled decay.")
        plain = {"scale": None, "block_size": None, "memory_budget": None, "method": "auto", "merge": 0, "split": None}
        other = [name for name, value in plain.items() if group[name] != value]
        if other:
            raise OptionError(f"the published SOAP has no option {', '.join(map(repr, other))}; leave reference out.")


def _check_roots(group: dict[str, Any]) -> None:
    """Refuse exponents that the solver or the schedule cannot work with."""
    beta2 = float(group["betas"][1])
    ridge = Ridge(eps=float(group["eps"])) if beta2 == 1 else Ridge(damping=float(group["damping"]))
    for exponent in _exponents(group):
        if isinstance(group["solver"], CoupledNewton):
            group["solver"].order_of(exponent, ridge)
        if isinstance(group["refresh"], Adaptive) and root_order(exponent) is None:
            raise OptionError(
                f"an Adaptive refresh looks at how well a root fits, which works for exponents -1, -1/2, -1/3, ..., "
                f"got {exponent}; use Every or Warmup."
            )


def copies_of(group: dict[str, Any], family: Family) -> int:
    """Return how many matrices of a factor's size are kept for each: itself, its root, a warm start's basis."""
    return 3 if family != "soap" and getattr(group["solver"], "is_warm", False) else 2


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
