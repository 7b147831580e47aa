"""Advice for a whole model: for every layer what fits its curvature, what that costs, and what to set."""

from __future__ import annotations

import glob
import math
import os
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.advising.candidates import Candidate, by_kind, candidates
from kronscope.errors import LayerError, MemoryBudgetError, OptionError
from kronscope.gradients.losses import LossFunction
from kronscope.gradients.matrices import resolve_layers, unwrap
from kronscope.measures import Results
from kronscope.measures.measure import measure
from kronscope.measures.table import text_width
from kronscope.optim import Shampoo, param_groups
from kronscope.optim.base import KroneckerOptimizer
from kronscope.optim.explain import table
from kronscope.optim.roles import roles_in
from kronscope.support.callers import callers_level
from kronscope.support.files import write_json

__all__ = ["Advice", "LayerAdvice", "Option", "advise"]

# A cheaper option must save this part of what a step of the whole model costs.
WORTH_IT = 0.01
TITLES = {
    "shampoo2": "both sides",
    "left": "one-sided L",
    "right": "one-sided R",
    "diagonal": "diagonal",
    "blocks": "blocks",
    "split": "split q, k, v",
    "heads": "split by heads",
}


@dataclass(frozen=True)
class Option:
    """One way to precondition a layer.

    Attributes:
        name: ``shampoo2`` (both sides), ``left``, ``right``, ``diagonal``, ``blocks``, ``split`` or ``heads``.
        settings: What to set in a parameter group for it.
        cosine: With the layer's Gauss–Newton matrix; NaN where it could not be measured.
        milliseconds: Estimate of what it costs in a step of this machine, roots spread over their period.
        bytes: Of its state.
    """

    name: str
    settings: dict[str, Any]
    cosine: float
    milliseconds: float
    bytes: int

    @property
    def title(self) -> str:
        """For people."""
        size = self.settings.get("block_size")
        return f"{TITLES[self.name]} of {size}" if size else TITLES[self.name]


@dataclass(frozen=True)
class LayerAdvice:
    """What fits one layer.

    Attributes:
        layer: The parameter's name.
        shape: Its (m, n) as a matrix.
        optimal: The cosine of the best Kronecker product there is.
        options: What was compared, the best fit first.
        choice: The recommended one.
        reason: Why.
    """

    layer: str
    shape: tuple[int, int]
    optimal: float
    options: tuple[Option, ...]
    choice: Option
    reason: str


@dataclass(frozen=True)
class Advice:
    """What to set for each layer of a model; print it for a table. Made by :func:`advise`.

    Attributes:
        layers: One entry for each measured layer.
        results: The cosines behind it.
        tolerance: How much cosine a cheaper option may lose.

    >>> torch.manual_seed(0) and None
    >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> data = [(torch.randn(16, 6), torch.randint(3, (16,)))]
    >>> advice = advise(model, nn.CrossEntropyLoss(), data)
    >>> [entry.layer for entry in advice.layers]
    ['0.weight', '2.weight']
    """

    layers: tuple[LayerAdvice, ...]
    results: Results
    tolerance: float

    def param_groups(self, model: nn.Module, **options: Any) -> list[dict[str, Any]]:
        """Return parameter groups that train a model as recommended.

        Args:
            model: The model, or another one with the same parameters.
            options: For :func:`kronscope.param_groups`, such as ``decay_vectors``.

        Returns:
            Groups for :class:`Shampoo`, :class:`SOAP` and :class:`KLShampoo`.

        Raises:
            OptionError: the model has no parameter of a name that the advice is for.
        """
        # overrides are patterns, and these are names: a module may be called "a[0]"
        settings = {glob.escape(entry.layer): entry.choice.settings for entry in self.layers}
        return param_groups(unwrap(model), overrides=settings, **options)

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write ``advice.json`` and the page ``advice.html`` to a folder.

        Args:
            folder: The folder; it is made if it is not there.

        Returns:
            The paths of both.
        """
        from kronscope.advising.page import to_data

        path = write_json(Path(folder) / "advice.json", to_data(self))
        return [path, self.report(Path(folder) / "advice.html")]

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML page with all options of all layers.

        Args:
            path: The file.

        Returns:
            The path.
        """
        from kronscope.advising.page import write_page

        return write_page(self, path)

    def __str__(self) -> str:
        header = ("shape", "best fit", "recommended", "cosine", "ms")
        lines = [
            (
                "×".join(map(str, entry.shape)),
                f"{entry.options[0].title} {entry.options[0].cosine:.2f}",
                entry.choice.title,
                f"{entry.choice.cosine:.2f}",
                f"{entry.choice.milliseconds:.2g}",
            )
            for entry in self.layers
        ]
        names, reasons = [entry.layer for entry in self.layers], [entry.reason for entry in self.layers]
        beside = [(name, *line, why) for name, line, why in zip(names, lines, reasons, strict=True)]
        text, width = table(("layer", *header, "why"), beside), text_width()
        if max(map(len, text.splitlines())) <= width:
            return text
        # not all of it fits beside each other: a name stands above its numbers and the reason below
        head, *numbers = table(header, lines).splitlines()
        parts = [head]
        for name, line, why in zip(names, numbers, reasons, strict=True):
            parts += [name, line, textwrap.fill(why, width, initial_indent="    ", subsequent_indent="    ")]
        return "\n".join(parts)


def advise(
    model: nn.Module,
    loss: LossFunction,
    data: Iterable[Any],
    layers: Sequence[str] | str | None = None,
    *,
    tolerance: float = 0.05,
    tables: bool = False,
    family: Callable[..., KroneckerOptimizer] | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    memory_budget: int | str | None = None,
    accuracy: float = 0.02,
    max_columns: int | None = 256,
    progress: bool = True,
) -> Advice:
    """Tell for every layer which preconditioner fits its curvature, what it costs, and what to set.

    Compared are Shampoo² of the whole matrix, one factor alone (L or R), the diagonal (Adam's), blocks, and where there
    are any, query, key and value or heads by themselves; all against the Gauss–Newton matrix. Recommended is the one
    that fits best, or the cheapest whose cosine is at most ``tolerance`` below, if that saves at least a hundredth of
    the whole model's step.

    Args:
        model: The model, best after some training: curvature changes most in the first steps.
        loss: The loss, as for :func:`kronscope.measure`.
        data: Batches ``(inputs, targets)``, as for :func:`kronscope.measure`.
        layers: Names or globs of whole parameters; None takes every matrix that is trained.
        tolerance: How much cosine a cheaper option may lose.
        tables: Recommend for embeddings and heads what fits them, too. If not they keep AdamW, as by default: in our
            trials factors helped them only at large learning rates.
        family: The class of the optimizer whose costs are estimated, such as :class:`SOAP`; None for :class:`Shampoo`.
        max_samples: Use only the first samples.
        seed: Of random columns, where there are very many classes.
        forward: ``(model, inputs) -> outputs`` for models with their own conventions.
        memory_budget: Bytes, or a text such as ``"2GiB"``, for measuring.
        accuracy: The standard error to reach where the matrix itself is estimated.
        max_columns: Estimate it where exact labels need more columns for each sample than this.
        progress: Show a progress bar on a terminal.

    Returns:
        The advice; print it for a table, and pass ``advice.param_groups(model)`` to an optimizer.

    Raises:
        OptionError: an argument is not among the allowed values.
        LayerError: a layer does not exist, is no whole matrix, or is not trained.
        KronscopeError: as :func:`kronscope.measure` does.

    >>> import kronscope as ks
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> data = [(torch.randn(16, 6), torch.randint(3, (16,)))]
    >>> advice = ks.advise(model, nn.CrossEntropyLoss(), data)
    >>> optimizer = ks.Shampoo(advice.param_groups(model), lr=1e-3)
    """
    if not 0 <= tolerance < 1:
        raise OptionError(f"tolerance must be a number between 0 and 1, got {tolerance!r}.")
    if family is not None and not callable(family):
        raise OptionError(f"family must be an optimizer's class, such as kronscope.SOAP, got {family!r}.")
    inner = unwrap(model)
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    chosen, shapes = _asked_for(inner, layers, parameters)

    def measured(kind: tuple[Any, ...], names: list[str]) -> list[Results]:
        """Measure layers of a kind; of those that nobody asked for by name, leave out what cannot be measured."""
        try:
            return [
                measure(
                    model,
                    loss,
                    data,
                    layers=names,
                    approximations=("optimal", *kind),
                    max_samples=max_samples,
                    seed=seed,
                    forward=forward,
                    memory_budget=memory_budget,
                    accuracy=accuracy,
                    max_columns=max_columns,
                    progress=progress,
                )
            ]
        except (LayerError, MemoryBudgetError) as error:
            if layers is not None:
                raise
            if len(names) > 1:
                return [part for name in names for part in measured(kind, [name])]
            warnings.warn(f"no advice for {names[0]}: {error}", stacklevel=callers_level())
            return []

    parts: list[Results] = []
    for kind, names in by_kind(chosen).items():
        parts += measured(kind, names)
        if any(part.partial for part in parts):
            break  # Ctrl-C means all of it
    if not parts:
        raise LayerError("no layer could be measured; the warnings say why.")
    results = parts[0].merge(*parts[1:])
    prices = _prices({name: chosen[name] for name in results.layers if name in chosen}, parameters, family or Shampoo)
    options = {
        name: _options(results.select(layer=name), chosen[name], prices[name]) for name in chosen if name in prices
    }
    optimal = {row.layer: row.cosine for row in results.select(approximation="optimal")}
    roles = {} if tables else roles_in(inner)
    least = WORTH_IT * sum(several[0].milliseconds for several in options.values())
    found = []
    for name, several in options.items():
        choice, reason = _choice_for(roles.get(parameters[name], ""), several, tolerance, least)
        found.append(LayerAdvice(name, shapes[name], optimal[name], several, choice, reason))
    return Advice(tuple(found), results, tolerance)


def _asked_for(
    model: nn.Module, layers: Sequence[str] | str | None, parameters: dict[str, nn.Parameter]
) -> tuple[dict[str, list[Candidate]], dict[str, tuple[int, int]]]:
    """The layers that are trained: what to compare for each, and their shapes."""
    chosen: dict[str, list[Candidate]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for spec in resolve_layers(model, layers):
        name, parameter = spec.parameters[0], parameters[spec.parameters[0]]
        if not spec.is_whole(parameter):
            raise LayerError(f"layer {spec.name!r}: advice is for whole parameters, not for parts or stacks of them.")
        if parameter.requires_grad:
            chosen[name], shapes[name] = candidates(name, parameter, model), spec.shape
        elif layers is not None:
            raise LayerError(f"layer {name!r} is not trained (requires_grad is False); leave it out.")
    if not chosen:
        raise LayerError("the model trains no matrix: there is nothing to advise on.")
    return chosen, shapes


def _choice_for(role: str, several: tuple[Option, ...], tolerance: float, least: float) -> tuple[Option, str]:
    """What to recommend for a layer of a role, and why."""
    if role in ("embedding", "head"):
        (choice,) = [one for one in several if one.name == "diagonal"]
        return choice, f"AdamW, as for every {role}; {several[0].title} has {several[0].cosine:.2f}"
    return _choice(several, tolerance, least)


def _prices(
    chosen: dict[str, list[Candidate]], parameters: dict[str, nn.Parameter], family: Callable[..., KroneckerOptimizer]
) -> dict[str, list[tuple[float, int]]]:
    """Milliseconds and bytes of each candidate, from the plan of an optimizer that has nothing but shapes.

    Equal layers with equal options share what calls cost, as they do in a step.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, several in chosen.items():
        for place, one in enumerate(several):
            # candidates must not share a budget
            new = {"params": [], "memory_budget": math.inf, **one.options}
            ghost = torch.empty_like(parameters[name], device="meta").requires_grad_()
            groups.setdefault(repr(sorted(one.options.items())), new)["params"].append((f"{name} {place}", ghost))
    plan = family(list(groups.values()), lr=1e-3, parallel="single").explain()
    assert plan.rate is not None  # it is where the work is not divided
    unit = 1e3 / plan.rate
    prices = {row.name: (unit * plan.row_cost(row), row.bytes) for row in plan.rows}
    return {name: [prices[f"{name} {place}"] for place in range(len(several))] for name, several in chosen.items()}


def _options(results: Results, several: Sequence[Candidate], prices: Sequence[tuple[float, int]]) -> tuple[Option, ...]:
    """What was compared for a layer, the best fit first and what could not be measured last."""
    cosines = {row.approximation: row.cosine for row in results}
    found = [
        Option(one.name, dict(one.options), cosines.get(one.name, math.nan), *price)
        for one, price in zip(several, prices, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: math.inf if math.isnan(one.cosine) else -one.cosine))


def _choice(options: Sequence[Option], tolerance: float, least: float) -> tuple[Option, str]:
    """The recommended option of a layer and why; a cheaper one must save ``least`` milliseconds."""
    best = options[0]
    if math.isnan(best.cosine):
        return min(options, key=lambda one: one.milliseconds), "nothing could be measured: the cheapest"
    near = [one for one in options if one.cosine >= best.cosine - tolerance]
    choice = min(near, key=lambda one: one.milliseconds)
    if best.milliseconds - choice.milliseconds >= max(least, 1e-12):
        below = f"{best.cosine - choice.cosine:.2f}"
        fit = "fits as well" if below == "0.00" else f"its cosine is {below} lower"
        return choice, f"{_share(choice, best)} cheaper than {best.title}, and {fit}"
    cheaper = [one for one in options if best.milliseconds - one.milliseconds >= max(least, 1e-12)]
    if not cheaper:
        return best, "the best fit; others save next to nothing"
    nearest = max(cheaper, key=lambda one: -math.inf if math.isnan(one.cosine) else one.cosine)
    return best, f"{nearest.title} would save {_share(nearest, best)} of the time but reaches {nearest.cosine:.2f}"


def _share(cheap: Option, dear: Option) -> str:
    return f"{100 * (1 - cheap.milliseconds / dear.milliseconds):.0f} %"
