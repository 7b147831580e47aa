"""How much memory measuring may take, and which layers share a sweep within it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from kronscope.errors import MemoryBudgetError, OptionError
from kronscope.gradients import LayerSpec

__all__ = ["affordable", "container_limit", "layer_bytes", "parse_budget", "size_text", "spare_bytes", "sweeps"]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_BY_DEFAULT = 8 << 30
_NO_LIMIT = 1 << 60


def parse_budget(budget: int | float | str | None, device: torch.device | None = None) -> int:
    """Return a number of bytes; None takes a third of the memory of a device, at most 8 GiB.

    Args:
        budget: Bytes, a text, or None.
        device: Where the work is done; a GPU with memory of its own counts that, and only half of what is free there.
            On the host, the memory is that of the machine or, if this is less, that of the container.

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
        limits = [limit for limit in (container_limit(), total) if limit is not None]
        return max(1, min(min(limits) // 3, _MOST_BY_DEFAULT))
    wanted = f"memory_budget must be bytes or a text like '2GiB', got {budget!r}"
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kmgt]?)i?b?\s*", budget.lower())
        if match is None:
            raise OptionError(f"{wanted}.")
        budget = float(match[1]) * _UNITS[match[2]]
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise OptionError(f"{wanted}.")
    if not 0 < budget < math.inf:
        raise OptionError(f"memory_budget must be positive and finite, got {budget}.")
    return int(budget)


def container_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The memory that this process's control groups allow, the least of all levels; None where there is no limit.

    Args:
        root: Where control groups are mounted.
        own: The file that says which ones this process is in.
    """
    try:
        entries = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        entries = []
    places: list[tuple[Path, str, str]] = [(root, "", "memory.max"), (root / "memory", "", "memory.limit_in_bytes")]
    for entry in entries:
        if len(entry) == 3 and entry[0] == "0":
            places.append((root, entry[2], "memory.max"))
        elif len(entry) == 3 and "memory" in entry[1].split(","):
            places.append((root / "memory", entry[2], "memory.limit_in_bytes"))
    found = []
    for base, inside, name in places:
        parts = [part for part in inside.split("/") if part not in ("", "..")]
        # a limit of a parent holds too
        for depth in range(len(parts) + 1):
            try:
                text = base.joinpath(*parts[:depth], name).read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError):
                continue
            if text.isdecimal() and 0 < int(text) < _NO_LIMIT:  # "max" is none, and so are numbers beyond any memory
                found.append(int(text))
    return min(found, default=None)


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


def spare_bytes(shapes: Sequence[tuple[int, int]], budget: int) -> int:
    """Bytes of the budget that the largest layer's factors leave to gradients.

    >>> spare_bytes([(1, 1), (16, 16)], 1 << 20) == (1 << 20) - layer_bytes((16, 16))
    True
    """
    return max(budget - max(layer_bytes(shape) for shape in shapes), budget // 8)


def sweeps(sizes: Mapping[str, int], samples: int, room: int, copies: float = 0.0) -> Iterator[tuple[list[str], bool]]:
    """Yield groups of layers that are captured in one sweep, and whether their atoms are kept in memory.

    A layer whose atoms do not fit goes alone, and its atoms are captured anew for every pass.

    Args:
        sizes: Bytes of one sample's atoms, by layer: those of the truth and those that are fitted on.
        samples: Number of samples.
        room: Bytes allowed for atoms.
        copies: How many times a layer's atoms are there once more while it is measured.

    >>> list(sweeps({"a": 10, "b": 10, "c": 90, "d": 10}, 1, 30))
    [(['c'], False), (['a', 'b', 'd'], True)]
    """
    group: list[str] = []
    used, largest = 0, 0
    for name, each in sizes.items():
        size = each * samples
        if size * (1 + copies) > room:
            yield [name], False
            continue
        if used + size + copies * max(largest, size) > room and group:
            yield group, True
            group, used, largest = [], 0, 0
        group.append(name)
        used, largest = used + size, max(largest, size)
    if group:
        yield group, True
