"""Facts: our root solvers pass the public check, and a broken one does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kronscope.errors import ConformanceError, OptionError
from kronscope.kron.roots import CoupledNewton, Eigh, Ridge, Roots, RootSolver, WarmQR
from kronscope.testing import check_solver


@pytest.mark.parametrize(
    ("solver", "tolerance"),
    [(Eigh(), 1e-9), (Eigh(float64=True), 1e-9), (WarmQR(rounds=2), 1e-6), (CoupledNewton(), 0.02)],
)
def test_our_solvers_conform(solver: RootSolver, tolerance: float) -> None:
    check_solver(solver, tolerance=tolerance)


@dataclass(frozen=True)
class Broken:
    """Eigh with one promise broken."""

    how: str
    tolerance: float = 1e-3
    is_warm: bool = False
    is_thread_safe: bool = True

    def check(self, exponent: float, ridge: Ridge) -> None:
        """Take everything."""

    def solve(self, factors: Tensor, exponent: float, ridge: Ridge, warm: Tensor | None = None) -> Roots:
        if self.how == "refuses":
            raise OptionError("no")
        if self.how == "ridge":
            ridge = Ridge(damping=0.5)
        roots = Eigh().solve(factors, exponent, ridge)
        if self.how == "overwrites":
            factors.zero_()
        if self.how == "symmetric":
            return replace(roots, matrices=roots.matrices + 1e-6 * torch.ones_like(roots.matrices).triu(1))
        if self.how == "residual":
            return replace(roots, residuals=torch.ones_like(roots.residuals))
        if self.how == "stack":
            return replace(roots, matrices=roots.matrices.flip(0))
        if self.how == "scale" and float(factors.max()) > 1e4:
            return replace(roots, matrices=2 * roots.matrices)
        return roots


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("refuses", "refused every"),
        ("ridge", "is off by"),
        ("overwrites", "changed the factors"),
        ("symmetric", "must be symmetric"),
        ("residual", "above the solver's tolerance"),
        ("stack", "is off by|depend on its stack"),
        ("scale", "depend on the factor's scale"),
    ],
)
def test_a_broken_solver_is_found(how: str, text: str) -> None:
    with pytest.raises(ConformanceError, match=text):
        check_solver(Broken(how))
