"""Arguments that other optimizers have, and misspelt ones: what to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from kronscope.errors import OptionError

__all__ = ["check_group_names", "default_arguments", "with_advice"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Entries of a group that are not options: torch's, the schedulers', timm's, and our own.
_NOT_OPTIONS = {"params", "param_names", "roles", "family", "initial_lr", "skipped_steps", "lr_scale"}
_SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "shampoo_beta": "betas",
    "precondition_frequency": "refresh",
    "preconditioning_frequency": "refresh",
    "update_freq": "refresh",
    "max_precond_dim": "block_size",
    "max_preconditioner_dim": "block_size",
    "grafting_config": "scale",
    "use_decoupled_weight_decay": "decay",
    "use_nesterov": "nesterov",
}
_TOGETHER = "equal blocks of all parameters are treated together in any case"
_ELSEWHERE = {
    "fused": _TOGETHER,
    "foreach": _TOGETHER,
    "amsgrad": "no maximum of second moments is kept",
    "capturable": "steps cannot be captured in a CUDA graph",
    "differentiable": "steps cannot be differentiated",
    "precondition_1d": "parameters of one dimension get AdamW, or method='kronecker' in a group of their own",
}


def with_advice(init: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a constructor refuse arguments it does not have with an :class:`OptionError` that says what to do."""
    names = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in names:
                raise OptionError(_advice(name, names[1:], type(args[0]).__name__))
        return init(*args, **kwargs)

    return checked


def default_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that a function has defaults for, with these.

    >>> default_arguments(lambda a, b=2: a)
    {'b': 2}
    """
    found = inspect.signature(function).parameters.values()
    return {argument.name: argument.default for argument in found if argument.default is not argument.empty}


def check_group_names(group: Mapping[str, Any], options: Iterable[str], kind: str) -> None:
    """Refuse what looks like an option in a group and is none; groups may carry notes of their own.

    Args:
        group: The group.
        options: The options there are.
        kind: The name of the optimizer's class.

    Raises:
        OptionError: an option is misspelt, or another optimizer's (and switched on).

    >>> check_group_names({"params": [], "name": "backbone", "fused": None}, ["lr", "eps"], "Shampoo")
    """
    known = sorted(options)
    for name, value in group.items():
        if name in _NOT_OPTIONS or name in known:
            continue
        is_theirs = name in _ELSEWHERE and value not in (None, False)
        if is_theirs or (name not in _ELSEWHERE and _meant(name, known)):
            raise OptionError(_advice(name, known, kind))


def _meant(name: str, options: Iterable[str]) -> str:
    """Return the option that a name stands for, empty where it resembles none."""
    allowed = list(options)
    if _SYNONYMS.get(name) in allowed:
        return _SYNONYMS[name]
    return next(iter(difflib.get_close_matches(name, allowed, 1, 0.75)), "")


def _advice(name: str, options: Iterable[str], kind: str) -> str:
    allowed = list(options)
    if name in _ELSEWHERE:
        return f"{kind} has no option {name!r}: {_ELSEWHERE[name]}. Leave it out."
    meant = _meant(name, allowed)
    if meant:
        return f"{kind} has no option {name!r}; did you mean {meant!r}?"
    return f"{kind} has no option {name!r}; it has {', '.join(option for option in allowed if option != 'params')}."
