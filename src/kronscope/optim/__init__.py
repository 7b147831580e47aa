"""Training with the preconditioners that the other half measures."""

from __future__ import annotations

from kronscope.kron.roots import CoupledNewton, Eigh, WarmQR
from kronscope.optim.config import Adaptive, Budget, Every, Graft, Norm, Trace, Warmup
from kronscope.optim.groups import param_groups
from kronscope.optim.rules.kl import KLShampoo
from kronscope.optim.rules.shampoo import Shampoo
from kronscope.optim.rules.soap import SOAP
from kronscope.optim.solvers import CostModel, measure_solvers

__all__ = [
    "SOAP",
    "Adaptive",
    "Budget",
    "CostModel",
    "CoupledNewton",
    "Eigh",
    "Every",
    "Graft",
    "KLShampoo",
    "Norm",
    "Shampoo",
    "Trace",
    "Warmup",
    "WarmQR",
    "measure_solvers",
    "param_groups",
]
