"""Measure a whole model: every layer, every approximation, one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kronscope.approx import Approximation
from kronscope.errors import ModelError, OptionError
from kronscope.gradients import Recorder, resolve_layers
from kronscope.gradients.guard import RandomStates, generators_of
from kronscope.gradients.losses import read_loss
from kronscope.measures.fits import DEFAULT_APPROXIMATIONS, Fit
from kronscope.measures.probes import Probes
from kronscope.measures.processes import common_budget, described, same_model
from kronscope.measures.progress import Bar
from kronscope.measures.results import Results
from kronscope.measures.work import TRUTHS, FitWork, Work
from kronscope.support.checks import count, whole
from kronscope.support.processes import find_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["measure", "measure_fits"]


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
    fit = Fit(labels, batch_size, approximations, details, estimator)
    return measure_fits(
        model,
        loss,
        data,
        [fit],
        layers,
        truth,
        max_samples=max_samples,
        seed=seed,
        step=step,
        progress=progress,
        forward=forward,
        draws=draws,
        population=population,
        memory_budget=memory_budget,
        spectrum_rank=spectrum_rank,
        accuracy=accuracy,
        max_columns=max_columns,
        replacement=replacement,
        backend=backend,
        verbose=verbose,
        distributed=distributed,
    )[0]


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
    first = processes.rank == 0
    budget = common_budget(memory_budget, processes)
    with processes.failing_together():
        seed, step = whole("seed", seed), whole("step", step)
        _check(model, fits, truth, population, seed, accuracy)
        draws, spectrum_rank = count("draws", draws), count("spectrum_rank", spectrum_rank)
        max_samples = None if max_samples is None else count("max_samples", max_samples)
        max_columns = None if max_columns is None else count("max_columns", max_columns)
        work = Work(
            fits=tuple(FitWork.of(fit, seed) for fit in fits),
            truth=truth,
            step=step,
            draws=draws,
            population=population,
            spectrum_rank=spectrum_rank,
            accuracy=accuracy,
            max_columns=max_columns,
            replacement=replacement,
            seed=seed,
            budget=budget,
            warns=first,
        )
        specs = resolve_layers(model, [layers] if isinstance(layers, str) else layers)
        # the data is not among them: it is what differs
        asked = {
            "fits": [(fit.fit, described(fit.approximations)) for fit in work.fits],
            "layers": [(spec.name, spec.shape) for spec in specs],
            "loss": read_loss(loss),
            "forward": getattr(forward, "__qualname__", type(forward).__name__),
            "truth": truth,
            "max_samples": max_samples,
            "seed": seed,
            "step": step,
            "draws": draws,
            "population": population,
            "memory_budget": memory_budget,
            "spectrum_rank": spectrum_rank,
            "accuracy": accuracy,
            "max_columns": max_columns,
            "replacement": replacement,
            "backend": backend,
        }
    states = RandomStates(generators_of(data))
    try:
        with Bar(progress and first) as bar, same_model(processes, model, asked):
            was_training = any(module.training for module in model.modules())
            with processes.failing_together():
                fitting = work.fitting(specs, by_name=layers is not None)
            bar.begin("checking the data", 1)
            recorder = Recorder(
                model,
                loss,
                data,
                fitting,
                forward=forward,
                max_samples=max_samples,
                seed=seed,
                backend=backend,
                chunk_bytes=max(1 << 16, min(64 << 20, work.budget // 8)),
                progress=bar.at,
                skip_unreached=layers is None,
                processes=processes,
            )
            parameters = sum(parameter.numel() for parameter in model.parameters())
            with processes.failing_together():
                work.begin(recorder, parameters, was_training)
            if verbose and first:
                sys.stderr.write("\n".join(map(str, work.plans(recorder))) + "\n")
                work.tell = sys.stderr.write
            work.run(recorder, bar)
    except KeyboardInterrupt:
        work.partial = True
    finally:
        states.restore()
    if work.partial:
        return work.results()
    # the numbers are equal already; so are the times now
    return processes.on_rank_0(work.results)


def _check(model: Any, fits: Sequence[Fit], truth: str, population: bool, seed: int, accuracy: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"Parameter {name!r} is on the meta device and has no values; load the model first.")
        if parameter.is_inference():
            raise ModelError(
                f"Parameter {name!r} was made in inference mode and cannot have gradients; make or load the model "
                "outside of torch.inference_mode()."
            )
    if truth not in TRUTHS:
        raise OptionError(f"truth must be one of {tuple(TRUTHS)}, got {truth!r}.")
    if not fits:
        raise OptionError("fits is empty: give at least one Fit.")
    if population and all(fit.probes(seed) is not None for fit in fits):
        raise OptionError("population=True needs the exact estimator; leave estimator at 'exact'.")
    if not isinstance(accuracy, int | float) or not accuracy > 0:
        raise OptionError(f"accuracy must be a positive number, got {accuracy!r}.")
