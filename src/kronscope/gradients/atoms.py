r"""Gradient atoms: the weighted gradients of some samples, whole or as factors.

Every matrix kronscope looks at is
:math:`H = \sum_i w_i \sum_c \operatorname{vec}(G_{ic})\operatorname{vec}(G_{ic})^\top` over samples *i* and columns *c*
(one per class direction or label draw). A chunk of atoms holds :math:`w_i` and :math:`G_{ic}` of k samples, as whole
gradients (:class:`DenseAtoms`) or as factors (:class:`FactoredAtoms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Atoms", "DenseAtoms", "FactoredAtoms", "joined", "mixed"]


@dataclass(frozen=True)
class DenseAtoms:
    """Some samples of a stream, with every gradient as a whole matrix.

    Attributes:
        grads: Gradients (k, c, m, n): k samples with c columns each.
        weights: Weights (k,) of the samples, float64.
        samples: The samples' numbers (k,), counted in the order of the data.

    >>> from kronscope.gradients.stream import GradientStream
    >>> (chunk,) = GradientStream.from_tensors(torch.ones(4, 2, 3))
    >>> chunk.grads.shape, chunk.weights.tolist()
    (torch.Size([4, 1, 2, 3]), [0.25, 0.25, 0.25, 0.25])
    """

    grads: Tensor
    weights: Tensor
    samples: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The (m, n) of a gradient."""
        return self.grads.shape[2], self.grads.shape[3]

    @property
    def columns(self) -> int:
        """Columns of each sample."""
        return self.grads.shape[1]

    @property
    def numel(self) -> int:
        """Numbers that the gradients consist of."""
        return self.grads.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return self.grads.numel() * self.grads.element_size()

    def dense(self) -> DenseAtoms:
        """Return itself."""
        return self

    def part(self, start: int, stop: int) -> DenseAtoms:
        """Return samples ``start`` to ``stop`` of the chunk."""
        return DenseAtoms(self.grads[start:stop], self.weights[start:stop], self.samples[start:stop])

    def to(self, device: torch.device) -> DenseAtoms:
        """Return the chunk on a device."""
        return DenseAtoms(self.grads.to(device), self.weights.to(device), self.samples.to(device))

    def wide(self) -> DenseAtoms:
        """Return the chunk in float64."""
        return replace(self, grads=self.grads.double())


@dataclass(frozen=True)
class FactoredAtoms:
    r"""Some samples of a stream, with every gradient as a product :math:`G_{ic} = B_{ic}^\top A_{ic}` over t positions.

    Attributes:
        row_factors: :math:`B` (k, c or 1, t, m); for a linear layer the gradients of its outputs.
        col_factors: :math:`A` (k, c or 1, t, n); for a linear layer its inputs, shared by all columns.
        weights: Weights (k,) of the samples, float64.
        samples: The samples' numbers (k,), counted in the order of the data.
        row_inputs: Only for a weight that is used both ways, as a tied embedding and head is: for each position,
            whether its row factor is the layer's input and its column factor the gradient. Otherwise empty.

    >>> from kronscope.gradients.stream import GradientStream
    >>> (chunk,) = GradientStream.from_factors(torch.ones(4, 5, 2), torch.ones(4, 5, 3))
    >>> chunk.positions, chunk.dense().grads.shape
    (5, torch.Size([4, 1, 2, 3]))
    """

    row_factors: Tensor
    col_factors: Tensor
    weights: Tensor
    samples: Tensor
    row_inputs: tuple[bool, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The (m, n) of a gradient."""
        return self.row_factors.shape[3], self.col_factors.shape[3]

    @property
    def columns(self) -> int:
        """Columns of each sample."""
        return max(self.row_factors.shape[1], self.col_factors.shape[1])

    @property
    def positions(self) -> int:
        """Positions that share the weight, such as tokens, pixels of a convolution, or uses of a tied weight."""
        return self.row_factors.shape[2]

    @property
    def numel(self) -> int:
        """Numbers that the factors consist of."""
        return self.row_factors.numel() + self.col_factors.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return sum(f.numel() * f.element_size() for f in (self.row_factors, self.col_factors))

    def dense(self) -> DenseAtoms:
        """Form the gradients."""
        rows, cols = self.row_factors, self.col_factors
        if cols.shape[1] == 1 < rows.shape[1]:
            # one product for all columns of a sample: broadcasting would copy the shared side for each
            k, c, t, m = rows.shape
            grads = rows.permute(0, 1, 3, 2).reshape(k, c * m, t) @ cols.squeeze(1)
            return DenseAtoms(grads.view(k, c, m, -1), self.weights, self.samples)
        return DenseAtoms(rows.mT @ cols, self.weights, self.samples)

    def part(self, start: int, stop: int) -> FactoredAtoms:
        """Return samples ``start`` to ``stop`` of the chunk."""
        cut = slice(start, stop)
        return replace(
            self,
            row_factors=self.row_factors[cut],
            col_factors=self.col_factors[cut],
            weights=self.weights[cut],
            samples=self.samples[cut],
        )

    def to(self, device: torch.device) -> FactoredAtoms:
        """Return the chunk on a device."""
        return replace(
            self,
            row_factors=self.row_factors.to(device),
            col_factors=self.col_factors.to(device),
            weights=self.weights.to(device),
            samples=self.samples.to(device),
        )

    def wide(self) -> FactoredAtoms:
        """Return the chunk in float64."""
        return replace(self, row_factors=self.row_factors.double(), col_factors=self.col_factors.double())


Atoms = DenseAtoms | FactoredAtoms


def mixed(chunk: Atoms, spare: Atoms, taken: Tensor) -> Atoms:
    """Return a chunk with some samples' gradients replaced by those of another chunk of the same samples.

    Args:
        chunk: The chunk.
        spare: The other one, of the same form.
        taken: For each sample (k,) whether its gradients come from ``spare``.
    """
    where = taken.view(-1, 1, 1, 1)
    if isinstance(chunk, DenseAtoms):
        return replace(chunk, grads=torch.where(where, spare.dense().grads, chunk.grads))
    assert isinstance(spare, FactoredAtoms)
    return replace(
        chunk,
        row_factors=torch.where(where, spare.row_factors, chunk.row_factors),
        col_factors=torch.where(where, spare.col_factors, chunk.col_factors),
    )


def joined(chunks: Iterable[Atoms], most_bytes: int) -> Iterator[Atoms]:
    """Join neighbouring chunks of one form up to a size, so that many small batches do not mean small products."""
    waiting: list[Atoms] = []
    for chunk in chunks:
        fits = sum(part.nbytes for part in waiting) + chunk.nbytes <= most_bytes
        if waiting and not (fits and _form(waiting[0]) == _form(chunk)):
            yield _concatenated(waiting)
            waiting = []
        waiting.append(chunk)
    yield _concatenated(waiting)


def _form(atoms: Atoms) -> tuple[object, ...]:
    tensors = (atoms.grads,) if isinstance(atoms, DenseAtoms) else (atoms.row_factors, atoms.col_factors)
    way = () if isinstance(atoms, DenseAtoms) else atoms.row_inputs
    return (type(atoms), way, *((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors))


def _concatenated(parts: list[Atoms]) -> Atoms:
    first = parts[0]
    if len(parts) == 1:
        return first

    def all_of(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    if isinstance(first, DenseAtoms):
        return DenseAtoms(all_of("grads"), all_of("weights"), all_of("samples"))
    factors = all_of("row_factors"), all_of("col_factors")
    return FactoredAtoms(*factors, all_of("weights"), all_of("samples"), first.row_inputs)
