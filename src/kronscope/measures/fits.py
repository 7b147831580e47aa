"""What approximations are fitted on: one or several answers to that, against one truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kronscope.approx import Approximation, several
from kronscope.errors import OptionError
from kronscope.measures.probes import Probes
from kronscope.measures.rows import variants
from kronscope.support.checks import count

__all__ = ["DEFAULT_APPROXIMATIONS", "DETAILS", "Fit"]

DEFAULT_APPROXIMATIONS = ("optimal", "shampoo2", "shampoo", "kfac-reduce")
DETAILS = ("spectrum", "exponents", "batch_sizes")
_LABELS = ("exact", "sampled", "real")


@dataclass(frozen=True)
class Fit:
    """One way to fit approximations: which labels, which batch size, which approximations.

    :func:`kronscope.measure_fits` compares several of them with one truth.

    Args:
        labels: ``"exact"``, ``"sampled"`` or ``"real"``; None takes the truth's own.
        batch_size: The batch size B of the paper's batch lemmas.
        approximations: Names or objects; see :func:`kronscope.approx.names`.
        details: Curves to compute beside the cosines: ``"spectrum"``, ``"exponents"``, ``"batch_sizes"``.
        estimator: ``"exact"``, or ``"probes"`` (or a :class:`Probes`) for the paper's estimator.

    Raises:
        OptionError: a value is not among the allowed ones.

    >>> Fit("real", 256).batch_size
    256
    """

    labels: str | None = None
    batch_size: int = 1
    approximations: Sequence[str | Approximation] = DEFAULT_APPROXIMATIONS
    details: Sequence[str] = ()
    estimator: str | Probes = "exact"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.labels is not None and self.labels not in _LABELS:
            raise OptionError(f"labels must be one of {_LABELS} or None, got {self.labels!r}.")
        object.__setattr__(self, "batch_size", count("batch_size", self.batch_size))
        if isinstance(self.details, str):
            object.__setattr__(self, "details", (self.details,))
        if unknown := set(self.details) - set(DETAILS):
            raise OptionError(f"details may be {DETAILS}, got {', '.join(sorted(map(repr, unknown)))}.")
        if not isinstance(self.estimator, Probes) and self.estimator not in ("exact", "probes"):
            raise OptionError(f"estimator must be 'exact', 'probes' or a Probes object, got {self.estimator!r}.")

    @property
    def fitted(self) -> tuple[Approximation, ...]:
        """The approximations as objects."""
        return several(self.approximations)

    def to_json(self) -> dict[str, Any]:
        """Return the values as plain data."""
        probes = self.probes(0)
        return {
            "labels": self.labels,
            "batch_size": self.batch_size,
            "approximations": variants(self.fitted),
            "details": list(self.details),
            "estimator": "exact" if probes is None else "probes",
            "probes": None if probes is None else probes.count,
        }

    def probes(self, seed: int) -> Probes | None:
        """The probes to estimate with; None for exact values."""
        if isinstance(self.estimator, Probes):
            return self.estimator
        return Probes(seed=seed) if self.estimator == "probes" else None
