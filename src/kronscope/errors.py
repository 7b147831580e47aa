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
    """Base class of all errors that kronscope raises on purpose.

    >>> import kronscope as ks
    >>> try:
    ...     ks.approx.get("shampo")
    ... except ks.errors.KronscopeError as error:
    ...     print(error)
    there is no approximation 'shampo'; did you mean 'shampoo' or 'shampoo2'?
    """


class ShapeError(KronscopeError, ValueError):
    """A tensor has the wrong number of dimensions or the wrong sizes.

    >>> import torch, kronscope as ks
    >>> ks.GradientStream.from_tensors(torch.ones(4, 3))
    Traceback (most recent call last):
        ...
    kronscope.errors.ShapeError: from_tensors needs gradients (N, m, n), got (4, 3).
    """


class OptionError(KronscopeError, ValueError):
    """An argument has a value that is not allowed.

    >>> import kronscope as ks
    >>> ks.Every(0)
    Traceback (most recent call last):
        ...
    kronscope.errors.OptionError: Every(steps) must be a whole number of at least 1, got 0.
    """


class LayerError(KronscopeError, ValueError):
    """A layer does not exist, is not a matrix, or the loss does not depend on it.

    >>> import torch, kronscope as ks
    >>> ks.gradients.resolve_layers(torch.nn.Linear(3, 2), ["wieght"])
    Traceback (most recent call last):
        ...
    kronscope.errors.LayerError: Unknown layer 'wieght'. The nearest names are: weight.
    """


class DataError(KronscopeError, ValueError):
    """The data is empty, cannot be iterated twice, changes its order, or has the wrong form.

    >>> import torch, kronscope as ks
    >>> ks.GradientStream.from_tensors(torch.ones(0, 2, 3))
    Traceback (most recent call last):
        ...
    kronscope.errors.DataError: a gradient stream needs at least one sample, got gradients of shape (0, 2, 3).
    """


class LabelError(KronscopeError, ValueError):
    """The labels do not fit the loss or the model's outputs.

    >>> import torch, kronscope as ks
    >>> data = [(torch.ones(2, 3), torch.tensor([0, 7]))]  # a label 7, but only two outputs
    >>> try:
    ...     ks.measure(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), data, labels="real", progress=False)
    ... except ks.errors.LabelError as error:
    ...     print(error)
    Class indices must lie in 0..1 (or be ignore_index=-100), got 7.
    """


class ModelError(KronscopeError, ValueError):
    """The model cannot be measured as it is, for example because it mixes the samples of a batch.

    >>> import torch, kronscope as ks
    >>> class Centred(torch.nn.Linear):
    ...     def forward(self, inputs):
    ...         return super().forward(inputs - inputs.mean(0))
    >>> try:
    ...     data = [(torch.randn(8, 3), torch.randn(8, 2))]
    ...     ks.measure(Centred(3, 2), torch.nn.MSELoss(), data, progress=False)
    ... except ks.errors.ModelError as error:
    ...     print("one sample's output depends on the others" if "sample" in str(error) else error)
    one sample's output depends on the others
    """


class NonFiniteError(KronscopeError, ValueError):
    """An activation, a gradient or a matrix contains NaN or infinity.

    >>> import torch, kronscope as ks
    >>> ks.GradientStream.from_tensors(torch.tensor([[[float("nan")]]]))
    Traceback (most recent call last):
        ...
    kronscope.errors.NonFiniteError: the gradients contain NaN or infinity; drop those samples or mend the model first.
    """


class NotFactoredError(KronscopeError, ValueError):
    """K-FAC needs inputs and output gradients, but only whole gradients are there.

    >>> import torch, kronscope as ks
    >>> try:
    ...     ks.approx.get("kfac-reduce").fit(ks.GradientStream.from_tensors(torch.ones(4, 2, 3)))
    ... except ks.errors.NotFactoredError:
    ...     print("use GradientStream.from_factors")
    use GradientStream.from_factors
    """


class MemoryBudgetError(KronscopeError, MemoryError):
    """The memory budget is too small for what was asked.

    >>> import torch, kronscope as ks
    >>> model, data = torch.nn.Linear(300, 2), [(torch.ones(2, 300), torch.tensor([0, 1]))]
    >>> try:
    ...     ks.measure(model, torch.nn.CrossEntropyLoss(), data, "weight", memory_budget="1KiB", progress=False)
    ... except ks.errors.MemoryBudgetError:
    ...     print("allow more memory")
    allow more memory
    """


class ConvergenceError(KronscopeError, RuntimeError):
    """An iteration did not reach its tolerance.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> try:
    ...     ks.approx.get("kl", max_rounds=1).fit(stream)
    ... except ks.errors.ConvergenceError:
    ...     print("allow more rounds")
    allow more rounds
    """


class ResultsError(KronscopeError, ValueError):
    """A results file is missing, damaged, written by a newer version, or cannot be written.

    >>> import kronscope as ks
    >>> try:
    ...     ks.Results.load("no-such-file.json")
    ... except ks.errors.ResultsError:
    ...     print("not there")
    not there
    """


class MissingExtraError(KronscopeError, ImportError):
    """An optional package is not installed; the text says how to install it.

    >>> issubclass(MissingExtraError, ImportError)
    True
    """


class MissingDataError(DataError, FileNotFoundError):
    """A data set is not where it was looked for; the text says where that was, and how to get the data.

    >>> issubclass(MissingDataError, FileNotFoundError)
    True
    """


class RunError(KronscopeError, RuntimeError):
    """A run folder is in use, holds another run, or is damaged.

    >>> from kronscope.runs import Run
    >>> try:
    ...     Run.open("no-such-folder")
    ... except RunError:
    ...     print("no run there")
    no run there
    """


class GradientError(KronscopeError, RuntimeError):
    """An optimizer met a gradient of a kind it cannot use: sparse, complex or not floating-point.

    >>> import torch, kronscope as ks
    >>> embedding = torch.nn.Embedding(5, 3, sparse=True)
    >>> embedding(torch.tensor([1])).sum().backward()
    >>> try:
    ...     ks.Shampoo(embedding.named_parameters(), lr=1e-3).step()
    ... except ks.errors.GradientError:
    ...     print("sparse gradients are not supported")
    sparse gradients are not supported
    """


class StateError(KronscopeError, ValueError):
    """An optimizer's state is not there yet, or a saved state does not fit the model.

    >>> import torch, kronscope as ks
    >>> model = torch.nn.Linear(3, 2)
    >>> try:
    ...     ks.Shampoo(model.named_parameters(), lr=1e-3).operator(model.weight)
    ... except ks.errors.StateError:
    ...     print("take a step first")
    take a step first
    """


class DistributedError(KronscopeError, RuntimeError):
    """Processes that should work together do not.

    They were called with different arguments, one of them failed or does not answer, or they hold a parameter in parts
    that cannot be used. The text names the processes.

    >>> issubclass(DistributedError, RuntimeError)
    True
    """


class ConformanceError(KronscopeError, AssertionError):
    """A check of :mod:`kronscope.testing` failed: an operator, approximation or solver breaks a promise.

    >>> import torch, kronscope as ks
    >>> from kronscope.testing import check_operator
    >>> class Wrong(ks.kron.Identity):
    ...     def trace(self):
    ...         return 0.0
    >>> try:
    ...     check_operator(Wrong((2, 3), 1.0))
    ... except ks.errors.ConformanceError:
    ...     print("its trace is wrong")
    its trace is wrong
    """
