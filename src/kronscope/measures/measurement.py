"""How one call of ``measure`` goes: plan within the budget, capture once, contract for every fit."""

from __future__ import annotations

import math
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from kronscope.approx import Approximation, get
from kronscope.curvature import SecondMoment
from kronscope.curvature.whole import block_squares
from kronscope.errors import LayerError, MemoryBudgetError, ModelError, OptionError
from kronscope.gradients import GradientStream, LayerSpec, Recorder, resolve_layers
from kronscope.gradients.guard import RandomStates, generators_of
from kronscope.gradients.losses import LossFunction, read_loss
from kronscope.kron.precision import exact_products
from kronscope.kron.workspace import limited_workspace
from kronscope.measures.budget import affordable, size_text, spare_bytes, sweeps
from kronscope.measures.columns import TRUTHS, CallColumns, ColumnRequest, TruthColumns
from kronscope.measures.curves import batch_size_curve, exponent_curve, kronecker_spectrum
from kronscope.measures.estimated_curves import estimated_batch_sizes, estimated_exponents
from kronscope.measures.estimates import RandomColumns
from kronscope.measures.facts import why_no_eigenvalue
from kronscope.measures.fits import Fit
from kronscope.measures.layer import Condition, LayerStreams, estimated_cosine, layer_rows
from kronscope.measures.operators import Given, given_operators
from kronscope.measures.options import MeasureOptions
from kronscope.measures.probes import Probes
from kronscope.measures.processes import common_budget, same_model
from kronscope.measures.progress import Bar
from kronscope.measures.results import Results
from kronscope.measures.rows import Detail, Row
from kronscope.measures.whole import ALL_LAYERS, WHOLE_MODEL, WholeModel, check_disjoint
from kronscope.support.callers import callers_level
from kronscope.support.default_device import host_by_default
from kronscope.support.processes import Processes
from kronscope.support.texts import printable

__all__ = ["run"]


def run(
    model: nn.Module,
    loss: LossFunction,
    data: Iterable[Any],
    options: MeasureOptions,
    processes: Processes,
    *,
    progress: bool = True,
    verbose: bool = False,
    kept: Results | None = None,
) -> tuple[Results, ...]:
    """Measure what the options ask for, with all processes; for the other arguments see :func:`kronscope.measure`.

    ``kept`` is what an interrupted call with the same arguments and a single fit returned; its whole layers stay as
    they are.

    Returns:
        One result for each fit.
    """
    measurement = _begun(model, options, processes)
    measurement.kept = kept
    try:
        with _recording(model, loss, data, measurement, processes, progress) as (recorder, bar):
            if verbose and processes.rank == 0:
                measurement.tell = lambda text: sys.stderr.write(printable(text))
            measurement.go(recorder, bar)
    except KeyboardInterrupt:
        measurement.partial = True
    if measurement.partial:
        return measurement.results()
    # the numbers are equal already; so are the times now
    return processes.on_rank_0(measurement.results)


def captured_layer(
    model: nn.Module,
    loss: LossFunction,
    data: Iterable[Any],
    options: MeasureOptions,
    processes: Processes,
    *,
    progress: bool = True,
) -> GradientStream:
    """Capture the truth's atoms of the only layer the options ask for."""
    measurement = _begun(model, options, processes)
    with _recording(model, loss, data, measurement, processes, progress) as (recorder, bar):
        return measurement.capture_one(recorder, bar)


def _begun(model: nn.Module, options: MeasureOptions, processes: Processes) -> Measurement:
    """Check the model, whose device says how much memory there is."""
    with processes.failing_together():
        _check(model)
    budget = common_budget(options.memory_budget, processes, model)
    return Measurement(options, budget, warns=processes.rank == 0)


@contextmanager
def _recording(
    model: nn.Module,
    loss: LossFunction,
    data: Iterable[Any],
    measurement: Measurement,
    processes: Processes,
    progress: bool,
) -> Iterator[tuple[Recorder, Bar]]:
    """Check everything, and give what records the gradients; random states are restored at the end."""
    options, budget = measurement.options, measurement.budget
    with processes.failing_together():
        specs = resolve_layers(model, options.layers)
        # the data is not among them: it is what differs
        asked = {
            **options.to_json(),
            "layers": [(spec.name, spec.shape) for spec in specs],
            "loss": read_loss(loss, curved=options.truth == "gauss_newton"),
        }
    states = RandomStates(generators_of(data))
    try:
        shown = progress and processes.rank == 0
        with (
            Bar(shown) as bar,
            exact_products(),
            host_by_default(),
            limited_workspace(budget // 16, resident=budget * 3 // 4),
            same_model(processes, model, asked),
        ):
            was_training = any(module.training for module in model.modules())
            with processes.failing_together():
                specs = measurement.leave_out(specs)
                measurement.take_operators(model, specs)
            bar.begin("checking the data", 1)
            recorder = Recorder(
                model,
                loss,
                data,
                specs,
                forward=options.forward,
                max_samples=options.max_samples,
                seed=options.seed,
                backend=options.backend,
                chunk_bytes=max(1 << 16, min(64 << 20, budget // 8)),
                progress=bar.at,
                skip_unreached=options.layers is None,
                processes=processes,
            )
            parameters = sum(parameter.numel() for parameter in model.parameters())
            with processes.failing_together():
                measurement.begin(recorder, parameters, was_training)
            yield recorder, bar
    finally:
        states.restore()


def _check(model: Any) -> None:
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


@dataclass
class FitRecord:
    """One fit of a call: its objects, and the rows and curves that are there so far."""

    fit: Fit
    approximations: tuple[Approximation, ...]
    probes: Probes | None
    rows: dict[str, list[Row]] = field(default_factory=dict)
    curves: dict[str, list[Detail]] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """What the progress bar counts for each layer, apart from given operators."""
        return len(self.approximations) + len(self.fit.details)


class Measurement:
    """One call: what was asked, how it is done, and what is there so far.

    The truth's atoms are captured once and serve every fit; so do the atoms of fits on equal columns.

    Args:
        options: What was asked.
        budget: Bytes this process may take.
        warns: Whether to warn here; with several processes one does.
    """

    def __init__(self, options: MeasureOptions, budget: int, *, warns: bool = True) -> None:
        self.options, self.budget, self.warns = options, budget, warns
        self.fits = [FitRecord(fit, fit.fitted, fit.probes(options.seed)) for fit in options.fits]
        self.columns = CallColumns(options, ColumnRequest(TRUTHS[options.truth]))
        self.operators: dict[str, list[Given]] = {}
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.partial = False
        self.kept: Results | None = None
        # layers with all their rows and curves, and how many there will be
        self.done: list[str] = []
        self.layers = 0
        self.tell: Callable[[str], object] = lambda text: None

    # ------------------------------------------------------------------ planning

    def leave_out(self, specs: Sequence[LayerSpec]) -> list[LayerSpec]:
        """Leave out layers that do not fit the budget, with a warning; asked for by name, that is an error."""
        kept, skipped = affordable(specs, self.budget, by_name=self.options.layers is not None)
        self._say(f"skipped: {text}" for text in skipped)
        if not kept:
            raise MemoryBudgetError(
                f"no layer fits the memory budget of {size_text(self.budget)}; raise memory_budget."
            )
        return kept

    def take_operators(self, model: nn.Module, specs: Sequence[LayerSpec]) -> None:
        """Look up the operators that are measured beside the fits, as they are now."""
        self.operators = given_operators(self.options.operators, model, list(specs))

    def begin(self, recorder: Recorder, parameters: int, was_training: bool) -> None:
        """Write down how it is done, and decide what the truth is made of, if only to begin with."""
        mode = "eval mode"
        if was_training:
            mode += " (the model came in training mode; dropout and batch statistics are off, modes are restored)"
        self.facts = {
            "samples": recorder.num_samples,
            "measured in": mode,
            "exact columns per sample": recorder.exact_columns,
            "memory budget": size_text(self.budget),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        if recorder.processes.world_size > 1:
            self.facts["processes"] = recorder.processes.world_size
        if recorder.unreached:
            self._say([f"left out, the loss does not depend on them: {', '.join(recorder.unreached)}"])
        if recorder.doubt:
            self._say([recorder.doubt])
        self.choice = TruthColumns(self.options, recorder, parameters)
        self.columns = CallColumns(self.options, self.choice.first())
        if self.options.whole_model:
            self._check_whole(recorder)

    def _check_whole(self, recorder: Recorder) -> None:
        """Refuse before the work what the whole model's answer cannot be had of."""
        check_disjoint(recorder.specs)
        if recorder.processes.world_size > 1:
            raise OptionError("whole_model=True is for one process; measure with distributed=False.")
        truth = self.columns.truth
        if truth.mixed:
            raise OptionError(
                f"whole_model=True needs exact labels, but {recorder.exact_columns} columns per sample are too many; "
                f"take fewer samples or max_columns={recorder.exact_columns}, or truth='empirical_fisher'."
            )
        size = 2 * recorder.num_samples * sum(plan.bytes for plan in truth.plan(recorder))
        if size > self.budget:
            raise MemoryBudgetError(
                f"whole_model=True keeps the gradients of all layers, {size_text(size)} with room to work; raise "
                f"memory_budget ({size_text(self.budget)}), or take fewer samples or layers."
            )

    def _say(self, texts: Iterable[str]) -> None:
        for text in texts:
            if self.warns:  # once, not from every process
                warnings.warn(f"{text}.", stacklevel=callers_level())
            self.notes.append(text)

    # ------------------------------------------------------------------ doing

    def go(self, recorder: Recorder, bar: Bar) -> None:
        """Capture and measure; layers whose estimate is not accurate enough are measured again with more columns."""
        self.tell("".join(f"{plan}\n" for plan in self.columns.truth.plan(recorder)))
        estimated = (
            f"{recorder.exact_columns} exact columns per sample were too many: the truth is estimated from some of "
            "them and random sums of the others, standard errors included"
        )
        if self.columns.truth.mixed:
            self.notes.append(estimated)
        if self.options.population and any(record.fit.details for record in self.fits):
            self.notes.append("curves are of these samples; only rows answer for their population")
        names = [spec.name for spec in recorder.specs]
        self.layers = len(names)
        for record in self.fits:
            record.rows = {name: [] for name in names}
            record.curves = {name: [] for name in names}
        mixed = self._take_kept()
        missing = [name for name in names if name not in self.done]
        pending = {self.columns.truth: missing} if missing else {}
        while pending:
            columns = next(iter(pending))
            self.columns = CallColumns(self.options, columns)
            names = pending.pop(columns)
            mixed = mixed.union(names) if columns.mixed else mixed.difference(names)
            for name in self._measure_layers(recorder, names, bar):
                more = self.choice.enough(columns, self._worst(name), self.options.accuracy)
                pending.setdefault(more, []).append(name)
        if estimated in self.notes and not mixed:  # every layer asked for all columns in the end
            self.notes.remove(estimated)
        if self.options.whole_model:
            self._measure_whole(recorder, bar)

    def _take_kept(self) -> set[str]:
        """Take over the whole layers of an interrupted call; return those whose truth was estimated."""
        if self.kept is None:
            return set()
        (record,) = self.fits
        match self.kept.settings.get("done"):
            case {"layers": list(whole)}:
                pass
            case _:
                whole = []
        self.done = [name for name in record.rows if name in whole]
        for name in self.done:
            record.rows[name] = [row for row in self.kept.rows if row.layer == name]
            record.curves[name] = [curve for curve in self.kept.details if curve.layer == name]
        for fact in ("capture", "contraction", "leading eigenvalue"):
            if found := {name: told for name, told in self.kept.settings.get(fact, {}).items() if name in self.done}:
                self.facts[fact] = found
        return {name for name in self.done if any("random columns" in row.note for row in record.rows[name])}

    def _measure_whole(self, recorder: Recorder, bar: Bar) -> None:
        """Compare the layers with the matrix of all of them together."""
        names, truth = [spec.name for spec in recorder.specs], self.columns.truth
        bar.begin("gradients of all layers", recorder.own_samples)
        streams = truth.streams(recorder, names, cache=True)
        bar.begin("the whole model", 1)
        squares = block_squares([streams[name] for name in names]).tolist()
        values = WholeModel(tuple(names), tuple(map(tuple, squares)), {}).detail_values()
        for record in self.fits:
            labels, size = self.columns.of(record.fit).labels, record.fit.batch_size
            condition = self._condition(ALL_LAYERS, labels, size, streams[names[0]])
            record.curves[ALL_LAYERS] = [condition.detail(WHOLE_MODEL, values)]
        bar.step()

    def capture_one(self, recorder: Recorder, bar: Bar) -> GradientStream:
        """Capture the truth's atoms of a layer: exactly, or as well as an estimate can."""
        names = [spec.name for spec in recorder.specs]
        if len(names) != 1:
            raise LayerError(f"one layer is wanted, but {self.options.layers!r} stands for {', '.join(names)}.")
        columns = self.columns.truth
        if columns.mixed:
            columns = self.choice.most()
        if columns.mixed:
            made_of = f"{columns.fixed} exact and {columns.draws} random columns a sample"
            self._say([f"{recorder.exact_columns} exact columns per sample are too many: estimated from {made_of}"])
        size = columns.plan(recorder)[0].bytes * recorder.most_samples
        bar.begin("gradients of one layer", recorder.own_samples)
        stream = columns.streams(recorder, names, cache=2 * size <= self.budget)[names[0]]
        stream.keep_bytes = self.budget // 2
        return stream

    def _measure_layers(self, recorder: Recorder, layers: list[str], bar: Bar) -> list[str]:
        """Measure group by group of layers that share a sweep; return those that need more columns."""
        wanted, again = self.columns.all(), []
        truth = self.columns.truth
        for plan in truth.plan(recorder):
            if plan.name in layers:
                self.facts.setdefault("capture", {})[plan.name] = str(plan)
        sizes: dict[str, int] = {}
        for plan in (plan for each in wanted for plan in each.plan(recorder) if plan.name in layers):
            sizes[plan.name] = sizes.get(plan.name, 0) + plan.bytes
        spare = spare_bytes([spec.shape for spec in recorder.specs if spec.name in layers], self.budget)
        # halves of random columns, and halves of these, are copies
        copies = 1.5 if truth.mixed else 0.0
        for names, cache in sweeps(sizes, recorder.most_samples, spare // 2, copies):
            captured = self._capture(recorder, wanted, names, bar, cache=cache)
            # layers are measured one after the other, and what was formed of one goes with it
            for stream in (stream for streams in captured.values() for stream in streams.values()):
                stream.keep_bytes = spare // (2 * max(2, len(wanted)))
            bar.begin("measuring", len(names) * sum(record.units + len(self.options.operators) for record in self.fits))
            for name in names:
                own = {each: streams.pop(name) for each, streams in captured.items()}
                self._measure_layer(name, own, bar)
                for stream in own.values():
                    stream.forget()
                if truth.mixed and self.choice.enough(truth, self._worst(name), self.options.accuracy) != truth:
                    again.append(name)
                else:
                    self.done.append(name)
        return again

    def _worst(self, name: str) -> float:
        """The largest standard error of a layer's rows; NaN where random columns did not suffice for an answer."""
        rows = [row for record in self.fits if record.probes is None for row in record.rows[name]]
        if any(math.isnan(row.cosine) and not math.isnan(row.stderr) for row in rows):
            return math.nan
        return max((row.stderr for row in rows if not math.isnan(row.stderr)), default=0.0)

    def _capture(
        self, recorder: Recorder, wanted: Sequence[ColumnRequest], names: list[str], bar: Bar, *, cache: bool
    ) -> dict[ColumnRequest, dict[str, GradientStream]]:
        captured: dict[ColumnRequest, dict[str, GradientStream]] = {}
        for each in wanted:
            what = f"of {len(names)} layer{'s' * (len(names) > 1)}" if not captured else f"with {each.labels} labels"
            bar.begin(f"gradients {what}", recorder.own_samples)
            captured[each] = each.streams(recorder, names, cache=cache)
        return captured

    def _measure_layer(self, name: str, captured: Mapping[ColumnRequest, GradientStream], bar: Bar) -> None:
        truth, columns = captured[self.columns.truth], self.columns.truth
        form = str(SecondMoment(truth).plan())
        self.facts.setdefault("contraction", {})[name] = form
        self.tell(f"{name}: {form}\n")
        bar.say("measuring", name)
        if self.options.leading_eigenvalue:
            reason = why_no_eigenvalue(truth, population=self.options.population)
            self.facts.setdefault("leading eigenvalue", {})[name] = f"left out: {reason}" if reason else "to 1e-4"
        note = f"truth from {columns.fixed} exact and {columns.draws} random columns a sample" if columns.mixed else ""
        for record in self.fits:
            made_of = self.columns.of(record.fit)
            streams = LayerStreams(
                truth,
                captured[made_of.fitted],
                made_of.resample,
                note,
                spare=None if made_of.spare is None else captured[made_of.spare],
                batches=made_of.batches,
                eigenvalue=self.options.leading_eigenvalue,
            )
            condition = self._condition(name, made_of.labels, record.fit.batch_size, truth)
            self._measure_fit(streams, condition, record, bar)

    def _condition(self, name: str, labels: str, batch_size: int, truth: GradientStream) -> Condition:
        return Condition(name, self.options.step, self.options.truth, labels, batch_size, truth.num_samples)

    def _measure_fit(self, streams: LayerStreams, condition: Condition, record: FitRecord, bar: Bar) -> None:
        rows = record.rows[condition.layer] = []
        beside = self.operators.get(condition.layer, ())
        # one by one: an interrupt keeps those that are done
        for row in layer_rows(streams, condition, [*record.approximations, *beside], probes=record.probes):
            rows.append(row)
            bar.step()
        curves = record.curves[condition.layer] = []
        for kind in record.fit.details:
            curves.append(self._curve(kind, streams, condition, record.approximations))
            bar.step()

    def _curve(
        self, kind: str, streams: LayerStreams, condition: Condition, approximations: Sequence[Approximation]
    ) -> Detail:
        batches, unusual = streams.batches, ""
        columns = RandomColumns.of(streams.truth) if streams.truth.random_columns else None
        values: dict[str, Any]
        if kind == "spectrum":
            values = kronecker_spectrum(streams.truth, self.options.spectrum_rank)
            if columns is not None:
                values["ratio"] = columns.cosine(get("optimal")).value
        elif kind == "exponents":
            fitted, unusual = batches.of(streams.fitted), batches.options
            values = exponent_curve(streams.truth, fitted) if columns is None else estimated_exponents(columns, fitted)
        elif columns is None:
            values = batch_size_curve(
                streams.truth,
                streams.fitted,
                approximations,
                replacement=batches.replacement,
                labels=batches.labels,
            )
        else:
            values = estimated_batch_sizes(
                streams.fitted,
                approximations,
                lambda approximation, other: estimated_cosine(columns, streams, approximation, other),
                batches,
            )
        if kind == "batch_sizes":
            unusual = replace(batches, size=2).options  # it has every size
        return condition.detail(kind, values, unusual)

    def results(self) -> tuple[Results, ...]:
        """What is there, one for each fit."""
        return tuple(
            Results(
                [row for rows in record.rows.values() for row in rows],
                [curve for curves in record.curves.values() for curve in curves],
                self._settings(record),
                self.partial,
            )
            for record in self.fits
        )

    def _settings(self, record: FitRecord) -> dict[str, Any]:
        notes: dict[str, Any] = {"notes": self.notes} if self.notes else {}
        labels = self.columns.of(record.fit).labels
        if self.partial and self.layers:
            notes["done"] = {"layers": self.done, "of": self.layers}
        return {**self.options.settings(record.fit), "labels": labels, **self.facts, **notes}
