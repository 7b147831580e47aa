r"""The second-moment matrix of a gradient stream and everything that can be said of it exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kronscope.curvature.chunk_pairs import over_pairs
from kronscope.curvature.chunks import (
    FORMED,
    bounded,
    chunks_from,
    combined,
    own_gram,
    products,
    rotated_squares,
)
from kronscope.curvature.columns import all_column_pairs, column_forms
from kronscope.curvature.forms import FormPlan
from kronscope.curvature.leading import TOLERANCE, largest_eigenvalue
from kronscope.curvature.middles import Matrix, Spanned, content_key
from kronscope.curvature.pairs import assembled_kernels, pair_squares
from kronscope.curvature.passes import Passes
from kronscope.errors import DataError, MemoryBudgetError, ShapeError
from kronscope.gradients.atoms import Atoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import (
    Diagonal,
    EigenbasisDiagonal,
    Identity,
    KroneckerProduct,
    KroneckerSum,
    Operator,
    PsdFactor,
)
from kronscope.kron.workspace import work_bytes

__all__ = ["SecondMoment"]

# Samples of a no-sharing stream whose pair kernels (two float64 matrices) are kept for the optimal product.
_MAX_KERNEL_SAMPLES = 6000
_DENSE_BYTES = 8 << 30
# Tables in eigenbases that are remembered; several approximations share Shampoo's, or K-FAC's.
_TABLES = 6
# Squared norms below this have lost digits.
_TINY = 1e-290
# The whole matrix of a small layer may take so much while its norm is computed.
_SMALL_BYTES = 32 << 20


def out_of_range(trace: float) -> str:
    """What to say of gradients whose fourth powers are not numbers in float64."""
    return (
        f"the gradients are too large or too small to be measured (the sum of their squares is {trace:.1g}, and its "
        "square leaves the range of float64); multiply the loss by a number that brings them near one"
    )


def _near_one(factor: Tensor) -> tuple[Tensor, float]:
    """Return a factor of a product, and 1; one far from 1 is divided by a power of two, which is returned with it.

    Three sums of squared gradients are multiplied in an inner product with L ⊗ R, and only two of them are sure to stay
    in the range of float64.
    """
    largest = float(factor.abs().max()) if factor.numel() else 1.0
    if not 0.0 < largest < math.inf or 2.0**-120 < largest < 2.0**120:
        return factor, 1.0
    unit = 2.0 ** math.frexp(largest)[1]
    return factor / unit, unit


class SecondMoment:
    r"""The matrix :math:`H = \sum_i w_i \sum_c \operatorname{vec}(G_{ic})\operatorname{vec}(G_{ic})^\top` of a stream.

    With the gradients of a model it is the Gauss–Newton matrix or the empirical Fisher matrix, with those of a training
    run Adagrad's matrix. It is never formed (except by :meth:`to_dense`): sums over gradients are exact, computed in
    float64, and remembered, so that asking twice costs once.

    Args:
        stream: The gradients.
        narrow: Whether contractions may be done in float32, the gradients' own type: a search can be, an answer not.

    >>> H = SecondMoment(GradientStream.from_tensors(torch.eye(2, dtype=torch.float64).view(2, 1, 2)))
    >>> H.norm(), H.trace()
    (0.70..., 1.0)
    """

    def __init__(self, stream: GradientStream, *, narrow: bool = False) -> None:
        self.stream = stream
        self.passes = Passes(stream, narrow=narrow)

    @property
    def shape(self) -> tuple[int, int]:
        """The layer's (m, n)."""
        return self.stream.shape

    # ------------------------------------------------------------------ scalars

    def trace(self) -> float:
        r"""Return the trace, :math:`\sum w \|G\|_F^2`."""

        def compute() -> float:
            # the trace of either factor; the smaller one is the cheaper
            return float(self._contract(0 if self.shape[0] <= self.shape[1] else 1, None).diagonal().sum())

        return self.passes.once("trace", compute)

    def norm(self) -> float:
        r"""Return the norm: :math:`\|H\|_F^2 = \sum_{ij} w_i w_j \sum_{cd}\langle G_{ic}, G_{jd}\rangle^2`."""
        return math.sqrt(max(self.norm_squared(), 0.0))

    def norm_squared(self) -> float:
        """Return the square of the Frobenius norm; where several columns are random, an unbiased estimate.

        Raises:
            DataError: the gradients are so large or small that float64 does not hold their fourth powers.
        """

        def compute() -> float:
            if self.stream.known.norm_squared is not None:
                return self.stream.known.norm_squared
            if self.stream.random_columns > 1:
                return float(self.stream.weights() @ self.distinct_sums().sum(1))
            kernels = self.kernels()
            if kernels is not None:
                rows, cols, weights = kernels
                return float(weights @ (rows * cols) @ weights)
            if self._has_few_entries():
                return float(self.to_dense().square().sum())
            return float(self.pair_sums().sum())

        def checked() -> float:
            found = compute()
            if not _TINY < abs(found) < math.inf and self.trace() != 0:
                raise DataError(f"{out_of_range(self.trace())}.")
            return found

        return self.passes.once("norm_squared", checked)

    def pair_sums(self, groups: Tensor | None = None) -> Tensor:
        r"""Sum :math:`w_i w_j S_{ij}` over pairs of samples, by the groups the two samples belong to.

        Args:
            groups: Group (N,) of each sample, 0 to K-1; default all in one.

        Returns:
            Symmetric matrix (K, K), float64; its total is :math:`\|H\|_F^2`.
        """
        count = 1 if groups is None else int(groups.max()) + 1

        def local() -> Tensor:
            out = torch.zeros(count, count, dtype=torch.float64)

            def add(first: Atoms, second: Atoms, on_diagonal: bool) -> None:
                weighted = pair_squares(first, second) * first.weights[:, None] * second.weights
                if groups is None:
                    tile = weighted.sum().view(1, 1).cpu()
                else:
                    left = torch.nn.functional.one_hot(groups[first.samples.cpu()], count).double()
                    right = torch.nn.functional.one_hot(groups[second.samples.cpu()], count).double()
                    tile = left.T @ weighted.cpu() @ right
                out.add_(tile if on_diagonal else tile + tile.T)

            factored = self.plan().gram == "factored"
            over_pairs(lambda: chunks_from(self.stream, factored=factored), add, self.stream.processes)
            return out

        return self.passes.summed(local, (count, count))

    def own_sums(self, *, same_column: bool = False) -> Tensor:
        r"""Return :math:`w_i^2 \sum_{cd}\langle G_{ic}, G_{id}\rangle^2` (N,), the pairs a sample makes with itself.

        Args:
            same_column: Count only pairs of a column with itself.
        """

        def local() -> Iterator[tuple[Tensor, Tensor]]:
            for atoms in self.passes.chunks():
                for part in bounded(atoms):
                    grams = own_gram(part)
                    if same_column:
                        grams = grams.diagonal(dim1=1, dim2=2).unsqueeze(-1)
                    yield part.samples, part.weights.square() * grams.square().sum((1, 2))

        self.plan()
        return self.stream.by_sample(local)

    # ------------------------------------------------------------------ column by column

    def column_forms(self, left: Matrix | None = None, right: Matrix | None = None) -> Tensor:
        r"""Return :math:`\langle G_{ic}, A\, G_{ic} B\rangle` (N, c) for symmetric A and B, by default identities."""

        def local() -> Iterator[tuple[Tensor, Tensor]]:
            sides = zip(self.passes.with_middles(0, left), self.passes.with_middles(1, right), strict=True)
            for (atoms, rows), (_, cols) in sides:
                yield atoms.samples, column_forms(atoms, rows, cols, left, right)

        self.plan()
        return self.stream.by_column(local)

    def column_pairs(self) -> tuple[Tensor, Tensor]:
        r"""Square the inner products of all pairs of columns, once.

        Returns:
            :math:`g_{ic}^\top H g_{ic} = \sum_{jd} w_j \langle G_{ic}, G_{jd}\rangle^2` (N, c), and the squares
            :math:`\langle G_{ic}, G_{id}\rangle^2` (N, c, c) between the columns of each sample.
        """

        def compute() -> tuple[Tensor, Tensor]:
            return all_column_pairs(
                self.stream, factored=self.plan().gram == "factored", narrow=self.passes.in_float32()
            )

        return self.passes.once("column_pairs", compute)

    def distinct_sums(self) -> Tensor:
        r"""Return :math:`g_{ic}^\top H g_{ic}` (N, c) as it is in expectation over the random columns.

        A random column's pair with itself is replaced by the mean of its pairs with the other random columns of its
        sample. Weighted and added up, that is an unbiased estimate of the squared norm.
        """
        count = self.stream.random_columns
        sums, own = self.column_pairs()
        random = own[:, -count:, -count:]
        among = random.sum(2)
        others = (among - random.diagonal(dim1=1, dim2=2)) * count / (count - 1)
        distinct = sums.clone()
        distinct[:, -count:] += self.stream.weights()[:, None] * (others - among)
        return distinct

    # ------------------------------------------------------------------ contractions

    def left(self, R: Matrix | None = None) -> Tensor:
        r"""Return :math:`\sum w\, G R G^\top` (m, m); ``R`` defaults to the identity."""
        # what is remembered is not handed out, so that readers may change what they get
        return self._contract(0, R) if R is not None else self._contract(0, None).clone()

    def right(self, L: Matrix | None = None) -> Tensor:
        r"""Return :math:`\sum w\, G^\top L G` (n, n); ``L`` defaults to the identity."""
        return self._contract(1, L) if L is not None else self._contract(1, None).clone()

    def within(self, mode: int, vectors: Tensor, other: Matrix) -> Tensor:
        r"""Return a contraction between vectors: :math:`V^\top (\sum w\, G R G^\top) V` (r, r).

        Args:
            mode: 0 for :meth:`left`, 1 for :meth:`right`.
            vectors: :math:`V` (m or n, r); products with them are shared with those of a :class:`Spanned` matrix.
            other: :math:`R`, or :math:`L` for ``mode`` 1; symmetric.
        """
        return self.passes.within(mode, vectors, other)

    def factors(self) -> tuple[PsdFactor, PsdFactor]:
        """Return Shampoo's two factors, :meth:`left` and :meth:`right` of the identity, as shared objects."""

        def compute() -> tuple[PsdFactor, PsdFactor]:
            narrow = self.passes.in_float32()
            return PsdFactor(self._contract(0, None), narrow=narrow), PsdFactor(self._contract(1, None), narrow=narrow)

        return self.passes.once("factors", compute)

    def matvec(self, V: Tensor) -> Tensor:
        r"""Return H times a vector, both as matrices: :math:`\sum w\, \langle G, V\rangle G` for ``V`` (..., m, n)."""
        if V.shape[-2:] != self.shape:
            raise ShapeError(f"matvec needs (..., {self.shape[0]}, {self.shape[1]}), got {tuple(V.shape)}.")
        vectors = V.reshape(-1, *self.shape).double()
        # of a size that any type can hold
        sizes = vectors.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny).view(-1, 1, 1)
        units = vectors / sizes

        def local() -> Tensor:
            out = torch.zeros_like(vectors)
            for part in self.passes.ready():
                at = units.to(part.weights.device, torch.float32 if self.passes.in_float32() else torch.float64)
                out += products(part, at).to(out)
            return out

        images: Tensor = self.passes.summed(local, vectors.shape) * sizes
        return images.view(V.shape)

    def leading_eigenvalue(self, tolerance: float = TOLERANCE) -> float:
        """Return the largest eigenvalue, by Lanczos' method.

        Each product with H is a pass over the gradients; some ten are usual.

        Args:
            tolerance: The relative error to stop at.

        Raises:
            ConvergenceError: it takes more than 200 passes.
        """

        def start() -> Tensor:
            # gradients added up with random signs have most of the directions that H is largest in
            out = torch.zeros(self.shape, dtype=torch.float64)
            for part in self.passes.wide_parts():
                generator = torch.Generator().manual_seed(int(part.samples[0]))
                signs = torch.randn(len(part.weights), part.columns, generator=generator, dtype=torch.float64)
                signs = signs.to(part.weights.device) * part.weights.sqrt()[:, None]
                out += combined(part, signs.unsqueeze(0))[0].to(out)
            return out

        def compute() -> float:
            return largest_eigenvalue(self.matvec, self.passes.summed(start, self.shape), tolerance)

        return self.passes.once(("leading eigenvalue", tolerance), compute)

    def mean(self) -> Tensor:
        r"""Return the mean gradient :math:`\bar G = \sum_i w_i G_i` (m, n); label draws are averaged."""

        def local() -> Tensor:
            total = torch.zeros(self.shape, dtype=torch.float64)
            for part in self.passes.whole_parts():
                # D draws are D columns scaled by D^-1/2; their mean needs D^-1
                scale = part.columns**-0.5 if self.stream.draws else 1.0
                summed = (part.grads * part.weights.view(-1, 1, 1, 1)).sum((0, 1))
                total = total.to(summed.device) + scale * summed
            return total

        return self.passes.once("mean", lambda: self.passes.summed(local, self.shape)).clone()

    def table(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        r"""Return :math:`\Lambda_{ij} = \sum w\, (Q_L^\top G Q_R)_{ij}^2` (m, n), the diagonal of H in an eigenbasis.

        Args:
            left: Orthonormal :math:`Q_L` (m, m), or None for the identity.
            right: Orthonormal :math:`Q_R` (n, n), or None for the identity.
        """

        def local() -> Tensor:
            total = torch.zeros(self.shape, dtype=torch.float64)
            # an optimizer's bases may be float32
            wide = [basis if basis is None else basis.double() for basis in (left, right)]
            for part in self.passes.wide_parts():
                squares = rotated_squares(part, *wide)
                total = total.to(squares.device) + squares
            return total

        tables: dict[object, tuple[Tensor, object]] = self.passes.once("tables", dict)
        key = content_key(left), content_key(right)
        if key not in tables:
            # the bases are kept so that their ids stay theirs
            found = self.passes.summed(local, self.shape), (left, right)
            while len(tables) >= _TABLES:
                del tables[next(iter(tables))]
            tables[key] = found
        return tables[key][0].clone()

    def inner(self, op: Operator) -> float:
        r"""Return the inner product with an operator, :math:`\langle H, K\rangle_F = \sum w \langle G, K(G)\rangle`."""
        if op.shape != self.shape:
            raise ShapeError(f"H acts on {self.shape} matrices, the operator on {op.shape}.")
        if isinstance(op, Identity):
            return op.scale * self.trace()
        if isinstance(op, KroneckerProduct):
            if op.left.is_decomposed and op.right.is_decomposed:
                spectra = op.left.spectrum, op.right.spectrum
                table = self.table(spectra[0].vectors, spectra[1].vectors)
                (left, unit), (right, other) = (_near_one(spectrum.values.double()) for spectrum in spectra)
                return op.scale * unit * float(left @ table @ right) * other
            return self._inner_product(op.left.matrix, op.right.matrix, op.scale)
        if isinstance(op, KroneckerSum):
            return sum(self._inner_product(left, right, sigma) for sigma, left, right in op.terms)
        if type(op) in (EigenbasisDiagonal, Diagonal):
            assert isinstance(op, EigenbasisDiagonal)
            return float((op.values * self.table(op.left, op.right)).sum())

        def local() -> Tensor:
            total = 0.0
            for part in self.passes.whole_parts():
                products = (part.grads * op.apply(part.grads)).sum((1, 2, 3))
                total += float(products @ part.weights)
            return torch.tensor(total, dtype=torch.float64)

        return float(self.passes.summed(local, ()))

    def to_dense(self) -> Tensor:
        """Return the whole mn x mn matrix.

        Raises:
            MemoryBudgetError: it would take more than 8 GiB.
        """
        size = self.shape[0] * self.shape[1]
        if size * size * 8 > _DENSE_BYTES:
            raise MemoryBudgetError(
                f"a dense {size} x {size} matrix takes {size * size * 8 / 2**30:.0f} GiB; norm(), inner(), left(), "
                "right() and matvec() give what you need without it."
            )

        def local() -> Tensor:
            dense = torch.zeros(size, size, dtype=torch.float64)
            for part in self.passes.whole_parts():
                grads = part.grads.flatten(2).flatten(0, 1)
                weights = part.weights.repeat_interleave(part.columns)
                dense = dense.to(grads.device) + grads.T @ (grads * weights[:, None])
            return dense

        return self.passes.summed(local, (size, size))

    def reweighted(self, weights: Tensor) -> SecondMoment:
        """Return the matrix of the same gradients with other weights (N,); what does not depend on weights is kept."""
        other = SecondMoment(self.stream.reweighted(weights), narrow=self.passes.narrow)
        if "plan" in self.stream.memo:
            other.stream.memo["plan"] = self.stream.memo["plan"]
        kernels = self.stream.memo.get("kernels")
        if kernels is not None:
            # kernels are in the order of the chunks, weights in that of the sample numbers
            numbers = torch.cat([chunk.samples for chunk in self.stream])
            other.stream.memo["kernels"] = (*kernels[:2], weights.to(kernels[2])[numbers])
        kept = self.stream.memo.get(FORMED)
        if kept is not None:
            other.stream.memo[FORMED] = [
                replace(chunk, weights=weights.to(chunk.weights)[chunk.samples]) for chunk in kept
            ]
        return other

    # ------------------------------------------------------------------ how it is done

    def kernels(self) -> tuple[Tensor, Tensor, Tensor] | None:
        r"""Return (row kernel, column kernel, weights) over samples if each gradient is a :math:`b_{ic} a_i^\top`.

        With them the norm is :math:`w^\top (K_B \circ K_A) w`, and power iterations run on vectors of N numbers. The
        answer is None where a weight is shared over positions, where gradients are whole, where N² numbers would take
        too much memory, or where the samples are spread over processes.
        """

        def compute() -> tuple[Tensor, Tensor, Tensor] | None:
            count = self.stream.num_samples
            if count > _MAX_KERNEL_SAMPLES or 16 * count * count > self.stream.keep_bytes:
                return None
            if not self.stream.in_memory or self.stream.processes.world_size > 1:
                return None
            chunks = list(self.stream)
            plain = all(
                isinstance(a, FactoredAtoms)
                and a.positions == 1
                and min(a.row_factors.shape[1], a.col_factors.shape[1]) == 1
                for a in chunks
            )
            # with fewer samples than it takes to fill a factor, N-vectors are also the smaller space
            return assembled_kernels(chunks) if plain else None

        return self.passes.once("kernels", compute)

    def plan(self) -> FormPlan:
        """Say whether gradients are used as factors or as whole matrices, and which costs decided it."""
        return self.passes.plan()

    def _contract(self, mode: int, other: Matrix | None) -> Tensor:
        if other is None:
            known = (self.stream.known.left, self.stream.known.right)[mode]
            whole = partial(self.passes.contraction, mode, None)
            return self.passes.once(("gram", mode), whole) if known is None else known
        size = self.shape[1 - mode]
        if other.shape != (size, size):
            side = "left needs R" if mode == 0 else "right needs L"
            raise ShapeError(f"{side} of shape ({size}, {size}), got {tuple(other.shape)}.")
        return self.passes.contraction(mode, other if isinstance(other, Spanned) else other.double())

    def _has_few_entries(self) -> bool:
        """Whether the matrix has fewer rows than there are gradients, so that it costs less than all their pairs."""
        size = self.shape[0] * self.shape[1]
        return size < self.stream.num_samples * self.stream.columns and 8 * size**2 <= work_bytes(_SMALL_BYTES)

    def _inner_product(self, left: Tensor, right: Tensor, scale: float) -> float:
        """s⟨H, A⊗B⟩ = s⟨Σ w GᵀAG, B⟩ = s⟨Σ w GBGᵀ, A⟩, through the contraction whose result is the larger."""
        (left, unit), (right, other) = _near_one(left), _near_one(right)
        if self.shape[0] <= self.shape[1]:
            return scale * unit * float((self.right(left) * right).sum()) * other
        return scale * unit * float((self.left(right) * left).sum()) * other
