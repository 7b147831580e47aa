"""Changes of an optimizer's groups and plan that are made as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["all_or_nothing"]


@contextmanager
def all_or_nothing(optimizer: Optimizer, *more: dict[str, Any]) -> Iterator[None]:
    """Put an optimizer back as it was if what is done inside fails, whatever the reason.

    Its attributes are put back, and what is in its lists, dictionaries and groups; values in a state or of an option
    that are changed in place stay so.

    Args:
        optimizer: The optimizer.
        more: Groups that are not in it yet.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> try:
    ...     with all_or_nothing(optimizer):
    ...         optimizer.param_groups[0]["lr"] = 5.0
    ...         optimizer.add_param_group({"params": "none"})
    ... except TypeError:
    ...     print(optimizer.param_groups[0]["lr"])
    0.1
    """
    attributes = dict(optimizer.__dict__)
    groups: list[Any] = [*optimizer.param_groups, *more]
    held = [value for value in (*attributes.values(), *groups) if isinstance(value, dict | list)]
    before = [value.copy() for value in held]
    try:
        yield
    except BaseException:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(attributes)
        for value, content in zip(held, before, strict=True):
            value.clear()
            (value.update if isinstance(value, dict) else value.extend)(content)
        raise
