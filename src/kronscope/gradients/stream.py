"""Streams of gradient atoms: chunks that can be iterated again and again, on one process or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kronscope.errors import DataError, NonFiniteError, ShapeError
from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms, joined, mixed
from kronscope.kron.workspace import work_bytes
from kronscope.support.processes import ALONE, Processes

__all__ = ["GradientStream", "Known"]

# Bytes of one chunk of an in-memory stream: large enough for full GEMM speed, small beside the data itself.
_CHUNK_BYTES = 64 << 20
_KEEP_BYTES = 3 << 30


@dataclass(frozen=True)
class Known:
    """Contractions of a stream that whoever made it has already, so that nobody goes over the atoms for them.

    Attributes:
        left: The sum of w G Gᵀ.
        right: The sum of w Gᵀ G.
        norm_squared: The squared norm of the second-moment matrix.
    """

    left: Tensor | None = None
    right: Tensor | None = None
    norm_squared: float | None = None


class GradientStream:
    r"""The weighted gradients of one (m, n) layer, sample by sample: what a second-moment matrix is made of.

    A stream stands for :math:`H = \sum_i w_i \sum_c \operatorname{vec}(G_{ic})\operatorname{vec}(G_{ic})^\top`. The sum
    is over samples *i* and their columns *c*; a sample has one column for each direction of the outputs (exact labels),
    or one for each label drawn. Make a stream with :meth:`from_tensors` or :meth:`from_factors`, or let
    :func:`kronscope.second_moment` capture it from a model.

    Iterating gives chunks of samples, the same ones in the same order every time. Where the samples are spread over
    several processes, each process iterates over its own; ``num_samples`` counts those of all, and :meth:`sums` adds
    over all processes.

    Attributes:
        shape: The layer's (m, n).
        num_samples: Number of samples, over all processes.
        columns: Columns of each sample.
        draws: Whether the columns are independent label draws, so that the stream is itself an estimate.
        random_columns: How many of each sample's columns, its last ones, are random combinations of exact columns.
        in_memory: Whether iterating costs nothing but reading memory.
        processes: The processes the samples are spread over.
        own_samples: Number of samples that this process has.

    >>> stream = GradientStream.from_tensors(torch.ones(4, 2, 3))
    >>> stream.shape, stream.num_samples, stream.total_weight()
    ((2, 3), 4, 1.0)
    """

    def __init__(
        self,
        source: Callable[[], Iterable[Atoms]],
        shape: tuple[int, int],
        num_samples: int,
        columns: int,
        *,
        draws: bool = False,
        random_columns: int = 0,
        in_memory: bool = False,
        processes: Processes = ALONE,
        own_samples: int | None = None,
    ) -> None:
        """Wrap a source of chunks.

        Args:
            source: Called for each pass; gives the chunks.
            shape: The (m, n) of a gradient.
            num_samples: Samples in a pass, over all processes.
            columns: Columns of each sample.
            draws: Whether the columns are independent label draws, so that the stream is itself an estimate.
            random_columns: How many of each sample's columns, its last ones, are independent random combinations of
                exact columns, each scaled by their number to the power -½; the columns before them are exact.
            in_memory: Whether a pass costs nothing but reading memory.
            processes: The processes the samples are spread over.
            own_samples: Samples in a pass of this process; default all.
        """
        self._source = source
        self.processes = processes
        self.own_samples = int(num_samples if own_samples is None else own_samples)
        self.shape = (int(shape[0]), int(shape[1]))
        self.num_samples = int(num_samples)
        self.columns = int(columns)
        self.draws = draws
        self.random_columns = random_columns
        self.in_memory = in_memory
        # how many bytes of gradients formed from factors may be kept between passes
        self.keep_bytes = _KEEP_BYTES
        self.known = Known()
        # contractions of this stream, computed once; a stream never changes, so nothing can go stale
        self.memo: dict[Any, Any] = {}

    def __iter__(self) -> Iterator[Atoms]:
        """Start a new pass over the chunks."""
        return iter(self._source())

    def __repr__(self) -> str:
        """Say what it holds."""
        m, n = self.shape
        return f"GradientStream({m}x{n}, {self.num_samples} samples, {self.columns} columns)"

    @classmethod
    def from_tensors(cls, G: Tensor, weights: Tensor | None = None) -> GradientStream:
        r"""Take whole gradients: :math:`H = \sum_i w_i \operatorname{vec}(G_i)\operatorname{vec}(G_i)^\top`.

        Args:
            G: Gradients (N, m, n); not copied, so do not change them afterwards.
            weights: Weights (N,), not negative; default 1/N.

        Returns:
            The stream.

        Raises:
            ShapeError: wrong dimensions.
            DataError: no gradients, or negative weights.
            NonFiniteError: NaN or infinity in the gradients or weights.

        >>> GradientStream.from_tensors(torch.ones(4, 2, 3), weights=torch.tensor([1.0, 1.0, 0.5, 0.5]))
        GradientStream(2x3, 4 samples, 1 columns)
        """
        if G.ndim != 3:
            raise ShapeError(f"from_tensors needs gradients (N, m, n), got {tuple(G.shape)}.")
        grads = _checked(G, "gradients")
        checked = _checked_weights(weights, grads)
        whole = DenseAtoms(grads.unsqueeze(1), checked, torch.arange(len(grads), device=grads.device))
        return cls.of_chunks(whole)

    @classmethod
    def from_factors(cls, B: Tensor, A: Tensor, weights: Tensor | None = None) -> GradientStream:
        r"""Take gradients that are products, :math:`G_i = B_i^\top A_i`; K-FAC needs this form.

        For a linear layer :math:`A_i` holds the inputs of sample i at T positions and :math:`B_i` the gradients of its
        outputs.

        Args:
            B: Output gradients (N, T, m); not copied, so do not change them afterwards.
            A: Inputs (N, T, n); not copied either.
            weights: Weights (N,), not negative; default 1/N.

        Returns:
            The stream.

        Raises:
            ShapeError: wrong dimensions.
            DataError: no gradients, or negative weights.
            NonFiniteError: NaN or infinity in the factors or weights.

        >>> GradientStream.from_factors(torch.ones(4, 5, 2), torch.ones(4, 5, 3))
        GradientStream(2x3, 4 samples, 1 columns)
        """
        if B.ndim != 3 or A.ndim != 3 or B.shape[:2] != A.shape[:2]:
            raise ShapeError(
                f"from_factors needs B (N, T, m) and A (N, T, n) with one N and T, "
                f"got {tuple(B.shape)} and {tuple(A.shape)}."
            )
        common = torch.promote_types(B.dtype, A.dtype)
        rows, cols = _checked(B.to(common), "output gradients"), _checked(A.to(common), "inputs")
        checked = _checked_weights(weights, rows)
        numbers = torch.arange(len(rows), device=rows.device)
        return cls.of_chunks(FactoredAtoms(rows.unsqueeze(1), cols.unsqueeze(1), checked, numbers))

    @classmethod
    def of_chunks(
        cls,
        *chunks: Atoms,
        draws: bool = False,
        random_columns: int = 0,
        processes: Processes = ALONE,
        whole: tuple[int, int] | None = None,
    ) -> GradientStream:
        """Make a stream of chunks that are in memory; large ones are cut up, and small neighbours joined.

        Args:
            chunks: The chunks, in the order of the samples' numbers.
            draws: As in :class:`GradientStream`.
            random_columns: As in :class:`GradientStream`.
            processes: The processes the samples are spread over.
            whole: The number of samples and of columns over all of ``processes``; None if this process has all.

        Returns:
            The stream.
        """
        if not chunks or sum(len(chunk.weights) for chunk in chunks) == 0:
            raise DataError("a gradient stream needs at least one gradient.")
        parts: list[Atoms] = []
        size = work_bytes(_CHUNK_BYTES)
        for chunk in joined(chunks, size):
            step = max(1, size * len(chunk.weights) // max(chunk.nbytes, 1))
            parts.extend(chunk.part(at, at + step) for at in range(0, len(chunk.weights), step))
        own = sum(len(chunk.weights) for chunk in chunks)
        count, columns = whole or (own, max(chunk.columns for chunk in chunks))
        return cls(
            lambda: parts,
            chunks[0].shape,
            count,
            columns,
            draws=draws,
            random_columns=random_columns,
            in_memory=True,
            processes=processes,
            own_samples=own,
        )

    def sums(self, local: Callable[[], tuple[Tensor, ...]], shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Add up, over all processes, what each computes from its own samples; every process must call it.

        Args:
            local: Computes this process's part, as float64 tensors.
            shapes: The shapes of these tensors.

        Returns:
            The sums, the same on every process.
        """
        return self.processes.all_reduce(local, shapes)

    def summed(self, local: Callable[[], Tensor], shape: Sequence[int]) -> Tensor:
        """Do as :meth:`sums` does, for a single tensor."""
        return self.sums(lambda: (local(),), [shape])[0]

    def by_sample(self, local: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> Tensor:
        """Collect one number for each sample of all processes, as (N,), from pairs of (sample numbers, values)."""
        return self.by_column(lambda: ((samples, values.unsqueeze(1)) for samples, values in local()), 1).squeeze(1)

    def by_column(self, local: Callable[[], Iterable[tuple[Tensor, Tensor]]], width: int | None = None) -> Tensor:
        """Collect ``width`` numbers for each sample as :meth:`by_sample` does; by default one for each column."""
        shape = (self.num_samples, self.columns if width is None else width)

        def scattered() -> Tensor:
            out = torch.zeros(shape, dtype=torch.float64)
            for samples, values in local():
                out[samples.cpu(), : values.shape[1]] = values.double().cpu()
            return out

        return self.summed(scattered, shape)

    def forget(self) -> None:
        """Let go of all that was computed from the stream, which may hold on to the stream itself."""
        self.memo.clear()

    def weights(self) -> Tensor:
        """Return the weights (N,) of all samples in the order of their numbers, on the CPU."""
        if "weights" not in self.memo:
            self.memo["weights"] = self.by_sample(lambda: ((chunk.samples, chunk.weights) for chunk in self))
        known: Tensor = self.memo["weights"]
        return known

    def total_weight(self) -> float:
        """Sum of the samples' weights."""

        def local() -> Tensor:
            return torch.tensor(sum(float(chunk.weights.sum()) for chunk in self), dtype=torch.float64)

        return float(self.summed(local, []))

    def map(self, change: Callable[[Atoms], Atoms]) -> GradientStream:
        """Return a stream whose chunks are changed by a function when they are iterated over."""
        source = self._source
        return self._derived(lambda: (change(chunk) for chunk in source()), self.num_samples, self.own_samples)

    def reweighted(self, weights: Tensor) -> GradientStream:
        """Return the same gradients with other weights (N,), in the order of the samples' numbers."""
        return self.map(lambda chunk: replace(chunk, weights=weights.to(chunk.weights)[chunk.samples]))

    def mixed(self, other: GradientStream, taken: Tensor) -> GradientStream:
        """Return the stream with some samples' gradients replaced by those of another stream of the same samples.

        Args:
            other: Gradients of the same form in the same order, such as those of other label draws.
            taken: For each sample number, whether its gradients come from ``other``.
        """
        mine, theirs = self._source, other._source

        def chunks() -> Iterator[Atoms]:
            for chunk, spare in zip(mine(), theirs(), strict=True):
                yield mixed(chunk, spare, taken.to(chunk.samples.device)[chunk.samples])

        return self._derived(chunks, self.num_samples, self.own_samples)

    def with_atom(self, grad: Tensor, weight: float) -> GradientStream:
        """Return the stream with one more gradient (m, n), as a sample numbered after the last one."""
        source, number = self._source, self.num_samples
        extra = DenseAtoms(
            grad.reshape(1, 1, *self.shape),
            torch.tensor([weight], dtype=torch.float64, device=grad.device),
            torch.tensor([number], device=grad.device),
        )

        here = self.processes.rank == 0

        def chunks() -> Iterator[Atoms]:
            yield from source()
            if here:
                yield extra

        return self._derived(chunks, number + 1, self.own_samples + here)

    def knowing(self, known: Known) -> GradientStream:
        """Return the same gradients together with contractions that were computed before."""
        made = self._derived(self._source, self.num_samples, self.own_samples)
        made.known = known
        return made

    def with_random_columns(self, kept: Sequence[int]) -> GradientStream:
        """Return the stream with only some of its random columns, scaled up so that they stand for all.

        Args:
            kept: Numbers of the random columns to keep, counted from 0.
        """
        if not kept:
            raise DataError("a stream with random columns needs at least one of them.")
        source, fixed = self._source, self.columns - self.random_columns
        columns = [*range(fixed), *(fixed + number for number in kept)]
        scale = torch.ones(len(columns), dtype=torch.float64)
        scale[fixed:] = (self.random_columns / len(kept)) ** 0.5

        def taken(tensor: Tensor) -> Tensor:
            if tensor.shape[1] == 1:  # shared by all columns
                return tensor
            return tensor[:, columns] * scale.to(tensor).view(1, -1, 1, 1)

        def cut(atoms: Atoms) -> Atoms:
            if isinstance(atoms, DenseAtoms):
                return replace(atoms, grads=taken(atoms.grads))
            rows, cols = atoms.row_factors, atoms.col_factors
            if min(rows.shape[1], cols.shape[1]) > 1:  # the scale belongs on one side only
                return replace(atoms, row_factors=taken(rows), col_factors=cols[:, columns])
            return replace(atoms, row_factors=taken(rows), col_factors=taken(cols))

        made = self._derived(lambda: (cut(atoms) for atoms in source()), self.num_samples, self.own_samples)
        made.columns, made.random_columns = len(columns), len(kept)
        return made

    def in_one_piece(self) -> GradientStream:
        """Return the same atoms made once, where the stream changes those of another one in memory at every pass."""
        if not self.in_memory:
            return self
        chunks = list(self._source())
        made = self._derived(lambda: chunks, self.num_samples, self.own_samples)
        made.known = self.known
        return made

    def _derived(self, source: Callable[[], Iterable[Atoms]], num_samples: int, own_samples: int) -> GradientStream:
        """A stream of other atoms for the same layer, under the same budget."""
        made = GradientStream(
            source,
            self.shape,
            num_samples,
            self.columns,
            draws=self.draws,
            random_columns=self.random_columns,
            in_memory=self.in_memory,
            processes=self.processes,
            own_samples=own_samples,
        )
        made.keep_bytes = self.keep_bytes
        return made


def _checked(values: Tensor, what: str) -> Tensor:
    if values.shape[0] == 0:
        raise DataError(f"a gradient stream needs at least one sample, got {what} of shape {tuple(values.shape)}.")
    if not values.dtype.is_floating_point:
        raise ShapeError(f"the {what} must be real floating-point tensors, got {values.dtype}.")
    if not bool(torch.isfinite(values).all()):
        raise NonFiniteError(f"the {what} contain NaN or infinity; drop those samples or mend the model first.")
    values = values.detach()
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _checked_weights(weights: Tensor | None, like: Tensor) -> Tensor:
    count = like.shape[0]
    if weights is None:
        return torch.full((count,), 1.0 / count, dtype=torch.float64, device=like.device)
    weights = torch.as_tensor(weights, dtype=torch.float64, device=like.device).detach()
    if weights.shape != (count,):
        raise ShapeError(f"weights must have shape ({count},), got {tuple(weights.shape)}.")
    if not bool(torch.isfinite(weights).all()):
        raise NonFiniteError("the weights contain NaN or infinity.")
    if bool((weights < 0).any()):
        raise DataError("weights must not be negative: H would no longer be positive semi-definite.")
    return weights.clone()
