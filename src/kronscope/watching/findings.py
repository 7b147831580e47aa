"""What is wrong with a run, in words: from one record and the one before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["findings"]

# Thresholds beyond which people should look. Steps usually move a weight by about a thousandth of its size; roots that
# are taken every 10 steps are off by a few tenths while a run settles.
LARGE_STEP, SMALL_STEP = 0.1, 1e-7
OFF = 0.3
FAR_BELOW, POOR_FIT = 0.2, 0.5


def findings(layers: Sequence[str], record: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[str]:
    """Return warnings, the gravest first; each names the worst layer and says how many more there are.

    Args:
        layers: Names of the layers, in the order of the record's lists.
        record: A record without warnings.
        before: The one before it.

    >>> record = {"layers": {"residual": [0.1, 0.4], "staleness": [9, 40]}, "run": {}, "cosines": []}
    >>> findings(["h.0.mlp", "h.3.mlp"], record)
    ['roots of h.3.mlp are 40 steps old and 0.4 off: take them more often (refresh)']
    """
    numbers, found = record["layers"], []

    def values(number: str) -> list[float | None]:
        return numbers.get(number) or [None] * len(layers)

    def worst(number: str, bad: Callable[[float], bool], *, largest: bool = True) -> tuple[int, float, str] | None:
        hits = [(value, place) for place, value in enumerate(values(number)) if value is not None and bad(value)]
        if not hits:
            return None
        value, place = max(hits) if largest else min(hits)
        return place, value, f" (and {len(hits) - 1} more)" if len(hits) > 1 else ""

    skipped = record["run"].get("skipped_steps", 0) - ((before or {}).get("run", {}).get("skipped_steps", 0))
    if skipped > 0:
        found.append(f"{_many(int(skipped), 'step')} skipped since the last record: a gradient was not finite")
    if hit := worst("gradient_norm", lambda value: value == 0):
        found.append(f"the gradient of {layers[hit[0]]}{hit[2]} is zero: it does not learn")
    if hit := worst("update_ratio", lambda value: value > LARGE_STEP):
        found.append(
            f"a step moves {layers[hit[0]]}{hit[2]} by {100 * hit[1]:.0f} % of its size: lower the learning rate"
        )
    if hit := worst("update_ratio", lambda value: 0 < value < SMALL_STEP, largest=False):
        found.append(f"a step moves {layers[hit[0]]}{hit[2]} by {hit[1]:.1g} of its size: it hardly trains")
    if (hit := worst("residual", lambda value: value > OFF)) and (age := values("staleness")[hit[0]]):
        found.append(
            f"roots of {layers[hit[0]]}{hit[2]} are {_many(int(age), 'step')} old and {hit[1]:.3g} off: take them more "
            f"often (refresh)"
        )
    return found + _cosines(record["cosines"])


def _cosines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    layers: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["cosine"] is not None:
            layers.setdefault(row["layer"], {})[row["approximation"]] = row["cosine"]
    found = []
    gaps = sorted(
        (one["live"] - one["optimal"], name) for name, one in layers.items() if {"live", "optimal"} <= one.keys()
    )
    behind = [(gap, name) for gap, name in gaps if gap < -FAR_BELOW]
    if behind:
        one = layers[behind[0][1]]
        found.append(
            f"the live preconditioner of {behind[0][1]}{_more(behind)} has a cosine of {one['live']:.2f}, the best "
            f"Kronecker product {one['optimal']:.2f}"
        )
    poor = sorted((one["optimal"], name) for name, one in layers.items() if one.get("optimal", 1.0) < POOR_FIT)
    if poor:
        found.append(f"no Kronecker product fits {poor[0][1]}{_more(poor)}: the best has a cosine of {poor[0][0]:.2f}")
    return found


def _more(items: Sequence[object]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
