"""Runs experiments in forked children that the test kills: importing torch once instead of before every kill.

Reads lines ``folder`` from standard input, forks a child that runs the experiment in that folder (resuming what is
there), prints the child's process number, and when it has ended its exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from kronscope.paper import plans, scaled
from kronscope.paper.experiment import Options, run_experiment

SETTINGS = scaled("digits-linear", steps=12, samples=40, measure_at=[0, 3, 7, 12], seed=3)
PLAN = plans.get("figure2")
OPTIONS = Options(probes=3)


def work(folder: Path) -> None:
    """Run the experiment from wherever it stands."""
    run_experiment(PLAN, SETTINGS, SETTINGS.load_data(), folder, options=OPTIONS, resume=True, show_bars=False)


def main() -> None:
    torch.set_num_threads(1)
    # Loads what the children will need, before the first of them is forked.
    SETTINGS.build_model(SETTINGS.load_data())
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(Path(line.strip()))
                code = 0
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
