r"""The largest eigenvalue of a second-moment matrix, by Lanczos' method on products with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kronscope.errors import ConvergenceError

__all__ = ["TOLERANCE", "largest_eigenvalue"]

# The relative error that is asked for, unless told otherwise, and the most products for it.
TOLERANCE = 1e-4
_MOST_PRODUCTS = 200
# The second eigenvalue of a space with few vectors may be far below that of H, and the gap too large.
_CAUTION = 0.01


def largest_eigenvalue(multiply: Callable[[Tensor], Tensor], start: Tensor, tolerance: float = TOLERANCE) -> float:
    r"""Return the largest eigenvalue of a symmetric PSD matrix H.

    After k products with H, Lanczos' method knows the largest eigenvalue :math:`\theta \le \lambda_1` of H in the space
    that ``start`` and these products span, with the residual :math:`\rho` of its vector. With the gap
    :math:`\gamma` to the second eigenvalue of that space it stops once :math:`\rho^2 / \gamma`, about what is missing
    to :math:`\lambda_1`, is below a hundredth of ``tolerance`` times :math:`\theta`, or :math:`\rho` is below
    ``tolerance`` times :math:`\theta`.

    Args:
        multiply: The product with H.
        start: A vector (any shape) with some of the leading eigenvector in it; a random one will do.
        tolerance: The relative error.

    Returns:
        The eigenvalue; 0 for a start of zero.

    Raises:
        ConvergenceError: it needs more than 200 products.

    >>> values = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    >>> round(largest_eigenvalue(lambda vector: values * vector, torch.ones(3, dtype=torch.float64)), 4)
    5.0
    """
    size = float(start.norm())
    if not size > 0:
        return 0.0
    basis = [start.double() / size]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(_MOST_PRODUCTS, start.numel())):
        image = multiply(basis[-1]).double()
        diagonal.append(float((image * basis[-1]).sum()))
        # against all earlier vectors, twice: rounding would bring them back
        for _ in range(2):
            for vector in basis:
                image = image - (image * vector).sum() * vector
        rest = float(image.norm())
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, beside))
        theta = float(values[-1])
        residual = rest * abs(float(vectors[-1, -1]))
        gap = theta - float(values[-2]) if len(values) > 1 else 0.0
        if residual <= tolerance * theta or (gap > 0 and residual * residual / gap <= _CAUTION * tolerance * theta):
            return theta
        if rest <= 1e-14 * theta:
            return theta
        beside.append(rest)
        basis.append(image / rest)
    if len(basis) > start.numel():
        return theta
    raise ConvergenceError(
        f"the largest eigenvalue needs more than {_MOST_PRODUCTS} products for a relative error of {tolerance:.0e}; "
        "ask for a larger tolerance."
    )


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Tensor:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
    return matrix
