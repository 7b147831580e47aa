"""An experiment in a folder that a test names, in processes that it kills."""

from __future__ import annotations

from pathlib import Path

from kronscope.paper import Experiment, Options, plans, scaled

SETTINGS = scaled("digits-linear", steps=12, samples=40, measure_at=[0, 3, 7, 12], seed=3)
PLAN = plans.get("figure2")
OPTIONS = Options(probes=3)


def work(folder: Path) -> None:
    """Run the experiment from wherever it stands."""
    Experiment(PLAN, SETTINGS, SETTINGS.load_data(), OPTIONS).run(folder, resume=True, show_bars=False)
