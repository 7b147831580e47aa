"""The paper's experiments: data, models, training runs that can be resumed, and the figures made of them."""

from __future__ import annotations

from kronscope.paper.experiment import Experiment
from kronscope.paper.measurements import Options, results_so_far
from kronscope.paper.scale import Settings, scaled
from kronscope.paper.training import Training
from kronscope.paper.workloads import Workload

__all__ = ["Experiment", "Options", "Settings", "Training", "Workload", "results_so_far", "scaled"]
