"""Who works on which blocks: the seam between the mathematics of a step and the processes that share it."""

from __future__ import annotations

from kronscope.optim.parallel.single import SingleProcess

__all__ = ["SingleProcess"]
