"""Which parameter of a saved state is which: by name where both sides have names, else by place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor

from kronscope.errors import StateError
from kronscope.optim.naming import is_place, plain_names

__all__ = ["matched"]

# Entries of a group that are not options.
_OF_PARAMETERS = ("params", "param_names", "roles", "skipped_steps", "initial_lr")


def matched(saved: Any, groups: Sequence[dict[str, Any]], trained: Callable[[Tensor], bool]) -> dict[str, Any]:
    """Return a saved state with its groups and parameters in an optimizer's order; nothing else is changed.

    torch.distributed.checkpoint has put them into that order by itself, with names for keys.

    Args:
        saved: What ``state_dict`` returned, here or elsewhere.
        groups: The optimizer's groups.
        trained: Whether a parameter takes part in training, so that it needs a state.

    Raises:
        StateError: it is no state of ours, or the names say that it is another model's.
    """
    _check_ours(saved)
    known, own = _names(saved["param_groups"]), _names(groups)
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    if known is None or own is None or any(isinstance(key, str) for key in keys):
        return dict(saved)
    if set(known) != set(own):
        known, own = _same_start(known, own)
    places = dict(zip(known, keys, strict=True))
    params = [param for group in groups for param in group["params"]]
    _check_names(
        new=[name for name, param in zip(own, params, strict=True) if name not in places and trained(param)],
        gone=[name for name, key in places.items() if name not in set(own) and key in saved["state"]],
    )
    home = {key: group for group in saved["param_groups"] for key in group["params"]}
    ordered, names = [], iter(own)
    for index, group in enumerate(groups):
        # a parameter that is not in the saved run is frozen, and has no state
        wanted = [places.get(next(names)) for _ in group["params"]]
        options = _options(index, [home[key] for key in wanted if key is not None], saved["param_groups"], group)
        ordered.append({**options, "params": wanted, "param_names": list(group["param_names"])})
    return {**saved, "param_groups": ordered}


def _check_ours(saved: object) -> None:
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        found = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise StateError(
            f"load_state_dict() takes what state_dict() returned, with 'state' and 'param_groups'; got {found}."
        )
    strange = [group for group in saved["param_groups"] if "family" not in group]
    if strange:
        seen = {name for tensors in saved["state"].values() for name in tensors}
        kind = " (torch.optim.AdamW's, or of one like it)" if seen >= {"exp_avg", "exp_avg_sq"} else ""
        raise StateError(
            f"the saved state is that of another optimizer{kind}: it has no factors, so Shampoo, SOAP and KLShampoo "
            f"cannot take it over. Nothing was changed. To go on with such a run load the model's weights, leave the "
            f"optimizer's state out (in a Trainer's checkpoint folder: take optimizer.pt away), and begin with a short "
            f"warm-up of the learning rate."
        )


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the names of all parameters in order; None where one has none, or two have the same."""
    names: list[str] = []
    for group in groups:
        own = [str(name) for name in group.get("param_names") or ()]
        if len(own) != len(group["params"]) or any(map(is_place, own)):
            return None
        names += own
    plain = plain_names(names)
    return plain if len(set(plain)) == len(plain) else None


def _same_start(known: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return names without what all on one side begin with, if that makes both sides the same.

    A model may be an attribute of another module in one run and not in the other.
    """
    short = [_without_start(names) for names in (known, own)]
    return (short[0], short[1]) if set(short[0]) == set(short[1]) else (list(known), list(own))


def _without_start(names: Sequence[str]) -> list[str]:
    parts = [name.split(".") for name in names]
    most = min(len(one) for one in parts) - 1
    common = sum(
        1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*(p[:most] for p in parts), strict=True))
    )
    return [".".join(one[common:]) for one in parts]


def _check_names(new: Sequence[str], gone: Sequence[str]) -> None:
    if not new and not gone:
        return
    parts = []
    if new:
        parts.append(f"it has nothing for {_listed(new)}")
    if gone:
        parts.append(f"{_listed(gone)} of it {'is' if len(gone) == 1 else 'are'} not in this optimizer")
    raise StateError(
        f"the saved state is of other parameters: {', and '.join(parts)}. Nothing was changed. Make the optimizer for "
        f"the parameters of the saved run, and add others with add_param_group() after loading. If they were only "
        f"renamed, and are in the same order, take 'param_names' out of every group in state_dict['param_groups']: "
        f"then places count."
    )


def _options(
    index: int, homes: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], group: dict[str, Any]
) -> dict[str, Any]:
    """Return the options a group has in the saved run."""
    if not homes:
        return saved[index] if index < len(saved) and not saved[index]["params"] else group
    first = homes[0]
    for other in homes:
        for name in (first.keys() | other.keys()) - set(_OF_PARAMETERS) if other is not first else ():
            if first.get(name) != other.get(name):
                raise StateError(
                    f"group {index} of this optimizer has parameters of several groups of the saved run, where "
                    f"{name!r} is {first.get(name)!r} for some and {other.get(name)!r} for others; make the optimizer "
                    f"with groups as they were in the saved run, in any order."
                )
    return first


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
