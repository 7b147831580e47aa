"""See and use Shampoo's preconditioner: how well Kronecker products approximate curvature, layer by layer.

The names below are in the order data flows: gradients, the matrix they make, approximations of it, measures; then the
optimizers that train with them.

>>> import torch, kronscope as ks
>>> stream = ks.GradientStream.from_tensors(torch.eye(3, dtype=torch.float64).view(3, 1, 3))
>>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("shampoo2").fit(stream)), 6)
1.0
"""

from __future__ import annotations

from kronscope import approx, errors, integrations
from kronscope.advising import Advice, advise
from kronscope.curvature import SecondMoment
from kronscope.gradients import GradientStream
from kronscope.gradients.history import GradientHistory
from kronscope.kron import Operator
from kronscope.measures import (
    Fit,
    Probes,
    Results,
    StepQuality,
    cosine,
    measure,
    measure_fits,
    measure_history,
    second_moment,
    step_quality,
)
from kronscope.optim import (
    SOAP,
    Adaptive,
    Budget,
    Every,
    Graft,
    KLShampoo,
    Norm,
    Shampoo,
    Trace,
    Warmup,
    param_groups,
)
from kronscope.watching import Watch, watch

__all__ = [
    "SOAP",
    "Adaptive",
    "Budget",
    "Advice",
    "Every",
    "Fit",
    "GradientHistory",
    "GradientStream",
    "Graft",
    "KLShampoo",
    "Norm",
    "Operator",
    "Probes",
    "Results",
    "SecondMoment",
    "Shampoo",
    "StepQuality",
    "Trace",
    "Warmup",
    "Watch",
    "advise",
    "approx",
    "cosine",
    "errors",
    "integrations",
    "measure",
    "measure_fits",
    "measure_history",
    "param_groups",
    "second_moment",
    "step_quality",
    "watch",
]

__version__ = "0.1.0"
