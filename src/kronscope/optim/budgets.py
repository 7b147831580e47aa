"""The schedule that keeps a budget: its period follows from the counted costs of the whole plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kronscope.optim.blocks import Layout
from kronscope.optim.config import Budget, Every, Warmup, parse_refresh
from kronscope.optim.costs import counted_cost
from kronscope.optim.options import hyper_of
from kronscope.optim.rules import Rule

__all__ = ["budgeted", "in_words"]


def budgeted(budget: Budget, groups: Sequence[dict[str, Any]], layouts: Mapping[Tensor, Layout], rule: Rule) -> Warmup:
    """Return the schedule by which the groups that have a budget keep this one.

    Args:
        budget: The budget.
        groups: All parameter groups.
        layouts: The layouts of their parameters; those that have none yet are left out.
        rule: The optimizer's family.
    """
    costs = _Costs(groups, layouts, rule)
    return budget.schedule(costs.of_period, costs.numbers)


def in_words(groups: Sequence[dict[str, Any]], layouts: Mapping[Tensor, Layout], rule: Rule) -> tuple[str, ...]:
    """Say of each budget what it counts, and whether it is kept."""
    found = dict.fromkeys(refresh for group in groups if isinstance(refresh := parse_refresh(group["refresh"]), Budget))
    costs = _Costs(groups, layouts, rule)
    lines = []
    for budget in found:
        work, own = budget.counted_work(costs.numbers), costs.of_period(budgeted(budget, groups, layouts, rule).every)
        share = own / (own + work)
        counted = f"{budget.rows} rows" if budget.work is None else "as given"
        kept = "" if share <= budget.share else f": more than {100 * budget.share:.0f} %, even with the longest period"
        lines.append(
            f"{budget}: {100 * share:.1f} % of a step by counted costs, {own / 1e9:.3g} of ours beside "
            f"{work / 1e9:.3g} G multiply-adds of a forward and backward ({counted}){kept}"
        )
    return tuple(lines)


class _Costs:
    """The counted costs of all groups, those with a budget at any period."""

    def __init__(self, groups: Sequence[dict[str, Any]], layouts: Mapping[Tensor, Layout], rule: Rule) -> None:
        self._hypers = [hyper_of(group, rule) for group in groups]
        self._is_free = [isinstance(parse_refresh(group["refresh"]), Budget) for group in groups]
        self._members = [
            (param, layouts[param], index)
            for index, group in enumerate(groups)
            for param in group["params"]
            if param in layouts
        ]
        # what each row of a batch is multiplied with: an embedding's rows are only looked up
        self.numbers = sum(
            param.numel() for param, layout, _ in self._members if not layout.frozen and layout.reason != "embedding"
        )

    def of_period(self, period: int) -> float:
        """Return the cost of a step if each root of the groups with a budget is taken once every so many steps."""
        now = [
            replace(hyper, refresh=Every(period)) if free else hyper
            for hyper, free in zip(self._hypers, self._is_free, strict=True)
        ]
        return counted_cost([(param, layout, now[index]) for param, layout, index in self._members])
