"""Root solvers for stacks of PSD factors, and a safety net around them; :mod:`kronscope.kron.solver` says what they do.

A new solver is a frozen dataclass with the members of :class:`RootSolver`; ``kronscope.testing.check_solver`` tests it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.bases import decomposition_residuals, eigenbases, orthogonal_iteration, probe_vector
from kronscope.kron.devices import has_float64
from kronscope.kron.powers import Spectrum, default_cutoff
from kronscope.kron.rescues import FAILURES, IDENTITY, KEPT, RETRIED, BadAnswerError, Rescue, note_lost, note_rescues
from kronscope.kron.solver import SOLVER_MEMBERS, Ridge, Roots, RootSolver, root_order

__all__ = [
    "SOLVER_MEMBERS",
    "CoupledNewton",
    "Eigh",
    "Ridge",
    "RootSolver",
    "Roots",
    "WarmQR",
    "eigenbases",
    "orthogonal_iteration",
    "root_order",
    "root_residual",
    "solve_roots",
]

# Below this relative damping float32 eigenvectors cost accuracy (4 % at condition 1e6), so float64 decomposes.
_DAMPING_FOR_FLOAT32 = 1e-5
# Rounds of the Newton iteration that a distance to one of about a half takes to become rounding, and two to spare.
_LAST_ROUNDS = 8
_SQUARINGS = 10


@dataclass(frozen=True)
class Eigh:
    """A root solver that decomposes the factor fully: it takes any exponent, and knows the rank exactly.

    Attributes:
        float64: Whether to decompose in float64. None does so when the damping is too small for float32.
        tolerance: The residual above which a root is not used.
        is_warm: False: it does not start from the eigenvectors of the root before.

    >>> roots = Eigh().solve(torch.diag_embed(torch.tensor([[1.0, 3.0]])), -0.5, Ridge())
    >>> roots.matrices[0].diagonal()
    tensor([2.0000, 1.1547])
    """

    float64: bool | None = None
    tolerance: float = 1e-3
    is_warm: bool = False

    @property
    def is_thread_safe(self) -> bool:
        """Always true, since nothing is kept between calls."""
        return True

    def check(self, exponent: float, ridge: Ridge) -> None:
        """Do nothing: every exponent is taken."""

    def solve(self, factors: Tensor, exponent: float, ridge: Ridge, warm: Tensor | None = None) -> Roots:
        """Return the roots of ``factors`` (B, d, d); each factor is divided by its trace first.

        Raises:
            NonFiniteError: a factor on the CPU contains NaN or infinity. On an accelerator nobody waits for the answer:
                the residual of such a factor is NaN.
        """
        wide = ridge.damping < _DAMPING_FOR_FLOAT32 if self.float64 is None else self.float64
        work = factors.to(_work_dtype(factors, wide))
        # the rank is decided by the precision the factor was accumulated in, not by that of its decomposition
        cutoff = default_cutoff(factors.shape[-1], factors.dtype)
        if factors.device.type == "cpu":
            return _from_spectrum(factors, work, Spectrum.of(work, cutoff), exponent, ridge)
        finite = torch.isfinite(work.sum((-2, -1)))
        eye = torch.eye(work.shape[-1], dtype=work.dtype, device=work.device)
        work = torch.where(finite.view(-1, 1, 1), work, eye)
        roots = _from_spectrum(factors, work, Spectrum.decomposed(work, cutoff), exponent, ridge)
        return replace(roots, residuals=roots.residuals.masked_fill(~finite, float("nan")))


@dataclass(frozen=True)
class WarmQR:
    """A root solver that starts from the last eigenvectors: cheaper than :class:`Eigh` where factors change slowly.

    It turns the eigenvectors of the last root by orthogonal iteration (power steps with a QR decomposition).

    Attributes:
        rounds: Power steps before eigenvalues are read off.
        tolerance: The residual above which :class:`Eigh` takes over.
        is_warm: True: it starts from the eigenvectors of the root before.

    >>> factor = torch.diag_embed(torch.tensor([[1.0, 3.0]]))
    >>> before = Eigh().solve(factor, -0.5, Ridge())
    >>> WarmQR().solve(factor, -0.5, Ridge(), before.vectors).matrices[0].diagonal()
    tensor([2.0000, 1.1547])
    """

    rounds: int = 1
    tolerance: float = 1e-2
    is_warm: bool = True

    @property
    def is_thread_safe(self) -> bool:
        """Always true, since nothing is kept between calls."""
        return True

    def check(self, exponent: float, ridge: Ridge) -> None:
        """Do nothing: every exponent is taken."""

    def solve(self, factors: Tensor, exponent: float, ridge: Ridge, warm: Tensor | None = None) -> Roots:
        """Return the roots of ``factors`` (B, d, d), each divided by its trace first; cold starts use :class:`Eigh`."""
        if warm is None:
            return Eigh(tolerance=self.tolerance).solve(factors, exponent, ridge)
        work = factors.to(_work_dtype(factors, False))
        vectors, values = orthogonal_iteration(work, warm.to(work.dtype), self.rounds)
        cutoff = default_cutoff(factors.shape[-1], factors.dtype)
        largest = values.amax(-1, keepdim=True).clamp_min(0)
        values = torch.where(values > cutoff * largest, values, torch.zeros_like(values))
        return _from_spectrum(factors, work, Spectrum(values, vectors), exponent, ridge)


@dataclass(frozen=True)
class CoupledNewton:
    r"""A root solver that needs matrix products only: the coupled Newton iteration, for :math:`A^{-1/p}` with whole p.

    With :math:`M_0 = zA` and :math:`X_0 = z^{1/p} I`, iterate :math:`T = ((p+1)I - M)/p`, :math:`X \leftarrow XT`,
    :math:`M \leftarrow T^p M` until :math:`M = I`. On a CPU it takes as long as about ten eigendecompositions; it is
    the faster one where decompositions are slow (on GPUs, and for small matrices in large stacks). The factor must be
    damped.

    Attributes:
        iterations: At most this many rounds.
        tolerance: The residual above which a root is not used.
        is_warm: False: it does not start from the root before.

    >>> factor = torch.diag_embed(torch.tensor([[1.0, 3.0]]))
    >>> CoupledNewton().solve(factor, -0.5, Ridge(damping=1e-4)).matrices[0].diagonal()
    tensor([1.9997, 1.1546])
    """

    iterations: int = 60
    tolerance: float = 1e-3
    is_warm: bool = False

    @property
    def is_thread_safe(self) -> bool:
        """Always true, since nothing is kept between calls."""
        return True

    def check(self, exponent: float, ridge: Ridge) -> None:
        """Refuse what :meth:`order_of` refuses."""
        self.order_of(exponent, ridge)

    def order_of(self, exponent: float, ridge: Ridge) -> int:
        """Return p for the exponent -1/p.

        Raises:
            OptionError: ``exponent`` is not -1/p, or there is no ridge; such roots need :class:`Eigh`.
        """
        order = root_order(exponent)
        if order is None or ridge.is_pseudo_inverse:
            raise OptionError(
                f"the coupled Newton iteration takes exponents -1, -1/2, -1/3, ... of damped factors, got exponent "
                f"{exponent} and {ridge}; use Eigh()."
            )
        return order

    def solve(self, factors: Tensor, exponent: float, ridge: Ridge, warm: Tensor | None = None) -> Roots:
        """Return the roots of ``factors`` (B, d, d); each factor is divided by its trace first.

        Raises:
            OptionError: as :meth:`order_of`.
        """
        order = self.order_of(exponent, ridge)
        size = factors.shape[-1]
        eye = torch.eye(size, dtype=factors.dtype, device=factors.device)
        largest = _largest_eigenvalue(factors)
        shift = ridge.eps + ridge.damping * largest
        trace = _traces(factors, ridge)
        matrix = (factors + shift.view(-1, 1, 1) * eye) / trace.view(-1, 1, 1)
        # the Frobenius norm bounds the spectrum, so that M starts within the region of convergence
        z = (1 + order) / (2 * torch.linalg.matrix_norm(matrix).clamp_min(torch.finfo(matrix.dtype).tiny))
        coupled = z.view(-1, 1, 1) * matrix
        root = z.pow(1 / order).view(-1, 1, 1) * eye
        fixed = (order + 1) / order * eye
        for _ in range(self._rounds(order, z * shift / trace)):
            step = torch.sub(fixed, coupled, alpha=1 / order)
            root = root @ step
            coupled = torch.linalg.matrix_power(step, order) @ coupled
        error = (coupled - eye).abs().amax((-2, -1))
        root = (root + root.mT) / 2
        unknown = torch.zeros_like(largest)
        return Roots(root, error, torch.stack([largest + shift, unknown], -1))

    def _rounds(self, order: int, smallest: Tensor) -> int:
        r"""Return how many rounds bring the eigenvalues of M to one, given bounds from below for the smallest ones.

        One that is small grows by :math:`((p+1)/p)^p` in a round; then the distance to one is squared. Looking at the
        error in every round instead would make the host wait for the device as often.
        """
        least = float(smallest.amin())
        if not 0 < least < math.inf:
            return self.iterations
        growth = order * math.log1p(1 / order)
        return min(self.iterations, math.ceil(max(0.0, -math.log(least)) / growth) + _LAST_ROUNDS)


def solve_roots(
    factors: Tensor,
    exponent: float,
    ridge: Ridge,
    solver: RootSolver,
    *,
    previous: Tensor | None = None,
    warm: Tensor | None = None,
) -> Roots:
    """Solve with a safety net: the solver, then a decomposition in float64, then the previous root, then the identity.

    The identity comes with a warning, unless rescues are recorded.

    A factor of zeros has no scale; its root is that of the identity, so that a gradient arriving later is not lost.

    Args:
        factors: Symmetric PSD matrices (B, d, d).
        exponent: Any real number the solver takes.
        ridge: What is added before the power.
        solver: The first attempt.
        previous: Roots (B, d, d) to fall back on.
        warm: Eigenvectors (B, d, d) to start from, for solvers that can.
    """
    try:
        roots = solver.solve(factors, exponent, ridge, warm)
    except FAILURES as error:
        return _rescued(factors, exponent, ridge, None, [error] * len(factors), previous)
    good = _usable(roots, solver.tolerance)
    if bool(good.all()):
        return roots
    residuals = torch.where(torch.isfinite(roots.matrices.sum((-2, -1))), roots.residuals, float("nan")).tolist()
    reasons: list[Exception | None] = [
        None if is_good else BadAnswerError.of(residual)
        for is_good, residual in zip(good.tolist(), residuals, strict=True)
    ]
    return _rescued(factors, exponent, ridge, roots, reasons, previous, is_warm=solver.is_warm)


def root_residual(factors: Tensor, roots: Tensor, exponent: float, ridge: Ridge, largest: Tensor) -> Tensor:
    r"""How far stored roots are from being the roots of the present factors, by one probe vector: O(d²).

    For :math:`e = -1/p` it is :math:`\lVert X^p \hat A z - z\rVert / \lVert z\rVert`, with :math:`\hat A` the ridged
    factor over its trace and :math:`z` in its range; for other exponents the commutator
    :math:`\lVert XAz - AXz\rVert / \lVert XAz\rVert`, which sees a turned eigenbasis only.

    Args:
        factors: Present factors (B, d, d).
        roots: Stored roots (B, d, d).
        exponent: Their exponent.
        ridge: Their ridge.
        largest: Largest eigenvalue (B,) when the root was taken, for the relative part of the ridge.

    >>> A = torch.diag_embed(torch.tensor([[1.0, 3.0]]))
    >>> stored = Eigh().solve(A, -0.5, Ridge()).matrices
    >>> root_residual(A, stored, -0.5, Ridge(), torch.tensor([3.0])).round(decimals=4)
    tensor([0.])
    """
    shift = (ridge.eps + ridge.damping * largest).view(-1, 1, 1).to(factors.dtype)
    trace = _traces(factors, ridge).view(-1, 1, 1)
    probe = probe_vector(factors)

    def times(vector: Tensor) -> Tensor:
        return (factors @ vector + shift * vector) / trace

    inside = times(probe)
    order = root_order(exponent)
    if order is not None:
        moved = times(inside)
        for _ in range(order):
            moved = roots @ moved
        difference, size = moved - inside, inside
    else:
        size = roots @ inside
        difference = size - times(roots @ probe)
    tiny = torch.finfo(factors.dtype).tiny
    lengths = torch.linalg.vector_norm(size, dim=(-2, -1)).clamp_min(tiny)
    residuals: Tensor = torch.linalg.vector_norm(difference, dim=(-2, -1)) / lengths
    return residuals


def _from_spectrum(factors: Tensor, work: Tensor, spectrum: Spectrum, exponent: float, ridge: Ridge) -> Roots:
    residuals = decomposition_residuals(work, spectrum.values, spectrum.vectors)
    values = ridge.regularised(spectrum.values, default_cutoff(factors.shape[-1], factors.dtype))
    # a factor of zeros is taken for the identity: zero roots would swallow the gradients that come before a refresh
    largest = values.amax(-1, keepdim=True)
    values = torch.where(largest > 0, values, 1.0)
    trace = _traces(factors, ridge)
    trace = torch.where(trace > 0, trace, float(factors.shape[-1]))
    powered = Spectrum(values / trace.to(values.dtype).unsqueeze(-1), spectrum.vectors).powered(exponent)
    matrices = Spectrum(powered, spectrum.vectors).matrix()
    smallest = values.masked_fill(values <= 0, math.inf).amin(-1)
    extremes = torch.stack([torch.where(largest > 0, largest, 1.0).squeeze(-1), smallest], -1)
    return Roots(
        matrices.to(factors.dtype),
        residuals.to(factors.dtype),
        extremes.to(factors.dtype),
        spectrum.vectors.to(factors.dtype),
    )


def _rescued(
    factors: Tensor,
    exponent: float,
    ridge: Ridge,
    roots: Roots | None,
    reasons: Sequence[Exception | None],
    previous: Tensor | None,
    *,
    is_warm: bool = False,
) -> Roots:
    """Redo one by one what failed; each factor ends with the best root that could be had.

    Args:
        factors: The factors.
        exponent: The exponent.
        ridge: The ridge.
        roots: What the solver found, if it ended.
        reasons: For each factor why its root is no good; None where it is.
        previous: Roots to fall back on.
        is_warm: The solver starts from the root before, so that it is expected to be inexact after a jump.
    """
    count, size = factors.shape[0], factors.shape[-1]
    eye = torch.eye(size, dtype=factors.dtype, device=factors.device)
    matrices = torch.empty_like(factors) if roots is None else roots.matrices.clone()
    vectors = eye.expand(count, size, size).clone() if roots is None or roots.vectors is None else roots.vectors.clone()
    residuals = factors.new_zeros(count) if roots is None else roots.residuals.clone()
    extremes = factors.new_zeros(count, 2) if roots is None else roots.extremes.clone()
    fresh = torch.ones(count, dtype=torch.bool, device=factors.device)
    for index, reason in enumerate(reasons):
        if reason is None:
            continue
        again = _second_attempt(factors[index : index + 1], exponent, ridge)
        if again is not None:
            assert again.vectors is not None
            matrices[index], vectors[index] = again.matrices[0], again.vectors[0]
            residuals[index], extremes[index] = again.residuals[0], again.extremes[0]
            outcome = RETRIED
        elif previous is not None and bool(torch.isfinite(previous[index]).all()):
            matrices[index], fresh[index] = previous[index], False
            outcome = KEPT
        else:
            # whose residual is that of the whole, and whose eigenvalues nobody knows
            matrices[index], vectors[index] = float(size) ** -exponent * eye, eye
            residuals[index], extremes[index] = 1.0, 0.0
            outcome = IDENTITY
        expected = is_warm and outcome == RETRIED and isinstance(reason, BadAnswerError)
        note_rescues(replace(Rescue.after(outcome, reason), is_expected=expected))
        if outcome != RETRIED:
            note_lost(index)
    return Roots(matrices, residuals, extremes, vectors, fresh)


def _second_attempt(factor: Tensor, exponent: float, ridge: Ridge) -> Roots | None:
    """Decompose one factor (1, d, d) in float64; None if that fails too."""
    try:
        roots = Eigh(float64=True).solve(factor, exponent, ridge)
    except FAILURES:
        return None
    return roots if bool(_usable(roots, Eigh().tolerance).all()) else None


def _usable(roots: Roots, tolerance: float) -> Tensor:
    # roots are near one, so that their sum is finite where they are
    return torch.isfinite(roots.matrices.sum((-2, -1))) & (roots.residuals <= tolerance)


def _traces(factors: Tensor, ridge: Ridge) -> Tensor:
    return factors.diagonal(dim1=-2, dim2=-1).sum(-1) + ridge.eps * factors.shape[-1]


def _work_dtype(factors: Tensor, wide: bool) -> torch.dtype:
    return torch.float64 if wide and has_float64(factors.device) else factors.dtype


def _largest_eigenvalue(factors: Tensor) -> Tensor:
    r"""Return the largest eigenvalues (B,), from below, within 0.2 % at size 1024.

    It is the Rayleigh quotient of a column of :math:`A^{2^k}`, got by squaring: a few products, where a Lanczos
    iteration of the same quality takes hundreds of small steps.
    """
    tiny = torch.finfo(factors.dtype).tiny
    power = factors
    for _ in range(_SQUARINGS):
        power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(tiny)
        power = power @ power
    best = torch.linalg.vector_norm(power, dim=-2).argmax(-1)
    vector = power.gather(-1, best.view(-1, 1, 1).expand(-1, factors.shape[-1], 1))
    vector = vector / torch.linalg.vector_norm(vector, dim=-2, keepdim=True).clamp_min(tiny)
    quotient: Tensor = (vector * (factors @ vector)).sum((-2, -1))
    return quotient
