"""Measure a whole model: every layer, every approximation, one call."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kronscope.approx import Approximation, get, several
from kronscope.curvature import SecondMoment
from kronscope.errors import MemoryBudgetError, OptionError
from kronscope.gradients import GradientStream, LayerPlan, Recorder, resolve_layers
from kronscope.gradients.guard import RandomStates, generators_of
from kronscope.measures.batches import batch_stream
from kronscope.measures.budget import factor_bytes, parse_budget, sweeps
from kronscope.measures.curves import batch_size_curve, exponent_curve, kronecker_spectrum
from kronscope.measures.layer import Condition, LayerStreams, layer_rows
from kronscope.measures.probes import Probes
from kronscope.measures.progress import Bar
from kronscope.measures.results import Results
from kronscope.measures.rows import Detail, Row

__all__ = ["DEFAULT_APPROXIMATIONS", "DETAILS", "measure"]

DEFAULT_APPROXIMATIONS = ("optimal", "shampoo2", "shampoo", "kfac-reduce")
DETAILS = ("spectrum", "exponents", "batch_sizes")
_TRUTHS = {"gauss_newton": "exact", "empirical_fisher": "real"}
_LABELS = ("exact", "sampled", "real")
# Above this many columns and multiply-adds, exact labels give way to draws.
_MANY_COLUMNS = 100
_MANY_OPERATIONS = 1e11
_MANY_PAIRS = 2e13
_PILOT_DRAWS, _MOST_DRAWS = 8, 128


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

    >>> import kronscope as ks
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
    >>> results = ks.measure(model, nn.CrossEntropyLoss(), data, layers=["0.weight"], progress=False)
    >>> [row.approximation for row in results]
    ['optimal', 'shampoo2', 'shampoo', 'kfac-reduce']
    """
    probes = _checked_estimator(estimator, seed)
    if truth not in _TRUTHS:
        raise OptionError(f"truth must be one of {tuple(_TRUTHS)}, got {truth!r}.")
    if labels is not None and labels not in _LABELS:
        raise OptionError(f"labels must be one of {_LABELS} or None, got {labels!r}.")
    counts: dict[str, Any] = {"batch_size": batch_size, "draws": draws}
    for name, number in counts.items():
        if not isinstance(number, int) or number < 1:
            raise OptionError(f"{name} must be a whole number of 1 or more, got {number!r}.")
    if max_samples is not None and max_samples < 1:
        raise OptionError(f"max_samples must be 1 or more, got {max_samples}.")
    if population and probes is not None:
        raise OptionError("population=True needs the exact estimator; leave estimator at 'exact'.")
    details = (details,) if isinstance(details, str) else details
    if unknown := set(details) - set(DETAILS):
        raise OptionError(f"details may be {DETAILS}, got {', '.join(sorted(map(repr, unknown)))}.")
    if not accuracy > 0:
        raise OptionError(f"accuracy must be positive, got {accuracy}.")
    work = _Work(
        approximations=several(approximations),
        truth=truth,
        labels=labels,
        batch_size=batch_size,
        step=step,
        draws=draws,
        population=population,
        probes=probes,
        details=tuple(details),
        spectrum_rank=spectrum_rank,
        accuracy=accuracy,
        max_columns=max_columns,
        replacement=replacement,
        seed=seed,
        budget=parse_budget(memory_budget),
    )
    states = RandomStates(generators_of(data))
    try:
        with Bar(progress) as bar:
            was_training = any(module.training for module in model.modules())
            specs = resolve_layers(model, [layers] if isinstance(layers, str) else layers)
            bar.begin("checking the data", 1)
            recorder = Recorder(
                model,
                loss,
                data,
                work.fitting(specs, by_name=layers is not None),
                forward=forward,
                max_samples=max_samples,
                seed=seed,
                backend=backend,
                chunk_bytes=max(1 << 16, min(64 << 20, work.budget // 8)),
                progress=bar.at,
                skip_unreached=layers is None,
            )
            parameters = sum(parameter.numel() for parameter in model.parameters())
            work.begin(recorder, parameters, was_training)
            if verbose:
                sys.stderr.write("\n".join(map(str, work.plans(recorder))) + "\n")
                work.tell = sys.stderr.write
            work.run(recorder, bar)
    except KeyboardInterrupt:
        work.partial = True
    finally:
        states.restore()
    return work.results()


def _checked_estimator(estimator: str | Probes, seed: int) -> Probes | None:
    if isinstance(estimator, Probes):
        return estimator
    if estimator not in ("exact", "probes"):
        raise OptionError(f"estimator must be 'exact', 'probes' or a Probes object, got {estimator!r}.")
    return Probes(seed=seed) if estimator == "probes" else None


@dataclass
class _Work:
    """One call of :func:`measure`: what was asked, how it is done, and what is there so far."""

    approximations: tuple[Approximation, ...]
    truth: str
    labels: str | None
    batch_size: int
    step: int
    draws: int
    population: bool
    probes: Probes | None
    details: tuple[str, ...]
    spectrum_rank: int
    accuracy: float
    max_columns: int | None
    replacement: bool
    seed: int
    budget: int
    rows: list[Row] = field(default_factory=list)
    curves: list[Detail] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    partial: bool = False
    truth_draws: int | None = None
    tell: Callable[[str], object] = lambda text: None

    # ------------------------------------------------------------------ planning

    def fitting(self, specs: Sequence[Any], *, by_name: bool) -> list[Any]:
        """Leave out layers whose factors do not fit the budget; by name, that is an error."""
        kept = []
        for spec in specs:
            needed = factor_bytes(spec.shape)
            if needed <= self.budget:
                kept.append(spec)
                continue
            m, n = spec.shape
            text = (
                f"layer {spec.name!r} ({m} x {n}) needs {_size(needed)} for its factors, the memory budget is "
                f"{_size(self.budget)}; raise memory_budget"
            )
            if m > n:
                text += f", or measure a range of its rows such as '{spec.name}[0:{max(1, m // 4)}]'"
            if by_name:
                raise MemoryBudgetError(f"{text}.")
            warnings.warn(f"skipped: {text}.", stacklevel=3)
            self.notes.append(f"skipped: {text}")
        if not kept:
            raise MemoryBudgetError(f"no layer fits the memory budget of {_size(self.budget)}; raise memory_budget.")
        return kept

    def begin(self, recorder: Recorder, parameters: int, was_training: bool) -> None:
        """Decide how the truth is computed and write down what was asked."""
        columns = recorder.exact_columns
        many = self._costly(recorder, parameters) if self.max_columns is None else columns > self.max_columns
        if self.truth == "gauss_newton" and many:
            self.truth_draws = _PILOT_DRAWS
        mode = "eval mode"
        mode += (
            " (the model came in training mode; dropout and batch statistics are off, modes are restored)"
            * was_training
        )
        self.settings = {
            "truth": self.truth,
            "labels": self.fit_labels,
            "batch_size": self.batch_size,
            "samples": recorder.num_samples,
            "approximations": [approximation.name for approximation in self.approximations],
            "seed": self.seed,
            "draws": self.draws,
            "population": self.population,
            "estimator": "exact" if self.probes is None else "probes",
            "probes": None if self.probes is None else self.probes.count,
            "measured in": mode,
            "batches drawn": "with replacement" if self.replacement else "without replacement",
            "exact columns per sample": columns,
            "memory budget": _size(self.budget),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        if recorder.unreached:
            text = f"left out, the loss does not depend on them: {', '.join(recorder.unreached)}"
            warnings.warn(f"{text}.", stacklevel=3)
            self.notes.append(text)

    def _costly(self, recorder: Recorder, parameters: int) -> bool:
        """Whether exact labels cost so much that draws are the better answer."""
        columns, samples = recorder.exact_columns, recorder.num_samples
        if columns <= _MANY_COLUMNS:
            return False
        largest = max(spec.shape[0] * spec.shape[1] for spec in recorder.specs)
        return columns * samples * parameters > _MANY_OPERATIONS or (columns * samples) ** 2 * largest > _MANY_PAIRS

    @property
    def fit_labels(self) -> str:
        """The labels the rows report."""
        if self.labels is None:
            return "sampled" if self.truth_draws is not None else _TRUTHS[self.truth]
        return "sampled" if self.labels == "exact" and self.truth_draws is not None else self.labels

    @property
    def _fits_are_truths(self) -> bool:
        """Whether the approximations are fitted on the very atoms of the truth."""
        own = _TRUTHS[self.truth]
        fit = self.labels or own
        return fit == own or (self.truth_draws is not None and fit == "sampled")

    def plans(self, recorder: Recorder) -> list[LayerPlan]:
        """How the truth's atoms of each layer are captured."""
        if self.truth_draws is not None:
            return recorder.plan("sampled", self.truth_draws)
        return recorder.plan(_TRUTHS[self.truth])

    # ------------------------------------------------------------------ doing

    def run(self, recorder: Recorder, bar: Bar) -> None:
        """Capture and measure, group by group of layers that share a sweep."""
        if self.truth_draws is not None:
            self.truth_draws = self._chosen_draws(recorder, bar)
            self.notes.append(
                f"{recorder.exact_columns} exact columns per sample were too many: the truth is estimated from "
                f"{self.truth_draws} label draws per sample, standard errors included"
            )
        plans = self.plans(recorder)
        self.settings["capture"] = {plan.name: str(plan) for plan in plans}
        sizes = {plan.name: plan.bytes for plan in plans}
        if not self._fits_are_truths:
            for plan in recorder.plan(self.labels or _TRUTHS[self.truth], self.draws):
                sizes[plan.name] += plan.bytes
        for names, cache in sweeps(sizes, recorder.num_samples, self.budget):
            self._measure_group(recorder, bar, names, cache)

    def _streams(self, recorder: Recorder, bar: Bar, names: list[str], cache: bool) -> dict[str, LayerStreams]:
        own = _TRUTHS[self.truth]
        drawn = self.truth_draws is not None
        bar.begin(f"gradients of {len(names)} layer{'s' * (len(names) > 1)}", recorder.num_samples)
        truths = (
            recorder.streams("sampled", draws=self.truth_draws or 1, names=names, cache=cache)
            if drawn
            else recorder.streams(own, names=names, cache=cache)
        )
        fit = self.labels or own
        if self._fits_are_truths:
            fits = truths
        else:
            bar.begin(f"gradients with {fit} labels", recorder.num_samples)
            # other draws than the truth's
            fits = recorder.streams(fit, draws=self.draws, names=names, cache=cache, seed=self.seed + 1)
        resample = "samples" if self.population else "draws" if drawn else "drawn fit" if fit == "sampled" else None
        if self.probes is not None:
            resample = None
        note = f"truth from {self.truth_draws} label draws per sample" if drawn else ""
        keep = self.budget // (4 * len(names))
        for stream in (*truths.values(), *fits.values()):
            stream.keep_bytes = keep
        own_labels = drawn and self.labels in (None, "exact")
        return {name: LayerStreams(truths[name], fits[name], resample, note, own_labels=own_labels) for name in names}

    def _measure_group(self, recorder: Recorder, bar: Bar, names: list[str], cache: bool) -> None:
        streams = self._streams(recorder, bar, names, cache)
        bar.begin("measuring", len(names) * (len(self.approximations) + len(self.details)))
        for name in names:
            layer = streams.pop(name)
            form = str(SecondMoment(layer.truth).plan())
            self.settings.setdefault("contraction", {})[name] = form
            self.tell(f"{name}: {form}\n")
            labels = self.fit_labels
            condition = Condition(name, self.step, self.truth, labels, self.batch_size, recorder.num_samples)
            bar.say(f"measuring {name}")
            for row in layer_rows(
                layer,
                condition,
                self.approximations,
                replacement=self.replacement,
                probes=self.probes,
                done=lambda _: bar.step(),
            ):
                self.rows.append(row)
            for kind in self.details:
                values = self._curve(kind, layer.truth, layer.fitted)
                self.curves.append(Detail(name, self.step, self.truth, labels, self.batch_size, kind, values))
                bar.step()

    def _curve(self, kind: str, truth: GradientStream, fitted: GradientStream) -> dict[str, Any]:
        if kind == "spectrum":
            return kronecker_spectrum(truth, self.spectrum_rank)
        if kind == "exponents":
            batches = batch_stream(fitted, self.batch_size, replacement=self.replacement, labels=self.fit_labels)
            return exponent_curve(truth, batches)
        return batch_size_curve(
            truth, fitted, self.approximations, replacement=self.replacement, labels=self.fit_labels
        )

    def _chosen_draws(self, recorder: Recorder, bar: Bar) -> int:
        """Measure with a few draws, and see how many it takes for the accuracy asked for."""
        worst = 0.0
        smallest = min(self.plans(recorder), key=lambda plan: plan.shape[0] * plan.shape[1]).name
        streams = self._streams(recorder, bar, [smallest], cache=True)[smallest]
        condition = Condition(smallest, self.step, self.truth, "sampled", 1, recorder.num_samples)
        for row in layer_rows(streams, condition, [get("shampoo2"), get("shampoo")]):
            worst = max(worst, row.stderr if row.stderr == row.stderr else 0.0)
        needed = _PILOT_DRAWS * (worst / self.accuracy) ** 2
        return int(min(max(_PILOT_DRAWS, -(-needed // 1)), _MOST_DRAWS, max(recorder.exact_columns, _PILOT_DRAWS)))

    def results(self) -> Results:
        """What is there."""
        notes = {"notes": self.notes} if self.notes else {}
        return Results(self.rows, self.curves, {**self.settings, **notes}, self.partial)


def _size(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
