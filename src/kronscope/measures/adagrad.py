"""Measure Adagrad's matrix over a training run, from the gradients it recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kronscope.approx import Approximation, Optimal, several
from kronscope.curvature import SecondMoment
from kronscope.errors import DataError, OptionError
from kronscope.gradients.atoms import Atoms
from kronscope.gradients.history import GradientHistory
from kronscope.gradients.history_weights import history_weights
from kronscope.gradients.stream import GradientStream, Known
from kronscope.kron.precision import exact_products
from kronscope.measures.curves import exponent_curve, kronecker_spectrum
from kronscope.measures.layer import Condition, LayerStreams, layer_rows
from kronscope.measures.progress import Bar
from kronscope.measures.results import Results
from kronscope.measures.rows import Detail, Row, variants
from kronscope.support.checks import count
from kronscope.support.default_device import host_by_default

__all__ = ["measure_history"]

_DETAILS = ("spectrum", "exponents")


def measure_history(
    history: GradientHistory,
    approximations: Sequence[str | Approximation] = ("optimal", "shampoo2", "shampoo"),
    at: Sequence[int] | int | None = None,
    *,
    layers: Sequence[str] | str | None = None,
    beta: float | None = None,
    details: Sequence[str] = (),
    progress: bool = True,
) -> Results:
    r"""Measure how well each approximation fits Adagrad's matrix, at chosen steps of a training run.

    At step T the matrix is :math:`H_T = \sum_{t\le T} g_t g_t^\top`. The answer is exact if every step was recorded,
    and has standard errors if the history is thinned. K-FAC has no fit here, since a run's gradients are those of whole
    batches: its cosine is NaN.

    If several processes share the records, each of them must call this, and all get the same answer.

    Args:
        history: The recorded gradients.
        approximations: Names or objects; see :func:`kronscope.approx.names`.
        at: The steps T, counted from 1; None takes the last one.
        layers: Which of the recorded layers to measure; None takes all.
        beta: Weigh the gradients as an exponential mean with this decay; None adds them up, as Adagrad does.
        details: Curves to compute as well: ``"spectrum"`` (Figure 2; singular values beyond the first only at the last
            step) and ``"exponents"``.
        progress: Show a progress bar if standard error is a terminal.

    Returns:
        One row for each layer, step and approximation, with ``truth="adagrad"``.

    Raises:
        OptionError: a step or an option is out of range.
        DataError: nothing is recorded.
        NonFiniteError: a recorded gradient is not finite.
        DistributedError: another process called this with other arguments, failed, or did not call it.

    >>> import kronscope as ks
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> history = ks.GradientHistory.attach(optimizer, model, layers=["weight"])
    >>> for _ in range(5):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 3)).square().mean().backward()
    ...     optimizer.step()
    >>> history.detach()
    >>> [(row.step, row.approximation) for row in ks.measure_history(history, at=[1, 5], approximations=["shampoo2"])]
    [(1, 'shampoo2'), (5, 'shampoo2')]
    """
    processes = history.processes
    processes.barrier("ks.measure_history")
    if not history.total_steps or not len(history):
        raise DataError("the gradient history is empty: take optimizer steps between attach and measure_history.")
    details = (details,) if isinstance(details, str) else details
    if unknown := set(details) - set(_DETAILS):
        raise OptionError(f"details of a history may be {_DETAILS}, got {', '.join(sorted(map(repr, unknown)))}.")
    steps = _chosen_steps(history, at)
    chosen = several(approximations)
    names = history.layers if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)
    for name in names:
        history.shape(name)  # raises for a layer that is not recorded, before any work
    asked = {"approximations": variants(chosen), "at": at, "layers": names, "beta": beta, "details": details}
    processes.check_equal("ks.measure_history", {**asked, "steps": history.steps})
    rows: list[Row] = []
    curves: list[Detail] = []
    partial = False
    with Bar(progress and processes.rank == 0) as bar, exact_products(), host_by_default():
        bar.begin("Adagrad's matrix", len(names) * len(steps))
        try:
            for name in names:
                running = _Running(history, name, beta, steps)
                for step in steps:
                    streams = running.at(step, [item for item in chosen if isinstance(item, Optimal)])
                    condition = Condition(name, step, "adagrad", "real", 1, streams.truth.num_samples)
                    rows.extend(layer_rows(streams, condition, chosen))
                    for kind in details:
                        values: dict[str, Any] = (
                            kronecker_spectrum(streams.truth, 8 if step == steps[-1] else 1)
                            if kind == "spectrum"
                            else exponent_curve(streams.truth, streams.truth)
                        )
                        curves.append(condition.detail(kind, values))
                    bar.step()
        except KeyboardInterrupt:
            partial = True
    settings = {
        "truth": "adagrad",
        "steps recorded": f"{len(history)} of {history.total_steps}",
        "every": history.every,
        "weights": "sum" if beta is None else f"exponential mean, beta {beta}",
        "approximations": variants(chosen),
        "torch": torch.__version__,
    }
    if partial:
        return Results(rows, curves, settings, partial)
    if processes.world_size > 1:
        settings["processes"] = processes.world_size
    return processes.on_rank_0(lambda: Results(rows, curves, settings))


def _chosen_steps(history: GradientHistory, at: Sequence[int] | int | None) -> list[int]:
    """The steps to measure at, ascending."""
    if at is None:
        return [history.total_steps]
    given = at if isinstance(at, Iterable) else [at]
    try:
        steps = sorted({count("at", step) for step in given})
    except OptionError:
        steps = []
    if not steps or steps[0] < history.steps[0] or steps[-1] > history.total_steps:
        raise OptionError(f"at must be whole steps from {history.steps[0]} to {history.total_steps}, got {at!r}.")
    return steps


class _Running:
    """One layer's norms and factors at some steps; factors are carried on from step to step."""

    def __init__(self, history: GradientHistory, layer: str, beta: float | None, steps: Sequence[int]) -> None:
        self.history, self.layer, self.beta = history, layer, beta
        self._count = 0
        self._step = 0
        self._squares = self._squared_norms(steps)
        self._grams: tuple[Tensor, Tensor] | None = None
        self._start: Tensor | None = None

    def _squared_norms(self, steps: Sequence[int]) -> dict[int, float]:
        r"""Squared norms at the steps before which nothing is missing, from one pass over all pairs of gradients.

        With weights relative to the end :math:`T_k` of the interval between two of the steps a gradient lies in, and
        :math:`P_{kl}` the sums over pairs from two intervals,
        :math:`\|H_{T_j}\|^2 = \sum_{k,l \le j} \beta^{2T_j - T_k - T_l} P_{kl}`.
        """
        recorded = torch.tensor(self.history.steps)
        exact = [step for step in steps if int((recorded <= step).sum()) == step]
        if not exact:
            return {}
        ends = torch.tensor(exact)
        recorded = recorded[recorded <= ends[-1]]
        groups = torch.searchsorted(ends, recorded)
        weights = history_weights(recorded, ends[groups], self.beta)
        stream = self.history.stream(self.layer, exact[-1]).reweighted(weights)
        pairs = SecondMoment(stream).pair_sums(groups)
        squares = {}
        for place, step in enumerate(exact, start=1):
            fade = torch.ones(place, dtype=torch.float64)
            if self.beta is not None:
                fade = self.beta ** (step - ends[:place]).double()
            squares[step] = float(fade @ pairs[:place, :place] @ fade)
        return squares

    def at(self, step: int, solvers: Sequence[Optimal]) -> LayerStreams:
        """Return the layer's streams at a step, with what is known already; solvers start from the step before."""
        stream = self.history.stream(self.layer, step, beta=self.beta)
        left, right = self._advance(stream, step)
        stream = stream.knowing(Known(left, right, self._squares.get(step)))
        for solver in solvers:
            self._start = solver.solve(stream, self._start).operator.right.matrix
        if step in self._squares:
            return LayerStreams(stream, stream)
        whole = history_weights(torch.arange(1, step + 1), step, self.beta)
        share = float(whole.square().sum() / whole.sum() ** 2)
        note = f"{stream.num_samples} of {step} steps were recorded"
        return LayerStreams(stream, stream, "samples", note, share)

    def _advance(self, stream: GradientStream, step: int) -> tuple[Tensor, Tensor]:
        """Add the gradients since the last step to the factors, and return these."""
        fade = 1.0 if self.beta is None or not self._count else float(self.beta ** (step - self._step))
        known, count = self._count, stream.num_samples
        m, n = stream.shape
        left, right = self._grams or (torch.zeros(m, m, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64))
        left, right = fade * left, fade * right
        if count > known:
            # chunk by chunk: a history on disk may be far larger than memory
            news = SecondMoment(_part(stream, known, count))
            left, right = left.to(news.left()) + news.left(), right.to(news.right()) + news.right()
        self._grams, self._count, self._step = (left, right), count, step
        return left, right


def _part(stream: GradientStream, start: int, stop: int) -> GradientStream:
    """The samples numbered ``start`` to ``stop``, numbered from 0."""

    def chunks() -> Iterator[Atoms]:
        for chunk in stream:
            # ascending, though with gaps where other processes have the ones between
            low, high = torch.searchsorted(chunk.samples, torch.tensor([start, stop])).tolist()
            if low < high:
                part = chunk.part(low, high)
                yield replace(part, samples=part.samples - start)

    return GradientStream(
        chunks,
        stream.shape,
        stop - start,
        stream.columns,
        in_memory=stream.in_memory,
        processes=stream.processes,
        own_samples=stream.own_samples,
    )
