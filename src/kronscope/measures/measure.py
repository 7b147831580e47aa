"""Measure a whole model: every layer, every approximation, one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kronscope.approx import Approximation
from kronscope.curvature import SecondMoment
from kronscope.measures.fits import DEFAULT_APPROXIMATIONS, Fit
from kronscope.measures.measurement import captured_layer, run
from kronscope.measures.operators import OperatorSource
from kronscope.measures.options import MeasureOptions
from kronscope.measures.probes import Probes
from kronscope.measures.results import Results
from kronscope.support.processes import find_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["measure", "measure_fits", "second_moment"]


def measure(
    model: nn.Module,
    loss: nn.Module,
    data: Iterable[Any],
    layers: Sequence[str] | str | None = None,
    truth: str = "gauss_newton",
    labels: str | None = None,
    batch_size: int = 1,
    approximations: Sequence[str | Approximation] = DEFAULT_APPROXIMATIONS,
    max_samples: int | None = None,
    seed: int = 0,
    step: int = 0,
    progress: bool = True,
    forward: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    draws: int = 1,
    population: bool = False,
    estimator: str | Probes = "exact",
    memory_budget: int | str | None = None,
    *,
    details: Sequence[str] = (),
    spectrum_rank: int = 8,
    accuracy: float = 0.01,
    max_columns: int | None = None,
    replacement: bool = True,
    backend: str = "auto",
    operators: Mapping[str, OperatorSource] | None = None,
    verbose: bool = False,
    distributed: bool | ProcessGroup | None = None,
) -> Results:
    r"""Measure how well each approximation fits a curvature matrix, for every layer of a model.

    For each layer, with :math:`H` the ``truth`` and :math:`K` an approximation fitted on ``labels`` and
    ``batch_size``, the result is :math:`\cos(H, K) = \langle H, K\rangle_F / (\|H\|_F\|K\|_F)`: exact for the samples
    given, unless you ask for the population they came from or for the paper's random probes.

    The model is measured in eval mode and left exactly as found: parameters, buffers, modes, gradients, hooks and
    random states, also after an error. Ctrl-C returns what is done so far, marked partial.

    Args:
        model: Any ``nn.Module`` that treats the samples of a batch independently in eval mode.
        loss: ``nn.CrossEntropyLoss``, ``nn.MSELoss`` or ``nn.BCEWithLogitsLoss``.
        data: Batches ``(inputs, targets)``, first dimension = samples, in the same order every time.
        layers: Parameter names or globs; ``"p[0:64]"`` takes rows, ``"a+b"`` stacks rows. None takes every parameter
            of two or more dimensions that fits the memory budget.
        truth: ``"gauss_newton"`` or ``"empirical_fisher"``.
        labels: What the approximations are fitted on: ``"exact"``, ``"sampled"`` or ``"real"``; None is the truth's own
            (the optimal product is always fitted on the truth).
        batch_size: The B of the batch lemmas: the fit is the expectation over batches of B samples.
        approximations: Names or objects; see :func:`kronscope.approx.names`.
        max_samples: Use only the first samples.
        seed: For drawn labels and probes.
        step: The training step to write into the rows.
        progress: Show a progress bar on a terminal.
        forward: ``(model, inputs) -> outputs`` for models with their own conventions.
        draws: Label draws per sample for ``labels="sampled"``.
        population: Answer for the population the samples came from, with standard errors, instead of for the samples.
        estimator: ``"exact"``, or ``"probes"`` (or a :class:`Probes`) for the paper's estimator.
        memory_budget: Bytes, or a text such as ``"2GiB"``; default a third of the machine's memory, at most 8 GiB.
        details: Also compute ``"spectrum"`` (Figure 2), ``"exponents"`` and ``"batch_sizes"`` curves.
        spectrum_rank: Leading singular values in the ``"spectrum"`` detail.
        accuracy: With very many classes the truth itself is drawn: the standard error to reach.
        max_columns: Draw the truth's labels when exact ones need more backward passes than this per sample; None
            decides by the cost.
        replacement: Whether the batches of ``batch_size`` are drawn with replacement.
        backend: ``"auto"``, ``"hooks"`` (fast) or ``"func"`` (general).
        operators: Operators to measure beside the fits, by the name of their rows: an optimizer, whose live operators
            of the layers are taken (ours, or the second moments of torch's), or operators by layer.
        verbose: Print how each layer is captured and contracted, to standard error.
        distributed: With torch.distributed initialised, every process calls this with its own part of the data, and all
            get the answer for the whole. None infers that, False measures this process alone, a process group those
            in it.

    Returns:
        One row per layer and approximation.

    Raises:
        OptionError: an argument is not among the allowed values.
        LayerError: a layer does not exist, is no matrix, or the loss does not reach it.
        DataError: the data is empty, cannot be iterated twice, or changes between passes.
        LabelError: labels do not fit the outputs.
        ModelError: the model mixes the samples of a batch.
        NonFiniteError: NaN or infinity on the way.
        MemoryBudgetError: a layer asked for by name does not fit.
        DistributedError: another process was called differently, failed, or did not come.

    >>> import kronscope as ks
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
    >>> results = ks.measure(model, nn.CrossEntropyLoss(), data, layers=["0.weight"], progress=False)
    >>> [row.approximation for row in results]
    ['optimal', 'shampoo2', 'shampoo', 'kfac-reduce']
    """
    processes = find_processes(distributed)
    processes.barrier("ks.measure")
    with processes.failing_together():
        options = MeasureOptions(
            [Fit(labels, batch_size, approximations, details, estimator)],
            layers=layers,
            truth=truth,
            max_samples=max_samples,
            seed=seed,
            step=step,
            forward=forward,
            draws=draws,
            population=population,
            memory_budget=memory_budget,
            spectrum_rank=spectrum_rank,
            accuracy=accuracy,
            max_columns=max_columns,
            replacement=replacement,
            backend=backend,
            operators={} if operators is None else operators,
        )
    return run(model, loss, data, options, processes, progress=progress, verbose=verbose)[0]


def measure_fits(
    model: nn.Module,
    loss: nn.Module,
    data: Iterable[Any],
    fits: Sequence[Fit],
    layers: Sequence[str] | str | None = None,
    truth: str = "gauss_newton",
    *,
    max_samples: int | None = None,
    seed: int = 0,
    step: int = 0,
    progress: bool = True,
    forward: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    draws: int = 1,
    population: bool = False,
    memory_budget: int | str | None = None,
    spectrum_rank: int = 8,
    accuracy: float = 0.01,
    max_columns: int | None = None,
    replacement: bool = True,
    backend: str = "auto",
    verbose: bool = False,
    distributed: bool | ProcessGroup | None = None,
) -> tuple[Results, ...]:
    r"""Measure several fits against one truth: the gradients are captured once, its norm and optimum taken once.

    That is how to see the effect of labels, batch size and estimator. Put the results together with
    :meth:`Results.merge`.

    Args:
        model: As for :func:`measure`, and so are all other arguments that are not listed here.
        loss: The loss.
        data: The data.
        fits: What approximations are fitted on, and which ones.
        layers: The layers.
        truth: ``"gauss_newton"`` or ``"empirical_fisher"``.
        max_samples: Use only the first samples.
        seed: For drawn labels and probes.
        step: The training step to write into the rows.
        progress: Show a progress bar on a terminal.
        forward: ``(model, inputs) -> outputs``.
        draws: Label draws per sample for ``labels="sampled"``.
        population: Answer for the population the samples came from, except in fits that are estimated with probes.
        memory_budget: Bytes, or a text such as ``"2GiB"``.
        spectrum_rank: Leading singular values in the ``"spectrum"`` detail.
        accuracy: The standard error to reach where the truth itself is drawn.
        max_columns: Draw the truth's labels above this many backward passes per sample.
        replacement: Whether batches are drawn with replacement.
        backend: ``"auto"``, ``"hooks"`` or ``"func"``.
        verbose: Print how each layer is captured and contracted.
        distributed: Whether the data is spread over processes.

    Returns:
        One result for each fit, in their order.

    Raises:
        KronscopeError: as :func:`measure` does.

    >>> import kronscope as ks
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
    >>> fits = [ks.Fit("real", size, ["shampoo2"]) for size in (1, 256)]
    >>> one, many = ks.measure_fits(model, nn.CrossEntropyLoss(), data, fits, "0.weight", progress=False)
    >>> one.rows[0].batch_size, many.rows[0].batch_size
    (1, 256)
    """
    processes = find_processes(distributed)
    processes.barrier("ks.measure")
    with processes.failing_together():
        options = MeasureOptions(
            fits,
            layers=layers,
            truth=truth,
            max_samples=max_samples,
            seed=seed,
            step=step,
            forward=forward,
            draws=draws,
            population=population,
            memory_budget=memory_budget,
            spectrum_rank=spectrum_rank,
            accuracy=accuracy,
            max_columns=max_columns,
            replacement=replacement,
            backend=backend,
        )
    return run(model, loss, data, options, processes, progress=progress, verbose=verbose)


def second_moment(
    model: nn.Module,
    loss: nn.Module,
    data: Iterable[Any],
    layer: str,
    truth: str = "gauss_newton",
    *,
    max_samples: int | None = None,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    memory_budget: int | str | None = None,
    max_columns: int | None = None,
    backend: str = "auto",
    progress: bool = True,
    distributed: bool | ProcessGroup | None = None,
) -> SecondMoment:
    """Capture one layer's matrix, the truth that :func:`measure` compares with.

    Its norm, trace, contractions and products with vectors are there without the matrix being formed, and
    :func:`cosine` compares it with any operator. Where exact labels need too many columns, it is estimated from 256
    columns of each sample, with a warning.

    Args:
        model: As for :func:`measure`, and so are all other arguments that are not listed here.
        loss: The loss.
        data: The data.
        layer: The name of one layer, as in ``layers`` of :func:`measure`.
        truth: ``"gauss_newton"`` or ``"empirical_fisher"``.
        max_samples: Use only the first samples.
        seed: Of the random columns of an estimate.
        forward: ``(model, inputs) -> outputs``.
        memory_budget: Bytes, or a text such as ``"2GiB"``; what does not fit is captured anew for every contraction.
        max_columns: Estimate above this many backward passes per sample.
        backend: ``"auto"``, ``"hooks"`` or ``"func"``.
        progress: Show a progress bar on a terminal.
        distributed: Whether the data is spread over processes.

    Raises:
        LayerError: the name stands for no layer, or for several.
        KronscopeError: as :func:`measure` does.

    >>> import kronscope as ks
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
    >>> H = ks.second_moment(model, nn.CrossEntropyLoss(), data, layer="0.weight", progress=False)
    >>> H.shape, ks.cosine(H, ks.approx.get("optimal").fit(H.stream)) > 0.9
    ((5, 4), True)
    """
    processes = find_processes(distributed)
    processes.barrier("ks.second_moment")
    with processes.failing_together():
        options = MeasureOptions(
            [Fit()],
            layers=layer,
            truth=truth,
            max_samples=max_samples,
            seed=seed,
            forward=forward,
            memory_budget=memory_budget,
            max_columns=max_columns,
            backend=backend,
        )
    return SecondMoment(captured_layer(model, loss, data, options, processes, progress=progress))
