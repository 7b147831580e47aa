"""``kronscope measure``: a model of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kronscope.cli.arguments import Checkpoint, Data, Forward, Loss, MaxSamples, MemoryBudget, Model
from kronscope.cli.terminal import default_folder, end_interrupted, open_console, say, say_where
from kronscope.measures import Fit, Results
from kronscope.measures.measurement import run
from kronscope.measures.options import MeasureOptions
from kronscope.runs.measurement import run_measurement
from kronscope.support.processes import find_processes
from kronscope.targets import (
    approximation_names,
    blaming_the_model,
    load_data,
    load_forward,
    load_loss,
    load_model,
    own_part,
)

__all__ = ["command"]


def command(
    model: Model,
    data: Data,
    loss: Loss = "cross-entropy",
    forward: Forward = None,
    checkpoint: Checkpoint = None,
    layer: Annotated[list[str] | None, typer.Option(help="Layer to measure; may be given several times.")] = None,
    truth: Annotated[str, typer.Option(help="gauss_newton or empirical_fisher.")] = "gauss_newton",
    labels: Annotated[str | None, typer.Option(help="exact, sampled or real.")] = None,
    batch_size: Annotated[int, typer.Option(help="Fit on gradients of batches of so many samples.")] = 1,
    approximation: Annotated[list[str] | None, typer.Option(help="May be given several times; 'all' for all.")] = None,
    max_samples: MaxSamples = None,
    draws: Annotated[int, typer.Option(help="Label draws per sample.")] = 1,
    population: Annotated[bool, typer.Option(help="Answer for the population, with error bars.")] = False,
    estimator: Annotated[str, typer.Option(help="exact or probes.")] = "exact",
    detail: Annotated[list[str] | None, typer.Option(help="spectrum, exponents, batch_sizes.")] = None,
    accuracy: Annotated[float, typer.Option(help="Standard error to reach where the truth is estimated.")] = 0.01,
    max_columns: Annotated[int | None, typer.Option(help="Estimate the truth beyond this many columns.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn.")] = 0,
    step: Annotated[int, typer.Option(help="Training step to write into the results.")] = 0,
    leading_eigenvalue: Annotated[bool, typer.Option(help="Find the largest eigenvalue of each matrix.")] = False,
    whole_model: Annotated[bool, typer.Option(help="Tell what the layers are to all of them together.")] = False,
    memory_budget: MemoryBudget = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/measure.")] = None,
    verbose: Annotated[bool, typer.Option(help="Print how each layer is captured and contracted.")] = False,
) -> None:
    """Measure how well preconditioners fit a model of yours."""
    console = open_console()
    processes = find_processes(None)
    with processes.failing_together():
        options = MeasureOptions(
            [Fit(labels, batch_size, approximation_names(approximation), detail or (), estimator)],
            layers=layer,
            truth=truth,
            forward=load_forward(forward),
            max_samples=max_samples,
            seed=seed,
            step=step,
            draws=draws,
            population=population,
            accuracy=accuracy,
            max_columns=max_columns,
            memory_budget=memory_budget,
            leading_eigenvalue=leading_eigenvalue,
            whole_model=whole_model,
        )
        network = load_model(model, checkpoint)
        found = load_data(data, network, lambda line: say(console, line))
        batches = own_part(found, processes)
        criterion = load_loss(loss)
    sources = {
        "model": model,
        "data": data,
        "loss": loss,
        "forward": forward,
        "checkpoint": checkpoint and str(checkpoint),
    }
    config = {**options.to_json(), **sources}

    def measured(kept: Results | None = None) -> Results:
        return run(network, criterion, batches, options, processes, verbose=verbose, kept=kept)[0]

    with blaming_the_model():
        results, written = run_measurement(
            out or processes.on_rank_0(lambda: default_folder(Path("runs/measure"), config, console)),
            config,
            measured,
            processes,
            measured,
        )
    console.print(results)
    say_where(console, written)
    if results.partial:
        end_interrupted(console, written[0].parent)
