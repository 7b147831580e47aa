"""How one call of ``measure`` goes: plan within the budget, capture once, contract for every fit."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kronscope.approx import Approximation, get, options_of
from kronscope.curvature import SecondMoment
from kronscope.errors import MemoryBudgetError
from kronscope.gradients import GradientStream, LayerPlan, Recorder
from kronscope.measures.batches import batch_stream
from kronscope.measures.budget import factor_bytes, sweeps
from kronscope.measures.curves import batch_size_curve, exponent_curve, kronecker_spectrum
from kronscope.measures.fits import Fit
from kronscope.measures.layer import Condition, LayerStreams, layer_rows
from kronscope.measures.probes import Probes
from kronscope.measures.progress import Bar
from kronscope.measures.results import Results
from kronscope.measures.rows import NO_REPLACEMENT, Detail, Row, variant_name
from kronscope.support.callers import callers_level

__all__ = ["TRUTHS", "FitWork", "Work"]

# Each truth, and the labels its own atoms have.
TRUTHS = {"gauss_newton": "exact", "empirical_fisher": "real"}
# Above this many columns and multiply-adds, exact labels give way to draws.
_MANY_COLUMNS = 100
_MANY_OPERATIONS = 1e11
_MANY_PAIRS = 2e13
_PILOT_DRAWS, _MOST_DRAWS = 8, 128
# Fewer label draws than this say too little about how they vary when one is left out.
_FEW_DRAWS = 5


@dataclass
class FitWork:
    """One fit of a call: its objects, and what is there so far."""

    fit: Fit
    approximations: tuple[Approximation, ...]
    probes: Probes | None
    rows: list[Row] = field(default_factory=list)
    curves: list[Detail] = field(default_factory=list)

    @classmethod
    def of(cls, fit: Fit, seed: int) -> FitWork:
        """Look up what the fit names."""
        return cls(fit, fit.fitted, fit.probes(seed))

    @property
    def units(self) -> int:
        """What the progress bar counts for each layer."""
        return len(self.approximations) + len(self.fit.details)


@dataclass
class Work:
    """One call of :func:`kronscope.measure_fits`: what was asked, how it is done, and what is there so far.

    The truth's atoms are captured once and serve every fit; so do the atoms of fits with equal labels.
    """

    fits: tuple[FitWork, ...]
    truth: str
    step: int
    draws: int
    population: bool
    spectrum_rank: int
    accuracy: float
    max_columns: int | None
    replacement: bool
    seed: int
    budget: int
    warns: bool = True
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
            self._warn(f"skipped: {text}.")
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
            "samples": recorder.num_samples,
            "seed": self.seed,
            "draws": self.draws,
            "population": self.population,
            "measured in": mode,
            "batches drawn": "with replacement" if self.replacement else "without replacement",
            "exact columns per sample": columns,
            "memory budget": _size(self.budget),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        if recorder.processes.world_size > 1:
            self.settings["processes"] = recorder.processes.world_size
        if recorder.unreached:
            text = f"left out, the loss does not depend on them: {', '.join(recorder.unreached)}"
            self._warn(f"{text}.")
            self.notes.append(text)

    def _warn(self, text: str) -> None:
        if self.warns:  # once, not from every process
            warnings.warn(text, stacklevel=callers_level())

    def _costly(self, recorder: Recorder, parameters: int) -> bool:
        """Whether exact labels cost so much that draws are the better answer."""
        columns, samples = recorder.exact_columns, recorder.num_samples
        if columns <= _MANY_COLUMNS:
            return False
        largest = max(spec.shape[0] * spec.shape[1] for spec in recorder.specs)
        return columns * samples * parameters > _MANY_OPERATIONS or (columns * samples) ** 2 * largest > _MANY_PAIRS

    def labels_of(self, fit: Fit) -> str:
        """The labels the rows of a fit report."""
        own = TRUTHS[self.truth]
        if self.truth_draws is not None and fit.labels in (None, "exact"):
            return "sampled"
        return fit.labels or own

    def _is_truths(self, fit: Fit) -> bool:
        """Whether the approximations are fitted on the very atoms of the truth."""
        own = TRUTHS[self.truth]
        labels = fit.labels or own
        return labels == own or (self.truth_draws is not None and labels == "sampled")

    @property
    def _other_labels(self) -> list[str]:
        """Labels of atoms that are fitted on besides the truth's."""
        return sorted({str(work.fit.labels) for work in self.fits if not self._is_truths(work.fit)})

    @property
    def _spares(self) -> bool:
        """Whether as many other draws are needed to see how a fit on drawn labels varies."""
        drawn = any(work.probes is None and work.fit.labels == "sampled" for work in self.fits)
        return drawn and not self.population and self.truth_draws is None and self.draws < _FEW_DRAWS

    def plans(self, recorder: Recorder) -> list[LayerPlan]:
        """How the truth's atoms of each layer are captured."""
        if self.truth_draws is not None:
            return recorder.plan("sampled", self.truth_draws)
        return recorder.plan(TRUTHS[self.truth])

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
        for labels in [*self._other_labels, *["sampled"] * self._spares]:
            for plan in recorder.plan(labels, self.draws):
                sizes[plan.name] += plan.bytes
        for names, cache in sweeps(sizes, recorder.most_samples, self.budget):
            self._measure_group(recorder, bar, names, cache)

    def _streams(self, recorder: Recorder, bar: Bar, names: list[str], cache: bool) -> dict[str, _Captured]:
        drawn = self.truth_draws is not None
        bar.begin(f"gradients of {len(names)} layer{'s' * (len(names) > 1)}", recorder.own_samples)
        truths = (
            recorder.streams("sampled", draws=self.truth_draws or 1, names=names, cache=cache)
            if drawn
            else recorder.streams(TRUTHS[self.truth], names=names, cache=cache)
        )
        others = {}
        for labels in self._other_labels:
            bar.begin(f"gradients with {labels} labels", recorder.own_samples)
            # other draws than the truth's
            others[labels] = recorder.streams(labels, draws=self.draws, names=names, cache=cache, seed=self.seed + 1)
        spares: Mapping[str, GradientStream] = {}
        if self._spares:
            bar.begin("gradients with other sampled labels", recorder.own_samples)
            spares = recorder.streams("sampled", draws=self.draws, names=names, cache=cache, seed=self.seed + 2)
        keep = self.budget // (2 * (1 + max(1, len(others)) + self._spares) * len(names))
        for streams in (truths, *others.values(), spares):
            for stream in streams.values():
                stream.keep_bytes = keep
        return {
            name: _Captured(
                truths[name], {labels: streams[name] for labels, streams in others.items()}, spares.get(name)
            )
            for name in names
        }

    def _layer_streams(self, captured: _Captured, work: FitWork) -> LayerStreams:
        fit, drawn = work.fit, self.truth_draws is not None
        labels = fit.labels or TRUTHS[self.truth]
        resample = "samples" if self.population else "draws" if drawn else "drawn fit" if labels == "sampled" else None
        return LayerStreams(
            captured.truth,
            captured.truth if self._is_truths(fit) else captured.others[labels],
            None if work.probes is not None else resample,
            f"truth from {self.truth_draws} label draws per sample" if drawn else "",
            spare=captured.spare,
            own_labels=drawn and fit.labels in (None, "exact"),
        )

    def _measure_group(self, recorder: Recorder, bar: Bar, names: list[str], cache: bool) -> None:
        streams = self._streams(recorder, bar, names, cache)
        bar.begin("measuring", len(names) * sum(work.units for work in self.fits))
        for name in names:
            captured = streams.pop(name)
            form = str(SecondMoment(captured.truth).plan())
            self.settings.setdefault("contraction", {})[name] = form
            self.tell(f"{name}: {form}\n")
            bar.say(f"measuring {name}")
            for work in self.fits:
                self._measure_fit(name, recorder.num_samples, self._layer_streams(captured, work), work, bar)

    def _measure_fit(self, name: str, samples: int, streams: LayerStreams, work: FitWork, bar: Bar) -> None:
        fit, labels = work.fit, self.labels_of(work.fit)
        rows = layer_rows(
            streams,
            Condition(name, self.step, self.truth, labels, fit.batch_size, samples),
            work.approximations,
            replacement=self.replacement,
            probes=work.probes,
            done=lambda _: bar.step(),
        )
        for row in rows:  # one by one: an interrupt keeps those that are done
            work.rows.append(row)
        for kind in fit.details:
            values, options = self._curve(kind, streams.truth, streams.fitted, work)
            work.curves.append(Detail(name, self.step, self.truth, labels, fit.batch_size, kind, values, options))
            bar.step()

    def _curve(
        self, kind: str, truth: GradientStream, fitted: GradientStream, work: FitWork
    ) -> tuple[dict[str, Any], str]:
        """A curve, and how it differs from the usual one of its kind."""
        labels = self.labels_of(work.fit)
        unusual = NO_REPLACEMENT * (not self.replacement)
        if kind == "spectrum":
            return kronecker_spectrum(truth, self.spectrum_rank), ""
        if kind == "exponents":
            batches = batch_stream(fitted, work.fit.batch_size, replacement=self.replacement, labels=labels)
            return exponent_curve(truth, batches), unusual * (batches is not fitted)
        curves = batch_size_curve(truth, fitted, work.approximations, replacement=self.replacement, labels=labels)
        return curves, unusual * (labels != "exact")

    def _chosen_draws(self, recorder: Recorder, bar: Bar) -> int:
        """Measure with a few draws, and see how many it takes for the accuracy asked for."""
        worst = 0.0
        smallest = min(self.plans(recorder), key=lambda plan: plan.shape[0] * plan.shape[1]).name
        captured = self._streams(recorder, bar, [smallest], cache=True)[smallest]
        streams = LayerStreams(captured.truth, captured.truth, "draws")
        condition = Condition(smallest, self.step, self.truth, "sampled", 1, recorder.num_samples)
        for row in layer_rows(streams, condition, [get("shampoo2"), get("shampoo")]):
            worst = max(worst, row.stderr if row.stderr == row.stderr else 0.0)
        needed = _PILOT_DRAWS * (worst / self.accuracy) ** 2
        return int(min(max(_PILOT_DRAWS, -(-needed // 1)), _MOST_DRAWS, max(recorder.exact_columns, _PILOT_DRAWS)))

    def results(self) -> tuple[Results, ...]:
        """What is there, one for each fit."""
        return tuple(Results(work.rows, work.curves, self._settings(work), self.partial) for work in self.fits)

    def _settings(self, work: FitWork) -> dict[str, Any]:
        notes = {"notes": self.notes} if self.notes else {}
        return {
            "labels": self.labels_of(work.fit),
            "batch_size": work.fit.batch_size,
            "approximations": [variant_name(item.name, options_of(item)) for item in work.approximations],
            "estimator": "exact" if work.probes is None else "probes",
            "probes": None if work.probes is None else work.probes.count,
            **self.settings,
            **notes,
        }


@dataclass(frozen=True)
class _Captured:
    """A layer's atoms: those of the truth, those with other labels that are fitted on, and other draws of these."""

    truth: GradientStream
    others: dict[str, GradientStream]
    spare: GradientStream | None = None


def _size(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
