"""What each figure needs measured, and how it is drawn from the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kronscope import approx, figures
from kronscope.errors import OptionError
from kronscope.measures import Fit, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Plan", "get", "names"]

_SHAMPOOS = ("optimal", "shampoo2", "shampoo")


@dataclass(frozen=True)
class Plan:
    """What a figure needs and how it is drawn.

    Args:
        name: The figure.
        title: What it shows.
        gauss_newton: Measurements against the Gauss–Newton matrix.
        adagrad: Approximations to measure against Adagrad's matrix, none to leave it out.
        adagrad_details: Curves to compute for it.
        draw: Makes pictures, by file name, from one layer's results per column title.
    """

    name: str
    title: str
    gauss_newton: tuple[Fit, ...]
    adagrad: tuple[str, ...]
    adagrad_details: tuple[str, ...]
    draw: Callable[[Mapping[str, Results]], dict[str, Figure]]

    def with_labels(self, labels: str) -> Plan:
        """The same with other labels where the figure takes the truth's own."""
        fits = tuple(replace(fit, labels=labels) if fit.labels == "exact" else fit for fit in self.gauss_newton)
        return replace(self, gauss_newton=fits)


def _figure1(columns: Mapping[str, Results]) -> dict[str, Figure]:
    return {"figure1": figures.figure1(columns)}


def _figure2(columns: Mapping[str, Results]) -> dict[str, Figure]:
    return {"figure2": figures.figure2(columns)}


def _figure3(columns: Mapping[str, Results]) -> dict[str, Figure]:
    return {"figure3": figures.figure3(columns)}


def _figure4(columns: Mapping[str, Results]) -> dict[str, Figure]:
    return {"figure4": figures.figure4(columns)}


def _figure5(columns: Mapping[str, Results]) -> dict[str, Figure]:
    return {"figure5": figures.figure1(columns)}


def _beyond(columns: Mapping[str, Results]) -> dict[str, Figure]:
    drawn = {}
    for place, (title, results) in enumerate(columns.items()):
        suffix = "" if len(columns) == 1 else f"-{place + 1}"
        exact = results.select(labels=[labels for labels in ("exact", "sampled") if _has(results, labels)])
        drawn[f"family{suffix}"] = figures.figure1({title: results}, approx.names())
        drawn[f"exponents{suffix}"] = figures.exponents(exact)
        real = [detail for detail in results.details if detail.kind == "batch_sizes"]
        if real:
            drawn[f"batch-sizes{suffix}"] = figures.batch_sizes(Results([], real, results.settings))
    return drawn


def _has(results: Results, labels: str) -> bool:
    return any(row.labels == labels for row in results)


def _figures(columns: Mapping[str, Results]) -> dict[str, Figure]:
    return _figure1(columns) | _figure2(columns) | _figure3(columns) | _figure4(columns)


def _everything(columns: Mapping[str, Results]) -> dict[str, Figure]:
    return _figures(columns) | _beyond(columns)


_REAL = (Fit("real", 1, _SHAMPOOS), Fit("real", 256, _SHAMPOOS))
_FAMILY = tuple(name for name in approx.names() if name != "optimal-paper")

_PLANS = (
    Plan(
        "figure1",
        "Shampoo² is close to the optimal Kronecker product",
        (Fit("exact", 1, _SHAMPOOS),),
        _SHAMPOOS,
        (),
        _figure1,
    ),
    Plan(
        "figure2",
        "one round of power iteration from the identity",
        (Fit("exact", 1, ("optimal", "shampoo2"), ("spectrum",)),),
        ("optimal", "shampoo2"),
        ("spectrum",),
        _figure2,
    ),
    Plan("figure3", "real labels, batches of 1 and 256", _REAL, (), (), _figure3),
    Plan("figure4", "with K-FAC", (Fit("exact", 1, (*_SHAMPOOS, "kfac-reduce")),), (), (), _figure4),
    Plan("figure5", "three layers of a ViT", (Fit("exact", 1, _SHAMPOOS),), _SHAMPOOS, (), _figure5),
    Plan(
        "figures",
        "figures 1 to 4 from one training run",
        (Fit("exact", 1, (*_SHAMPOOS, "kfac-reduce"), ("spectrum",)), *_REAL),
        _SHAMPOOS,
        ("spectrum",),
        _figures,
    ),
    Plan(
        "all",
        "every figure, every approximation, exponent and batch-size sweeps",
        (
            Fit("exact", 1, _FAMILY, ("spectrum", "exponents")),
            Fit("real", 1, _SHAMPOOS, ("batch_sizes",)),
            Fit("real", 256, _SHAMPOOS),
        ),
        tuple(name for name in _FAMILY if "kfac" not in name),
        ("spectrum", "exponents"),
        _everything,
    ),
)


def names() -> tuple[str, ...]:
    """The figures there are."""
    return tuple(plan.name for plan in _PLANS)


def get(name: str) -> Plan:
    """A figure's plan.

    Raises:
        OptionError: There is no such figure.
    """
    for plan in _PLANS:
        if plan.name == name:
            return plan
    raise OptionError(f"there is no figure {name!r}; there are: {', '.join(names())}.")
