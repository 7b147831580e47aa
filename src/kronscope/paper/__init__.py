"""The paper's experiments: data, models, training runs that can be resumed, and the settings of each."""

from __future__ import annotations

from kronscope.paper.runs import Run
from kronscope.paper.scale import Settings, scaled
from kronscope.paper.training import train
from kronscope.paper.workloads import Workload

__all__ = ["Run", "Settings", "Workload", "scaled", "train"]
