r"""What an approximation does to a step, beside its cosine.

A Frobenius cosine is ruled by the largest eigenvalues of the matrix, a preconditioned step by the smallest ones: two
approximations with the same cosine may lead to very different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from kronscope.curvature import SecondMoment
from kronscope.errors import ConvergenceError, NonFiniteError, OptionError, ShapeError
from kronscope.kron import EigenbasisDiagonal, Identity, KroneckerProduct, Operator
from kronscope.kron.block_diagonal import BlockDiagonal

__all__ = ["StepQuality", "step_quality"]

# Where conjugate gradients stop; what is left in the decrease is the square of that.
_TOLERANCE = 1e-8
# The same where the matrix is estimated from random columns, whose products are taken in float32.
_LOOSE = 1e-4
_MOST_ITERATIONS = 5000


@dataclass(frozen=True)
class StepQuality:
    r"""How a step that is preconditioned with an approximation compares with the damped Newton step.

    Attributes:
        damping: The damping :math:`\lambda` as a share of the matrix's mean eigenvalue.
        cosine: Cosine of the angle between :math:`(sK + \lambda I)^{-1} g` and :math:`(H + \lambda I)^{-1} g`.
        decrease: The decrease that the quadratic model :math:`H + \lambda I` predicts for the best length of that step,
            as a share of what the damped Newton step gets: 1 is perfect.
        plain_decrease: The same share for the gradient itself, without any preconditioner.
        iterations: Iterations of conjugate gradients that the damped Newton step took.

    >>> StepQuality(0.1, 0.9, 0.8, 0.5, 12).decrease
    0.8
    """

    damping: float
    cosine: float
    decrease: float
    plain_decrease: float
    iterations: int


@overload
def step_quality(
    H: SecondMoment, K: Operator, gradient: Tensor, damping: Sequence[float] = ...
) -> list[StepQuality]: ...


@overload
def step_quality(
    H: SecondMoment, K: Mapping[str, Operator], gradient: Tensor, damping: Sequence[float] = ...
) -> dict[str, list[StepQuality]]: ...


def step_quality(
    H: SecondMoment,
    K: Operator | Mapping[str, Operator],
    gradient: Tensor,
    damping: Sequence[float] = (1e-2, 1e-1, 1.0, 10.0),
) -> list[StepQuality] | dict[str, list[StepQuality]]:
    r"""Compare :math:`(sK + \lambda I)^{-1} g` with :math:`(H + \lambda I)^{-1} g` at several dampings.

    The scale s is the one at which :math:`sK` is nearest to H, since some approximations are on another scale. The
    damped Newton step is found with conjugate gradients, without forming H.

    Args:
        H: The matrix.
        K: The approximation, of the same shape; or several by name, for which the damped Newton step, which takes most
            of the time, is found once.
        gradient: The gradient g (m, n) that is to be preconditioned.
        damping: The :math:`\lambda`, as shares of the mean eigenvalue :math:`\operatorname{tr} H / mn`.

    Returns:
        One answer for each damping; of several approximations, such a list for each name.

    Raises:
        ShapeError: the shapes differ.
        NonFiniteError: the gradient contains NaN or infinity.
        OptionError: a damping is not positive, the matrix, the gradient or the approximation is zero, or the
            approximation has no eigenbasis to be damped in.
        ConvergenceError: conjugate gradients did not converge; raise the damping.

    >>> import torch, kronscope as ks
    >>> draw = torch.Generator().manual_seed(0)
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=draw))
    >>> H, K = ks.SecondMoment(stream), ks.approx.get("shampoo2").fit(stream)
    >>> best = ks.step_quality(H, K, torch.randn(3, 4, generator=draw), damping=[0.1])[0]
    >>> best.plain_decrease < best.decrease < 1
    True
    """
    operators = K if isinstance(K, Mapping) else {"": K}
    for operator in operators.values():
        if operator.shape != H.shape or tuple(gradient.shape) != H.shape:
            raise ShapeError(
                f"H acts on {H.shape} matrices, K on {operator.shape}, and the gradient is {tuple(gradient.shape)}."
            )
    if not bool(torch.isfinite(gradient).all()):
        raise NonFiniteError("the gradient contains NaN or infinity.")
    if not damping or any(not share > 0 for share in damping):
        raise OptionError(f"damping must be positive numbers, got {tuple(damping)}.")
    g = gradient.detach().double().to(H.left().device)
    scales = {name: _scale(H, operator) for name, operator in operators.items()}
    if not (all(scale > 0 for scale in scales.values()) and float(g.norm()) > 0):
        raise OptionError("the matrix, the approximation and the gradient must not be zero.")
    mean = H.trace() / (H.shape[0] * H.shape[1])
    found: dict[str, list[StepQuality]] = {name: [] for name in operators}
    tolerance = _LOOSE if H.stream.random_columns else _TOLERANCE
    for share in damping:
        ridge = share * mean
        # first what may be refused, then what takes long
        steps = {name: _preconditioned(operators[name], scales[name], ridge, g) for name in operators}
        newton, iterations = _conjugate_gradients(_damped(H, ridge), g, tolerance)
        best = float((g * newton).sum())

        def decrease(direction: Tensor, ridge: float = ridge, best: float = best) -> float:
            bent = float((direction * _damped(H, ridge)(direction)).sum())
            return float((g * direction).sum()) ** 2 / (bent * best)

        plain = decrease(g)
        for name, step in steps.items():
            angle = float((step * newton).sum() / (step.norm() * newton.norm()))
            found[name].append(StepQuality(share, angle, decrease(step), plain, iterations))
    return found if isinstance(K, Mapping) else found[""]


def _scale(H: SecondMoment, K: Operator) -> float:
    """The s at which sK is nearest to H; 0 if there is none."""
    square = K.norm() ** 2
    return H.inner(K) / square if square > 0 else 0.0


def _damped(H: SecondMoment, ridge: float) -> Callable[[Tensor], Tensor]:
    return lambda vector: H.matvec(vector) + ridge * vector


def _preconditioned(K: Operator, scale: float, ridge: float, g: Tensor) -> Tensor:
    """(sK + λI)⁻¹ g, in the eigenbasis of K."""
    if isinstance(K, Identity):
        return g / (scale * K.scale + ridge)
    if isinstance(K, BlockDiagonal):
        # entries of no block are mapped to zero, so that the damping alone is left there
        step = (g / ridge).flatten()
        for indices, operator in K.blocks:
            index = indices.to(g.device)
            step[index] = _preconditioned(operator, scale, ridge, g.flatten()[index])
        return step.view_as(g)
    if isinstance(K, KroneckerProduct):
        bases = [factor.spectrum.vectors.to(g) for factor in (K.left, K.right)]
    elif type(K).shape is EigenbasisDiagonal.shape and isinstance(K, EigenbasisDiagonal):
        bases = [
            torch.eye(size).to(g) if basis is None else basis.to(g)
            for basis, size in zip((K.left, K.right), K.shape, strict=True)
        ]
    else:
        raise OptionError(
            f"{type(K).__name__} has no eigenbasis to be damped in; use a Kronecker product, blocks of such, or an "
            "approximation that is diagonal in some basis."
        )
    left, right = bases
    values = scale * K.eigenvalues().to(g) + ridge
    return left @ ((left.T @ g @ right) / values) @ right.T


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], g: Tensor, tolerance: float) -> tuple[Tensor, int]:
    solution, rest = torch.zeros_like(g), g.clone()
    direction, square = rest.clone(), float((rest * rest).sum())
    goal = tolerance**2 * square
    for iteration in range(1, _MOST_ITERATIONS + 1):
        image = apply(direction)
        length = square / float((direction * image).sum())
        solution += length * direction
        rest -= length * image
        last, square = square, float((rest * rest).sum())
        if square <= goal:
            return solution, iteration
        direction = rest + (square / last) * direction
    raise ConvergenceError(
        f"the damped Newton step did not converge in {_MOST_ITERATIONS} iterations; raise the damping."
    )
