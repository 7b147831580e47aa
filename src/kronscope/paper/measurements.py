"""What a figure needs measured while a workload trains: kept step by step in the run, and put together from there."""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from kronscope.errors import OptionError, ResultsError, RunError
from kronscope.gradients.history import GradientHistory
from kronscope.gradients.history_parts import why_lacking
from kronscope.measures import Fit, Results, measure_fits, measure_history
from kronscope.measures.probes import Probes
from kronscope.measures.schema import from_data, to_data
from kronscope.paper import plans
from kronscope.paper.data import Dataset
from kronscope.paper.held_out import evaluate
from kronscope.paper.models import logits
from kronscope.paper.plans import Plan
from kronscope.paper.scale import Settings
from kronscope.paper.training import Training
from kronscope.runs import Run
from kronscope.runs.contents import Checkpoint

__all__ = ["Measurements", "Options", "collect", "lacking", "not_stored", "results_so_far"]

# A history may fill half of what the disk has left, and never more than this.
_MOST_HISTORY = 20 << 30
_STORED = re.compile(r"(?P<kind>gauss_newton|probes)-(?P<fit>\d+)-(?P<step>\d+)|adagrad")
_SETTINGS = ("workload", "scale", "steps", "batch", "samples", "optimizer", "lr", "weight_decay", "momentum", "seed")


@dataclass(frozen=True)
class Options:
    """How to measure, besides what the figure asks for.

    Args:
        draws: Label draws per sample, where labels are sampled.
        probes: Also estimate each cosine with this many random probes, as the paper did; 0 for none.
        population: Estimate for the population the samples came from, with error bars.
        memory_budget: As for :func:`kronscope.measure`.
        accuracy: The standard error to reach where there are so many classes that the truth itself is estimated.
    """

    draws: int = 1
    probes: int = 0
    population: bool = False
    memory_budget: int | str | None = None
    accuracy: float = 0.01

    def config(self) -> dict[str, Any]:
        """All of it as plain data; without an accuracy that is the default, as in runs from before there was one."""
        options = asdict(self)
        if self.accuracy == Options.accuracy:
            del options["accuracy"]
        return options


class Measurements:
    """Measures a model in training and stores each result in the run; what is stored is not measured again.

    From the start on it records gradients, if the figure shows Adagrad's matrix. Use it in a ``with`` block: also after
    an interrupt whoever goes on with the run must find the history's folder free.

    Args:
        plan: What to measure.
        settings: The run's settings.
        dataset: Its data.
        options: How to measure.
        training: The model and its optimizer; the recorded gradients are saved with its checkpoints.
        run: Where to store.
        show_bars: Let measurements show their progress.
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        dataset: Dataset,
        options: Options,
        training: Training,
        run: Run,
        *,
        show_bars: bool = True,
    ) -> None:
        self._plan, self._settings, self._dataset, self._options = plan, settings, dataset, options
        self._training, self._run, self._show_bars = training, run, show_bars
        self._names = {spec: name for name, spec in settings.definition.layer_specs(training.model).items()}
        run.store("layers", {name: spec for spec, name in self._names.items()})
        self._history = self._record() if plan.adagrad else None

    def __enter__(self) -> Measurements:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._history is not None:
            self._history.close()

    def _record(self) -> GradientHistory:
        folder, processes = self._run.folder / "history", self._run.processes
        if not self._training.resumed and folder.exists():
            # left by a run that was killed before its first checkpoint; several processes may be at it
            shutil.rmtree(folder, ignore_errors=processes.world_size > 1)
        # chosen once: a run that goes on finds less room, since its own history has taken some
        resumed = self._training.resumed
        free = processes.on_rank_0(lambda: shutil.disk_usage(self._run.folder).free)
        try:
            history = GradientHistory.attach(
                self._training.optimizer,
                self._training.model,
                list(self._names),
                folder,
                every=None if resumed else self._settings.history_every,
                space=None if resumed else max(1, min(_MOST_HISTORY, free // 2) // processes.world_size),
                resume=resumed,
                distributed=processes.distributed,
            )
        except OptionError as error:
            raise RunError(
                f"The disk of {self._run.folder} has {free} bytes left, too few for the gradients of this run: {error} "
                "Make room on the disk, or choose another folder (--out)."
            ) from error
        try:
            self._training.include("history", history)
        except BaseException:
            history.close()
            raise
        return history

    def gauss_newton(self, step: int) -> None:
        """Measure against the Gauss–Newton matrix."""
        asked = _fits(self._plan, self._settings, self._options, step)
        if all(_is_kept(self._run, name) for name in asked):
            return
        measured = measure_fits(
            self._training.model,
            self._settings.definition.loss().to(self._settings.device),
            self._dataset.sample(self._settings.samples, self._settings.seed, processes=self._run.processes),
            list(asked.values()),
            list(self._names),
            seed=self._settings.seed,
            step=step,
            forward=logits,
            draws=self._options.draws,
            population=self._options.population,
            memory_budget=self._options.memory_budget,
            accuracy=self._options.accuracy,
            # the figure shows singular values beyond the first after the last step only
            spectrum_rank=8 if step == self._settings.measure_at[-1] else 1,
            progress=self._show_bars,
            distributed=self._run.processes.distributed,
        )
        for name, results in zip(asked, measured, strict=True):
            self._store(name, results)

    def held_out(self, step: int) -> None:
        """Loss and accuracy on data that is never trained on, if there is some."""
        settings, unseen = self._settings, self._dataset.held_out
        if unseen is None or not settings.held_out or _is_kept(self._run, f"held_out-{step}"):
            return
        found = self._run.processes.on_rank_0(
            lambda: evaluate(
                self._training.model,
                settings.definition.loss().to(settings.device),
                unseen.sample(settings.held_out, settings.seed, batch=100),
                settings.device,
            )
        )
        self._run.store(f"held_out-{step}", {"step": step, **found})

    def adagrad(self) -> None:
        """Measure the recorded gradients against Adagrad's matrix."""
        if self._history is None:
            return
        self._history.detach()
        steps = [step for step in self._settings.measure_at if step > 0]
        if steps and not _is_kept(self._run, "adagrad"):
            details = self._plan.adagrad_details
            measured = measure_history(
                self._history, self._plan.adagrad, steps, details=details, progress=self._show_bars
            )
            self._store("adagrad", measured)

    def check_complete(self) -> None:
        """Look whether everything that was to be measured is stored, and whole.

        Raises:
            RunError: Something is missing.
        """
        missing = not_stored(self._plan, self._settings, self._options, self._run)
        if missing:
            raise RunError(
                f"{self._run.folder} cannot be finished without {', '.join(missing)}: somebody removed or changed what "
                "the run had written. Go on with the run (resume=True, --resume); it makes what is missing again."
            )

    def _store(self, name: str, results: Results) -> None:
        if results.partial:
            raise KeyboardInterrupt
        rows = [replace(row, layer=self._names[row.layer], seconds=math.nan) for row in results.rows]
        details = [replace(detail, layer=self._names[detail.layer]) for detail in results.details]
        self._run.store(name, to_data(Results(rows, details, results.settings)))


def not_stored(plan: Plan, settings: Settings, options: Options, run: Run) -> list[str]:
    """The files a finished run has and this one lacks, or has damaged."""
    names = [name for step in settings.measure_at for name in _names(plan, settings, options, step)]
    if plan.adagrad and settings.measure_at[-1] > 0:
        names.append("adagrad")
    return [f"stored/{name}.json" for name in names if not _is_kept(run, name)]


def lacking(plan: Plan, settings: Settings, options: Options, run: Run, checkpoint: Checkpoint) -> str | None:
    """What a checkpoint counts on and is not there any more: earlier measurements, and recorded gradients.

    Args:
        plan: What is measured.
        settings: The run's settings.
        options: How it is measured.
        run: The run.
        checkpoint: The checkpoint.

    Returns:
        What is missing, in words; None if nothing is.
    """
    # what is due at the checkpoint's own step comes after it
    before = [step for step in settings.measure_at if step < checkpoint.step]
    for name in (name for step in before for name in _names(plan, settings, options, step)):
        if not _is_kept(run, name):
            return f"stored/{name}.json is missing or damaged"
    history = checkpoint.state["watchers"].get("history")
    return None if history is None else why_lacking(run.folder / "history", history)


def _names(plan: Plan, settings: Settings, options: Options, step: int) -> list[str]:
    """Under which names something is stored at a step."""
    return [*([f"held_out-{step}"] if settings.held_out else []), *_fits(plan, settings, options, step)]


def _fits(plan: Plan, settings: Settings, options: Options, step: int) -> dict[str, Fit]:
    """What is fitted at a step, by the names under which it is stored."""
    fits = {f"gauss_newton-{i}-{step}": fit for i, fit in enumerate(plan.gauss_newton)}
    if options.probes:
        probes = Probes(options.probes, seed=settings.seed + step)
        fits |= {
            f"probes-{i}-{step}": replace(fit, estimator=probes, details=()) for i, fit in enumerate(plan.gauss_newton)
        }
    return fits


def _is_kept(run: Run, name: str) -> bool:
    """Whether results are stored under a name, and are results; or loss and accuracy on held-out samples."""
    try:
        if name.startswith("held_out-"):
            return {"step", "accuracy", "loss", "samples"} <= (run.stored(name) or {}).keys()
        from_data(run.stored(name), name)
    except (RunError, ResultsError):
        return False
    return True


def results_so_far(folder: str | os.PathLike[str]) -> Results:
    """The results of a run: of all of it if it has ended, else what is there, marked partial.

    Reading disturbs nothing; a run that is going on may be looked at.

    Raises:
        RunError: the folder is no run, or has nothing yet.
    """
    path = Path(folder)
    if (path / "results.json").exists():
        return Results.load(path / "results.json")
    run = Run.open(path) if (path / "config.json").exists() else None
    found = None if run is None else collect(run)
    if found is None and run is not None and run.config.get("command") == "watch":
        raise RunError(
            f"{path} is a watched run without cosines, which a report is made of: see it with 'kronscope watch', "
            "or hand loss= and data= to ks.watch next time."
        )
    if found is None:
        raise RunError(
            f"{path} has no results yet: there is no results.json and no measurement. If it is a run's folder, "
            "wait for its first measurement, or go on with it: 'kronscope paper' with --resume."
        )
    notes = [*found.settings["notes"], "the run has not ended: what it had measured is shown"]
    return Results(found.rows, found.details, {**found.settings, "notes": notes}, partial=True)


def collect(run: Run, *, probes: bool = False) -> Results | None:
    """What is stored, step by step and Adagrad's matrix last; None if nothing is.

    Args:
        run: The run.
        probes: Take what was estimated with random probes, instead of the rest.
    """
    found = sorted(
        (match["step"] is None, int(match["step"] or 0), int(match["fit"] or 0), name)
        for name in run.stored_names()
        if (match := _STORED.fullmatch(name)) and (match["kind"] == "probes") is probes
    )
    parts = [from_data(run.stored(name), name) for *_, name in found]
    if not parts:
        return None
    merged = parts[0].merge(*parts[1:])
    last = {"estimator": "probes"} if probes else {"runs": merged.settings.get("runs", [])}
    return Results(merged.rows, merged.details, {**_settings(run), **last, **_held_out(run)})


def _held_out(run: Run) -> dict[str, Any]:
    found = [run.stored(name) or {} for name in run.stored_names() if name.startswith("held_out-")]
    return {"held_out": sorted(found, key=lambda item: int(item["step"]))} if found else {}


def _settings(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "title": f"{config['title']}: {plans.get(config['figure']).title}",
        **{name: config[name] for name in _SETTINGS},
        "data": config["data"]["title"],
        "layers": run.stored("layers") or {},
        "cut": config["cuts"] or ["nothing: the paper's settings"],
        "notes": config["notes"],
        "population": config["options"]["population"],
        "environment": run.environment,
    }
