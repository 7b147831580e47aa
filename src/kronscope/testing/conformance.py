r"""What an operator and an approximation must satisfy, checked against the dense matrix.

Everything that is measured or applied by kronscope keeps these promises; hold your own class to them before you trust
its cosines:

>>> from kronscope import kron
>>> check_operator(kron.Identity((2, 3), 0.5))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kronscope.approx import Approximation
from kronscope.errors import ConformanceError, ConvergenceError, NotFactoredError
from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Diagonal, EigenbasisDiagonal, Identity, KroneckerProduct, KroneckerSum, Operator
from kronscope.testing import oracle
from kronscope.testing.strategies import StreamRecipe, chunked

__all__ = ["DEFAULT_RECIPES", "check_approximation", "check_operator"]

# Streams every approximation must cope with: all forms, degenerate shapes, and what has broken approximations before.
DEFAULT_RECIPES: tuple[StreamRecipe, ...] = (
    StreamRecipe("dense", (3, 4), samples=24, weights="random", cuts=(5,), seed=1),
    StreamRecipe("dense", (4, 2), samples=6, row_rank=3, scale=1e-4, spread=10.0, cuts=(2, 3), seed=2),
    StreamRecipe("factored", (3, 4), samples=16, columns=3, weights="zeros", cuts=(7,), seed=3),
    StreamRecipe("factored", (4, 3), samples=9, columns=2, shared_side="rows", col_rank=2, scale=1e4, seed=4),
    StreamRecipe("factored", (2, 3), samples=8, columns=3, shared_side="none", cuts=(1, 2), seed=5),
    StreamRecipe("shared", (3, 3), samples=12, columns=2, positions=4, weights="random", cuts=(6,), seed=6),
    StreamRecipe("shared", (2, 5), samples=4, positions=3, shared_side="none", seed=7),
    StreamRecipe("factored", (1, 4), samples=6, cuts=(3,), seed=8),
    StreamRecipe("dense", (4, 1), samples=6, cuts=(3,), seed=9),
    StreamRecipe("shared", (1, 1), samples=3, positions=2, seed=10),
    StreamRecipe("factored", (3, 2), samples=1, seed=11),
    StreamRecipe("dense", (2, 2), samples=1, seed=12),
)
# Between these two, relative to the largest, an eigenvalue may or may not count as zero; such spectra are not inverted.
_SURELY_ZERO, _SURELY_POSITIVE = 1e-13, 1e-7


def check_operator(op: Operator, *, tolerance: float = 1e-9, psd: bool = True, seed: int = 0) -> None:
    """Check an operator against its own dense matrix.

    ``apply``, ``norm``, ``trace``, ``inner`` and ``power`` must agree with ``to_dense``. The matrix must be symmetric
    and (with ``psd``) positive semi-definite. ``power(-1)`` must be its pseudo-inverse, and powers of a matrix that is
    not PSD must leave out its negative part. Arguments must not be changed, and wrong shapes must raise. Powers are not
    checked where an eigenvalue lies between 1e-13 and 1e-7 of the largest, since whether that is zero is a convention.

    Args:
        op: The operator; m·n should be small, since its mn x mn matrix is decomposed.
        tolerance: Largest relative error that is accepted.
        psd: Whether the operator promises to be positive semi-definite.
        seed: Seed of the matrices it is applied to.

    Raises:
        ConformanceError: a promise is not kept; the text says which.

    >>> from kronscope.kron import Identity
    >>> check_operator(Identity((2, 3), 0.5))
    """
    m, n = _checked_shape(op)
    dense = op.to_dense()
    _demand(tuple(dense.shape) == (m * n, m * n), f"to_dense() must be {m * n} x {m * n}, got {tuple(dense.shape)}")
    _demand(bool(torch.isfinite(dense).all()), "to_dense() must be finite")
    _close("to_dense()", dense, dense.T, tolerance, "must be symmetric")
    dense = dense.double()
    values = torch.linalg.eigvalsh(dense)
    size = float(values.abs().max())
    if psd:
        _demand(bool(values[0] >= -tolerance * size), f"the matrix must be PSD, its smallest eigenvalue is {values[0]}")
    _check_apply(op, dense, tolerance, seed)
    _check_scalars(op, dense, tolerance, seed)
    _check_powers(op, dense, values, tolerance)


def check_approximation(
    approximation: Approximation,
    *,
    streams: Sequence[GradientStream] | None = None,
    tolerance: float = 1e-8,
    degree: float | None = 2.0,
    psd: bool = True,
) -> None:
    """Check that an approximation can be trusted on any stream.

    - The fit must be an operator of the stream's shape that passes :func:`check_operator`.
    - It must not depend on how gradients are cut into chunks or ordered, must be the same when fitted again, and must
      leave the stream unchanged.
    - It must scale as :math:`K(cG) = c^d K(G)`, whether c is on the gradients or (squared) on the weights, and must be
      zero for zero gradients.
    - If it says that it is a Kronecker product, it must be one, no closer to H than the optimal one.

    An approximation may refuse a stream with :class:`~kronscope.errors.NotFactoredError` or
    :class:`~kronscope.errors.ConvergenceError`, but not every stream.

    Args:
        approximation: The approximation.
        streams: Streams to fit; None takes a dozen small ones of every form.
        tolerance: Largest relative error that is accepted.
        degree: The degree d in the gradients; 2 is that of H. None leaves this check out, but cosines must still agree.
        psd: Whether its fits promise to be positive semi-definite.

    Raises:
        ConformanceError: a promise is not kept; the text says which, and on which stream.

    >>> from kronscope import approx
    >>> check_approximation(approx.get("shampoo2"))
    """
    for member in ("name", "title"):
        _demand(isinstance(getattr(approximation, member, None), str), f"an approximation needs a {member}")
    fitted = 0
    for stream in [recipe.build() for recipe in DEFAULT_RECIPES] if streams is None else streams:
        try:
            fitted += _check_fit(approximation, stream, tolerance, degree, psd)
        except ConformanceError as error:
            raise ConformanceError(f"{approximation.name} on {stream}: {error}") from error
    _demand(fitted > 0, f"{approximation.name} refused every stream")


def _check_fit(
    approximation: Approximation, stream: GradientStream, tolerance: float, degree: float | None, psd: bool
) -> int:
    whole = list(stream)
    before = [_tensors(chunk) for chunk in whole]
    copies = [[tensor.clone() for tensor in tensors] for tensors in before]
    op = _fitted(approximation, whole)
    for tensors, copied in zip(before, copies, strict=True):
        for tensor, copy in zip(tensors, copied, strict=True):
            _demand(torch.equal(tensor, copy), "fit changed the stream")
    if op is None:
        return 0
    _demand(tuple(op.shape) == stream.shape, f"the fit must act on {stream.shape}, acts on {op.shape}")
    check_operator(op, tolerance=tolerance, psd=psd)
    dense = op.to_dense()
    again = _fitted(approximation, whole)
    _demand(again is not None and torch.equal(again.to_dense(), dense), "fitting twice must give the same")
    pieces = [chunk.part(i, i + 1) for chunk in whole for i in range(len(chunk.weights))]
    _close("the fit", _dense_fit(approximation, pieces), dense, tolerance, "must not depend on chunks")
    _close(
        "the fit", _dense_fit(approximation, pieces[::-1]), dense, tolerance, "must not depend on the order of atoms"
    )
    scaled = _dense_fit(approximation, [_scaled(chunk, 3.0) for chunk in whole])
    reweighted = _dense_fit(approximation, [replace(chunk, weights=9.0 * chunk.weights) for chunk in whole])
    _close("the fit with weights 9w", reweighted, scaled, tolerance, "must be that of 3G")
    if degree is not None:
        _close("the fit of 3G", scaled, 3.0**degree * dense, tolerance, f"must be {3.0**degree:.4g} times that of G")
    _check_direction(approximation, stream, dense, scaled, tolerance)
    zero = _fitted(approximation, [_scaled(chunk, 0.0) for chunk in whole])
    _demand(zero is not None and not bool(zero.to_dense().any()), "zero gradients must give the zero operator")
    return 1


def _check_direction(
    approximation: Approximation, stream: GradientStream, dense: Tensor, scaled: Tensor, tolerance: float
) -> None:
    H = oracle.second_moment(stream)
    cosine = oracle.cosine(H, dense)
    moved = oracle.cosine(H, scaled)
    _demand(abs(moved - cosine) <= tolerance, f"the cosine of 3G must be that of G, {cosine}, got {moved}")
    _demand(cosine <= 1 + tolerance, f"a cosine cannot be {cosine}")
    if getattr(approximation, "kronecker", False):
        sigma = torch.linalg.svdvals(oracle.rearrange(dense, stream.shape))
        _demand(bool(sigma[1:].norm() <= tolerance * sigma[0]), "a Kronecker product was promised; the fit is none")
        best = oracle.rearranged_singular_values(stream)
        bound = float(best[0] / best.norm())
        _demand(cosine <= bound + tolerance, f"no Kronecker product is closer to H than {bound}, got {cosine}")


def _checked_shape(op: Operator) -> tuple[int, int]:
    _demand(isinstance(op, Operator), f"{type(op).__name__} lacks a member of kronscope.kron.Operator")
    shape: object = op.shape
    good = isinstance(shape, tuple) and len(shape) == 2 and all(isinstance(d, int) and d > 0 for d in shape)
    _demand(good, f"shape must be a tuple of two positive whole numbers, got {shape!r}")
    return op.shape


def _check_apply(op: Operator, dense: Tensor, tolerance: float, seed: int) -> None:
    m, n = op.shape
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(2, 3, m, n, dtype=torch.float64, generator=generator)
    given = batch.clone()
    out = op.apply(given)
    _demand(torch.equal(given, batch), "apply changed its argument")
    _demand(out.shape == batch.shape, f"apply must keep the shape {tuple(batch.shape)}, got {tuple(out.shape)}")
    expected = (batch.reshape(-1, m * n) @ dense).reshape(batch.shape)
    _close("apply(V)", out, expected, tolerance, "must be to_dense() times V, row-major")
    _close("apply(V[0, 0])", op.apply(batch[0, 0]), expected[0, 0], tolerance, "must be that of the batch")
    _demand(op.apply(batch.float()).dtype == torch.float32, "apply must keep the dtype of its argument")
    _must_raise("apply to a matrix of another shape", lambda: op.apply(torch.zeros(m, n + 1)))


def _check_scalars(op: Operator, dense: Tensor, tolerance: float, seed: int) -> None:
    m, n = op.shape
    size = float(dense.norm())
    for name, value in (("norm", op.norm()), ("trace", op.trace()), ("inner", op.inner(op))):
        _demand(isinstance(value, float), f"{name}() must be a float, got {type(value).__name__}")
    _near("norm()", op.norm(), size, tolerance * size)
    _near("trace()", op.trace(), float(dense.diagonal().sum()), tolerance * size * dense.shape[0] ** 0.5)
    _near("inner(itself)", op.inner(op), size**2, 2 * tolerance * size**2)
    for other in _companions((m, n), seed):
        matrix = other.to_dense()
        expected, scale = float((dense * matrix).sum()), tolerance * size * float(matrix.norm())
        name = type(other).__name__
        _near(f"inner({name})", op.inner(other), expected, scale)
        _near(f"{name}.inner(itself)", other.inner(op), expected, scale)
    _must_raise("inner with an operator of another shape", lambda: op.inner(Identity((m + 1, n))))


def _check_powers(op: Operator, dense: Tensor, values: Tensor, tolerance: float) -> None:
    size = float(values.abs().max())
    _close("power(1)", op.power(1).to_dense(), dense, tolerance, "must be the operator itself")
    if size == 0.0:
        for exponent in (-1, -0.5, 0, 0.5, 2):
            _demand(not bool(op.power(exponent).to_dense().any()), f"power({exponent}) of zero must be zero")
        return
    unclear = (values.abs() > _SURELY_ZERO * size) & (values.abs() < _SURELY_POSITIVE * size)
    if bool(unclear.any()):
        return
    kept, vectors = torch.linalg.eigh(dense)
    positive = kept > _SURELY_POSITIVE * size
    for exponent in (-1, -0.5, 0, 0.5, 2, -0.25):
        # relative to the largest, so that very large and small operators stay in range
        powered = torch.where(positive, (kept / size).clamp_min(_SURELY_POSITIVE) ** exponent, torch.zeros_like(kept))
        expected = (vectors * powered) @ vectors.T * size**exponent
        meaning = "must be the pseudo-inverse" if exponent == -1 else "must be that of the dense matrix, on its range"
        # a small eigenvalue's relative error is the matrix's own, over it
        loss = size / float(kept[positive][0]) if exponent < 0 and bool(positive.any()) else 1.0
        made = op.power(exponent)
        _demand(tuple(made.shape) == tuple(op.shape), f"power({exponent}) must keep the shape")
        _close(f"power({exponent})", made.to_dense(), expected, tolerance * max(1.0, 1e-4 * loss), meaning)
        _close(
            f"power({exponent}).apply",
            made.apply(torch.eye(len(kept), dtype=torch.float64).view(-1, *op.shape)).flatten(1),
            expected,
            tolerance * max(1.0, 1e-4 * loss),
            "must agree with its to_dense()",
        )


def _companions(shape: tuple[int, int], seed: int) -> list[Operator]:
    """One operator of each kind to take inner products with."""
    m, n = shape
    generator = torch.Generator().manual_seed(seed + 1)
    left, right = (torch.randn(d, d, dtype=torch.float64, generator=generator) for d in shape)
    bases = [torch.linalg.qr(matrix).Q for matrix in (left, right)]
    table = torch.rand(m, n, dtype=torch.float64, generator=generator)
    return [
        Identity(shape, 0.5),
        KroneckerProduct(left @ left.T, right @ right.T, 0.3),
        EigenbasisDiagonal(bases[0], bases[1], table),
        Diagonal(table),
        KroneckerSum([(0.7, left + left.T, right + right.T), (0.2, left - left.T, right - right.T)]),
    ]


def _fitted(approximation: Approximation, chunks: Sequence[Atoms]) -> Operator | None:
    """Fit to a new stream, whose memory of earlier results is empty; None if it is refused."""
    try:
        return approximation.fit(chunked(*chunks))
    except (ConvergenceError, NotFactoredError):
        return None


def _dense_fit(approximation: Approximation, chunks: Sequence[Atoms]) -> Tensor:
    op = _fitted(approximation, chunks)
    if op is None:
        raise ConformanceError("the same atoms in other chunks, another order or another scale were refused")
    return op.to_dense()


def _scaled(chunk: Atoms, factor: float) -> Atoms:
    if isinstance(chunk, DenseAtoms):
        return replace(chunk, grads=factor * chunk.grads)
    return replace(chunk, row_factors=factor * chunk.row_factors)


def _tensors(chunk: Atoms) -> list[Tensor]:
    own = [chunk.row_factors, chunk.col_factors] if isinstance(chunk, FactoredAtoms) else [chunk.grads]
    return [*own, chunk.weights, chunk.samples]


def _demand(condition: bool, text: str) -> None:
    if not condition:
        raise ConformanceError(f"{text}.")


def _close(what: str, got: Tensor, expected: Tensor, tolerance: float, meaning: str) -> None:
    _demand(got.shape == expected.shape, f"{what} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    scale = float(expected.double().norm())
    error = float((got.double() - expected.double()).norm())
    # written so that NaN fails
    _demand(error <= tolerance * scale, f"{what} {meaning}: it is off by {error:.1e}, {tolerance * scale:.1e} allowed")


def _near(what: str, got: float, expected: float, allowed: float) -> None:
    _demand(abs(got - expected) <= allowed, f"{what} is {got}, but the dense matrix gives {expected}")


def _must_raise(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError:
        return
    raise ConformanceError(f"{what} must raise ShapeError (or another ValueError), and did not.")
