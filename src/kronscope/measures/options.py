"""What a call of ``measure`` asks for, in one object that checks itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kronscope.errors import OptionError
from kronscope.gradients.capture import BACKENDS
from kronscope.measures.budget import parse_budget
from kronscope.measures.columns import TRUTHS
from kronscope.measures.fits import Fit
from kronscope.measures.operators import OperatorSource, check_operators
from kronscope.support.checks import count, one_of, whole

__all__ = ["MeasureOptions"]

# Rows say the step, and rows of several calls are merged; layers and files would only differ between the parts.
_NOT_IN_RESULTS = ("layers", "step", "forward", "memory_budget", "spectrum_rank", "details")


@dataclass(frozen=True)
class MeasureOptions:
    """All that :func:`kronscope.measure` is asked for, apart from the model, the loss and the data.

    The comparison between processes, ``Results.settings`` and ``config.json`` are made from this object, so a new
    option is a field here and an argument of :func:`kronscope.measure`, whose docstring explains each of them.

    Args:
        fits: What approximations are fitted on, and which ones.

    Raises:
        OptionError: a value is not among the allowed ones.

    >>> options = MeasureOptions((Fit("real", 256, ["shampoo2"]),), truth="gauss_newton", draws=3)
    >>> options.draws, options.to_json()["batch_size"]
    (3, 256)
    """

    fits: Sequence[Fit]
    layers: Sequence[str] | str | None = None
    truth: str = "gauss_newton"
    max_samples: int | None = None
    seed: int = 0
    step: int = 0
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    draws: int = 1
    population: bool = False
    memory_budget: int | str | None = None
    spectrum_rank: int = 8
    accuracy: float = 0.01
    max_columns: int | None = None
    replacement: bool = True
    backend: str = "auto"
    operators: Mapping[str, OperatorSource] = field(default_factory=dict)
    leading_eigenvalue: bool = False
    whole_model: bool = False

    def __post_init__(self) -> None:
        """Check the values, and make whole numbers of other libraries ints."""
        if not self.fits:
            raise OptionError("fits is empty: give at least one Fit.")
        object.__setattr__(self, "fits", tuple(self.fits))
        one_of("truth", self.truth, TRUTHS)
        one_of("backend", self.backend, BACKENDS)
        for name in ("seed", "step"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("draws", "spectrum_rank", "max_samples", "max_columns"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, count(name, getattr(self, name)))
        # names that do not exist are refused here, before any work
        names = {approximation.name for fit in self.fits for approximation in fit.fitted}
        check_operators(self.operators, names)
        if self.population and all(fit.probes(self.seed) is not None for fit in self.fits):
            raise OptionError("population=True needs the exact estimator; leave estimator at 'exact'.")
        if self.whole_model and self.population:
            raise OptionError("whole_model=True answers for the samples given; leave population at False.")
        accuracy: Any = self.accuracy
        if not isinstance(accuracy, int | float) or not accuracy > 0:
            raise OptionError(f"accuracy must be a positive number, got {accuracy!r}.")
        parse_budget(self.memory_budget)

    def to_json(self) -> dict[str, Any]:
        """Return all options as plain data; those of a single fit stand beside the others."""
        fits = [fit.to_json() for fit in self.fits]
        return {**(fits[0] if len(fits) == 1 else {"fits": fits}), **self._common()}

    def settings(self, fit: Fit) -> dict[str, Any]:
        """Return what the results of one fit say was asked for."""
        asked = {**fit.to_json(), **self._common()}
        return {name: value for name, value in asked.items() if name not in _NOT_IN_RESULTS}

    def _common(self) -> dict[str, Any]:
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "fits"}
        plain["operators"] = list(self.operators)
        if self.forward is not None:
            plain["forward"] = getattr(self.forward, "__qualname__", type(self.forward).__name__)
        return plain
