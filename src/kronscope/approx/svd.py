r"""Leading singular triples of the rearranged matrix :math:`\hat H = \sum w\, G \otimes G`, by block Golub–Kahan.

:math:`\hat H` maps R to :math:`\sum w\, G R G^\top` and its transpose maps L to :math:`\sum w\, G^\top L G`; both keep
symmetric matrices symmetric and antisymmetric ones antisymmetric, so the two subspaces are searched apart. Krylov
spaces grow from the identity, are fully reorthogonalised, and restart from the best vectors found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronscope.curvature import SecondMoment
from kronscope.curvature.nearby import Refined, nearby
from kronscope.curvature.second_moment import out_of_range
from kronscope.errors import ConvergenceError, DataError
from kronscope.kron.workspace import work_bytes

__all__ = ["SingularTriples", "singular_triples"]

Block = Tensor  # (b, d): b vectors of a space, as rows
# Basis vectors before a restart: beyond this, orthogonalisation and memory cost more than a restart loses. Large ones
# are fewer, but never so few that restarts are all there is.
_MAX_BASIS, _MIN_BASIS = 32, 4
_BASIS_BYTES = 2 << 30
# What remains of a unit vector after orthogonalisation when it lay in the span already.
_DROP = 1e-12
# An image this small, relative to the largest, is rounding: the map has no further singular values there.
_FLOOR = 1e-13
# How far a map that is close is trusted, and the most steps of one correction.
_CLOSE, _MOST_STEPS = 1e-6, 40
# Beyond this the squares of an image's entries leave the range of float64.
_SMALLEST = 1e-145


@dataclass(frozen=True)
class SingularTriples:
    r"""The largest singular triples of :math:`\hat H`, in descending order.

    There are fewer than asked for where the rank of :math:`\hat H` is lower.

    Attributes:
        sigma: Singular values (k,).
        left: Matrices :math:`U_i` (k, m, m), unit Frobenius norm.
        right: Matrices :math:`V_i` (k, n, n), unit Frobenius norm, with trace not negative.
        residual: Largest :math:`\|\hat H^\top \operatorname{vec} U_i - \sigma_i \operatorname{vec} V_i\| / \sigma_1`.
        rounds: Rounds of power iteration (one contraction on each side) spent, the certifying one included.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> triples = ks.approx.singular_triples(ks.SecondMoment(stream), 2, tolerance=1e-8, max_rounds=200)
    >>> triples.left.shape, triples.right.shape
    (torch.Size([2, 3, 3]), torch.Size([2, 4, 4]))
    """

    sigma: Tensor
    left: Tensor
    right: Tensor
    residual: float
    rounds: int


@dataclass(frozen=True)
class _Problem:
    """A linear map between two inner-product spaces, as the solver sees it."""

    forward: Callable[[Block], Block]
    adjoint: Callable[[Block], Block]
    inner_left: Callable[[Block, Block], Tensor]
    inner_right: Callable[[Block, Block], Tensor]


@dataclass(frozen=True)
class _Pairs:
    """Pairs of vectors: singular values, what is wrong with the right vectors, the largest residual, rounds spent."""

    sigma: Tensor
    lefts: Block
    rights: Block
    wrong: Block
    residual: float
    rounds: int


def singular_triples(
    moment: SecondMoment,
    rank: int,
    *,
    tolerance: float,
    max_rounds: int,
    symmetric_only: bool = False,
    start: Tensor | None = None,
) -> SingularTriples:
    r"""Find the ``rank`` largest singular triples of :math:`\hat H`, or all that are not zero.

    :math:`\hat H = \sum w\, G \otimes G` is H rearranged so that a Kronecker product becomes a matrix of rank one; its
    triples give the best approximations of H by sums of Kronecker products.

    Args:
        moment: The matrix H.
        rank: How many triples to find.
        tolerance: Residual, relative to the largest singular value, at which to stop. Not below 1e-6 where the matrix
            is estimated from random columns, whose products are in float32.
        max_rounds: Rounds after which not having converged is an error.
        symmetric_only: Leave out pairs of antisymmetric factors; the first triple is never one of them.
        start: A right factor (n, n) to start from instead of the identity.

    Returns:
        Singular values and factors, the largest residual among them, and the number of rounds.

    Raises:
        ConvergenceError: the tolerance was not reached.
        DataError: the gradients are so large or small that float64 does not hold their fourth powers.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> triples = singular_triples(ks.SecondMoment(stream), 3, tolerance=1e-8, max_rounds=200)
    >>> triples.sigma.numpy().round(3).tolist()
    [3.689, 0.828, 0.823]
    """
    kernels = moment.kernels()
    if moment.trace() == 0:
        return _nothing(moment)
    tolerance = max(tolerance, moment.passes.rounding())
    if kernels is not None and rank == 1 and start is None:
        found = _in_kernel_space(moment, kernels, tolerance, max_rounds)
        if found.residual <= _accepted(tolerance):
            return found
        # samples that are nearly dependent: their kernels hold too few digits, so the last of them come from matrices
        polished = _in_matrix_space(moment, 1, tolerance, max_rounds, antisymmetric=False, start=found.right[0])
        return replace(polished, rounds=found.rounds + polished.rounds)
    parts = [_in_matrix_space(moment, rank, tolerance, max_rounds, antisymmetric=False, start=start)]
    # without sharing every G is a sum of b aᵀ with one a, and an antisymmetric form vanishes on it
    if not symmetric_only and kernels is None and min(moment.shape) > 1 and rank > 1:
        parts.append(_in_matrix_space(moment, rank, tolerance, max_rounds, antisymmetric=True, start=None))
    sigma = torch.cat([part.sigma for part in parts])
    order = sigma.argsort(descending=True)[:rank]
    return SingularTriples(
        sigma[order],
        torch.cat([part.left for part in parts])[order],
        torch.cat([part.right for part in parts])[order],
        max(part.residual for part in parts),
        sum(part.rounds for part in parts),
    )


def _in_matrix_space(
    moment: SecondMoment,
    rank: int,
    tolerance: float,
    max_rounds: int,
    *,
    antisymmetric: bool,
    start: Tensor | None,
) -> SingularTriples:
    m, n = moment.shape
    sign = -1.0 if antisymmetric else 1.0
    # how many triples the subspaces can have at most
    room = min(m * (m + sign) // 2, n * (n + sign) // 2)
    rank = int(min(rank, room))

    def mapped(contract: Callable[[Tensor], Tensor], size: int) -> Callable[[Block], Block]:
        def apply(block: Block) -> Block:
            images = [contract(vector.view(size, size)) for vector in block]
            return torch.stack([(image + sign * image.T) / 2 for image in images]).flatten(1)

        return apply

    def frobenius(one: Block, two: Block) -> Tensor:
        return one @ two.T

    def problem_of(matrix: SecondMoment | Refined) -> _Problem:
        return _Problem(mapped(matrix.left, n), mapped(matrix.right, m), frobenius, frobenius)

    problem = problem_of(moment)
    device = moment.left().device
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(rank, n, n, dtype=torch.float64, generator=generator).to(device)
    first = (first + sign * first.mT) / 2
    if not antisymmetric:
        first[0] = torch.eye(n, dtype=torch.float64) if start is None else start
    # ‖Ĥ vec I‖ lies between the largest singular value and √n times it
    scale = _in_range(float(torch.linalg.matrix_norm(moment.left())), moment)
    most = work_bytes(_BASIS_BYTES) // (8 * (m * m + n * n))
    close = nearby(moment) if rank == 1 else None
    answer = None
    if close is not None:
        # what refined contractions leave out is nothing beside the tolerance, with the least that the value can be
        small = 0.1 * tolerance * scale / math.sqrt(n)
        exact = problem_of(close.refined) if close.refined and close.refined.left_out <= small else problem
        start_block = first.flatten(1)
        answer = _by_corrections(exact, problem_of(close.matrix), start_block, tolerance, max_rounds, scale, most)
    if answer is None:
        found, rounds = _golub_kahan(problem, first.flatten(1), rank, tolerance, max_rounds, scale, most)
        if not len(found):
            return SingularTriples(first.new_zeros(0), first.new_zeros(0, m, m), first.new_zeros(0, n, n), 0.0, rounds)
        answer = _certified(problem, found, rounds, scale)
    if answer.residual > _accepted(tolerance):
        raise ConvergenceError(
            f"the leading Kronecker products did not converge: residual {answer.residual:.1e} after {answer.rounds} "
            f"rounds, {tolerance:.0e} asked for within {max_rounds}; raise max_rounds or tolerance."
        )
    left, right = answer.lefts.view(-1, m, m), answer.rights.view(-1, n, n)
    flip = torch.where(right.diagonal(dim1=1, dim2=2).sum(1) < 0, -1.0, 1.0).view(-1, 1, 1).to(right)
    return SingularTriples(answer.sigma, left * flip, right * flip, answer.residual, answer.rounds)


def _in_kernel_space(
    moment: SecondMoment, kernels: tuple[Tensor, Tensor, Tensor], tolerance: float, max_rounds: int
) -> SingularTriples:
    r"""The same on N-vectors: :math:`L = \sum_i x_i B_i^\top B_i`, :math:`R = \sum_i y_i a_i a_i^\top`.

    With :math:`K_B, K_A` the inner products of those matrices, the maps are :math:`x = w \circ K_A y` and
    :math:`y = w \circ K_B x`.
    """
    rows, cols, weights = kernels

    problem = _Problem(
        lambda y: weights * (y @ cols),
        lambda x: weights * (x @ rows),
        lambda x, other: x @ rows @ other.T,
        lambda y, other: y @ cols @ other.T,
    )
    # right(I) is the first image that lies in the span; its coefficients are w times the squared norms of the rows
    first = (weights * _row_traces(moment))[None]
    image = problem.forward(first / _norm(first, problem.inner_right))
    scale = _in_range(_norm(image, problem.inner_left), moment)
    found, rounds = _golub_kahan(problem, first, 1, tolerance, max_rounds, scale)
    pairs = _certified(problem, found, rounds, scale)
    # the matrices themselves: contractions with coefficients in the place of the weights
    left = _span(moment, pairs.lefts[0], 0)
    right = _span(moment, pairs.rights[0], 1)
    if float(right.diagonal().sum()) < 0:
        left, right = -left, -right
    return SingularTriples(pairs.sigma, left[None], right[None], pairs.residual, pairs.rounds)


def _in_range(scale: float, moment: SecondMoment) -> float:
    if not _SMALLEST < scale < 1 / _SMALLEST:
        raise DataError(f"{out_of_range(moment.trace())}.")
    return scale


def _row_traces(moment: SecondMoment) -> Tensor:
    return torch.cat([a.wide().row_factors.square().sum((1, 2, 3)) for a in moment.stream])  # type: ignore[union-attr]


def _span(moment: SecondMoment, coefficients: Tensor, mode: int) -> Tensor:
    """Combine each sample's BᵀB (mode 0) or AᵀA (mode 1) with coefficients of either sign."""
    size = moment.shape[mode]
    total = coefficients.new_zeros(size, size)
    at = 0
    for atoms in moment.stream:
        wide = atoms.wide()
        factors = (wide.row_factors, wide.col_factors)[mode]  # type: ignore[union-attr]
        part = coefficients[at : at + len(factors)].view(-1, 1, 1, 1)
        flat = factors.reshape(-1, size)
        total += flat.T @ (factors * part).reshape(-1, size)
        at += len(factors)
    return (total + total.T) / 2


def _nothing(moment: SecondMoment) -> SingularTriples:
    """The triple of the zero matrix: no singular value, and the identity for factors."""
    m, n = moment.shape
    left, right = (torch.eye(size, dtype=torch.float64) / size**0.5 for size in (m, n))
    return SingularTriples(torch.zeros(1, dtype=torch.float64), left[None], right[None], 0.0, 0)


def _golub_kahan(
    problem: _Problem,
    start: Block,
    rank: int,
    tolerance: float,
    max_rounds: int,
    scale: float,
    most: int = _MAX_BASIS,
) -> tuple[Block, int]:
    """Return right vectors, largest singular value first, and the rounds spent; none where the map is zero."""
    floor = _FLOOR * scale
    most = max(_MIN_BASIS, min(most, _MAX_BASIS), 3 * rank)
    rounds = 0
    block = start
    while True:
        rights = _orthonormal(block, None, problem.inner_right)
        lefts: Block | None = None
        newest = rights
        small = start.new_zeros(0, 0)
        while True:
            images = problem.forward(newest)
            fresh = _orthonormal(images, lefts, problem.inner_left, floor)
            lefts = fresh if lefts is None else torch.cat([lefts, fresh])
            if not len(lefts):
                return rights[:0], rounds + 1
            back = problem.adjoint(fresh) if len(fresh) else fresh.new_zeros(0, rights.shape[1])
            rounds += 1
            grown = _orthonormal(back, rights, problem.inner_right, floor)
            # coordinates of the adjoint images in the right basis: the rows of the small matrix
            known = problem.inner_right(back, rights)
            beyond = problem.inner_right(back, grown)
            old = small
            small = start.new_zeros(len(lefts), len(rights))
            small[: old.shape[0], : old.shape[1]] = old
            small[old.shape[0] :] = known
            if old.shape[0] and len(rights) > old.shape[1]:
                # what earlier left vectors see of right vectors that came later
                small[: old.shape[0], old.shape[1] :] = problem.inner_left(lefts[: old.shape[0]], images)
            p, sigma, qh = torch.linalg.svd(small, full_matrices=False)
            tail = p[old.shape[0] :, :rank]
            error = (tail.T @ beyond).norm(dim=1).max() if beyond.numel() else sigma.new_zeros(())
            done = bool(error <= tolerance * sigma[0]) or not len(grown)
            if done or rounds >= max_rounds or len(rights) + len(grown) > most:
                break
            rights, newest = torch.cat([rights, grown]), grown
        found = qh[:rank][sigma[:rank] > 10 * floor] @ rights
        if done or rounds >= max_rounds:
            return found, rounds
        block = found


def _by_corrections(
    problem: _Problem, close: _Problem, start: Block, tolerance: float, max_rounds: int, scale: float, most: int
) -> _Pairs | None:
    r"""Find the largest triple by searching with a map that is close, and correcting what the map itself finds wrong.

    With :math:`\hat H v = \sigma u` and :math:`\hat H^\top u = \sigma v + r`, the eigenvector of
    :math:`\hat H^\top \hat H` is to the first order :math:`v + \delta`, where
    :math:`(\sigma^2 - \hat H^\top \hat H)\,\delta = \sigma r` orthogonally to v. That is solved with the close map, so
    that each correction costs one round of the map itself and gains as many digits as the two have in common.

    Returns:
        The triple, or None where corrections do not help.
    """
    found, rounds = _golub_kahan(close, start, 1, max(tolerance, _CLOSE), max_rounds, scale, most)
    last = math.inf
    while len(found) and rounds < max_rounds:
        pairs = _certified(problem, found, rounds, scale)
        if pairs.residual <= _accepted(tolerance):
            return pairs
        if not pairs.residual < last / 2:
            return None
        last = pairs.residual
        change, spent = _correction(close, pairs, max(_CLOSE, 0.1 * tolerance / last))
        found, rounds = pairs.rights + change, pairs.rounds + spent
        found = found / _norm(found, problem.inner_right)
    return None


def _correction(close: _Problem, pairs: _Pairs, tolerance: float) -> tuple[Block, int]:
    """Solve for the correction by conjugate gradients; return it and the rounds they took."""
    sigma, right = float(pairs.sigma[0]), pairs.rights

    def projected(vector: Block) -> Block:
        return vector - close.inner_right(vector, right) @ right

    def apply(vector: Block) -> Block:
        image = close.adjoint(close.forward(vector) / sigma) / sigma
        return projected(vector - image)

    # divided by the square of the singular value
    residual = projected(pairs.wrong) / sigma
    change, direction = torch.zeros_like(residual), residual
    square = float(close.inner_right(residual, residual))
    goal = tolerance**2 * square
    for count in range(_MOST_STEPS):
        if square <= goal:
            return change, count
        moved = apply(direction)
        curvature = float(close.inner_right(direction, moved))
        if curvature <= 0:  # another singular value is larger: leave it to the map itself
            return change, count + 1
        change = change + square / curvature * direction
        residual = residual - square / curvature * moved
        last, square = square, float(close.inner_right(residual, residual))
        direction = residual + square / last * direction
    return change, _MOST_STEPS


def _certified(problem: _Problem, found: Block, rounds: int, scale: float) -> _Pairs:
    """Make the left vectors from the right ones and measure what is wrong with the pairs."""
    images = problem.forward(found)
    # orthogonal to the larger ones: dividing by a small singular value would blow up their rounding
    lefts = _orthonormal(images, None, problem.inner_left, _FLOOR * scale)
    images, found = images[: len(lefts)], found[: len(lefts)]
    sigma = problem.inner_left(images, lefts).diagonal().clone()
    wrong = problem.adjoint(lefts) - sigma[:, None] * found
    errors = [_norm(each[None], problem.inner_right) for each in wrong]
    errors += [_norm(each[None], problem.inner_left) for each in images - sigma[:, None] * lefts]
    order = sigma.argsort(descending=True)
    residual = max(errors) / float(sigma.max())
    return _Pairs(sigma[order], lefts[order], found[order], wrong[order], residual, rounds + 1)


def _accepted(tolerance: float) -> float:
    """Ten times the tolerance of the search, for the rounding of two more contractions."""
    return max(10 * tolerance, 1e-13)


def _norm(vector: Block, inner: Callable[[Block, Block], Tensor]) -> float:
    """Norm of one vector (1, d)."""
    return math.sqrt(max(float(inner(vector, vector)), 0.0))


def _orthonormal(
    block: Block, basis: Block | None, inner: Callable[[Block, Block], Tensor], floor: float = 0.0
) -> Block:
    """Orthonormalise vector by vector against a basis and each other, twice; what is left of rounding is dropped.

    Vectors no longer than ``floor`` are rounding from the start.
    """
    known = block[:0] if basis is None else basis
    fresh: list[Tensor] = []
    for index in range(len(block)):
        vector = block[index : index + 1]
        length = _norm(vector, inner)
        if length <= floor:
            continue
        vector, left_over = vector / length, 1.0
        for _ in range(3):
            if len(known):
                vector = vector - inner(vector, known) @ known
            norm = _norm(vector, inner)
            left_over *= norm
            if left_over < _DROP or left_over * length <= floor:
                break
            vector = vector / norm
        else:
            fresh.append(vector)
            if index + 1 < len(block):
                known = torch.cat([known, vector])
    # not a part of the vectors known by now, which would keep all of them in memory
    return torch.cat(fresh) if fresh else block[:0]
