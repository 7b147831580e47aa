"""``kronscope advise``: what to set for each layer of a model of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kronscope.advising import Advice, advise
from kronscope.cli.arguments import Checkpoint, Data, Forward, Loss, MaxSamples, MemoryBudget, Model
from kronscope.cli.terminal import default_folder, end_interrupted, open_console, say, say_where
from kronscope.measures import Results
from kronscope.runs.measurement import run_measurement
from kronscope.support.launch import is_rank_0
from kronscope.targets import blaming_the_model, load_data, load_forward, load_loss, load_model

__all__ = ["command"]


def command(
    model: Model,
    data: Data,
    loss: Loss = "cross-entropy",
    forward: Forward = None,
    checkpoint: Checkpoint = None,
    layer: Annotated[list[str] | None, typer.Option(help="Layer to advise on; may be given several times.")] = None,
    max_samples: MaxSamples = None,
    tolerance: Annotated[float, typer.Option(help="How much cosine a cheaper option may lose.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of random columns.")] = 0,
    memory_budget: MemoryBudget = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/advise.")] = None,
) -> None:
    """Tell which preconditioner fits each layer of a model of yours.

    For every layer: what fits its curvature, what that costs in a step, and what to set.
    """
    if not is_rank_0():
        return  # it is for one process
    console = open_console()
    network = load_model(model, checkpoint)
    batches = load_data(data, network, lambda line: say(console, line))
    criterion = load_loss(loss)
    function = load_forward(forward)
    asked = {"layer": layer, "max_samples": max_samples, "tolerance": tolerance, "seed": seed}
    sources = {
        "model": model,
        "data": data,
        "loss": loss,
        "forward": forward,
        "checkpoint": checkpoint and str(checkpoint),
    }
    config = {"command": "advise", **sources, **asked, "memory_budget": memory_budget}
    target = default_folder(Path("runs/advise"), config, console) if out is None else out
    found: list[Advice] = []

    def measured() -> Results:
        found.append(
            advise(
                network,
                criterion,
                batches,
                layers=layer,
                tolerance=tolerance,
                max_samples=max_samples,
                seed=seed,
                forward=function,
                memory_budget=memory_budget,
            )
        )
        # before the results, which say that there is no more to do
        found[0].save(target)
        return found[0].results

    with blaming_the_model():
        results, written = run_measurement(target, config, measured)
    if found:
        say(console, str(found[0]))
    say_where(console, [*written, target / "advice.json", target / "advice.html"])
    if results.partial:
        end_interrupted(console, target)
