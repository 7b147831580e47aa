"""Measure a whole model: every layer, every approximation, one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kronscope.approx import Approximation
from kronscope.curvature import SecondMoment
from kronscope.gradients.losses import LossFunction
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
    loss: LossFunction,
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
    leading_eigenvalue: bool = False,
    whole_model: bool = False,
    verbose: bool = False,
    distributed: bool | ProcessGroup | None = None,
) -> Results:
    r"""Measure how well each approximation fits a curvature matrix, for every layer of a model.

    For each layer, with :math:`H` the ``truth`` and :math:`K` an approximation fitted on ``labels`` and ``batch_size``,
    the result is :math:`\cos(H, K) = \langle H, K\rangle_F / (\|H\|_F\|K\|_F)`. It is exact for the samples given,
    unless you ask for the population they came from or for the paper's random probes.

    The model runs in eval mode and is left exactly as it was: parameters, buffers, mode, gradients, hooks and random
    states, also after an error. Ctrl-C returns what is done so far, marked as partial.

    Args:
        model: Any ``nn.Module`` that, in eval mode, treats the samples of a batch independently.
        loss: ``nn.CrossEntropyLoss``, ``nn.MSELoss`` or ``nn.BCEWithLogitsLoss`` with their options, or any other
            module or function ``(outputs, targets) -> number``, which is differentiated for each sample by itself:
            always for the empirical Fisher matrix, and for Gauss–Newton if it is convex and a sample has at most 256
            outputs.
        data: Batches ``(inputs, targets)`` with the samples in the first dimension; the same in every pass.
        layers: Parameter names or globs; ``"p[0:64]"`` takes rows of a parameter, ``"p[:, 0:64]"`` columns,
            ``"attn[heads]"`` each head of attention, ``"a+b"`` stacks two. None takes every parameter of two or more
            dimensions that fits the memory budget.
        truth: The matrix to compare with, ``"gauss_newton"`` or ``"empirical_fisher"``.
        labels: What the approximations are fitted on: ``"exact"`` (the expectation over the model's own predictions),
            ``"sampled"`` (labels drawn from them) or ``"real"`` (the targets). None takes the truth's own. The optimal
            product is always fitted on the truth.
        batch_size: The batch size B of the paper's lemmas: the fit is the expectation over batches of B samples. It has
            nothing to do with the batches of ``data``.
        approximations: Names or objects; see :func:`kronscope.approx.names`.
        max_samples: Use only so many samples, the first ones.
        seed: Seed of drawn labels and of probes.
        step: The training step to write into the rows.
        progress: Show a progress bar if standard error is a terminal.
        forward: A function ``(model, inputs) -> outputs``, for models that are called in another way.
        draws: Labels drawn per sample for ``labels="sampled"``.
        population: Answer for the population that the samples came from, with standard errors, instead of for the
            samples.
        estimator: ``"exact"``, or ``"probes"`` (or a :class:`~kronscope.Probes`) for the paper's estimator.
        memory_budget: Bytes, or a text such as ``"2GiB"``; None allows a third of the memory of the model's
            device (of a GPU at most half of what is free), at most 8 GiB.
        details: Curves to compute as well: ``"spectrum"`` (Figure 2), ``"exponents"`` and ``"batch_sizes"``.
        spectrum_rank: Number of leading singular values in the ``"spectrum"`` detail.
        accuracy: With very many classes the truth itself is estimated; this is the standard error to reach.
            ``math.inf`` takes ``max_columns`` and is content with what they give.
        max_columns: Estimate the truth if exact labels need more backward passes per sample than this. None decides by
            the cost.
        replacement: Whether the samples of a batch of ``batch_size`` are drawn with replacement.
        backend: How gradients are captured: ``"hooks"`` (fast), ``"func"`` (general), or ``"auto"``.
        operators: Operators to measure beside the fits, by the name their rows shall have. Each is an optimizer, whose
            current preconditioners are taken (for torch's optimizers their second moments), or a dictionary from layers
            to operators.
        leading_eigenvalue: Find the largest eigenvalue of each layer's truth, too, to a relative error of 1e-4. That
            takes some ten to a hundred passes over the gradients, and is NaN where the truth is estimated.
        whole_model: Tell also what the layers are to the matrix of all of them together: each layer's share of its
            norm, the share between layers, and the cosine of the block-diagonal approximation; see
            :meth:`Results.whole_model`. Needs exact answers, and all gradients in memory at once.
        verbose: Print to standard error how the gradients of each layer are captured and contracted.
        distributed: With torch.distributed initialised, every process calls this with its own part of the data, and all
            get the answer for the whole. None finds out whether it is, False measures this process alone, and a process
            group takes the processes in it.

    Returns:
        One row for each layer and approximation.

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
            leading_eigenvalue=leading_eigenvalue,
            whole_model=whole_model,
        )
    return run(model, loss, data, options, processes, progress=progress, verbose=verbose)[0]


def measure_fits(
    model: nn.Module,
    loss: LossFunction,
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
    leading_eigenvalue: bool = False,
    whole_model: bool = False,
    verbose: bool = False,
    distributed: bool | ProcessGroup | None = None,
) -> tuple[Results, ...]:
    """Measure several fits against one truth, in one go.

    Gradients are captured once, and the truth's norm and optimum are computed once. This is how to see what labels,
    batch size and estimator change. :meth:`Results.merge` puts the results together.

    Args:
        model: As for :func:`measure`, and so are all arguments that are explained briefly here.
        loss: The loss.
        data: The data.
        fits: What approximations are fitted on, and which ones.
        layers: The layers.
        truth: ``"gauss_newton"`` or ``"empirical_fisher"``.
        max_samples: Use only so many samples.
        seed: Seed of drawn labels and of probes.
        step: The training step to write into the rows.
        progress: Show a progress bar.
        forward: A function ``(model, inputs) -> outputs``.
        draws: Labels drawn per sample for ``labels="sampled"``.
        population: Answer for the population that the samples came from, except in fits that are estimated with probes.
        memory_budget: Bytes, or a text such as ``"2GiB"``.
        spectrum_rank: Number of leading singular values in the ``"spectrum"`` detail.
        accuracy: The standard error to reach where the truth itself is estimated.
        max_columns: Estimate the truth beyond so many backward passes per sample.
        replacement: Whether the samples of a batch are drawn with replacement.
        backend: ``"auto"``, ``"hooks"`` or ``"func"``.
        leading_eigenvalue: Find the largest eigenvalue of each layer's truth, too.
        whole_model: Tell what the layers are to the matrix of all of them, too.
        verbose: Print how each layer is captured and contracted.
        distributed: Whether the data is spread over processes.

    Returns:
        One result for each fit, in the order of ``fits``.

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
            leading_eigenvalue=leading_eigenvalue,
            whole_model=whole_model,
        )
    return run(model, loss, data, options, processes, progress=progress, verbose=verbose)


def second_moment(
    model: nn.Module,
    loss: LossFunction,
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
    """Capture the matrix of one layer: the truth that :func:`measure` compares with.

    Its norm, trace, contractions and products with vectors can be had without ever forming it, and :func:`cosine`
    compares it with any operator. Where exact labels would need too many backward passes, it is estimated from 256
    columns of each sample, with a warning.

    Args:
        model: As for :func:`measure`, and so are all arguments that are explained briefly here.
        loss: The loss.
        data: The data.
        layer: The name of one layer, written as in ``layers`` of :func:`measure`.
        truth: ``"gauss_newton"`` or ``"empirical_fisher"``.
        max_samples: Use only so many samples.
        seed: Seed of the random columns, if the matrix is estimated.
        forward: A function ``(model, inputs) -> outputs``.
        memory_budget: Bytes, or a text such as ``"2GiB"``. Gradients that do not fit are captured again for every
            contraction.
        max_columns: Estimate beyond so many backward passes per sample.
        backend: ``"auto"``, ``"hooks"`` or ``"func"``.
        progress: Show a progress bar.
        distributed: Whether the data is spread over processes.

    Returns:
        The matrix; its ``stream`` holds the gradients.

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
