"""Eigenbases of stacks of symmetric matrices: decomposed anew, or improved from the last ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor

from kronscope.kron.devices import on_host_if_missing, wide
from kronscope.kron.rescues import FAILURES, KEPT, RETRIED, BadAnswerError, Rescue, note_lost, note_rescues
from kronscope.kron.triangles import saves_half, symmetric_outer

__all__ = [
    "by_reflections",
    "decomposition_residuals",
    "eigenbases",
    "eigenbasis",
    "improved_basis",
    "orthogonal_iteration",
    "probe_vector",
]

# The residual above which a basis is not used; float32 leaves a few 1e-6.
_TOLERANCE = 1e-3
# As it is, then in float64.
_WIDTHS: tuple[Callable[[Tensor], Tensor], ...] = (lambda matrix: matrix, wide)


def orthogonal_iteration(factors: Tensor, vectors: Tensor, rounds: int = 1) -> tuple[Tensor, Tensor]:
    r"""Improve eigenvectors by power steps, :math:`Q \leftarrow \mathrm{qr}(AQ)`, in descending order of eigenvalue.

    Args:
        factors: Symmetric matrices (B, d, d).
        vectors: Orthonormal start (B, d, d).
        rounds: Number of power steps.

    Returns:
        The vectors and their Rayleigh quotients (B, d).
    """
    vectors = improved_basis(factors, vectors, rounds)
    return vectors, (vectors * (factors @ vectors)).sum(-2)


def improved_basis(factors: Tensor, vectors: Tensor, rounds: int = 1) -> Tensor:
    """Return the vectors of :func:`orthogonal_iteration` alone, which saves a product.

    Where a step fails, its start stays.
    """
    moved = factors @ vectors
    order = (vectors * moved).sum(-2).argsort(dim=-1, descending=True, stable=True)
    vectors = _orthonormal(moved.gather(-1, order.unsqueeze(-2).expand_as(moved)), vectors)
    for _ in range(rounds - 1):
        vectors = _orthonormal(factors @ vectors, vectors)
    return vectors


def _orthonormal(columns: Tensor, previous: Tensor) -> Tensor:
    r"""Return :math:`Q` of the QR decompositions of matrices (B, d, d), up to the signs of its columns.

    Columns that are nearly orthogonal, as those of a moved eigenbasis are, need no reflections: with
    :math:`W` the columns at length one and :math:`W^\top W = R^\top R`, it is :math:`W R^{-1}`: three
    quarters of the time at size 1024 on a CPU. Where a probe finds the result
    less than orthonormal, reflections take over.
    """
    try:
        basis, good = _by_cholesky(columns)
    except FAILURES:
        basis, good = previous.clone(), [False] * len(columns)
    bad = [index for index, is_good in enumerate(good) if not is_good]
    if not bad:
        return basis
    # in one call, where that works
    some = columns if len(bad) == len(columns) else torch.stack([columns[index] for index in bad])
    try:
        found, triangles = on_host_if_missing(torch.linalg.qr, some)
        good = (_qr_residuals(some, found, triangles) <= _TOLERANCE).tolist()
    except FAILURES:
        found, good = some, [False] * len(bad)
    if all(good) and len(bad) == len(columns):
        return found  # type: ignore[no-any-return]
    for place, index in enumerate(bad):
        basis[index] = found[place] if good[place] else by_reflections(columns[index], previous[index], index)
    return basis


def _by_cholesky(columns: Tensor) -> tuple[Tensor, list[bool]]:
    info = torch.finfo(columns.dtype)
    unit = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True).clamp_min(info.tiny)
    # only the lower half is read
    gram = symmetric_outer(unit.mT, unit.mT) if saves_half(unit.device) else unit.mT @ unit
    lower = on_host_if_missing(torch.linalg.cholesky_ex, gram).L
    basis: Tensor = on_host_if_missing(torch.linalg.solve_triangular, lower.mT, unit, upper=True, left=False)
    probe = probe_vector(basis)
    errors = torch.linalg.vector_norm(basis.mT @ (basis @ probe) - probe, dim=(-2, -1))
    return basis, (errors <= 100 * info.eps).tolist()


def by_reflections(columns: Tensor, previous: Tensor, place: int = 0) -> Tensor:
    """Return Q of the QR decomposition of a matrix (d, d), with a safety net.

    Where it fails, or is none, float64 is tried, then the previous basis stays.

    Args:
        columns: The matrix.
        previous: An orthonormal basis (d, d) to fall back on.
        place: Its place in a stack, for :func:`~kronscope.kron.rescues.lost_places`.
    """
    return _tried(_checked_qr, (with_width(columns) for with_width in _WIDTHS), previous, place)


def _checked_qr(columns: Tensor) -> Tensor:
    vectors, triangle = on_host_if_missing(torch.linalg.qr, columns)
    residual = float(_qr_residuals(columns.unsqueeze(0), vectors.unsqueeze(0), triangle.unsqueeze(0)))
    if not residual <= _TOLERANCE:
        raise BadAnswerError.of(residual)
    return vectors  # type: ignore[no-any-return]


def _qr_residuals(columns: Tensor, vectors: Tensor, triangles: Tensor) -> Tensor:
    """Return how far matrices (B, d, d) are from being QR decompositions, by one probe.

    On an accelerator, where launches count, it is only how far the vectors are from an orthonormal basis: another such
    basis does no harm, and the next refresh mends it.
    """
    probe = probe_vector(columns)
    skewed: Tensor = torch.linalg.vector_norm(vectors.mT @ (vectors @ probe) - probe, dim=(-2, -1))
    if columns.device.type != "cpu":
        return skewed
    # as large as the length of the columns times the probe's can be
    scale = columns.abs().amax((-2, -1)).clamp_min(torch.finfo(columns.dtype).tiny) * math.sqrt(columns.shape[-1])
    errors = torch.linalg.vector_norm(columns @ probe - vectors @ (triangles.triu() @ probe), dim=(-2, -1)) / scale
    return torch.maximum(errors, skewed)


def eigenbases(factors: Tensor, previous: Tensor) -> Tensor:
    """Return the eigenvectors of a stack of factors, by descending eigenvalue, with a safety net.

    Where a decomposition fails, or is none, float64 is tried, then the previous basis stays.

    Args:
        factors: Symmetric matrices (B, d, d).
        previous: Orthonormal bases (B, d, d) to fall back on.
    """
    try:
        values, vectors = on_host_if_missing(torch.linalg.eigh, factors)
        residuals = decomposition_residuals(factors, values, vectors).tolist()
        reasons: list[Exception | None] = [None if r <= _TOLERANCE else BadAnswerError.of(r) for r in residuals]
        vectors = vectors.flip(-1)
    except FAILURES as error:
        vectors, reasons = previous.clone(), [error] * len(factors)
    for index, reason in enumerate(reasons):
        if reason is not None:
            vectors[index] = _tried(_checked_eigh, [wide(factors[index])], previous[index], index, reason)
    return vectors  # type: ignore[no-any-return]


def eigenbasis(factor: Tensor, previous: Tensor, place: int = 0) -> Tensor:
    """Do the same for one factor (d, d), which has a place in a stack."""
    return _tried(_checked_eigh, (with_width(factor) for with_width in _WIDTHS), previous, place)


def _checked_eigh(factor: Tensor) -> Tensor:
    values, vectors = on_host_if_missing(torch.linalg.eigh, factor)
    residual = float(decomposition_residuals(factor.unsqueeze(0), values.unsqueeze(0), vectors.unsqueeze(0)))
    if not residual <= _TOLERANCE:
        raise BadAnswerError.of(residual)
    return vectors.flip(-1)  # type: ignore[no-any-return]


def _tried(
    attempt: Callable[[Tensor], Tensor],
    matrices: Iterable[Tensor],
    previous: Tensor,
    place: int,
    reason: Exception | None = None,
) -> Tensor:
    """Return the first attempt that works, or what there was before; whatever is not the first is noted.

    Args:
        attempt: Returns a basis, or raises one of ``FAILURES``.
        matrices: What to try it with, in order.
        previous: The basis to fall back on.
        place: The matrix's place in a stack.
        reason: Why an attempt before these failed.
    """
    for matrix in matrices:
        try:
            found = attempt(matrix).to(previous)
        except FAILURES as error:
            reason = reason or error
            continue
        if reason is not None:
            note_rescues(Rescue.after(RETRIED, reason))
        return found
    assert reason is not None
    note_rescues(Rescue.after(KEPT, reason))
    note_lost(place)
    return previous


def decomposition_residuals(factors: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    r"""Return how far :math:`Q, \Lambda` are from being eigendecompositions of matrices (B, d, d), by one probe: O(d²).

    It is the larger one of :math:`\lVert Az - Q\Lambda Q^\top z\rVert / \lVert\Lambda\rVert` and
    :math:`\lVert Q^\top Q z - z\rVert`, which sees errors in the null space too; NaN where there is NaN.

    >>> A = torch.diag_embed(torch.tensor([[1.0, 3.0]]))
    >>> decomposition_residuals(A, torch.tensor([[1.0, 3.0]]), torch.eye(2).unsqueeze(0))
    tensor([0.])
    """
    probe = probe_vector(factors)
    # before squaring: eigenvalues are squares themselves, and theirs would overflow
    largest = values.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(factors.dtype).tiny)
    relative = values / largest
    rebuilt = vectors @ (relative.unsqueeze(-1) * (vectors.mT @ probe))
    moved = factors @ probe / largest.unsqueeze(-1)
    scale = torch.linalg.vector_norm(relative, dim=-1).clamp_min(1.0)
    errors = torch.linalg.vector_norm(moved - rebuilt, dim=(-2, -1)) / scale
    skewed = torch.linalg.vector_norm(vectors.mT @ (vectors @ probe) - probe, dim=(-2, -1))
    residuals: Tensor = torch.maximum(errors, skewed)
    return residuals


def probe_vector(factors: Tensor) -> Tensor:
    """One fixed vector of signs per stack: no global random state is touched and reruns agree."""
    size = factors.shape[-1]
    return _signs(size, factors.dtype, factors.device).expand(factors.shape[0], size, 1)


# Kept, because sending it to a device makes the host wait.
@lru_cache(maxsize=256)
def _signs(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    index = torch.arange(1, size + 1, dtype=torch.float64)
    signs = torch.sign(torch.sin(index * index * 0.7390851332 + 0.5)).to(dtype) / math.sqrt(max(size, 1))
    return signs.view(1, size, 1).to(device)
