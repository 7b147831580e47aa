"""A run's folder: config, environment, records, checkpoints and results; one writer, and resumable after a kill."""

from __future__ import annotations

from kronscope.runs.contents import Checkpoint
from kronscope.runs.run import Run

__all__ = ["Checkpoint", "Run"]
