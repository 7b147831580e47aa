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

__all__ = ["Plan", "all_plans", "get"]

_SHAMPOOS = ("optimal", "shampoo2", "shampoo")
Draw = Callable[[Mapping[str, Results]], dict[str, "Figure"]]


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
        workload: The workload the command takes unless told otherwise.
    """

    name: str
    title: str
    gauss_newton: tuple[Fit, ...]
    adagrad: tuple[str, ...]
    adagrad_details: tuple[str, ...]
    draw: Draw
    workload: str = "mnist2"

    def with_labels(self, labels: str) -> Plan:
        """The same with other labels where the figure takes the truth's own."""
        fits = tuple(replace(fit, labels=labels) if fit.labels == "exact" else fit for fit in self.gauss_newton)
        return replace(self, gauss_newton=fits)


def _drawn(**pictures: Callable[[Mapping[str, Results]], Figure]) -> Draw:
    return lambda columns: {name: picture(columns) for name, picture in pictures.items()}


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


_figures = _drawn(figure1=figures.figure1, figure2=figures.figure2, figure3=figures.figure3, figure4=figures.figure4)


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
        _drawn(figure1=figures.figure1),
    ),
    Plan(
        "figure2",
        "one round of power iteration from the identity",
        (Fit("exact", 1, ("optimal", "shampoo2"), ("spectrum",)),),
        ("optimal", "shampoo2"),
        ("spectrum",),
        _drawn(figure2=figures.figure2),
    ),
    Plan("figure3", "real labels, batches of 1 and 256", _REAL, (), (), _drawn(figure3=figures.figure3)),
    Plan(
        "figure4",
        "with K-FAC",
        (Fit("exact", 1, (*_SHAMPOOS, "kfac-reduce")),),
        (),
        (),
        _drawn(figure4=figures.figure4),
    ),
    Plan(
        "figure5",
        "three layers of a ViT",
        (Fit("exact", 1, _SHAMPOOS),),
        _SHAMPOOS,
        (),
        _drawn(figure5=figures.figure1),
        "cifar-vit",
    ),
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
        "every figure and approximation, exponent and batch-size sweeps",
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


def all_plans() -> tuple[Plan, ...]:
    """The figures there are; each is a command."""
    return _PLANS


def get(name: str) -> Plan:
    """A figure's plan.

    Raises:
        OptionError: There is no such figure.
    """
    for plan in _PLANS:
        if plan.name == name:
            return plan
    raise OptionError(f"there is no figure {name!r}; there are: {', '.join(plan.name for plan in _PLANS)}.")
