r"""Powers of symmetric positive semi-definite matrices: the only code that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kronscope.errors import NonFiniteError, OptionError, ShapeError
from kronscope.kron.devices import on_host_if_missing
from kronscope.kron.triangles import symmetric_outer

__all__ = ["PsdFactor", "Spectrum", "default_cutoff", "psd_power"]


# Measured factors are float64 sums over many atoms, whose rounding grows with the root of their number: 2 x 2 factors
# of 5000 atoms had 13 eps where zero was due. Optimizers' float32 factors are sums of few terms and need every digit.
_MEASURED_CUTOFF = 1e-13
_NARROW_CUTOFF = 1e-6


def default_cutoff(size: int, dtype: torch.dtype) -> float:
    r"""Return the relative size below which an eigenvalue counts as rounding: :math:`d \cdot \epsilon`.

    In float64 it is at least 1e-13.

    Args:
        size: The number of rows d.
        dtype: The type whose machine precision is :math:`\epsilon`.

    Returns:
        The cutoff, relative to the largest eigenvalue.

    >>> default_cutoff(100, torch.float64)
    1e-13
    """
    cutoff = max(size, 1) * torch.finfo(dtype).eps
    return max(cutoff, _MEASURED_CUTOFF) if dtype == torch.float64 else cutoff


@dataclass(frozen=True)
class Spectrum:
    r"""The eigendecomposition :math:`A = Q \operatorname{diag}(\lambda) Q^\top` of symmetric PSD matrices.

    Attributes:
        values: Eigenvalues (..., d), never negative; those that are only rounding are exactly zero. Ascending when made
            by :meth:`of`.
        vectors: Orthonormal eigenvectors (..., d, d), one per column.

    >>> spectrum = Spectrum.of(torch.diag(torch.tensor([4.0, 0.0])))
    >>> spectrum.values, spectrum.rank, spectrum.powered(-0.5)
    (tensor([0., 4.]), 1, tensor([0.0000, 0.5000]))
    """

    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, matrix: Tensor, cutoff: float | None = None) -> Spectrum:
        """Decompose ``matrix``; eigenvalues below ``cutoff`` times the largest become exactly zero.

        Raises:
            ShapeError: ``matrix`` is not square.
            NonFiniteError: ``matrix`` contains NaN or infinity.
        """
        if matrix.ndim < 2 or matrix.shape[-2] != matrix.shape[-1]:
            raise ShapeError(
                f"a power needs a square matrix, got {tuple(matrix.shape)}; for a gradient call mode_gram first."
            )
        # a sum is twenty times quicker than looking at every entry, but may itself overflow
        if not bool(torch.isfinite(matrix.sum())) and not bool(torch.isfinite(matrix).all()):
            raise NonFiniteError(
                "cannot take a power of a matrix with NaN or infinity; check the gradients it is from."
            )
        return cls.decomposed(matrix, cutoff)

    @classmethod
    def decomposed(cls, matrix: Tensor, cutoff: float | None = None) -> Spectrum:
        """Do the same for square matrices that are known to be finite."""
        values, vectors = on_host_if_missing(torch.linalg.eigh, matrix)
        relative = default_cutoff(matrix.shape[-1], matrix.dtype) if cutoff is None else cutoff
        largest = values[..., -1:].clamp_min(0)
        return cls(torch.where(values > relative * largest, values, 0.0), vectors)

    @classmethod
    def narrow(cls, matrix: Tensor) -> Spectrum:
        """Decompose in float32, at about half the cost, a matrix that is itself known to a few digits only.

        Values and vectors are of the matrix's type. Eigenvalues below 1e-6 of the largest are rounding, and zero.
        """
        size = float(matrix.abs().max()) or 1.0
        # with many rows of zeros, as an embedding has, LAPACK's float32 often gives up or returns NaN; float64 does not
        try:
            found = cls.of((matrix / size).float(), _NARROW_CUTOFF)
        except RuntimeError:
            return cls.of(matrix, _NARROW_CUTOFF)
        if not bool(torch.isfinite(found.vectors.sum() + found.values.sum())):
            return cls.of(matrix, _NARROW_CUTOFF)
        return cls(found.values.to(matrix) * size, found.vectors.to(matrix))

    def powered(self, exponent: float) -> Tensor:
        """Return the eigenvalues to ``exponent``; zeros stay zero, also for exponents that are not positive."""
        return torch.where(self.values > 0, self.values**exponent, 0.0)

    @property
    def rank(self) -> int:
        """Number of eigenvalues that are not zero (of a single matrix)."""
        return int((self.values > 0).sum())

    def matrix(self) -> Tensor:
        """Return the matrix with this spectrum, symmetric to the last bit."""
        return symmetric_outer(self.vectors * self.values.unsqueeze(-2), self.vectors)


def psd_power(matrix: Tensor, exponent: float, *, cutoff: float | None = None) -> Tensor:
    r"""Raise a symmetric PSD matrix to a real power.

    With :math:`A = Q\Lambda Q^\top` (``matrix``) and :math:`p` (``exponent``),

    .. math:: A^p = Q \operatorname{diag}(\lambda_i^p) Q^\top ,

    where eigenvalues below ``cutoff`` times the largest count as zero, and stay zero for every power: negative powers
    are pseudo-inverses, and the power zero is the projector onto the range.

    Args:
        matrix: Symmetric PSD matrix (d, d).
        exponent: Any real number.
        cutoff: Relative cutoff; default :func:`default_cutoff`.

    Returns:
        The matrix :math:`A^p` (d, d).

    Raises:
        ShapeError: ``matrix`` is not square.
        NonFiniteError: ``matrix`` contains NaN or infinity.

    >>> psd_power(torch.diag(torch.tensor([4.0, 16.0])), -0.5).diagonal()
    tensor([0.5000, 0.2500])
    """
    spectrum = Spectrum.of(matrix, cutoff)
    return Spectrum(spectrum.powered(exponent), spectrum.vectors).matrix()


class PsdFactor:
    """One side of a Kronecker product: a PSD matrix whose eigendecomposition is computed when it is first needed.

    Powers of a factor share its eigenvectors, so that operators which are diagonal in the same basis are recognised.

    Args:
        matrix: Symmetric PSD matrix (d, d).
        narrow: Decompose in float32, for a matrix that is itself known to a few digits only.

    >>> factor = PsdFactor(torch.diag(torch.tensor([4.0, 1.0])))
    >>> factor.power(0.5).matrix.diagonal()
    tensor([2., 1.])
    """

    def __init__(self, matrix: Tensor, *, narrow: bool = False) -> None:
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ShapeError(f"a Kronecker factor is a square matrix, got {tuple(matrix.shape)}.")
        self.__dict__["matrix"] = matrix
        self._narrow = narrow

    @classmethod
    def of_spectrum(cls, spectrum: Spectrum) -> PsdFactor:
        """Make a factor from its eigendecomposition; the matrix is formed when first needed."""
        factor = cls.__new__(cls)
        factor.__dict__["spectrum"] = spectrum
        return factor

    @cached_property
    def matrix(self) -> Tensor:
        """The matrix itself."""
        return self.spectrum.matrix()

    @cached_property
    def spectrum(self) -> Spectrum:
        """The eigendecomposition, rank-revealing."""
        return Spectrum.narrow(self.matrix) if self._narrow else Spectrum.of(self.matrix)

    @property
    def is_decomposed(self) -> bool:
        """Whether the eigendecomposition has been computed already."""
        return "spectrum" in self.__dict__

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.matrix if "matrix" in self.__dict__ else self.spectrum.values)

    def power(self, exponent: float) -> PsdFactor:
        """Return the factor to a real power, in the same eigenbasis; one is the factor itself."""
        if exponent != exponent or exponent in (float("inf"), float("-inf")):
            raise OptionError(f"an exponent must be a finite number, got {exponent}.")
        if exponent == 1:
            return self
        powered = Spectrum(self.spectrum.powered(exponent), self.spectrum.vectors)
        return PsdFactor.of_spectrum(powered)

    def norm(self) -> float:
        """Frobenius norm."""
        if "matrix" in self.__dict__:
            return float(torch.linalg.matrix_norm(self.matrix))
        return float(torch.linalg.vector_norm(self.spectrum.values))

    def trace(self) -> float:
        """Trace."""
        if "matrix" in self.__dict__:
            return float(self.matrix.diagonal().sum())
        return float(self.spectrum.values.sum())
