"""What every framework hides: our optimizer inside its wrapper, and the names of the parameters in its groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from kronscope.errors import OptionError
from kronscope.optim import param_groups
from kronscope.optim.base import KroneckerOptimizer
from kronscope.watching.layers import innermost

__all__ = ["PREFIX", "find", "last_metrics", "named_groups", "unwrap"]

# In front of every name that is logged, so that trackers show ours in a section of their own.
PREFIX = "kronscope/"


def find(optimizer: object) -> KroneckerOptimizer | None:
    """Return the optimizer of ours inside a wrapper, or None where there is none."""
    inner = innermost(optimizer)
    return inner if isinstance(inner, KroneckerOptimizer) else None


def unwrap(optimizer: object) -> KroneckerOptimizer:
    """Return the :class:`~kronscope.Shampoo`, :class:`~kronscope.SOAP` or :class:`~kronscope.KLShampoo` in a wrapper.

    Accelerate's ``prepare``, and with it Transformers' Trainer, returns a wrapper that has ``step`` and ``state_dict``
    but not ``explain``, ``operator``, ``diagnostics`` or ``metrics``.

    Args:
        optimizer: The wrapper; an optimizer of ours is returned as it is.

    Returns:
        The optimizer inside.

    Raises:
        OptionError: the optimizer inside is not one of ours.

    >>> import torch, kronscope as ks
    >>> class Wrapper:
    ...     def __init__(self, optimizer):
    ...         self.optimizer = optimizer
    >>> type(unwrap(Wrapper(ks.SOAP(torch.nn.Linear(3, 2).named_parameters(), lr=1e-3)))).__name__
    'SOAP'
    """
    found = find(optimizer)
    if found is None:
        raise OptionError(
            f"unwrap needs a Shampoo, SOAP or KLShampoo, or a framework's wrapper around one; got a "
            f"{type(optimizer).__name__} without one inside."
        )
    return found


def last_metrics(optimizer: object) -> dict[str, float]:
    """Return the ``metrics()`` of the optimizer inside a wrapper, each name with ``kronscope/`` in front.

    They are the numbers of the last step on this process; other processes are not waited for.

    Args:
        optimizer: An optimizer of ours or a wrapper around one.

    Returns:
        The metrics by name.

    Raises:
        OptionError: the optimizer inside is not one of ours.

    >>> import torch, kronscope as ks
    >>> found = last_metrics(ks.Shampoo(torch.nn.Linear(3, 2).named_parameters(), lr=1e-3))
    >>> found["kronscope/step"], found["kronscope/skipped_steps"]
    (0.0, 0.0)
    """
    return {f"{PREFIX}{name}": value for name, value in unwrap(optimizer).metrics().items()}


def named_groups(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give the parameters in a framework's groups their names and roles, so that embeddings and heads are recognised.

    Trainers that sort parameters themselves (by weight decay, by depth) hand over tensors without names, and from those
    only the shape can be told.

    Args:
        model: The model that the parameters belong to.
        groups: The groups as the framework made them; their options are kept.

    Returns:
        New groups, without parameters that do not require gradients; groups with no others are left out.

    Raises:
        OptionError: a parameter does not belong to the model.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    >>> (group,) = named_groups(model, [{"params": [model[0].weight, model[1].weight], "lr": 0.1}])
    >>> [name for name, _ in group["params"]], group["roles"], group["lr"]
    (['0.weight', '1.weight'], ['embedding', ''], 0.1)
    """
    known: dict[Tensor, tuple[str, str]] = {}
    for ours in param_groups(model):
        for (name, param), role in zip(ours["params"], ours["roles"], strict=True):
            known[param] = name, role
    named = []
    for group in groups:
        params = [param for param in _tensors(group["params"]) if param.requires_grad]
        for param in params:
            if param not in known:
                raise OptionError(
                    f"a group has a parameter of shape {tuple(param.shape)} that is not one of the model's; make the "
                    f"groups from the same model, after any step that replaces its parameters."
                )
        if params:
            options = {name: value for name, value in group.items() if name not in ("params", "param_names", "roles")}
            pairs = [(known[param][0], param) for param in params]
            named.append({**options, "params": pairs, "roles": [known[param][1] for param in params]})
    return named


def _tensors(params: Any) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    return [item[1] if isinstance(item, tuple) else item for item in params]
