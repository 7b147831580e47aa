r"""Symmetric operators on (m, n) matrices: what is measured against a curvature matrix and what an optimizer applies.

All of them act on :math:`\operatorname{vec}(G)` with torch's row-major ``flatten``, so that
:math:`(L \otimes R)\operatorname{vec}(G) = \operatorname{vec}(L G R^\top)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kronscope.errors import OptionError, ShapeError
from kronscope.kron.devices import has_float64, wide
from kronscope.kron.powers import PsdFactor, Spectrum, default_cutoff

__all__ = ["Diagonal", "EigenbasisDiagonal", "Identity", "KroneckerProduct", "KroneckerSum", "Operator"]

# The largest m*n for which a power may be taken through a dense eigendecomposition (4096² doubles are 128 MB).
_MAX_DENSE = 4096


@runtime_checkable
class Operator(Protocol):
    """A symmetric linear map on matrices of shape (m, n): what stands for a curvature matrix of size mn x mn.

    Fitted approximations and an optimizer's live preconditioner are operators, and anything with these members can be
    measured. :func:`kronscope.testing.check_operator` tests your own.

    >>> from kronscope.kron import KroneckerProduct
    >>> K = KroneckerProduct(torch.eye(2), torch.eye(3))
    >>> isinstance(K, Operator), K.shape, K.trace()
    (True, (2, 3), 6.0)
    """

    @property
    def shape(self) -> tuple[int, int]:
        """The (m, n) of the matrices it acts on."""
        ...

    def apply(self, matrix: Tensor) -> Tensor:
        """Map (..., m, n) to the same shape."""
        ...

    def norm(self) -> float:
        """Frobenius norm of the mn x mn matrix."""
        ...

    def trace(self) -> float:
        """Trace of the mn x mn matrix."""
        ...

    def power(self, exponent: float) -> Operator:
        """Return the operator to a real power; a negative power is one of the pseudo-inverse."""
        ...

    def inner(self, other: Operator) -> float:
        """Frobenius inner product with another operator of the same shape."""
        ...

    def to_dense(self) -> Tensor:
        """Return the mn x mn matrix."""
        ...


class KroneckerProduct:
    r"""The operator :math:`s\, L \otimes R`, which maps :math:`G` to :math:`s\, L G R^\top`; both factors are PSD.

    Args:
        left: The factor L (m, m).
        right: The factor R (n, n).
        scale: The number s.

    >>> K = KroneckerProduct(torch.diag(torch.tensor([1.0, 2.0])), torch.eye(3))
    >>> K.trace(), K.power(-1).trace()
    (9.0, 4.5)
    """

    def __init__(self, left: Tensor | PsdFactor, right: Tensor | PsdFactor, scale: float = 1.0) -> None:
        self.left = left if isinstance(left, PsdFactor) else PsdFactor(left)
        self.right = right if isinstance(right, PsdFactor) else PsdFactor(right)
        self.scale = float(scale)

    @property
    def shape(self) -> tuple[int, int]:
        """The (m, n) of the matrices it acts on."""
        return self.left.size, self.right.size

    def apply(self, matrix: Tensor) -> Tensor:
        """Map (..., m, n) to :math:`s L G R^T`."""
        matrix = _checked(matrix, self.shape)
        left, right = self.left.matrix.to(matrix), self.right.matrix.to(matrix)
        return self.scale * (left @ matrix @ right.mT)

    def norm(self) -> float:
        """Frobenius norm, the product of the factors' norms."""
        return abs(self.scale) * self.left.norm() * self.right.norm()

    def trace(self) -> float:
        """Trace, the product of the factors' traces."""
        return self.scale * self.left.trace() * self.right.trace()

    def power(self, exponent: float) -> KroneckerProduct:
        """Return the operator to a real power; both factors stay in their eigenbases.

        Raises:
            OptionError: the scale is negative and the exponent is not a whole number.
        """
        if self.scale < 0 and exponent != int(exponent):
            raise OptionError(f"a Kronecker product with scale {self.scale} has no real power {exponent}.")
        scale = 0.0 if self.scale == 0 else self.scale**exponent
        return KroneckerProduct(self.left.power(exponent), self.right.power(exponent), scale)

    def inner(self, other: Operator) -> float:
        """Frobenius inner product."""
        return _inner(self, other)

    def to_dense(self) -> Tensor:
        """Return the mn x mn matrix."""
        # torch.kron refuses one transposed and one contiguous argument
        return self.scale * torch.kron(self.left.matrix.contiguous(), self.right.matrix.contiguous())

    def eigenvalues(self) -> Tensor:
        """Return the (m, n) table of eigenvalues in the factors' eigenbases."""
        return self.scale * torch.outer(self.left.spectrum.values, self.right.spectrum.values)


class EigenbasisDiagonal:
    r"""An operator that is diagonal in a Kronecker basis, as those of SOAP and E-KFAC are.

    It maps :math:`G` to :math:`Q_L (\kappa \circ Q_L^\top G Q_R) Q_R^\top`, where :math:`\circ` is the elementwise
    product.

    Args:
        left: Orthonormal :math:`Q_L` (m, m), or None for the identity.
        right: Orthonormal :math:`Q_R` (n, n), or None for the identity.
        values: The table :math:`\kappa` (m, n).

    >>> E = EigenbasisDiagonal(None, None, torch.tensor([[1.0, 4.0]]))
    >>> E.apply(torch.ones(1, 2)), E.power(-0.5).apply(torch.ones(1, 2))
    (tensor([[1., 4.]]), tensor([[1.0000, 0.5000]]))
    """

    def __init__(self, left: Tensor | None, right: Tensor | None, values: Tensor) -> None:
        if values.ndim != 2:
            raise ShapeError(f"the table of eigenvalues is (m, n), got {tuple(values.shape)}.")
        for side, basis, size in (("left", left, values.shape[0]), ("right", right, values.shape[1])):
            if basis is not None and basis.shape != (size, size):
                raise ShapeError(f"the {side} basis must be {(size, size)} for this table, got {tuple(basis.shape)}.")
        self.left, self.right, self.values = left, right, values

    @property
    def shape(self) -> tuple[int, int]:
        """The (m, n) of the matrices it acts on."""
        return self.values.shape[0], self.values.shape[1]

    def apply(self, matrix: Tensor) -> Tensor:
        """Map (..., m, n) to the same shape."""
        matrix = _checked(matrix, self.shape)
        left = None if self.left is None else self.left.to(matrix)
        right = None if self.right is None else self.right.to(matrix)
        inside = matrix if left is None else left.T @ matrix
        inside = inside if right is None else inside @ right
        inside = inside * self.values.to(matrix)
        inside = inside if left is None else left @ inside
        return inside if right is None else inside @ right.T

    def norm(self) -> float:
        """Frobenius norm."""
        return float(torch.linalg.vector_norm(self.values))

    def trace(self) -> float:
        """Trace."""
        return float(self.values.sum())

    def power(self, exponent: float) -> EigenbasisDiagonal:
        """Return the operator to a real power; entries that are zero up to rounding stay zero."""
        values = self.values
        cutoff = default_cutoff(max(values.shape), values.dtype)
        values = torch.where(values > cutoff * values.amax(), values, torch.zeros_like(values))
        return EigenbasisDiagonal(self.left, self.right, Spectrum(values, values).powered(exponent))

    def inner(self, other: Operator) -> float:
        """Frobenius inner product."""
        return _inner(self, other)

    def to_dense(self) -> Tensor:
        """Return the mn x mn matrix."""
        m, n = self.shape
        eye = {size: torch.eye(size, dtype=self.values.dtype, device=self.values.device) for size in (m, n)}
        left = eye[m] if self.left is None else self.left
        right = eye[n] if self.right is None else self.right
        basis = torch.kron(left.contiguous(), right.contiguous())
        return (basis * self.values.flatten()) @ basis.T

    def eigenvalues(self) -> Tensor:
        """Return the (m, n) table of eigenvalues."""
        return self.values


class Diagonal(EigenbasisDiagonal):
    """A diagonal operator, as Adam's is: the elementwise product with ``values``.

    Args:
        values: The diagonal as a table (m, n).

    >>> Diagonal(torch.tensor([[1.0, 4.0]])).power(-0.5).apply(torch.ones(1, 2))
    tensor([[1.0000, 0.5000]])
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__(None, None, values)

    def power(self, exponent: float) -> Diagonal:
        """Return the operator to a real power; entries that are zero up to rounding stay zero."""
        return Diagonal(super().power(exponent).values)


class Identity:
    """A multiple of the identity on (m, n) matrices: what plain gradient descent stands for.

    Args:
        shape: The (m, n) of the matrices it acts on.
        scale: The multiple.

    >>> Identity((2, 3), 0.5).trace(), Identity((2, 3), 0.5).apply(torch.ones(2, 3)).sum()
    (3.0, tensor(3.))
    """

    def __init__(self, shape: tuple[int, int], scale: float = 1.0) -> None:
        self._shape = (int(shape[0]), int(shape[1]))
        self.scale = float(scale)

    @property
    def shape(self) -> tuple[int, int]:
        """The (m, n) of the matrices it acts on."""
        return self._shape

    def apply(self, matrix: Tensor) -> Tensor:
        """Map (..., m, n) to a multiple of itself."""
        return self.scale * _checked(matrix, self.shape)

    def norm(self) -> float:
        """Frobenius norm."""
        return abs(self.scale) * math.sqrt(self.shape[0] * self.shape[1])

    def trace(self) -> float:
        """Trace."""
        return self.scale * self.shape[0] * self.shape[1]

    def power(self, exponent: float) -> Identity:
        """Return the operator to a real power; zero stays zero."""
        return Identity(self.shape, self.scale**exponent if self.scale > 0 else 0.0)

    def inner(self, other: Operator) -> float:
        """Frobenius inner product."""
        return _inner(self, other)

    def to_dense(self) -> Tensor:
        """Return the mn x mn matrix."""
        return self.scale * torch.eye(self.shape[0] * self.shape[1], dtype=torch.float64)


class KroneckerSum:
    r"""A sum of Kronecker products, :math:`\sum_k \sigma_k U_k \otimes V_k`.

    The factors need not be PSD (of a best fit, only the first pair is: Lemma 6 of the paper), nor even symmetric: a
    best fit may pair two antisymmetric factors, whose product is symmetric again.

    Args:
        terms: Triples (sigma, U (m, m), V (n, n)).

    >>> first = (2.0, torch.eye(2), torch.eye(3))
    >>> both = KroneckerSum([first, (1.0, torch.eye(2), torch.diag(torch.tensor([1.0, 0.0, 0.0])))])
    >>> both.trace(), both.shape
    (14.0, (2, 3))
    """

    def __init__(self, terms: Sequence[tuple[float, Tensor, Tensor]]) -> None:
        if not terms:
            raise ShapeError("a Kronecker sum needs at least one term.")
        shapes = {(left.shape[0], right.shape[0]) for _, left, right in terms}
        if len(shapes) != 1:
            raise ShapeError(f"the terms of a Kronecker sum must have one shape, got {sorted(shapes)}.")
        self.terms = tuple(terms)

    @property
    def shape(self) -> tuple[int, int]:
        """The (m, n) of the matrices it acts on."""
        _, left, right = self.terms[0]
        return left.shape[0], right.shape[0]

    def apply(self, matrix: Tensor) -> Tensor:
        """Map (..., m, n) to the same shape."""
        matrix = _checked(matrix, self.shape)
        out = torch.zeros_like(matrix)
        for sigma, left, right in self.terms:
            out = out + sigma * (left.to(matrix) @ matrix @ right.to(matrix).mT)
        return out

    def norm(self) -> float:
        """Frobenius norm."""
        return math.sqrt(max(self.inner(self), 0.0))

    def trace(self) -> float:
        """Trace."""
        return sum(s * float(left.diagonal().sum() * right.diagonal().sum()) for s, left, right in self.terms)

    def power(self, exponent: float) -> EigenbasisDiagonal | KroneckerSum:
        """Return the operator to a real power, through a dense eigendecomposition.

        Eigenvalues that are not positive, which a truncated sum can have, are left out, as in a pseudo-inverse.

        Raises:
            OptionError: m*n is above 4096; a sum of Kronecker products has no cheap power.
        """
        if exponent == 1:
            return self
        m, n = self.shape
        if m * n > _MAX_DENSE:
            raise OptionError(
                f"a power of a Kronecker sum needs a dense {m * n} x {m * n} eigendecomposition, which is done up to "
                f"{_MAX_DENSE}; use a Kronecker product (rank 1) or an eigenvalue-corrected approximation instead."
            )
        spectrum = Spectrum.of(self.to_dense())
        # as an operator on 1 x mn matrices reshaped back: one dense basis on the flattened space
        return _DenseSpectral(spectrum.vectors, spectrum.powered(exponent), self.shape)

    def inner(self, other: Operator) -> float:
        """Frobenius inner product."""
        return _inner(self, other)

    def to_dense(self) -> Tensor:
        """Return the mn x mn matrix."""
        dense = [s * torch.kron(left.contiguous(), right.contiguous()) for s, left, right in self.terms]
        return torch.stack(dense).sum(0)


class _DenseSpectral(EigenbasisDiagonal):
    """A dense symmetric operator held by its eigenvectors; only powers of Kronecker sums need it."""

    def __init__(self, vectors: Tensor, values: Tensor, shape: tuple[int, int]) -> None:
        super().__init__(None, vectors, values.view(1, -1))
        self._matrix_shape = shape

    @property
    def shape(self) -> tuple[int, int]:
        return self._matrix_shape

    def apply(self, matrix: Tensor) -> Tensor:
        matrix = _checked(matrix, self.shape)
        flat = matrix.flatten(-2).unsqueeze(-2)
        basis = EigenbasisDiagonal(None, self.right, self.values)
        return basis.apply(flat).reshape(matrix.shape)

    def power(self, exponent: float) -> _DenseSpectral:
        powered = EigenbasisDiagonal(None, self.right, self.values).power(exponent)
        assert self.right is not None
        return _DenseSpectral(self.right, powered.values.flatten(), self.shape)

    def inner(self, other: Operator) -> float:
        _check_same_shape(self, other)
        return _dense_inner(self.to_dense(), other)

    def to_dense(self) -> Tensor:
        assert self.right is not None
        return (self.right * self.values.flatten()) @ self.right.T


def _checked(matrix: Tensor, shape: tuple[int, int]) -> Tensor:
    if matrix.shape[-2:] != shape:
        raise ShapeError(f"this operator acts on (..., {shape[0]}, {shape[1]}), got {tuple(matrix.shape)}.")
    return matrix


def _check_same_shape(first: Operator, second: Operator) -> None:
    if first.shape != second.shape:
        raise ShapeError(f"the operators act on different shapes: {first.shape} and {second.shape}.")


def _inner(first: Operator, second: Operator) -> float:
    """Inner product by the cheapest closed form; of operators of other kinds only the dense matrix is asked for."""
    _check_same_shape(first, second)
    for one, two in ((first, second), (second, first)):
        if isinstance(one, Identity):
            return one.scale * two.trace()
        if isinstance(one, KroneckerSum):
            return sum(s * _inner_product(left, right, two) for s, left, right in one.terms)
        if isinstance(one, KroneckerProduct):
            return one.scale * _inner_product(one.left.matrix, one.right.matrix, two)
    if type(first) in (EigenbasisDiagonal, Diagonal) and type(second) in (EigenbasisDiagonal, Diagonal):
        assert isinstance(first, EigenbasisDiagonal)
        assert isinstance(second, EigenbasisDiagonal)
        left = _overlap(first.left, second.left, first.shape[0], first.values)
        right = _overlap(first.right, second.right, first.shape[1], first.values)
        values, others = wide(first.values), wide(second.values).to(left.device)
        return float((values * (left @ others @ right.T)).sum())
    return _dense_inner(first.to_dense(), second)


def _dense_inner(dense: Tensor, other: Operator) -> float:
    """Inner product of a dense matrix with an operator, which may be elsewhere."""
    found = other.to_dense()
    if found.device != dense.device:
        dense = wide(dense)
        found = wide(found).to(dense.device)
    return float((dense * found).sum())


def _inner_product(left: Tensor, right: Tensor, other: Operator) -> float:
    """Inner product of ``left`` ⊗ ``right`` with an operator."""
    if isinstance(other, KroneckerSum):
        return sum(
            s * float((left * other_left.to(left.device)).sum() * (right * other_right.to(right.device)).sum())
            for s, other_left, other_right in other.terms
        )
    if isinstance(other, KroneckerProduct):
        other_left, other_right = other.left.matrix.to(left.device), other.right.matrix.to(right.device)
        return other.scale * float((left * other_left).sum() * (right * other_right).sum())
    if type(other) in (EigenbasisDiagonal, Diagonal):
        assert isinstance(other, EigenbasisDiagonal)
        rows, cols = _quadratic(left, other.left), _quadratic(right, other.right)
        return float(rows @ wide(other.values).to(rows.device) @ cols)
    if isinstance(other, Identity):
        return other.scale * float(left.diagonal().sum() * right.diagonal().sum())
    # a foreign operator: only its dense form is promised
    return _dense_inner(torch.kron(left.contiguous(), right.contiguous()), other)


def _quadratic(matrix: Tensor, basis: Tensor | None) -> Tensor:
    """Diagonal of a matrix in a basis, in float64."""
    if basis is None:
        return wide(matrix.diagonal())
    matrix = wide(matrix)
    basis = wide(basis).to(matrix.device)
    return (basis * (matrix @ basis)).sum(0)


def _overlap(first: Tensor | None, second: Tensor | None, size: int, like: Tensor) -> Tensor:
    """Squared entries of Q₁ᵀQ₂, the weights between two eigenbases, in float64."""
    eye = torch.eye(size, dtype=torch.float64, device=like.device if has_float64(like.device) else "cpu")
    one, two = (eye if basis is None else wide(basis).to(eye.device) for basis in (first, second))
    return (one.T @ two) ** 2
