"""Every error a user can meet.

Each message says what was expected, what came, and what to do. All of them derive from :class:`KronscopeError`, and
from the built-in exception a caller would otherwise expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

__all__ = [
    "ConformanceError",
    "ConvergenceError",
    "DataError",
    "DistributedError",
    "GradientError",
    "KronscopeError",
    "LabelError",
    "LayerError",
    "MemoryBudgetError",
    "MissingDataError",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "NotFactoredError",
    "OptionError",
    "ResultsError",
    "RunError",
    "ShapeError",
    "StateError",
]


class KronscopeError(Exception):
    """Base class of all errors raised on purpose by kronscope."""


class ShapeError(KronscopeError, ValueError):
    """A tensor has the wrong number of dimensions or the wrong sizes."""


class OptionError(KronscopeError, ValueError):
    """An argument has a value that is not among the allowed ones."""


class LayerError(KronscopeError, ValueError):
    """A layer does not exist, is not a matrix, or the loss does not depend on it."""


class DataError(KronscopeError, ValueError):
    """The data is empty, cannot be iterated twice, changes its order, or has the wrong form."""


class LabelError(KronscopeError, ValueError):
    """The labels do not fit the loss or the model's outputs."""


class ModelError(KronscopeError, ValueError):
    """The model cannot be measured as it is, for example because it mixes the samples of a batch."""


class NonFiniteError(KronscopeError, ValueError):
    """An activation, a gradient or a matrix contains NaN or infinity."""


class NotFactoredError(KronscopeError, ValueError):
    """An approximation needs inputs and output gradients, but only whole gradients are there."""


class MemoryBudgetError(KronscopeError, MemoryError):
    """The memory budget is too small for what was asked."""


class ConvergenceError(KronscopeError, RuntimeError):
    """An iteration did not reach its tolerance."""


class ResultsError(KronscopeError, ValueError):
    """A results file is missing, damaged, or of another version."""


class MissingExtraError(KronscopeError, ImportError):
    """An optional dependency is not installed."""


class MissingDataError(DataError, FileNotFoundError):
    """A data set is not where it was looked for; the text says where, and how to get it."""


class RunError(KronscopeError, RuntimeError):
    """A run folder is in use, holds another run, or is damaged."""


class GradientError(KronscopeError, RuntimeError):
    """An optimizer was given a gradient of a kind it cannot treat: sparse, complex or not floating-point."""


class StateError(KronscopeError, ValueError):
    """An optimizer's state is not there yet, or a saved one does not fit the model."""


class DistributedError(KronscopeError, RuntimeError):
    """Processes that work together differ, fail, do not answer, or hold a parameter in parts that cannot be used."""


class ConformanceError(KronscopeError, AssertionError):
    """An operator or approximation does not keep a promise that :mod:`kronscope.testing` checks."""
