"""The paper's statements, judged by the records: the rules, the table of verdicts, and a picture for each statement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from reproduction_records import NETWORKS, PICTURES, SHORT, by_step, named, own_labels, table, there, together

from kronscope import Results, figures


class Point(NamedTuple):
    """A number a statement is judged by, at one layer and step, and its standard error if it is an estimate."""

    layer: str
    step: int
    value: float
    stderr: float = 0.0


class Statement(NamedTuple):
    """A statement of the paper: it holds at a point if the point's value is at most ``limit``."""

    name: str
    text: str
    rule: str
    limit: float
    values: Callable[[Results], list[Point]]

    def verdict(self, records: Iterable[Results]) -> str:
        """Held if it holds at every point, partly if at half of them or more."""
        points = [point for record in records for point in self.values(record)]
        if not points:
            return "–"
        good = sum(point.value <= self.limit + 1e-9 for point in points)
        word = "held" if good == len(points) else "**partly**" if 2 * good >= len(points) else "**not held**"
        worst = max(points, key=lambda point: point.value)
        bar = f" ± {worst.stderr:.3f}" if worst.stderr else ""
        near = sum(0 < abs(point.value - self.limit) < 2 * point.stderr for point in points)
        return f"{word} {good}/{len(points)}, {worst.value:.3f}{bar}" + (f" ({near} open)" if near else "")


def pairs(truth: str, low: str, high: str, labels: str | None = None, batch: int = 1) -> Callable[..., list[Point]]:
    """The cosine of ``high`` minus that of ``low``, at each layer and step."""

    def values(results: Results) -> list[Point]:
        groups = by_step(results, truth, labels or own_labels(results, truth), batch)
        found = [(key, *(named(rows, name) for name in (low, high))) for key, rows in sorted(groups.items())]
        return [
            Point(*key, two.cosine - one.cosine, together(one, two))
            for key, one, two in found
            if one is not None and two is not None and not math.isnan(one.cosine + two.cosine)
        ]

    return values


def batches(results: Results) -> list[Point]:
    """Shampoo² on real labels: batches of 256 minus batches of 1."""
    one, many = (by_step(results, "gauss_newton", "real", batch) for batch in (1, 256))
    found = [(key, *(named(group.get(key, ()), "shampoo2") for group in (one, many))) for key in sorted(one)]
    return [
        Point(*key, large.cosine - small.cosine, together(small, large))
        for key, small, large in found
        if small is not None and large is not None
    ]


def rounds(truth: str) -> Callable[[Results], list[Point]]:
    """What one round leaves of the distance to 1, for the worse of the two factors."""

    def values(results: Results) -> list[Point]:
        found = []
        for item in results.details:
            if item.kind == "spectrum" and item.truth == truth:
                before, after = 1 - item.number("ratio"), 1 - min(item.number("left"), item.number("right"))
                found.append(Point(item.layer, item.step, after / before if before > 1e-9 else 0.0))
        return found

    return values


def traces(results: Results) -> list[Point]:
    """The largest trace of a singular vector beyond the first, over that of the first."""
    known = {"spectrum": ("alpha_left", "alpha_right"), "traces": ("alpha",)}
    found = [
        (item, item.series(name))
        for item in results.details
        for name in known.get(item.kind, ())
        if len(item.series(name)) > 1
    ]
    return [Point(item.layer, item.step, max(value / series[0] for value in series[1:])) for item, series in found]


GN, ADA = "gauss_newton", "adagrad"
_CLOSE, _NEAR = "Shampoo² is very close to the optimal product", "optimal − Shampoo² ≤ 0.05"
_WORSE, _BELOW = "Shampoo is significantly worse than Shampoo²", "Shampoo − Shampoo² ≤ −0.05"
_ROUND, _LEFT = "one round from the identity comes much closer to 1 than σ₁/‖σ‖", "distance to 1 left / before ≤ 0.5"
STATEMENTS = (
    Statement("close", f"{_CLOSE}, Gauss–Newton", _NEAR, 0.05, pairs(GN, "shampoo2", "optimal")),
    Statement("close-adagrad", f"{_CLOSE}, Adagrad", _NEAR, 0.05, pairs(ADA, "shampoo2", "optimal")),
    Statement("worse", f"{_WORSE}, Gauss–Newton", _BELOW, -0.05, pairs(GN, "shampoo2", "shampoo")),
    Statement("worse-adagrad", f"{_WORSE}, Adagrad", _BELOW, -0.05, pairs(ADA, "shampoo2", "shampoo")),
    Statement("round", f"{_ROUND}, Gauss–Newton", _LEFT, 0.5, rounds(GN)),
    Statement("round-adagrad", f"{_ROUND}, Adagrad", _LEFT, 0.5, rounds(ADA)),
    Statement("traces", "α₁ exceeds the other αᵢ", "largest αᵢ/α₁ ≤ 1", 1.0, traces),
    Statement("real", "real labels, B = 1, track the optimum", _NEAR, 0.05, pairs(GN, "shampoo2", "optimal", "real")),
    Statement("batch", "B = 256 is worse than B = 1", "Shampoo², B = 256 − B = 1 ≤ 0", 0.0, batches),
    Statement(
        "kfac", "Shampoo² is at or above K-FAC", "K-FAC − Shampoo² ≤ 0", 0.0, pairs(GN, "shampoo2", "kfac-reduce")
    ),
)


def verdicts_table(group: str, truth: str) -> str:
    """Each statement for each network of which there is a record."""
    columns = {title: records for title, names in NETWORKS.items() if (records := there(names))}
    return table(
        ["statement, and when it holds at a point", *columns],
        (
            [f"{item.text}: *{item.rule}*", *(item.verdict(records) for records in columns.values())]
            for item in STATEMENTS
        ),
    )


def draw() -> None:
    """One picture for each statement: the numbers it is judged by, and its limit."""
    import matplotlib.pyplot as plt

    for statement in STATEMENTS:
        figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
        learned = [title for title in NETWORKS if title not in SHORT]
        for title in (*SHORT, *learned):
            short = title in SHORT
            style: dict[str, Any] = {
                "color": f"{0.55 + 0.13 * SHORT.index(title)}" if short else f"C{learned.index(title)}",
                "marker": "^sD"[SHORT.index(title)] if short else "o",
                "ms": 3 if short else 6 if title == learned[0] else 4,
                # the first lies under the second, which has the same values
                "lw": 0.6 if short else 3 if title == learned[0] else 1.2,
                "label": title,
            }
            for record in there(NETWORKS[title]):
                points = sorted(statement.values(record), key=lambda point: point.step)
                layers = dict.fromkeys(point.layer for point in points)
                for layer in layers:
                    mine = [point for point in points if point.layer == layer]
                    steps, values = [point.step for point in mine], [point.value for point in mine]
                    # of several values at a step no line can say which belong together
                    line = "-" if len(set(steps)) == len(steps) else ""
                    bars = [2 * point.stderr for point in mine]
                    axes.errorbar(steps, values, bars if any(bars) else None, ls=line, clip_on=False, **style)
                    style["label"] = None
                    if len(layers) > 1 and not short and values[-1] > statement.limit:
                        side = {"xytext": (-4, 4), "textcoords": "offset points", "ha": "right", "fontsize": 6}
                        axes.annotate(layer, (steps[-1], values[-1]), color=style["color"], **side)
        axes.axhline(statement.limit, color="black", ls="--", lw=1, label="limit")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=-0.1)
        axes.set_xlabel("training step")
        axes.set_ylabel(statement.rule.split(" ≤")[0], fontsize=9)
        axes.set_title(statement.text, fontsize=9)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        figures.save(figure, PICTURES / f"summary-{statement.name}.png")
        plt.close(figure)
