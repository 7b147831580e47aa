"""What a figure needs measured while a workload trains: kept step by step in the run, and put together from there."""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from kronscope.errors import RunError
from kronscope.gradients.history import GradientHistory
from kronscope.measures import Fit, Results, measure_fits, measure_history
from kronscope.measures.probes import Probes
from kronscope.measures.schema import from_data, to_data
from kronscope.paper import plans
from kronscope.paper.data import Dataset
from kronscope.paper.models import logits
from kronscope.paper.plans import Plan
from kronscope.paper.scale import Settings
from kronscope.paper.training import Training
from kronscope.runs import Run

__all__ = ["Measurements", "Options", "collect", "results_so_far"]

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
    """

    draws: int = 1
    probes: int = 0
    population: bool = False
    memory_budget: int | str | None = None


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
        space = processes.on_rank_0(lambda: min(_MOST_HISTORY, shutil.disk_usage(self._run.folder).free // 2))
        history = GradientHistory.attach(
            self._training.optimizer,
            self._training.model,
            list(self._names),
            folder,
            space=space // processes.world_size,
            resume=self._training.resumed,
            distributed=processes.distributed,
        )
        try:
            self._training.include("history", history)
        except BaseException:
            history.close()
            raise
        return history

    def gauss_newton(self, step: int) -> None:
        """Measure against the Gauss–Newton matrix."""
        asked = self._fits(step)
        if all(self._run.stored(name) is not None for name in asked):
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
            # the figure shows singular values beyond the first after the last step only
            spectrum_rank=8 if step == self._settings.measure_at[-1] else 1,
            progress=self._show_bars,
            distributed=self._run.processes.distributed,
        )
        for name, results in zip(asked, measured, strict=True):
            self._store(name, results)

    def adagrad(self) -> None:
        """Measure the recorded gradients against Adagrad's matrix."""
        if self._history is None:
            return
        self._history.detach()
        steps = [step for step in self._settings.measure_at if step > 0]
        if steps and self._run.stored("adagrad") is None:
            details = self._plan.adagrad_details
            measured = measure_history(
                self._history, self._plan.adagrad, steps, details=details, progress=self._show_bars
            )
            self._store("adagrad", measured)

    @property
    def names(self) -> list[str]:
        """The names under which everything is stored in the end."""
        names = [name for step in self._settings.measure_at for name in self._fits(step)]
        return [*names, "adagrad"] if self._history is not None and self._settings.measure_at[-1] > 0 else names

    def _fits(self, step: int) -> dict[str, Fit]:
        fits = {_stored_name("gauss_newton", i, step): fit for i, fit in enumerate(self._plan.gauss_newton)}
        if self._options.probes:
            probes = Probes(self._options.probes, seed=self._settings.seed + step)
            fits |= {
                _stored_name("probes", i, step): replace(fit, estimator=probes, details=())
                for i, fit in enumerate(self._plan.gauss_newton)
            }
        return fits

    def _store(self, name: str, results: Results) -> None:
        if results.partial:
            raise KeyboardInterrupt
        rows = [replace(row, layer=self._names[row.layer], seconds=math.nan) for row in results.rows]
        details = [replace(detail, layer=self._names[detail.layer]) for detail in results.details]
        self._run.store(name, to_data(Results(rows, details, results.settings)))


def _stored_name(kind: str, fit: int, step: int) -> str:
    return f"{kind}-{fit}-{step}"


def results_so_far(folder: str | os.PathLike[str]) -> Results:
    """The results of a run: of all of it if it has ended, else what is there, marked partial.

    Reading disturbs nothing; a run that is going on may be looked at.

    Raises:
        RunError: the folder is no run, or has nothing yet.
    """
    path = Path(folder)
    if (path / "results.json").exists():
        return Results.load(path / "results.json")
    found = collect(Run.open(path)) if (path / "config.json").exists() else None
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
    return Results(merged.rows, merged.details, {**_settings(run), **last})


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
