r"""Pairs of samples, summed up sample by sample: how much of a matrix's norm each sample makes."""

from __future__ import annotations

import torch
from torch import Tensor

from kronscope.curvature.chunk_pairs import over_pairs
from kronscope.curvature.chunks import chunks_from
from kronscope.curvature.pairs import pair_squares
from kronscope.curvature.second_moment import SecondMoment
from kronscope.gradients.atoms import Atoms

__all__ = ["sample_pairs"]


def sample_pairs(moment: SecondMoment, groups: Tensor) -> Tensor:
    r"""Add up the squared inner products that each sample has with the others of every group.

    Args:
        moment: The matrix.
        groups: Group (N,) of each sample, 0 to K-1.

    Returns:
        :math:`\sum_{j \neq i,\, j \in k} w_j S_{ij}` (N, K) with
        :math:`S_{ij} = \sum_{cd}\langle G_{ic}, G_{jd}\rangle^2`, in float64, in the order of the samples' numbers.

    >>> from kronscope.gradients.stream import GradientStream
    >>> stream = GradientStream.from_tensors(torch.tensor([[[1.0]], [[2.0]], [[1.0]]]), torch.ones(3))
    >>> sample_pairs(SecondMoment(stream), torch.tensor([0, 1, 0])).tolist()
    [[1.0, 4.0], [8.0, 0.0], [1.0, 4.0]]
    """
    members = torch.nn.functional.one_hot(groups).double()
    found = _from_kernels(moment, members)
    return _from_chunks(moment, members) if found is None else found


def _from_kernels(moment: SecondMoment, members: Tensor) -> Tensor | None:
    kernels = moment.kernels()
    if kernels is None:
        return None
    rows, cols, weights = kernels
    # kernels are in the order of the chunks
    numbers = torch.cat([chunk.samples for chunk in moment.stream]).cpu()
    pairs = (rows * cols).fill_diagonal_(0)
    found = torch.zeros_like(members)
    found[numbers] = (pairs @ (weights[:, None] * members[numbers].to(weights.device))).cpu()
    return found


def _from_chunks(moment: SecondMoment, members: Tensor) -> Tensor:
    stream = moment.stream
    factored = moment.plan().gram == "factored"

    def local() -> Tensor:
        found = torch.zeros_like(members)

        def add(first: Atoms, second: Atoms, same: bool) -> None:
            squares = pair_squares(first, second).cpu()
            one, two = first.samples.cpu(), second.samples.cpu()
            if same:
                squares.fill_diagonal_(0)
            else:
                found[two] += squares.T @ (first.weights.cpu()[:, None] * members[one])
            found[one] += squares @ (second.weights.cpu()[:, None] * members[two])

        over_pairs(lambda: chunks_from(stream, factored=factored), add, stream.processes)
        return found

    return stream.summed(local, members.shape)
