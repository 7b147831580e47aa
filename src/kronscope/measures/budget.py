"""How much memory measuring may take, and which layers share a sweep within it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from kronscope.errors import MemoryBudgetError, OptionError
from kronscope.gradients import LayerSpec

__all__ = ["affordable", "layer_bytes", "parse_budget", "size_text", "sweeps"]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_BY_DEFAULT = 8 << 30


def parse_budget(budget: int | float | str | None, device: torch.device | None = None) -> int:
    """Return a number of bytes; None takes a third of the memory of a device, at most 8 GiB.

    Args:
        budget: Bytes, a text, or None.
        device: Where the work is done; a GPU with memory of its own counts that, and only half of what is free there.

    Raises:
        OptionError: not a positive number of bytes.

    >>> parse_budget("2 GiB") == 2 * 2**30
    True
    """
    if budget is None:
        if device is not None and device.type == "cuda" and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(device)
            return min(total // 3, free // 2, _MOST_BY_DEFAULT)
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            total = 3 * _MOST_BY_DEFAULT
        return min(total // 3, _MOST_BY_DEFAULT)
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?)i?b?\s*", budget.lower())
        if match is None:
            raise OptionError(f"memory_budget must be bytes or a text like '2GiB', got {budget!r}.")
        budget = float(match[1]) * _UNITS[match[2]]
    if not budget > 0:
        raise OptionError(f"memory_budget must be positive, got {budget}.")
    return int(budget)


def layer_bytes(shape: tuple[int, int]) -> int:
    """Bytes a layer needs whatever its samples: factors, eigenbases, tables and a few vectors of a power iteration."""
    m, n = shape
    return 8 * (12 * (m * m + n * n) + 4 * m * n)


def affordable(specs: Sequence[LayerSpec], budget: int, *, by_name: bool) -> tuple[list[LayerSpec], list[str]]:
    """Return the layers whose factors fit the budget, and for each of the others why it does not.

    Raises:
        MemoryBudgetError: a layer that was asked for by name does not fit.
    """
    kept, skipped = [], []
    for spec in specs:
        needed = layer_bytes(spec.shape)
        if needed <= budget:
            kept.append(spec)
            continue
        m, n = spec.shape
        text = (
            f"layer {spec.name!r} ({m} x {n}) needs {size_text(needed)} for its factors, the memory budget is "
            f"{size_text(budget)}; raise memory_budget"
        )
        if m > n:
            text += f", or measure a range of its rows such as '{spec.name}[0:{max(1, m // 4)}]'"
        if by_name:
            raise MemoryBudgetError(f"{text}.")
        skipped.append(text)
    return kept, skipped


def size_text(size: int) -> str:
    """A number of bytes to read.

    >>> size_text(3 << 29)
    '1.5 GiB'
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"


def sweeps(sizes: Mapping[str, int], samples: int, budget: int) -> Iterator[tuple[list[str], bool]]:
    """Yield groups of layers that are captured in one sweep, and whether their atoms are kept in memory.

    A layer whose atoms do not fit goes alone, and its atoms are captured anew for every pass.

    Args:
        sizes: Bytes of one sample's atoms, by layer: those of the truth and those that are fitted on.
        samples: Number of samples.
        budget: Bytes allowed.

    >>> list(sweeps({"a": 10, "b": 10, "c": 90, "d": 10}, 1, 60))
    [(['c'], False), (['a', 'b', 'd'], True)]
    """
    room = budget // 2
    group: list[str] = []
    used = 0
    for name, each in sizes.items():
        size = each * samples
        if size > room:
            yield [name], False
            continue
        if used + size > room and group:
            yield group, True
            group, used = [], 0
        group.append(name)
        used += size
    if group:
        yield group, True
