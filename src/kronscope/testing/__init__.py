"""Public helpers to test approximations and operators, ours and yours.

- :mod:`~kronscope.testing.oracle`: every matrix in full, by its textbook formula, sharing no code with the fast path;
- :mod:`~kronscope.testing.strategies`: hypothesis strategies for gradient streams (needs hypothesis);
- :func:`check_operator` and :func:`check_approximation`: what an operator or an approximation must satisfy;
- :func:`check_solver`: what a root solver must satisfy.

A new approximation is held to all of it by two lines in a test:

>>> from kronscope import approx
>>> from kronscope.testing import check_approximation
>>> check_approximation(approx.get("shampoo2"))
"""

from __future__ import annotations

from kronscope.testing import oracle, strategies
from kronscope.testing.conformance import check_approximation, check_operator
from kronscope.testing.solvers import check_solver
from kronscope.testing.strategies import StreamRecipe

__all__ = ["StreamRecipe", "check_approximation", "check_operator", "check_solver", "oracle", "strategies"]
