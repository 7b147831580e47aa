"""What is wrong with a run, in words: from one record and the one before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["findings"]

# Thresholds beyond which people should look. Steps usually move a weight by about a thousandth of its size. A step with
# roots that are taken every 10 steps has a cosine of 0.9 and more with that of fresh roots, soon after the start 0.7;
# with roots every 40 steps it is 0.7 to 0.8, every 200 steps 0.2, and SOAP's is then up to twice as long.
LARGE_STEP, SMALL_STEP = 0.1, 1e-7
TURNED, TOO_LONG = 0.7, 1.8
POOR_FIT = 0.5


def findings(layers: Sequence[str], record: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[str]:
    """Return warnings, the gravest first; each names the worst layer and says how many more there are.

    Args:
        layers: Names of the layers, in the order of the record's lists.
        record: A record without warnings.
        before: The one before it.

    >>> layers = {"fresh_cosine": [None, 0.31], "fresh_length": [None, 1.0], "staleness": [9, 40]}
    >>> findings(["h.0.mlp", "h.3.mlp"], {"layers": layers, "run": {}, "cosines": []})
    ['roots of h.3.mlp are 40 steps old, and its step has a cosine of 0.31 with that of fresh ones: lower refresh']
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
    for place, turned in enumerate(values("fresh_cosine")):
        length = values("fresh_length")[place]
        if turned is None or length is None or (turned >= TURNED and length * TOO_LONG >= 1):
            continue
        off = [f"has a cosine of {turned:.2g} with that of fresh ones"] if turned < TURNED else []
        off += [f"is {1 / length:.2g} times as long as with fresh ones"] if length * TOO_LONG < 1 else []
        age = _many(int(values("staleness")[place] or 0), "step")
        found.append(f"roots of {layers[place]} are {age} old, and its step {' and '.join(off)}: lower refresh")
    return found + _cosines(record["cosines"])


def _cosines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which layers no Kronecker product fits.

    That the live matrix is below the best product is no warning: it is so in nearly every run, for it is made of few
    batches' gradients, and Adam's is diagonal.
    """
    best = [row for row in rows if row["approximation"] == "optimal" and row["cosine"] is not None]
    # two standard errors, of an estimate
    poor = sorted(
        (row["cosine"], row["layer"]) for row in best if row["cosine"] + 2 * (row.get("stderr") or 0.0) < POOR_FIT
    )
    if not poor:
        return []
    return [f"no Kronecker product fits {poor[0][1]}{_more(poor)}: the best has a cosine of {poor[0][0]:.2f}"]


def _more(items: Sequence[object]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
