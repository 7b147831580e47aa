"""K-FAC for layers that share weights, in its two variants, and E-KFAC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronscope.approx.registry import register
from kronscope.curvature import SecondMoment
from kronscope.curvature.chunks import bounded_factors
from kronscope.errors import NotFactoredError
from kronscope.gradients.atoms import FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import EigenbasisDiagonal, KroneckerProduct, PsdFactor, mode_gram

__all__ = ["EigenvalueCorrectedKfac", "KfacExpand", "KfacReduce", "summed_positions"]


@register
@dataclass(frozen=True)
class KfacReduce:
    r"""K-FAC *reduce*: inputs and output gradients are summed over the positions of a sample before the outer products.

    Positions are the places where one sample uses the same weight: the tokens of a sequence, the pixels of a
    convolution. With the inputs :math:`a_t` and the output gradients :math:`b_{ct}` at position t (c counts label
    columns),

    .. math:: K = \Big(\sum w \sum_c \bar b_c \bar b_c^\top\Big) \otimes \Big(\sum w\, \bar a \bar a^\top\Big), \qquad
              \bar b = \sum_t b_t, \quad \bar a = \sum_t a_t .

    This is the variant the paper uses. The groups of a convolution and repeated uses of one weight count as further
    positions. A weight that serves as embedding and as head has inputs and gradients on both sides; there, an input
    counts once, however many label columns there are.

    >>> import torch, kronscope as ks
    >>> draw = torch.Generator().manual_seed(0)
    >>> output_gradients = torch.randn(50, 2, 3, generator=draw)  # 50 samples, 2 positions, 3 outputs
    >>> inputs = torch.randn(50, 2, 4, generator=draw)
    >>> stream = ks.GradientStream.from_factors(output_gradients, inputs)
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("kfac-reduce").fit(stream)), 3)
    0.657
    """

    name: ClassVar[str] = "kfac-reduce"
    title: ClassVar[str] = "K-FAC (reduce)"
    kronecker: ClassVar[bool] = True
    uses_batches: ClassVar[bool] = False

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment.

        Raises:
            NotFactoredError: the stream has whole gradients only.
        """
        return KroneckerProduct(*kfac_factors(stream, reduce=True))


@register
@dataclass(frozen=True)
class KfacExpand:
    r"""K-FAC *expand*: every position counts as a sample of its own.

    .. math:: K = \Big(\sum w \sum_{c,t} b_{ct} b_{ct}^\top\Big) \otimes \Big(\sum w \sum_t a_t a_t^\top\Big) .

    The symbols are those of :class:`KfacReduce`. Both variants agree where a sample uses the weight only once.

    >>> import torch, kronscope as ks
    >>> draw = torch.Generator().manual_seed(0)
    >>> output_gradients = torch.randn(50, 2, 3, generator=draw)  # 50 samples, 2 positions, 3 outputs
    >>> inputs = torch.randn(50, 2, 4, generator=draw)
    >>> stream = ks.GradientStream.from_factors(output_gradients, inputs)
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("kfac-expand").fit(stream)), 3)
    0.756
    """

    name: ClassVar[str] = "kfac-expand"
    title: ClassVar[str] = "K-FAC (expand)"
    kronecker: ClassVar[bool] = True
    uses_batches: ClassVar[bool] = False

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment.

        Raises:
            NotFactoredError: the stream has whole gradients only.
        """
        return KroneckerProduct(*kfac_factors(stream, reduce=False))


@register
@dataclass(frozen=True)
class EigenvalueCorrectedKfac:
    """E-KFAC: the diagonal of H in the eigenbasis of K-FAC *expand*.

    The basis of *reduce* would not do: it is arbitrary on the null space of its factors, where H need not vanish.

    >>> import torch, kronscope as ks
    >>> draw = torch.Generator().manual_seed(0)
    >>> output_gradients = torch.randn(50, 2, 3, generator=draw)  # 50 samples, 2 positions, 3 outputs
    >>> inputs = torch.randn(50, 2, 4, generator=draw)
    >>> stream = ks.GradientStream.from_factors(output_gradients, inputs)
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("ekfac").fit(stream)), 3)
    0.843
    """

    name: ClassVar[str] = "ekfac"
    title: ClassVar[str] = "E-KFAC"
    uses_batches: ClassVar[bool] = False

    def fit(self, stream: GradientStream) -> EigenbasisDiagonal:
        """Fit the operator to the stream's second moment.

        Raises:
            NotFactoredError: the stream has whole gradients only.
        """
        left, right = (factor.spectrum.vectors for factor in kfac_factors(stream, reduce=False))
        return EigenbasisDiagonal(left, right, SecondMoment(stream).table(left, right))


def kfac_factors(stream: GradientStream, *, reduce: bool) -> tuple[PsdFactor, PsdFactor]:
    """Return K-FAC's two factors, computed once for a stream."""
    key = ("kfac", reduce)
    if key not in stream.memo:
        m, n = stream.shape
        left, right, total = stream.sums(lambda: _moments(stream, reduce), [(m, m), (n, n), ()])
        # an average over samples on one side, so that K is of the first degree in the weights, as H is
        stream.memo[key] = (PsdFactor(left), PsdFactor(right / total if float(total) > 0 else right))
    factors: tuple[PsdFactor, PsdFactor] = stream.memo[key]
    return factors


def _moments(stream: GradientStream, reduce: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides' moments, and the weight they are made of."""
    m, n = stream.shape
    left, right = torch.zeros(m, m, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    total = 0.0
    for atoms in _factored_parts(stream):
        inputs = torch.tensor(atoms.row_inputs, dtype=torch.bool, device=atoms.weights.device)
        sides = ((atoms.row_factors, inputs), (atoms.col_factors, ~inputs))
        moments = [_both_ways(side, known, atoms.weights, reduce, stream.draws) for side, known in sides]
        left, right = left.to(moments[0]) + moments[0], right.to(moments[1]) + moments[1]
        both = 1 if len(inputs) else min(atoms.row_factors.shape[1], atoms.col_factors.shape[1])
        total += float(atoms.weights.sum()) * both
    return left, right, torch.tensor(total, dtype=torch.float64)


def _factored_parts(stream: GradientStream) -> Iterator[FactoredAtoms]:
    """Iterate a stream's chunks, cut so that float64 copies of them are small."""
    for atoms in stream:
        if not isinstance(atoms, FactoredAtoms):
            raise NotFactoredError(
                "K-FAC needs each sample's inputs and output gradients, but here there are whole gradients only (a "
                "layer that is captured whole, or a training run's batch gradients)."
            )
        yield from bounded_factors(atoms)


def _both_ways(factors: Tensor, inputs: Tensor, weights: Tensor, reduce: bool, draws: bool) -> Tensor:
    """One side's moment where some positions hold inputs and the others gradients, as of a tied embedding and head.

    Inputs count once however many columns the gradients have. Under exact labels a product of an input and a gradient
    has mean zero; each of several draws is a sample of its own, inputs included.
    """
    columns = factors.shape[1]
    if not len(inputs) or columns == 1:
        return _side(factors, weights, reduce)
    if draws:
        scale = 1.0 + (columns**-0.5 - 1.0) * inputs.double()
        return _side(factors * scale.view(1, 1, -1, 1), weights, reduce)
    once = factors[:, :1, inputs], factors[:, :, ~inputs]
    return _side(once[0], weights, reduce) + _side(once[1], weights, reduce)


def _side(factors: Tensor, weights: Tensor, reduce: bool) -> Tensor:
    wide = summed_positions(factors) if reduce else factors.double()
    return mode_gram(wide.flatten(1, 2), weights, mode=1)


def summed_positions(factors: Tensor) -> Tensor:
    """Add up factors (k, c, t, d) over positions: (k, c, 1, d), in float64.

    Args:
        factors: Inputs or output gradients.
    """
    wide = factors.double()
    if factors.shape[2] == 1:
        return wide
    summed = wide.sum(2, keepdim=True)
    # a sum that vanishes over positions, as of the gradients of attention keys, leaves rounding: take it for zero
    size = wide.abs().sum(2, keepdim=True)
    noise = 16 * torch.finfo(factors.dtype).eps
    return torch.where(summed.abs() > noise * size.amax(3, keepdim=True), summed, 0.0)
