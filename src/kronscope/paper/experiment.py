"""One experiment of the paper: train a workload, measure along the way, keep everything in one folder."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from kronscope.gradients.history import GradientHistory
from kronscope.measures import Results, measure_fits, measure_history
from kronscope.measures.probes import Probes
from kronscope.measures.schema import dumps, loads
from kronscope.paper.data import Dataset
from kronscope.paper.models import logits
from kronscope.paper.plans import Plan
from kronscope.paper.scale import Settings
from kronscope.paper.shared import AnyRun, processes_of, start_run
from kronscope.paper.training import Progress, Stateful, train
from kronscope.support.processes import find_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Options", "run_experiment"]

_T = TypeVar("_T")
# A history may fill half of what the disk has left, and never more than this.
_MOST_HISTORY = 20 << 30


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


def run_experiment(
    plan: Plan,
    settings: Settings,
    dataset: Dataset,
    folder: str | os.PathLike[str],
    *,
    options: Options | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    measuring: Callable[[int | None], None] = lambda step: None,
    show_bars: bool = True,
    distributed: bool | ProcessGroup | None = None,
) -> Results:
    """Train and measure; the folder then holds config, environment, metrics, checkpoints and ``results.json``.

    A run that was killed at any moment goes on with ``resume`` and ends with the same ``results.json``, byte for byte
    on one machine: measurements are kept step by step, and times are left out of the file.

    Args:
        plan: What to measure.
        settings: What to train and for how long.
        dataset: The data.
        folder: The run's folder.
        options: How to measure.
        resume: Go on with the run that is there.
        progress: Called after every training step.
        measuring: Called with the step before measuring there, and with None when training goes on.
        show_bars: Let measurements show their progress.
        distributed: With torch.distributed initialised, every process calls this: all train alike, each measures its
            part of the samples and keeps its part of the history, rank 0 has the folder. None infers that,
            False works on this process alone.

    Returns:
        All rows: Gauss–Newton at each measured step, Adagrad at each but the first.

    Raises:
        RunError: The folder holds another run, or is in use.
    """
    options = options or Options()
    settings = settings.on(dataset)
    config = {**settings.config(dataset), "figure": plan.name, "options": vars(options) | {}}
    processes = find_processes(distributed)
    processes.barrier("the experiment")
    with start_run(folder, config, resume, processes) as run:
        work = _Experiment(plan, settings, dataset, options, run, show_bars)

        def on_measure(step: int, model: nn.Module) -> None:
            measuring(step)
            work.measure_step(step, model)
            measuring(None)

        if not run.done:
            with work:
                train(settings, dataset, run=run, on_start=work.attach, on_measure=on_measure, progress=progress)
                measuring(settings.steps)
                results = work.finish()
            processes.on_rank_0(lambda: results.save(run.results_path))
            run.finish()
            measuring(None)
        return processes.on_rank_0(lambda: Results.load(run.results_path))


class _Experiment:
    def __init__(
        self, plan: Plan, settings: Settings, dataset: Dataset, options: Options, run: AnyRun, show_bars: bool
    ) -> None:
        self.plan, self.settings, self.dataset, self.options, self.run = plan, settings, dataset, options, run
        self.show_bars = show_bars
        self.processes = processes_of(run)
        self.names: dict[str, str] = {}
        self.history: GradientHistory | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        # also after an interrupt: whoever goes on with the run must find the folder free
        if self.history is not None:
            self.history.close()

    # ------------------------------------------------------------------ along the way

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Stateful]:
        """Find the layers and start recording gradients."""
        self.names = {spec: name for name, spec in self.settings.definition.layer_specs(model).items()}
        if not self.plan.adagrad:
            return {}
        folder = self.run.folder / "history"
        fresh = self.run.latest() is None
        if fresh and folder.exists():
            # left by a run that was killed before its first checkpoint; several processes may be at it
            shutil.rmtree(folder, ignore_errors=self.processes.world_size > 1)
        space = self.processes.on_rank_0(lambda: min(_MOST_HISTORY, shutil.disk_usage(self.run.folder).free // 2))
        self.history = GradientHistory.attach(
            optimizer,
            model,
            list(self.names),
            folder,
            space=space // self.processes.world_size,
            resume=not fresh,
            distributed=self.processes.distributed,
        )
        return {"history": self.history}

    def measure_step(self, step: int, model: nn.Module) -> None:
        """Measure against the Gauss–Newton matrix; what a killed run had measured is not measured again."""
        fits, names = (
            list(self.plan.gauss_newton),
            [f"gauss_newton-{i}-{step}" for i in range(len(self.plan.gauss_newton))],
        )
        if self.options.probes:
            probes = Probes(self.options.probes, seed=self.settings.seed + step)
            fits += [replace(fit, estimator=probes, details=()) for fit in self.plan.gauss_newton]
            names += [f"probes-{i}-{step}" for i in range(len(self.plan.gauss_newton))]
        if all(self.run.stored(name) is not None for name in names):
            return
        data = self.dataset.sample(self.settings.samples, self.settings.seed, processes=self.processes)
        measured = measure_fits(
            model,
            self.settings.definition.loss().to(self.settings.device),
            data,
            fits,
            list(self.names),
            seed=self.settings.seed,
            step=step,
            forward=logits,
            draws=self.options.draws,
            population=self.options.population,
            memory_budget=self.options.memory_budget,
            # the figure shows singular values beyond the first after the last step only
            spectrum_rank=8 if step == self.settings.measure_at[-1] else 1,
            progress=self.show_bars,
            distributed=self.processes.distributed,
        )
        for name, results in zip(names, measured, strict=True):
            self._store(name, results)

    def _store(self, name: str, results: Results) -> None:
        if results.partial:
            raise KeyboardInterrupt
        rows = [replace(row, layer=self.names[row.layer], seconds=math.nan) for row in results.rows]
        details = [replace(detail, layer=self.names[detail.layer]) for detail in results.details]
        self.run.store(name, json.loads(dumps(Results(rows, details, results.settings))))

    # ------------------------------------------------------------------ at the end

    def finish(self) -> Results:
        """Measure Adagrad's matrix and put everything together."""
        steps = [step for step in self.settings.measure_at if step > 0]
        if self.history is not None:
            self.history.detach()
            if steps and self.run.stored("adagrad") is None:
                measured = measure_history(
                    self.history,
                    self.plan.adagrad,
                    steps,
                    details=self.plan.adagrad_details,
                    progress=self.show_bars,
                )
                self._store("adagrad", measured)
        parts = [
            part
            for step in self.settings.measure_at
            for index in range(len(self.plan.gauss_newton))
            if (part := self._load(f"gauss_newton-{index}-{step}")) is not None
        ]
        if (adagrad := self._load("adagrad")) is not None:
            parts.append(adagrad)
        merged = parts[0].merge(*parts[1:])
        self._save_probes()
        return Results(merged.rows, merged.details, {**self._settings(), "runs": merged.settings.get("runs", [])})

    def _settings(self) -> dict[str, Any]:
        workload = self.settings.definition
        config = self.settings.config(self.dataset)
        kept = ("workload", "scale", "steps", "batch", "samples", "optimizer", "lr", "weight_decay", "momentum", "seed")
        return {
            "title": f"{workload.title}: {self.plan.title}",
            **{name: config[name] for name in kept},
            "data": self.dataset.title,
            "layers": {name: spec for spec, name in self.names.items()},
            "cut": list(self.settings.cuts) or ["nothing: the paper's settings"],
            "notes": list(workload.notes),
            "population": self.options.population,
            "environment": self.run.environment,
        }

    def _load(self, name: str) -> Results | None:
        stored = self.run.stored(name)
        return None if stored is None else loads(json.dumps(stored), name)

    def _save_probes(self) -> None:
        parts = [
            part
            for step in self.settings.measure_at
            for index in range(len(self.plan.gauss_newton))
            if (part := self._load(f"probes-{index}-{step}")) is not None
        ]
        if parts:
            merged = parts[0].merge(*parts[1:])
            results = Results(merged.rows, merged.details, {**self._settings(), "estimator": "probes"})
            self.processes.on_rank_0(lambda: results.save(Path(self.run.folder) / "probes.json"))
