r"""A matrix that differs from another one by rounding and costs far less: what a search can be done with.

The gradient of a batch of few samples or tokens has few singular values that are not rounding, so that it is a product
of two thin factors. Where it is not, float32 products still take half the time of float64 ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronscope.curvature.chunks import chunks_from
from kronscope.curvature.pairs import safe_in_float32
from kronscope.curvature.second_moment import SecondMoment
from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream

__all__ = ["nearby"]

# Multiply-adds of a contraction below which there is nothing worth saving (about a second).
_WORTH = 3e10
# A gradient's rank, at most this share of its smaller side, and how many gradients are looked at to guess it.
_THIN_SHARE = 0.25
_LOOKED_AT = 4
# Singular values below this share of the largest are rounding of float32, and what thin factors may leave out.
_ROUNDING, _LEFT_OUT = 1e-6, 1e-5
# More directions than the guess, so that a gradient of a somewhat higher rank is still caught.
_EXTRA = 8


def nearby(moment: SecondMoment) -> SecondMoment | None:
    """Return a matrix close to another one whose contractions are much cheaper, or None where there is none.

    Args:
        moment: The matrix; only its contractions are close, not what depends on its columns one by one.
    """
    stream = moment.stream
    if stream.processes.world_size > 1 or stream.random_columns or moment.contraction_cost() < _WORTH:
        return None
    if not all(safe_in_float32(atoms) for atoms in stream):
        return None
    if moment.plan().contraction == "dense":
        thin = _thin(stream)
        if thin is not None:
            return SecondMoment(thin)
    return SecondMoment(_again(stream), narrow=True)


def _again(stream: GradientStream) -> GradientStream:
    """The same gradients, of which nothing is remembered."""
    other = GradientStream(
        lambda: iter(stream), stream.shape, stream.num_samples, stream.columns, in_memory=stream.in_memory
    )
    other.keep_bytes = stream.keep_bytes
    return other


def _thin(stream: GradientStream) -> GradientStream | None:
    """The gradients as products of thin factors; None where one of them is not."""
    chunks: list[Atoms] = []
    rank = 0
    for atoms in chunks_from(stream, factored=False)(0):
        assert isinstance(atoms, DenseAtoms)
        if not rank:
            rank = _rank(atoms)
            if rank > _THIN_SHARE * min(stream.shape):
                return None
        found = _factored(atoms, rank)
        if found is None:
            return None
        chunks.append(found)
    return GradientStream.of_chunks(*chunks) if chunks else None


def _rank(atoms: DenseAtoms) -> int:
    """The largest rank of a few gradients, and some more."""
    flat = atoms.grads.flatten(0, 1)
    some = flat[torch.linspace(0, len(flat) - 1, min(_LOOKED_AT, len(flat))).long()]
    values = torch.linalg.svdvals(some.double())
    return int((values > _ROUNDING * values[:, :1]).sum(1).max()) + _EXTRA


def _factored(atoms: DenseAtoms, rank: int) -> FactoredAtoms | None:
    """Factors of a rank, found from products with random vectors; None where they leave too much out."""
    grads = atoms.grads
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(grads.shape[3], rank, generator=generator).to(grads)
    basis = torch.linalg.qr(grads @ probes).Q  # (k, c, m, r)
    rest = basis.mT @ grads
    if not _near(basis, rest, grads):
        return None
    return FactoredAtoms(basis.mT.contiguous(), rest, atoms.weights, atoms.samples)


def _near(basis: Tensor, rest: Tensor, grads: Tensor) -> bool:
    for q, a, g in zip(basis, rest, grads, strict=True):
        error = (g - q @ a).flatten(1).norm(dim=1)
        if not bool((error <= _LEFT_OUT * g.flatten(1).norm(dim=1)).all()):
            return False
    return True
