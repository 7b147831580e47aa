"""Saving and loading a state: options as plain values, checks before anything changes, tensors where they belong."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kronscope.errors import OptionError, StateError
from kronscope.kron.roots import RootSolver
from kronscope.optim.blocks import Layout
from kronscope.optim.config import Hyper, decode, encode
from kronscope.optim.elementwise import elementwise_state
from kronscope.optim.options import LAYOUT_OPTIONS, OBJECTS
from kronscope.optim.parallel.shards import is_dtensor
from kronscope.optim.rules import Rule
from kronscope.optim.stacks import factor_dtype, in_form_for, initial_state
from kronscope.support.callers import callers_level

__all__ = [
    "check_loaded",
    "decoded_groups",
    "encoded_group",
    "hooks_off",
    "loaded_tensors",
    "on_device",
    "placed",
    "read_hypers",
    "replaced_options",
    "warn_of_replaced",
]

# Options, beside those that are objects, that nothing but code and people set.
_COMPARED = (
    "betas",
    "eps",
    "exponent",
    "damping",
    "start",
    "power_rounds",
    "statistics",
    "nesterov",
    "decay",
    "maximize",
    "nonfinite",
)


def encoded_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with its options as plain values.

    A solver of the user's own cannot be written so and is left out: whoever loads the state brings it.
    """
    encoded = {name: encode(value) for name, value in group.items()}
    return {name: value for name, value in encoded.items() if name not in OBJECTS or not isinstance(value, RootSolver)}


def decoded_groups(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], rule: Rule
) -> list[dict[str, Any]]:
    """Undo :func:`encoded_group` for groups that were saved, completed from the optimizer's own.

    Options that decide what the state looks like are the optimizer's.

    Raises:
        StateError: another algorithm saved them: the same names mean other things there; or an option is damaged.
    """
    found = [{name: _decoded(name, value, index) for name, value in group.items()} for index, group in enumerate(saved)]
    for group, old in zip(groups, found, strict=False):
        for name in (*OBJECTS, "skipped_steps"):
            old.setdefault(name, group[name])
        # versions without this option took every gradient
        old.setdefault("statistics", 1)
        old.update({name: group[name] for name in (*LAYOUT_OPTIONS, "roles")})
        rule.check_saved_by(str(old["family"]))
    return found


def _decoded(name: str, value: object, index: int) -> object:
    try:
        return decode(value)
    except (OptionError, ValueError, TypeError, KeyError) as error:
        raise _unread(index, f"{name} is {value!r}: {error}") from error


def _unread(index: int, what: str) -> StateError:
    return StateError(
        f"an option of group {index} of the saved state cannot be read: {what} The file is damaged, or of a newer "
        f"version. Nothing was changed. Load another checkpoint."
    )


def read_hypers(
    read: Callable[[dict[str, Any]], Hyper], groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[Hyper]:
    """Return the options that groups will have when what was saved is loaded.

    Args:
        read: Returns a group's options.
        groups: The optimizer's groups.
        saved: The saved ones, as :func:`decoded_groups` returns them.

    Raises:
        StateError: one of them is not allowed.
    """
    found = []
    for index, (group, old) in enumerate(zip(groups, saved, strict=False)):
        try:
            found.append(read({**group, **old}))
        except OptionError as error:
            raise _unread(index, str(error)) from error
    return found


def replaced_options(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], usual: Mapping[str, Any]
) -> list[str]:
    """Return in words the options that code gave and a saved run replaces; not those that schedulers change.

    Args:
        groups: The optimizer's groups.
        saved: The saved ones.
        usual: What options are where code does not give them.
    """
    found = []
    for index, (group, old) in enumerate(zip(groups, saved, strict=False)):
        for name in (*_COMPARED, *OBJECTS):
            now, then, plain = (options.get(name) for options in (group, old, usual))
            if name == "betas" and then is not None:
                # the first is cycled by some schedulers
                now, then, plain = group[name][1], then[1], usual[name][1]
            if name in old and now not in (then, plain):
                found.append(f"{name}{f' of group {index}' if len(groups) > 1 else ''}: {now!r} by {then!r}")
    return found


def warn_of_replaced(found: Sequence[str]) -> None:
    """Warn of what :func:`replaced_options` found; when all is loaded, in case warnings are errors."""
    if found:
        warnings.warn(
            f"loading replaced options given in code by those of the saved run, as torch.optim does: "
            f"{'; '.join(found)}. To have your own, set them in optimizer.param_groups after loading.",
            UserWarning,
            stacklevel=callers_level(),
        )


@contextmanager
def hooks_off(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch from calling the hooks of loading, which our ``load_state_dict`` calls around it."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    after = optimizer._optimizer_load_state_dict_post_hooks
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    optimizer._optimizer_load_state_dict_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = before
        optimizer._optimizer_load_state_dict_post_hooks = after


def check_loaded(
    saved: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    layouts: Mapping[Tensor, Layout],
    hypers: Sequence[Hyper],
    names: Sequence[str],
) -> None:
    """Check that a state dict fits an optimizer.

    Args:
        saved: The state dict.
        groups: The optimizer's parameter groups.
        layouts: Its layouts.
        hypers: The options its groups will have.
        names: Its parameters' names, in order.

    Raises:
        StateError: it does not fit.
    """
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise StateError(
            f"the saved state has {len(saved_groups)} parameter groups, this optimizer {len(groups)}; make the "
            f"optimizer with the same groups (add_param_group for those added during the run) before loading."
        )
    position = 0
    for index, (group, old, hyper) in enumerate(zip(groups, saved_groups, hypers, strict=True)):
        if len(group["params"]) != len(old["params"]):
            raise StateError(
                f"group {index} of the saved state has {len(old['params'])} parameters, this optimizer's "
                f"{len(group['params'])}; was the model changed?"
            )
        old_names = old.get("param_names", [])
        for place, (param, key) in enumerate(zip(group["params"], old["params"], strict=True)):
            name = names[position + place]
            origin = f" (saved as {old_names[place]})" if old_names and old_names[place] != name else ""
            if key in saved["state"]:
                _check_parameter(name + origin, param, saved["state"][key], layouts[param], hyper)
        position += len(group["params"])


def _check_parameter(name: str, param: Tensor, saved: Mapping[str, Any], layout: Layout, hyper: Hyper) -> None:
    ghost = torch.empty(param.shape, dtype=param.dtype, device="meta")
    if layout.is_elementwise:
        wanted = elementwise_state(ghost, factor_dtype(param))
    else:
        wanted = initial_state(ghost, layout, hyper)
    surplus = sorted(key for key in saved if "factor" in key and key not in wanted)
    if surplus:
        raise StateError(
            f"{name} {tuple(param.shape)}: the saved state has {', '.join(surplus)}, which have no place here; the "
            f"parameter had more factors, or was cut into other blocks.{_hint(layout)}"
        )
    for key, tensor in wanted.items():
        if key not in saved:
            raise StateError(
                f"{name}: the saved state has no {key!r}. It has {sorted(saved)}; was it saved with other options "
                f"(betas, scale, momentum, block_size, method), of a parameter with another role (named or not), or by "
                f"another optimizer?{_hint(layout)}"
            )
        if not isinstance(saved[key], Tensor) or saved[key].shape != tensor.shape:
            found = tuple(saved[key].shape) if isinstance(saved[key], Tensor) else saved[key]
            raise StateError(
                f"{name} {tuple(param.shape)}: {key!r} is {found} in the saved state but {tuple(tensor.shape)} here; "
                f"the parameter, or the blocks it is cut into, has another shape.{_hint(layout)}"
            )
        if _here(saved[key]).is_meta:
            raise StateError(
                f"{name}: {key!r} of the saved state is on the meta device, without data. Nothing was changed. Load "
                f"the file with torch.load(..., map_location='cpu')."
            )
        if saved[key].is_floating_point() != tensor.is_floating_point() or saved[key].is_complex():
            raise StateError(
                f"{name}: {key!r} has dtype {saved[key].dtype} in the saved state where {tensor.dtype} belongs; the "
                f"file is damaged or was changed. Load another checkpoint."
            )
    for key in wanted:
        flaw = _flaw(key, _here(saved[key]), float(_here(saved["step"])))
        if flaw:
            raise StateError(
                f"{name}: {key!r} of the saved state {flaw}: the run had diverged before it was saved, or the file is "
                f"damaged. Nothing was changed. Load an earlier checkpoint."
            )


def _here(value: Tensor) -> Tensor:
    """Return what this process has of a saved tensor."""
    rows = getattr(value, "rows", None)
    if isinstance(rows, Tensor):
        return rows
    return value.to_local() if is_dtensor(value) else value


def _flaw(key: str, value: Tensor, step: float) -> str:
    """Say what no state of ours has in a tensor of this name; empty if nothing."""
    name = key.rsplit(".", maxsplit=1)[-1]
    if name == "step":
        return "" if 0 <= step < math.inf and step == int(step) else f"is {step:g}"
    if not value.numel():
        return ""
    if name in ("phase", "refreshed"):
        least, most = (int(end) for end in value.aminmax())
        return "is negative" if least < 0 else "is ahead of the step" if name == "refreshed" and most > step else ""
    if name == "spectrum":
        # beside the trace, a root that failed may have left NaN in older versions
        value = value[..., 0]
    # a sum is quicker than looking at every entry, but may itself overflow
    if not bool(torch.isfinite(value.sum())) and not bool(torch.isfinite(value).all()):
        return "contains NaN or infinity"
    return "is negative in places" if name in ("exp_avg_sq", "graft_sq") and float(value.amin()) < 0 else ""


def _hint(layout: Layout) -> str:
    """Return what helps with states of versions that left matrices whole by default."""
    text = " Long sides are cut, or left out, by default; a state of whole matrices loads with block_size=math.inf."
    return text if layout.limited else ""


def loaded_tensors(
    saved: Mapping[str, Any], groups: Sequence[dict[str, Any]], part: Callable[[Tensor, str, Tensor], Tensor]
) -> dict[Tensor, dict[str, Tensor]]:
    """Copy the saved tensors, in the dtype of the parameter's state; what steers the schedule stays on the CPU.

    Args:
        saved: The state dict.
        groups: The optimizer's parameter groups.
        part: Returns what this process keeps of a parameter's tensor.
    """
    found = {}
    for group, old in zip(groups, saved["param_groups"], strict=True):
        for param, key in zip(group["params"], old["params"], strict=True):
            if key in saved["state"]:
                kept = {name: part(param, name, value).detach() for name, value in saved["state"][key].items()}
                found[param] = placed(kept, param, copy=True)
    return found


def placed(tensors: Mapping[str, Tensor], param: Tensor, *, copy: bool = False) -> dict[str, Tensor]:
    """Return a state where and in the dtype its parameter wants it; what steers the schedule is on the CPU."""
    found = {}
    for name, value in tensors.items():
        on_host = name == "step" or not value.is_floating_point()
        dtype = value.dtype if on_host else factor_dtype(param)
        found[name] = value.to("cpu" if on_host else param.device, dtype, copy=copy)
    return found


def on_device(tensors: dict[str, Tensor], param: Tensor, layout: Layout, hyper: Hyper) -> dict[str, Tensor]:
    """Return a state on its parameter's device, in the one form that all devices save.

    DCP wants one device for all tensors but scalars.
    """
    tensors = in_form_for(torch.device("meta"), tensors, layout, hyper)
    return {name: tensor.to(param.device) if tensor.ndim else tensor for name, tensor in tensors.items()}
