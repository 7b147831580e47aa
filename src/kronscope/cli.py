"""The command line: ``kronscope demo``, ``kronscope paper figure1``, ``kronscope measure``, ``kronscope report``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kronscope.errors import KronscopeError, OptionError
from kronscope.support.launch import is_first, process_group

__all__ = ["app", "main"]

app = typer.Typer(
    help="See Shampoo's preconditioner: how well Kronecker products approximate curvature.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
paper_app = typer.Typer(
    help="Reproduce the figures of 'A New Perspective on Shampoo's Preconditioner'.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(paper_app, name="paper")


_INTERRUPTED = 130


def main() -> None:
    """Run the command line; errors meant for people end it with one line and exit code 2.

    Started by torchrun, all processes work on one run, and rank 0 writes.
    """
    try:
        with process_group():
            app()
    except KronscopeError as error:
        name = "kronscope" if is_first() else f"kronscope (process {os.environ['RANK']})"
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(2) from None
    except SystemExit as end:
        # typer turns Ctrl-C into this
        if end.code == _INTERRUPTED:
            hint = "; the same command with --resume goes on" if sys.argv[1:2] == ["paper"] else ""
            sys.stderr.write(f"kronscope: interrupted{hint}.\n")
        raise


def _print_version(asked: bool) -> None:
    if asked:
        import kronscope

        typer.echo(kronscope.__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------------- demo

_DEMO = ("digits-linear", "digits-resnet", "digits-vit")


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/demo.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Figure 1 on embedded data: three small models, table, picture and report, in under two minutes."""
    if not is_first():
        return  # it is small enough for one
    from kronscope.paper import plans
    from kronscope.paper.experiment import Options
    from kronscope.paper.outputs import prefixed, write_outputs
    from kronscope.paper.runs import Run
    from kronscope.paper.scale import scaled

    console = _console()
    target = _unused(Path("runs/demo")) if out is None else out
    plan = plans.get("figure1")
    titles, found = {}, {}
    with Run.create(target, {"command": "demo", "workloads": list(_DEMO), "seed": seed}) as run:
        for name in _DEMO:
            settings = scaled(name, seed=seed)
            dataset = settings.load_data()
            console.print(f"[bold]{settings.definition.title}[/bold]: {settings.steps} steps", highlight=False)
            results = _conducted(
                plan, settings, dataset, target / name, Options(), resume=False, console=console, distributed=False
            )
            titles[name] = settings.definition.title
            found[name] = results
        everything = prefixed(found)
        everything.save(run.results_path)
        columns = {titles[name]: results.select(layer=results.layers[0]) for name, results in found.items()}
        reported = {titles[name]: results for name, results in found.items()}
        written = write_outputs(plan, columns, reported, target, title="kronscope demo: Figure 1 on embedded data")
        run.finish()
    last = {layer: max(row.step for row in everything if row.layer == layer) for layer in everything.layers}
    final = [row for row in everything if row.step == last[row.layer]]
    from kronscope.measures import Results

    console.print(Results(final, settings={"title": "after training"}))
    _say_where(console, [run.results_path, *written])


# ---------------------------------------------------------------------- the paper's figures


@dataclass
class _PaperArguments:
    """What every ``paper`` command takes."""

    workload: str
    scale: str
    steps: int | None
    batch: int | None
    samples: int | None
    measure_at: str | None
    image_size: int | None
    dataset: str | None
    data_dir: Path | None
    download: bool
    device: str
    seed: int
    out: Path | None
    resume: bool
    labels: str
    draws: int
    probes: int
    population: bool
    memory_budget: str | None


def _paper_command(figure: str) -> Callable[..., None]:
    default = "cifar-vit" if figure == "figure5" else "mnist2"

    def command(
        workload: Annotated[
            str,
            typer.Option(
                help="mnist2, cifar-resnet18, imagenet-convnext, cifar-vit; embedded: "
                "digits-linear, digits-resnet, digits-vit."
            ),
        ] = default,
        scale: Annotated[
            str, typer.Option(help="'small' fits two processor cores, 'paper' is the paper's table.")
        ] = "small",
        steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
        batch: Annotated[int | None, typer.Option(help="Training batch.")] = None,
        samples: Annotated[int | None, typer.Option(help="Samples to measure on.")] = None,
        measure_at: Annotated[str | None, typer.Option(help="Steps to measure at, such as 0,10,100.")] = None,
        image_size: Annotated[int | None, typer.Option(help="Pixels a side.")] = None,
        dataset: Annotated[str | None, typer.Option(help="Use this data set only, such as cifar-10.")] = None,
        data_dir: Annotated[Path | None, typer.Option(help="Where the data is.")] = None,
        download: Annotated[
            bool, typer.Option(help="Fetch MNIST or CIFAR-10 into the data folder if missing.")
        ] = False,
        device: Annotated[str, typer.Option(help="cpu, cuda, mps.")] = "cpu",
        seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
        out: Annotated[Path | None, typer.Option(help="The run's folder; default runs/FIGURE-WORKLOAD.")] = None,
        resume: Annotated[bool, typer.Option(help="Go on with the run in the folder.")] = False,
        labels: Annotated[str, typer.Option(help="Where the figure takes exact labels: exact or sampled.")] = "exact",
        draws: Annotated[int, typer.Option(help="Label draws per sample, with --labels sampled.")] = 1,
        probes: Annotated[int, typer.Option(help="Also estimate with this many random probes, as the paper did.")] = 0,
        population: Annotated[bool, typer.Option(help="Estimate for the population, with error bars.")] = False,
        memory_budget: Annotated[str | None, typer.Option(help="Such as 4GiB.")] = None,
    ) -> None:
        asked = locals()
        _paper(figure, _PaperArguments(**{field.name: asked[field.name] for field in fields(_PaperArguments)}))

    return command


def _paper(figure: str, asked: _PaperArguments) -> None:
    from kronscope.measures import Results
    from kronscope.paper import plans
    from kronscope.paper.experiment import Options
    from kronscope.paper.outputs import columns_of, write_outputs
    from kronscope.paper.scale import scaled
    from kronscope.support.processes import find_processes

    console = _console()
    if asked.labels not in ("exact", "sampled"):
        raise OptionError(
            f"--labels must be exact or sampled, got {asked.labels!r}; figure3 is the one with real labels."
        )
    plan = plans.get(figure).with_labels(asked.labels)
    settings = scaled(
        asked.workload,
        asked.scale,
        steps=asked.steps,
        batch=asked.batch,
        samples=asked.samples,
        measure_at=None if asked.measure_at is None else _numbers(asked.measure_at),
        image_size=asked.image_size,
        dataset=asked.dataset,
        seed=asked.seed,
        device=asked.device,
    )
    processes = find_processes(None)
    if asked.download and processes.world_size > 1:
        # the others find what rank 0 has fetched
        processes.on_rank_0(lambda: len(settings.load_data(asked.data_dir, download=True)))
    with processes.failing_together():
        dataset = settings.load_data(asked.data_dir, download=asked.download)
        settings = settings.on(dataset)
    target = asked.out or Path("runs") / f"{figure}-{asked.workload}"
    console.print(f"[bold]{settings.definition.title}[/bold] on {dataset.title}", highlight=False)
    for line in settings.cuts or ("nothing was cut",):
        console.print(f"  cut: {line}", highlight=False)
    for line in settings.definition.notes:
        console.print(f"  note: {line}", highlight=False)
    options = Options(asked.draws, asked.probes, asked.population, asked.memory_budget)
    results = _conducted(plan, settings, dataset, target, options, resume=asked.resume, console=console)
    if not is_first():
        return
    title = settings.definition.title
    written = write_outputs(plan, columns_of({title: results}), results, target)
    console.print(results)
    if asked.probes:
        console.print(Results.load(target / "probes.json"))
    _say_where(console, [target / "results.json", *written])


for _name, _help in (
    ("figure1", "Shampoo² is close to the optimal Kronecker product, Shampoo is not."),
    ("figure2", "Why one round of power iteration from the identity is enough."),
    ("figure3", "Real labels, batches of 1 and 256."),
    ("figure4", "Figure 1 with K-FAC."),
    ("figure5", "Three layers of a ViT."),
    ("figures", "Figures 1 to 4 from one training run."),
    ("all", "Figures 1 to 4, every approximation, exponent and batch-size sweeps."),
):
    paper_app.command(_name, help=_help)(_paper_command(_name))


def _conducted(
    plan: Any,
    settings: Any,
    dataset: Any,
    target: Path,
    options: Any,
    *,
    resume: bool,
    console: Console,
    distributed: bool | None = None,
) -> Any:
    """Run an experiment under a progress bar for training; measurements show their own."""
    from kronscope.measures.progress import Bar
    from kronscope.paper.experiment import run_experiment

    bars: list[Bar] = []

    def training() -> Bar:
        if not bars:
            bar = Bar(console.is_terminal and is_first()).__enter__()
            bar.begin("training", settings.steps)
            bars.append(bar)
        return bars[0]

    def stop() -> None:
        while bars:
            bars.pop().__exit__(None, None, None)

    def progress(step: int, steps: int, loss: float, seconds_left: float) -> None:
        training().at(step, steps, f"training, loss {loss:.3f}")

    def measuring(step: int | None) -> None:
        stop()
        if step is not None and not console.is_terminal:
            console.print(f"  measuring at step {step} of {settings.steps}", highlight=False)

    try:
        return run_experiment(
            plan,
            settings,
            dataset,
            target,
            options=options,
            resume=resume,
            progress=progress,
            measuring=measuring,
            show_bars=console.is_terminal,
            distributed=distributed,
        )
    finally:
        stop()


# ---------------------------------------------------------------------- measure and report


@app.command()
def measure(
    model: Annotated[str, typer.Argument(help="'package.module:name': a model, or a function that returns one.")],
    data: Annotated[
        str,
        typer.Option(help="'package.module:name' of batches or a function that returns them, or a .pt or .npz file."),
    ],
    loss: Annotated[str, typer.Option(help="cross-entropy, mse or bce.")] = "cross-entropy",
    checkpoint: Annotated[Path | None, typer.Option(help="A state_dict to load into the model.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="Layer to measure; may be given several times.")] = None,
    truth: Annotated[str, typer.Option(help="gauss_newton or empirical_fisher.")] = "gauss_newton",
    labels: Annotated[str | None, typer.Option(help="exact, sampled or real.")] = None,
    batch_size: Annotated[int, typer.Option(help="The B of the batch lemmas.")] = 1,
    approximation: Annotated[list[str] | None, typer.Option(help="May be given several times; 'all' for all.")] = None,
    max_samples: Annotated[int | None, typer.Option(help="Use only the first samples.")] = None,
    draws: Annotated[int, typer.Option(help="Label draws per sample.")] = 1,
    population: Annotated[bool, typer.Option(help="Answer for the population, with error bars.")] = False,
    estimator: Annotated[str, typer.Option(help="exact or probes.")] = "exact",
    detail: Annotated[list[str] | None, typer.Option(help="spectrum, exponents, batch_sizes.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of drawn labels and probes.")] = 0,
    step: Annotated[int, typer.Option(help="Training step to write into the results.")] = 0,
    memory_budget: Annotated[str | None, typer.Option(help="Such as 4GiB.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/measure.")] = None,
    verbose: Annotated[bool, typer.Option(help="Print how each layer is captured and contracted.")] = False,
) -> None:
    """Measure a model of yours."""
    from kronscope import measure as run_measure
    from kronscope.paper.measurement import MeasurementFolder
    from kronscope.support.processes import find_processes
    from kronscope.targets import approximation_names, load_data, load_loss, load_model, own_part

    console = _console()
    names = approximation_names(approximation)
    asked = {
        "model": model,
        "data": data,
        "loss": loss,
        "layers": layer,
        "truth": truth,
        "labels": labels,
        "batch_size": batch_size,
        "approximations": list(names),
        "max_samples": max_samples,
        "draws": draws,
        "population": population,
        "estimator": estimator,
        "details": detail or [],
        "seed": seed,
        "step": step,
    }
    processes = find_processes(None)
    with processes.failing_together():
        network = load_model(model, checkpoint)
        found = load_data(data, network, lambda line: console.print(line, highlight=False, soft_wrap=True))
        batches = own_part(found, processes)
        criterion = load_loss(loss)
    default = Path("runs/measure")
    target = out or processes.on_rank_0(lambda: _unused(default))
    # the folder is taken before the work, so that nothing is measured that cannot be kept
    with MeasurementFolder(target, processes) as folder:
        results = run_measure(
            network,
            criterion,
            batches,
            layers=layer,
            truth=truth,
            labels=labels,
            batch_size=batch_size,
            approximations=names,
            max_samples=max_samples,
            seed=seed,
            step=step,
            progress=console.is_terminal,
            draws=draws,
            population=population,
            estimator=estimator,
            memory_budget=memory_budget,
            details=tuple(detail or ()),
            verbose=verbose,
        )
        if not results.rows:
            raise KeyboardInterrupt
        written = folder.write(results, asked)
    console.print(results)
    _say_where(console, written)


@app.command()
def report(
    run: Annotated[list[Path], typer.Argument(help="Run folders or results.json files.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; default report.html beside the first results.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
) -> None:
    """Write the interactive report of runs: one HTML file that needs no network.

    A run that has not ended is shown as far as it has come.
    """
    if not is_first():
        return
    from kronscope.measures import Results
    from kronscope.paper.partial import results_so_far
    from kronscope.report import write_report

    files = [path / "results.json" if path.is_dir() else path for path in run]
    loaded = [results_so_far(path) if path.is_dir() else Results.load(path) for path in run]
    short = [path.parent.name or str(path) for path in files]
    names = short if len(set(short)) == len(short) else [str(path) for path in files]
    if len({path.resolve() for path in files}) < len(files):
        raise OptionError(f"A run is given twice among {', '.join(map(str, run))}; give each one once.")
    several = dict(zip(names, loaded, strict=True))
    target = out or files[0].parent / "report.html"
    write_report(loaded[0] if len(loaded) == 1 else several, target, title=title)
    _say_where(_console(), [target])


# ---------------------------------------------------------------------- helpers


def _console() -> Console:
    return Console(quiet=not is_first())


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise OptionError(f"--measure-at takes whole numbers with commas, such as 0,10,100; got {text!r}.") from None


def _unused(path: Path) -> Path:
    """The path, or the first with a number after it that does not exist."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _say_where(console: Console, paths: list[Path]) -> None:
    console.print("Written:", highlight=False)
    for path in dict.fromkeys(paths):
        console.print(f"  {path}", highlight=False, soft_wrap=True)
