"""One experiment of the paper: train a workload, measure along the way, keep everything in one folder."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kronscope.errors import ResultsError
from kronscope.measures import Results
from kronscope.paper.data import Dataset
from kronscope.paper.measurements import Measurements, Options, collect, lacking, not_stored
from kronscope.paper.plans import Plan
from kronscope.paper.scale import Settings
from kronscope.paper.training import Event, Training
from kronscope.runs import Run
from kronscope.support.callers import callers_level
from kronscope.support.processes import find_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Experiment"]


class Experiment:
    """A figure's measurements along the training of a workload.

    Args:
        plan: What to measure.
        settings: What to train and for how long.
        dataset: The data.
        options: How to measure.

    Attributes:
        settings: The settings as they are on this data.

    Raises:
        OptionError: The data does not suit the settings.
    """

    def __init__(self, plan: Plan, settings: Settings, dataset: Dataset, options: Options | None = None) -> None:
        self.plan, self.dataset, self.options = plan, dataset, options or Options()
        self.settings = settings.on(dataset)

    @property
    def config(self) -> dict[str, Any]:
        """Everything that decides the numbers, as plain data."""
        return {
            **self.settings.config(self.dataset),
            "figure": self.plan.name,
            "options": self.options.config(),
        }

    def run(
        self,
        folder: str | os.PathLike[str],
        *,
        resume: bool = False,
        show: Callable[[Event], object] = lambda event: None,
        show_bars: bool = True,
        distributed: bool | ProcessGroup | None = None,
        write: Callable[[Results], object] = lambda results: None,
    ) -> Results:
        """Train and measure; the folder then holds config, environment, metrics, checkpoints and ``results.json``.

        A run that was killed at any moment goes on with ``resume`` and ends with the same ``results.json``, byte for
        byte on one machine: measurements are kept step by step, and times are left out of the file.

        Args:
            folder: The run's folder.
            resume: Go on with the run that is there.
            show: Called with what happens, before it is measured.
            show_bars: Let measurements show their progress.
            distributed: With torch.distributed initialised, every process calls this: all train alike, each measures
                its part of the samples and keeps its part of the history, rank 0 has the folder. None infers that,
                False works on this process alone.
            write: Called with the results on rank 0, to write more files while nobody else may write to the folder.

        Returns:
            All rows: Gauss–Newton at each measured step, Adagrad at each but the first.

        Raises:
            RunError: The folder holds another run, or is in use.
        """
        processes = find_processes(distributed)
        processes.barrier("the experiment")
        lacks = partial(lacking, self.plan, self.settings, self.options)
        with Run.start(folder, self.config, resume=resume, lacks=lacks, processes=processes) as run:
            if not run.done:
                self._conduct(run, show, show_bars)
            results = processes.on_rank_0(lambda: self._results(run))
            if processes.rank == 0:
                write(results)
            return results

    def _results(self, run: Run) -> Results:
        try:
            return Results.load(run.results_path)
        except ResultsError:
            stored = Run.open(run.folder)
            if not_stored(self.plan, self.settings, self.options, stored):
                raise
        warnings.warn(
            f"{run.results_path} is missing or damaged; it is put together again from {run.folder / 'stored'}.",
            stacklevel=callers_level(),
        )
        _write_results(run.folder)
        return Results.load(run.results_path)

    def _conduct(self, run: Run, show: Callable[[Event], object], show_bars: bool) -> None:
        training = Training(self.settings, self.dataset, run)
        with (
            training,
            Measurements(
                self.plan, self.settings, self.dataset, self.options, training, run, show_bars=show_bars
            ) as measurements,
        ):
            for event in training.events():
                show(event)
                if event.kind == "measure":
                    measurements.held_out(event.step)
                    measurements.gauss_newton(event.step)
                elif event.kind == "trained":
                    measurements.adagrad()
            measurements.check_complete()
        run.processes.on_rank_0(lambda: _write_results(run.folder))
        run.finish(needs=["results.json"])


def _write_results(folder: str | os.PathLike[str]) -> None:
    run = Run.open(folder)
    for file, probes in (("probes.json", True), ("results.json", False)):
        results = collect(run, probes=probes)
        if results is not None:
            results.save(run.folder / file)
