"""The two records results are made of: a row is one cosine, a detail is a curve behind it."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kronscope.approx import Approximation, options_of

__all__ = [
    "COLUMNS",
    "MATRIX_COLUMNS",
    "Detail",
    "Row",
    "curve_names",
    "since",
    "stderr_of",
    "variant_name",
    "variants",
]

COLUMNS = (
    "layer",
    "rows",
    "cols",
    "step",
    "truth",
    "labels",
    "batch_size",
    "approximation",
    "cosine",
    "stderr",
    "relative_error",
    "samples",
    "seconds",
)
# Of the matrix that the cosine is taken with; the same in all rows of a layer.
MATRIX_COLUMNS = ("trace", "norm", "effective_rank", "leading_eigenvalue")
_INTEGERS = ("rows", "cols", "step", "batch_size", "samples")
_FLOATS = ("cosine", "stderr", "relative_error", "seconds", *MATRIX_COLUMNS)


def since(version: int, default: Any) -> Any:
    """An entry that files have from a schema version on; from older files it is read as ``default``.

    A new entry of :class:`Row` or :class:`Detail` goes last, and its version is one more than the last released one.
    """
    return dataclasses.field(default=default, metadata={"since": version})


def variant_name(approximation: str, options: str) -> str:
    """What tables, figures and curves call an approximation with options.

    >>> variant_name("shampoo", "exponent=0.75"), variant_name("shampoo", "")
    ('shampoo (exponent=0.75)', 'shampoo')
    """
    return f"{approximation} ({options})" if options else approximation


def variants(approximations: Iterable[Approximation]) -> list[str]:
    """The names of approximations, with their options."""
    return [variant_name(item.name, options_of(item)) for item in approximations]


@dataclass(frozen=True, eq=False)
class Row:
    """One cosine: how well one approximation fits one matrix of one layer at one step.

    Attributes:
        layer: The parameter's name, as it was asked for.
        rows: Rows m of the layer's matrix.
        cols: Columns n of the layer's matrix.
        step: The training step, or the number of recorded gradients.
        truth: Which matrix the cosine is taken with: ``gauss_newton``, ``empirical_fisher`` or ``adagrad``.
        labels: What the approximation was fitted on: ``exact``, ``sampled`` or ``real``.
        batch_size: The batch size B of the paper's batch lemmas, not the data loader's.
        approximation: The registered name.
        cosine: The cosine between the approximation and the truth; NaN where it does not exist.
        stderr: Its standard error; NaN where the answer is exact.
        relative_error: √(1 − cosine²), the error that is left at the best scale.
        samples: How many data samples the numbers come from.
        seconds: How long this row took.
        note: What a reader must know, such as why the cosine is NaN.
        options: How the fit differs from the usual one of that name, such as ``exponent=0.75``; also
            ``replacement=False`` for batches drawn without replacement, where that makes a difference.
        trace: The trace of the truth H.
        norm: Its Frobenius norm, as the answer asked for has it: of these samples, or of the population.
        effective_rank: (tr H)² / ‖H‖², over about how many directions H is spread.
        leading_eigenvalue: The largest eigenvalue of H, where it was asked for and can be had; else NaN.

    Infinite numbers are kept as NaN. Two rows are equal when all their entries are, NaN being equal to NaN.

    >>> Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.97).shape
    (10, 64)
    """

    layer: str
    rows: int
    cols: int
    step: int
    truth: str
    labels: str
    batch_size: int
    approximation: str
    cosine: float
    stderr: float = math.nan
    relative_error: float = math.nan
    samples: int = 0
    seconds: float = math.nan
    note: str = ""
    options: str = since(2, "")
    trace: float = since(3, math.nan)
    norm: float = since(3, math.nan)
    effective_rank: float = since(3, math.nan)
    leading_eigenvalue: float = since(3, math.nan)

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        for name in _FLOATS:
            object.__setattr__(self, name, _finite_or_nan(getattr(self, name)))

    @property
    def shape(self) -> tuple[int, int]:
        """The layer's matrix, m × n."""
        return (self.rows, self.cols)

    @property
    def condition(self) -> tuple[str, str, int]:
        """Truth, labels and batch size; rows that differ here answer different questions."""
        return (self.truth, self.labels, self.batch_size)

    @property
    def variant(self) -> str:
        """The approximation with its options; rows that differ in this alone are different fits."""
        return variant_name(self.approximation, self.options)

    @property
    def key(self) -> tuple[str, int, str, str, int, str, str]:
        """What was measured, without the answer."""
        return (self.layer, self.step, *self.condition, self.approximation, self.options)

    def _comparable(self) -> tuple[object, ...]:
        return tuple(_nan_to_none(getattr(self, entry.name)) for entry in dataclasses.fields(self))

    def __eq__(self, other: object) -> bool:
        return self._comparable() == other._comparable() if isinstance(other, Row) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._comparable())


@dataclass(frozen=True, eq=False)
class Detail:
    """The curves behind a row, which a table cannot hold.

    Attributes:
        layer: As in :class:`Row`.
        step: As in :class:`Row`.
        truth: As in :class:`Row`.
        labels: As in :class:`Row`.
        batch_size: As in :class:`Row`.
        kind: ``spectrum`` (with ``sigma``, ``alpha_left``, ``alpha_right``, ``ratio``, ``left``, ``right``),
            ``exponents`` (with ``exponent``, ``cosine``) or ``batch_sizes`` (with ``batch_size`` and one curve per
            approximation, named by its :attr:`Row.variant`). Where the truth is estimated there are standard errors
            too: ``stderr``, and ``stderr of`` each curve.
        values: Lists of numbers, numbers and text, by name.
        options: As in :class:`Row`; for batches drawn without replacement, where that makes a difference.

    >>> curve = {"exponent": [0.5, 1.0], "cosine": [0.8, 0.9]}
    >>> Detail("fc.weight", 0, "gauss_newton", "exact", 1, "exponents", curve).series("cosine")
    [0.8, 0.9]
    """

    layer: str
    step: int
    truth: str
    labels: str
    batch_size: int
    kind: str
    values: Mapping[str, Sequence[float] | float | str]
    options: str = since(2, "")

    def __post_init__(self) -> None:
        for name in ("step", "batch_size"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        values = {str(name): _detail_value(value) for name, value in self.values.items()}
        object.__setattr__(self, "values", values)

    @property
    def condition(self) -> tuple[str, str, int]:
        """Truth, labels and batch size."""
        return (self.truth, self.labels, self.batch_size)

    @property
    def key(self) -> tuple[str, int, str, str, int, str, str]:
        """What was measured, without the answer."""
        return (self.layer, self.step, *self.condition, self.kind, self.options)

    def series(self, name: str) -> list[float]:
        """The list of numbers called ``name``; empty if there is none."""
        value = self.values.get(name)
        return list(value) if isinstance(value, list) else []

    def number(self, name: str) -> float:
        """The number called ``name``; NaN if there is none."""
        value = self.values.get(name)
        return value if isinstance(value, float) else math.nan

    def _comparable(self) -> tuple[object, ...]:
        return (*self.key, {name: _nan_to_none(value) for name, value in self.values.items()})

    def __eq__(self, other: object) -> bool:
        return self._comparable() == other._comparable() if isinstance(other, Detail) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)


def stderr_of(curve: str) -> str:
    """The name of the series with a batch-size curve's standard errors."""
    return f"stderr of {curve}"


def curve_names(detail: Detail) -> list[str]:
    """The approximations of a batch-size sweep that have values."""
    errors = {stderr_of(name) for name in detail.values}
    return [name for name in detail.values if name != "batch_size" and name not in errors and detail.series(name)]


def _finite_or_nan(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else math.nan


def _nan_to_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan_to_none(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _detail_value(value: Any) -> list[float] | float | str:
    if isinstance(value, str):
        return value
    if getattr(value, "ndim", None) == 0 or not isinstance(value, Iterable):
        return _finite_or_nan(value)
    return [_finite_or_nan(item) for item in value]
