r"""The matrix of several layers together: how large its blocks are, on the diagonal and beside it.

With :math:`G^a_{ic}` the gradient of layer a for column c of sample i, the block of layers a and b is
:math:`H_{ab} = \sum_i w_i \sum_c \operatorname{vec}(G^a_{ic}) \operatorname{vec}(G^b_{ic})^\top`, and

.. math:: \|H_{ab}\|_F^2
          = \sum_{ij} w_i w_j \sum_{cd} \langle G^a_{ic}, G^a_{jd}\rangle \langle G^b_{ic}, G^b_{jd}\rangle .
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kronscope.curvature.columns import inner_products
from kronscope.curvature.second_moment import SecondMoment
from kronscope.errors import DataError
from kronscope.gradients.atoms import Atoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream

__all__ = ["block_squares"]

# Entries of the largest intermediate of a tile, and bytes of whole gradients of one layer in it.
_TILE_ENTRIES = 8 << 20
_FORMED_BYTES = 128 << 20


def block_squares(streams: Sequence[GradientStream]) -> Tensor:
    r"""Return the table of :math:`\|H_{ab}\|_F^2` (k, k) of k layers; its sum is the squared norm of the whole matrix.

    Args:
        streams: The gradients of each layer, for the same samples and the same columns, in memory of one process.

    Raises:
        DataError: the streams are not of the same samples and columns.

    >>> grads = torch.tensor([[[1.0, 2.0]], [[0.0, 1.0]]])
    >>> layers = [GradientStream.from_tensors(grads[..., :1]), GradientStream.from_tensors(grads[..., 1:])]
    >>> float(block_squares(layers).sum()) == SecondMoment(GradientStream.from_tensors(grads)).norm_squared()
    True
    """
    layers = [_Layer(stream) for stream in streams]
    first = streams[0]
    for stream in streams[1:]:
        if (stream.num_samples, stream.columns) != (first.num_samples, first.columns):
            raise DataError(
                f"the layers must have the same samples and columns, got {first.num_samples} x {first.columns} and "
                f"{stream.num_samples} x {stream.columns}."
            )
    most = min(layer.most for layer in layers)
    edges = sorted({edge for layer in layers for edge in layer.edges})
    blocks = [(at, min(at + most, high)) for low, high in itertools.pairwise(edges) for at in range(low, high, most)]
    total = torch.zeros(len(layers), len(layers), dtype=torch.float64)
    for place, block in enumerate(blocks):
        own = [layer.block(block) for layer in layers]
        for other in blocks[place:]:
            both = own if other == block else [layer.block(other) for layer in layers]
            products = torch.stack([_gram(one, two) for one, two in zip(own, both, strict=True)])
            weighted = products * _weights(own[0])[:, None] * _weights(both[0])
            total += (1 if other == block else 2) * (weighted.flatten(1) @ products.flatten(1).T).cpu()
    return total


class _Layer:
    """One layer's chunks, by the numbers of their samples."""

    def __init__(self, stream: GradientStream) -> None:
        self.chunks = list(stream)
        self.edges = [int(chunk.samples[0]) for chunk in self.chunks] + [stream.num_samples]
        factored = SecondMoment(stream).plan().gram == "factored"
        self.form = factored and all(isinstance(chunk, FactoredAtoms) for chunk in self.chunks)
        columns, (m, n) = stream.columns, stream.shape
        positions = max((chunk.positions for chunk in self.chunks if isinstance(chunk, FactoredAtoms)), default=1)
        width = int(_TILE_ENTRIES**0.5) // (positions if self.form else 1)
        width = width if self.form else min(width, _FORMED_BYTES // (8 * m * n))
        # samples of a tile
        self.most = max(1, width // columns)

    def block(self, samples: tuple[int, int]) -> Atoms:
        """The atoms of samples that lie within one chunk."""
        for first, last, chunk in zip(self.edges, self.edges[1:], self.chunks, strict=True):
            if first <= samples[0] and samples[1] <= last:
                part = chunk.part(samples[0] - first, samples[1] - first)
                return part if self.form else part.dense()
        raise DataError(f"no chunk has the samples {samples[0]} to {samples[1]}.")


def _gram(first: Atoms, second: Atoms) -> Tensor:
    """Inner products (k·c, j·d) in float64."""
    products = inner_products(first, second, narrow=False).double()
    return products.reshape(len(first.weights) * first.columns, -1)


def _weights(atoms: Atoms) -> Tensor:
    return atoms.weights.repeat_interleave(atoms.columns)
