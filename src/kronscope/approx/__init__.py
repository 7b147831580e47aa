"""Kronecker-factored and related approximations of a second-moment matrix, by name.

>>> from kronscope import approx
>>> approx.get("shampoo2").title
'Shampoo²'
"""

from __future__ import annotations

from kronscope.approx.optimal import KroneckerSumFit, Optimal, OptimalFit, PaperOptimal  # isort: skip
from kronscope.approx.shampoo2 import Shampoo2, TensorNormal  # isort: skip
from kronscope.approx.shampoo import Shampoo  # isort: skip
from kronscope.approx.kfac import EigenvalueCorrectedKfac, KfacExpand, KfacReduce  # isort: skip
from kronscope.approx.eigenbasis import Caspr, Soap  # isort: skip
from kronscope.approx.kl import KlOptimal  # isort: skip
from kronscope.approx.simple import DiagonalFit, IdentityFit, OneSided  # isort: skip
from kronscope.approx.registry import Approximation, all_approximations, get, names, options_of, register, several
from kronscope.approx.svd import SingularTriples, singular_triples

__all__ = [
    "Approximation",
    "Caspr",
    "DiagonalFit",
    "EigenvalueCorrectedKfac",
    "IdentityFit",
    "KfacExpand",
    "KfacReduce",
    "KlOptimal",
    "KroneckerSumFit",
    "OneSided",
    "Optimal",
    "OptimalFit",
    "PaperOptimal",
    "Shampoo",
    "Shampoo2",
    "SingularTriples",
    "Soap",
    "TensorNormal",
    "all_approximations",
    "get",
    "names",
    "options_of",
    "register",
    "several",
    "singular_triples",
]
