"""The paper's experiments: data, models, training runs that can be resumed, and the figures made of them."""

from __future__ import annotations

from kronscope.paper.experiment import Options, run_experiment
from kronscope.paper.partial import results_so_far
from kronscope.paper.runs import Run
from kronscope.paper.scale import Settings, scaled
from kronscope.paper.training import train
from kronscope.paper.workloads import Workload

__all__ = ["Options", "Run", "Settings", "Workload", "results_so_far", "run_experiment", "scaled", "train"]
