"""``kronscope demo``: Figure 1 on embedded data."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from kronscope import figures
from kronscope.cli.terminal import ShowTraining, default_folder, open_console, say, say_where
from kronscope.measures import Results
from kronscope.paper import Experiment, plans, scaled
from kronscope.paper.outputs import prefixed, write_outputs
from kronscope.runs import Run
from kronscope.support.launch import is_rank_0

__all__ = ["command"]

_WORKLOADS = ("digits-linear", "digits-resnet", "digits-vit")


def command(
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/demo.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Show what it is about: Figure 1 of the paper, in two minutes.

    Three small models on embedded data; a table, a picture and a report.
    """
    if not is_rank_0():
        return  # it is small enough for one
    figures.require_matplotlib()
    console = open_console()
    plan = plans.get("figure1")
    titles, found = {}, {}
    config = {"command": "demo", "workloads": list(_WORKLOADS), "seed": seed}
    target = default_folder(Path("runs/demo"), config, console) if out is None else out
    with Run.start(target, config, resume=True, reopen=False) as run:
        for name in _WORKLOADS:
            settings = scaled(name, seed=seed)
            experiment = Experiment(plan, settings, settings.load_data())
            titles[name] = settings.definition.title
            say(console, f"{titles[name]}: {settings.steps} steps", "bold")
            with ShowTraining(console) as show:
                found[name] = experiment.run(
                    target / name, resume=True, show=show, show_bars=console.is_terminal, distributed=False
                )
        everything = prefixed(found)
        everything.save(run.results_path)
        columns = {titles[name]: results.select(layer=results.layers[0]) for name, results in found.items()}
        reported = {titles[name]: results for name, results in found.items()}
        written = write_outputs(plan, columns, reported, target, title="kronscope demo: Figure 1 on embedded data")
        run.finish(needs=["results.json", *(path.name for path in written)])
    last = {layer: max(row.step for row in everything if row.layer == layer) for layer in everything.layers}
    final = [row for row in everything if row.step == last[row.layer]]
    console.print(Results(final, settings={"title": "after training"}))
    say_where(console, [run.results_path, *written])
    console.print(f"\n{_in_words(everything)}", highlight=False, markup=False)
    report = next(path for path in written if path.suffix == ".html")
    say(console, f"\nTo open the report:  python -m webbrowser {report}")


def _in_words(results: Results) -> str:
    """What the picture shows, for somebody who sees it for the first time."""
    values: dict[str, dict[tuple[object, ...], float]] = {}
    for row in results:
        values.setdefault(row.approximation, {})[row.layer, row.step, row.condition] = row.cosine
    best = values["optimal"]
    gaps = {
        name: fmean(best[point] - values[name][point] for point in best if point in values[name])
        for name in ("shampoo2", "shampoo")
    }
    return (
        "What the picture shows: each line says how much of a layer's curvature matrix a preconditioner captures while "
        "the network trains; 1 is all of it. The factors that Shampoo keeps, used as Shampoo², are on average "
        f"{gaps['shampoo2']:.2f} below the best that any Kronecker product can do, used as the original Shampoo "
        f"{gaps['shampoo']:.2f}."
    )
