"""Hypothesis strategies: random gradient streams of every form, with the things that break code.

Tensors are made from a drawn seed, so that examples shrink in their shapes and options, not in their entries.

Example:
    .. code-block:: python

        from hypothesis import given
        from kronscope.testing import oracle, strategies

        @given(strategies.streams(max_dim=6))
        def test_my_approximation(stream):
            assert oracle.cosine(oracle.second_moment(stream), MyApproximation().fit(stream).to_dense()) <= 1 + 1e-12
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronscope.errors import MissingExtraError, OptionError
from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["KINDS", "StreamRecipe", "chunked", "psd_matrices", "seeds", "shapes", "streams"]

KINDS = ("dense", "factored", "shared")
_WEIGHTS = ("uniform", "random", "zeros")


@dataclass(frozen=True)
class StreamRecipe:
    """A recipe for one stream: what the hypothesis strategies draw, and what a failing test prints.

    Attributes:
        kind: ``"dense"``: whole gradients; ``"factored"``: one position, no sharing; ``"shared"``: several positions.
        shape: The (m, n) of a gradient.
        samples: Number of samples.
        columns: Columns of each sample.
        shared_side: Which factor all columns share: ``"rows"``, ``"cols"`` or ``"none"``; for factored atoms.
        positions: Positions of each sample; for ``"shared"``.
        weights: ``"uniform"``: 1/N; ``"random"``: positive; ``"zeros"``: some are zero.
        row_rank: Dimension of the space that all gradients' columns lie in; m for no deficiency.
        col_rank: Dimension of the space that all gradients' rows lie in; n for no deficiency.
        scale: Factor on all gradients.
        spread: Samples differ in size by up to this factor.
        cuts: Where the samples are cut into chunks.
        seed: Seed of the entries.

    >>> StreamRecipe(kind="factored", shape=(2, 3), samples=4, columns=1).build()
    GradientStream(2x3, 4 samples, 1 columns)
    """

    kind: str = "dense"
    shape: tuple[int, int] = (2, 3)
    samples: int = 4
    columns: int = 1
    shared_side: str = "cols"
    positions: int = 1
    weights: str = "uniform"
    row_rank: int | None = None
    col_rank: int | None = None
    scale: float = 1.0
    spread: float = 1.0
    cuts: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the words.

        Raises:
            OptionError: an unknown kind, side or way of weighting.
        """
        for value, allowed in (
            (self.kind, KINDS),
            (self.shared_side, ("rows", "cols", "none")),
            (self.weights, _WEIGHTS),
        ):
            if value not in allowed:
                raise OptionError(f"a stream recipe takes {', '.join(allowed)}, got {value!r}.")

    def build(self) -> GradientStream:
        """Make the stream.

        >>> StreamRecipe(kind="shared", positions=2, columns=3, cuts=(1,)).build()
        GradientStream(2x3, 4 samples, 3 columns)
        """
        whole = self._atoms()
        edges = sorted({0, self.samples, *(cut for cut in self.cuts if 0 < cut < self.samples)})
        return chunked(*(whole.part(a, b) for a, b in itertools.pairwise(edges)))

    def _atoms(self) -> Atoms:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, dtype=torch.float64, generator=generator)

        (m, n), k, c = self.shape, self.samples, self.columns
        # full-rank maps are left out, so that the plain case has plain Gaussian entries
        mix_rows = None if self.row_rank in (None, m) else normal(int(self.row_rank or 1), m)
        mix_cols = None if self.col_rank in (None, n) else normal(int(self.col_rank or 1), n)

        def side(mix: Tensor | None, size: int, *lead: int) -> Tensor:
            return normal(*lead, size) if mix is None else normal(*lead, len(mix)) @ mix

        sizes = self.scale * self.spread ** -torch.rand(k, dtype=torch.float64, generator=generator).view(k, 1, 1, 1)
        weights = self._weights(generator)
        numbers = torch.arange(k)
        if self.kind == "dense":
            inner = side(mix_cols, n, k, c, m if mix_rows is None else len(mix_rows))
            grads = inner if mix_rows is None else mix_rows.T @ inner
            return DenseAtoms(sizes * grads, weights, numbers)
        t = self.positions if self.kind == "shared" else 1
        rows = side(mix_rows, m, k, 1 if self.shared_side == "rows" else c, t)
        cols = side(mix_cols, n, k, 1 if self.shared_side == "cols" else c, t)
        return FactoredAtoms(sizes * rows, cols, weights, numbers)

    def _weights(self, generator: torch.Generator) -> Tensor:
        if self.weights == "uniform":
            return torch.full((self.samples,), 1 / self.samples, dtype=torch.float64)
        drawn = torch.rand(self.samples, dtype=torch.float64, generator=generator) + 0.1
        if self.weights == "zeros":
            # the last sample always counts, so that the weights are not all zero
            drawn[:-1] *= (torch.rand(self.samples - 1, generator=generator) > 0.5).double()
        return drawn


def chunked(*chunks: Atoms) -> GradientStream:
    """Serve chunks exactly as they are, where :meth:`~kronscope.GradientStream.of_chunks` would join or cut them."""
    count = sum(len(chunk.weights) for chunk in chunks)
    columns = max(chunk.columns for chunk in chunks)
    return GradientStream(lambda: chunks, chunks[0].shape, count, columns, in_memory=True)


def seeds() -> SearchStrategy[int]:
    """Seeds for what a test makes itself."""
    strategy: SearchStrategy[int] = _hypothesis().integers(0, 2**16)
    return strategy


def shapes(max_dim: int = 6) -> SearchStrategy[tuple[int, int]]:
    """Shapes (m, n), one-row and one-column matrices included."""
    st = _hypothesis()
    sizes = st.integers(1, max_dim)
    strategy: SearchStrategy[tuple[int, int]] = st.tuples(sizes, sizes)
    return strategy


def psd_matrices(max_dim: int = 6) -> SearchStrategy[Tensor]:
    """Positive semi-definite matrices of any rank, zero included, with a clear gap between zero and the rest."""
    st = _hypothesis()

    def build(size: int, rank: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
        values = 0.05 + torch.rand(size, dtype=torch.float64, generator=generator)
        values[rank:] = 0
        product: Tensor = (basis * values) @ basis.T
        return (product + product.T) / 2

    strategy: SearchStrategy[Tensor] = st.integers(1, max_dim).flatmap(
        lambda size: st.builds(build, st.just(size), st.integers(0, size), seeds())
    )
    return strategy


def streams(
    max_dim: int = 6,
    max_samples: int = 8,
    *,
    kinds: Sequence[str] = KINDS,
    max_columns: int = 3,
    deficient: bool = True,
    badly_scaled: bool = True,
    weights: Sequence[str] = _WEIGHTS,
) -> SearchStrategy[GradientStream]:
    """Gradient streams.

    Args:
        max_dim: Largest m and n.
        max_samples: Largest number of samples.
        kinds: Which of ``"dense"``, ``"factored"`` (no sharing) and ``"shared"`` (several positions) to draw.
        max_columns: Largest number of columns of a sample.
        deficient: Also gradients confined to a subspace on either side.
        badly_scaled: Also very small, very large and very unequal gradients.
        weights: Which of ``"uniform"``, ``"random"`` and ``"zeros"`` to draw.

    Raises:
        MissingExtraError: hypothesis is not installed.
    """
    st = _hypothesis()

    def recipe(draw: Any) -> GradientStream:
        m, n = draw(shapes(max_dim))
        samples = draw(st.integers(1, max_samples))
        kind = draw(st.sampled_from(tuple(kinds)))
        made = StreamRecipe(
            kind=kind,
            shape=(m, n),
            samples=samples,
            columns=draw(st.integers(1, max_columns)),
            shared_side="none" if kind == "dense" else draw(st.sampled_from(("cols", "rows", "none"))),
            positions=draw(st.integers(1, 4)) if kind == "shared" else 1,
            weights=draw(st.sampled_from(tuple(weights))),
            row_rank=draw(st.integers(1, m)) if deficient else None,
            col_rank=draw(st.integers(1, n)) if deficient else None,
            scale=draw(st.sampled_from((1.0, 1e-6, 1e6))) if badly_scaled else 1.0,
            spread=draw(st.sampled_from((1.0, 1e3))) if badly_scaled else 1.0,
            cuts=tuple(draw(st.lists(st.integers(1, max_samples), max_size=3))),
            seed=draw(seeds()),
        )
        _hypothesis_note(made)
        return made.build()

    strategy: SearchStrategy[GradientStream] = st.composite(recipe)()
    return strategy


def _hypothesis() -> ModuleType:
    try:
        from hypothesis import strategies as st
    except ImportError as error:
        raise MissingExtraError(
            "kronscope.testing.strategies needs hypothesis, which is not installed: pip install hypothesis."
        ) from error
    return st


def _hypothesis_note(recipe: StreamRecipe) -> None:
    """Let a failing test say how to make its stream again."""
    from hypothesis import note

    note(f"{recipe}.build()")
