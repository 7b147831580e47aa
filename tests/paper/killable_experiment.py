"""Runs an experiment in folders that the test names, in children that it kills."""

from __future__ import annotations

from pathlib import Path

from kronscope.paper import plans, scaled
from kronscope.paper.experiment import Options, run_experiment
from tests.paper.killing import serve

SETTINGS = scaled("digits-linear", steps=12, samples=40, measure_at=[0, 3, 7, 12], seed=3)
PLAN = plans.get("figure2")
OPTIONS = Options(probes=3)


def work(folder: Path) -> None:
    """Run the experiment from wherever it stands."""
    run_experiment(PLAN, SETTINGS, SETTINGS.load_data(), folder, options=OPTIONS, resume=True, show_bars=False)


if __name__ == "__main__":
    serve(work, SETTINGS)
