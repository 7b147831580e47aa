r"""What a root solver must satisfy, checked against an eigendecomposition in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kronscope.errors import ConformanceError, OptionError
from kronscope.kron.roots import Ridge, RootSolver
from kronscope.testing.oracle import power

__all__ = ["check_solver"]

_EXPONENTS = (-0.5, -0.25, -1.0, -0.37, 0.5)
_RIDGES = (Ridge(damping=1e-2), Ridge(eps=0.1), Ridge(eps=1e-2, damping=1e-3))


def check_solver(solver: RootSolver, *, tolerance: float = 1e-2, seed: int = 0) -> None:
    r"""Check a root solver on stacks of small factors, of full and of deficient rank.

    Each root must be :math:`\big((A + \rho I)/\operatorname{tr}(A + \epsilon I)\big)^e` with
    :math:`\rho = \epsilon + \delta\lambda_{\max}`, symmetric, the same whether factors come alone or in a stack and
    whatever their scale, with a residual below the solver's own tolerance; factors must not be changed. A solver may
    refuse an exponent or a ridge with :class:`~kronscope.errors.OptionError`, but not all of them.

    Args:
        solver: The solver.
        tolerance: Largest relative error of a root in Frobenius norm.
        seed: Seed of the factors.

    Raises:
        ConformanceError: a promise is not kept; the text says which.

    >>> from kronscope.kron.roots import Eigh
    >>> check_solver(Eigh(), tolerance=1e-6)
    """
    solved = 0
    for size, rank in ((1, 1), (4, 4), (7, 3)):
        rows = torch.randn(3, size, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        factors = rows @ rows.mT
        for exponent in _EXPONENTS:
            for ridge in _RIDGES:
                where = f"{solver} at exponent {exponent}, {ridge}, size {size} and rank {rank}"
                try:
                    solver.check(exponent, ridge)
                    _check(solver, factors, exponent, ridge, tolerance)
                    solved += 1
                except OptionError:
                    continue
                except ConformanceError as error:
                    raise ConformanceError(f"{where}: {error}") from error
    if not solved:
        raise ConformanceError(f"{solver} refused every exponent and ridge.")


def _check(solver: RootSolver, factors: Tensor, exponent: float, ridge: Ridge, tolerance: float) -> None:
    given = factors.clone()
    cold = solver.solve(given, exponent, ridge)
    _demand(torch.equal(given, factors), "solving changed the factors")
    attempts = {"the root": cold}
    if solver.is_warm:
        attempts["the warm root"] = solver.solve(factors, exponent, ridge, warm=cold.vectors)
    for what, roots in attempts.items():
        _demand(roots.matrices.shape == factors.shape, f"{what} must have the factors' shape")
        _demand(bool((roots.residuals <= solver.tolerance).all()), f"{what}'s residual is above the solver's tolerance")
        for matrix, root in zip(factors, roots.matrices, strict=True):
            _demand(torch.equal(root, root.T) or _error(root, root.T) <= 1e-12, f"{what} must be symmetric")
            error = _error(root, _expected(matrix, exponent, ridge))
            _demand(error <= tolerance, f"{what} is off by {error:.1e}, {tolerance:.1e} allowed")
    for index in range(len(factors)):
        alone = solver.solve(factors[index : index + 1], exponent, ridge).matrices[0]
        _demand(_error(alone, cold.matrices[index]) <= tolerance, "a factor's root must not depend on its stack")
    if ridge.eps == 0:
        scaled = solver.solve(1e6 * factors, exponent, ridge).matrices
        _demand(_error(scaled, cold.matrices) <= tolerance, "the root must not depend on the factor's scale")


def _expected(matrix: Tensor, exponent: float, ridge: Ridge) -> Tensor:
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    shift = ridge.eps + ridge.damping * float(torch.linalg.eigvalsh(matrix)[-1])
    return power((matrix + shift * eye) / float((matrix + ridge.eps * eye).trace()), exponent)


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def _demand(condition: bool, text: str) -> None:
    if not condition:
        raise ConformanceError(f"{text}.")
