"""``kronscope paper``: one command for each figure that has a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, get_type_hints

import typer

from kronscope import figures
from kronscope.cli.terminal import ShowTraining, open_console, say, say_where
from kronscope.errors import OptionError
from kronscope.measures import Results
from kronscope.paper import Experiment, Options, plans, scaled, workloads
from kronscope.paper.outputs import columns_of, write_outputs
from kronscope.paper.plans import Plan
from kronscope.support.launch import is_rank_0
from kronscope.support.processes import find_processes

__all__ = ["app"]

app = typer.Typer(
    help="Reproduce the paper's figures.\n\nThe paper is 'A New Perspective on Shampoo's Preconditioner'.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True)
class _Asked:
    """The options of every ``paper`` command."""

    workload: Annotated[str, typer.Option(help=f"{', '.join(workloads.names())}. The data of digits-* is embedded.")]
    scale: Annotated[str, typer.Option(help="'small' fits two processor cores, 'paper' is the paper's table.")] = (
        "small"
    )
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None
    batch: Annotated[int | None, typer.Option(help="Training batch.")] = None
    samples: Annotated[int | None, typer.Option(help="Samples to measure on.")] = None
    held_out: Annotated[int, typer.Option(help="Test samples for loss and accuracy, where there is test data.")] = 1000
    measure_at: Annotated[str | None, typer.Option(help="Steps to measure at, such as 0,10,100.")] = None
    image_size: Annotated[int | None, typer.Option(help="Pixels a side.")] = None
    dataset: Annotated[str | None, typer.Option(help="Use this data set only, such as cifar-10.")] = None
    data_dir: Annotated[Path | None, typer.Option(help="Where the data is.")] = None
    download: Annotated[bool, typer.Option(help="Fetch MNIST or CIFAR-10 into the data folder if missing.")] = False
    device: Annotated[str, typer.Option(help="cpu, cuda, mps.")] = "cpu"
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0
    warmup: Annotated[int, typer.Option(help="Steps in which the learning rate rises to its value.")] = 0
    lr: Annotated[float | None, typer.Option(help="Another learning rate than the workload's.")] = None
    history_every: Annotated[int, typer.Option(help="Record one gradient in so many for Adagrad's matrix.")] = 1
    out: Annotated[Path | None, typer.Option(help="The run's folder; default runs/FIGURE-WORKLOAD.")] = None
    resume: Annotated[bool, typer.Option(help="Go on with the run in the folder.")] = False
    labels: Annotated[str, typer.Option(help="Where the figure takes exact labels: exact or sampled.")] = "exact"
    draws: Annotated[int, typer.Option(help="Label draws per sample, with --labels sampled.")] = 1
    probes: Annotated[int, typer.Option(help="Also estimate with this many random probes, as the paper did.")] = 0
    population: Annotated[bool, typer.Option(help="Estimate for the population, with error bars.")] = False
    memory_budget: Annotated[str | None, typer.Option(help="Such as 4GiB.")] = None
    accuracy: Annotated[float, typer.Option(help="The standard error to reach where the truth is estimated.")] = 0.01


def _command(plan: Plan) -> Callable[..., None]:
    """A function that takes the options as its arguments, from which typer makes the command."""

    def command(**options: object) -> None:
        _reproduce(plan, _Asked(**options))  # type: ignore[arg-type]  # typer has checked them

    hints = get_type_hints(_Asked, include_extras=True)
    defaults = {field.name: field.default for field in fields(_Asked)} | {"workload": plan.workload}
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, default=defaults[name], annotation=hints[name]) for name in hints]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


for _plan in plans.all_plans():
    app.command(_plan.name, help=f"{_plan.title[0].upper()}{_plan.title[1:]}.")(_command(_plan))


def _reproduce(plan: Plan, asked: _Asked) -> None:
    figures.require_matplotlib()
    console = open_console()
    experiment = _prepare(plan, asked)
    workload = experiment.settings.definition
    say(console, f"{workload.title} on {experiment.dataset.title}", "bold")
    for line in experiment.settings.cuts or ("nothing was cut",):
        say(console, f"  cut: {line}")
    for line in workload.notes:
        say(console, f"  note: {line}")
    target = asked.out or Path("runs") / f"{plan.name}-{asked.workload}"
    written: list[Path] = []

    def write(results: Results) -> None:
        written.extend(write_outputs(plan, columns_of({workload.title: results}), results, target))

    with ShowTraining(console) as show:
        results = experiment.run(target, resume=asked.resume, show=show, show_bars=console.is_terminal, write=write)
    if not is_rank_0():
        return
    console.print(results)
    if asked.probes:
        console.print(Results.load(target / "probes.json"))
    say_where(console, [target / "results.json", *written])


def _prepare(plan: Plan, asked: _Asked) -> Experiment:
    if asked.labels not in ("exact", "sampled"):
        raise OptionError(
            f"--labels must be exact or sampled, got {asked.labels!r}; figure3 is the one with real labels."
        )
    settings = scaled(
        asked.workload,
        asked.scale,
        steps=asked.steps,
        batch=asked.batch,
        samples=asked.samples,
        held_out=asked.held_out,
        measure_at=None if asked.measure_at is None else _numbers(asked.measure_at),
        image_size=asked.image_size,
        dataset=asked.dataset,
        seed=asked.seed,
        device=asked.device,
        warmup=asked.warmup,
        lr=asked.lr,
        history_every=asked.history_every,
    )
    processes = find_processes(None)
    if asked.download and processes.world_size > 1:
        # the others find what rank 0 has fetched
        processes.on_rank_0(lambda: len(settings.load_data(asked.data_dir, download=True)))
    with processes.failing_together():
        dataset = settings.load_data(asked.data_dir, download=asked.download)
        options = Options(asked.draws, asked.probes, asked.population, asked.memory_budget, asked.accuracy)
        return Experiment(plan.with_labels(asked.labels), settings, dataset, options)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise OptionError(f"--measure-at takes whole numbers with commas, such as 0,10,100; got {text!r}.") from None
