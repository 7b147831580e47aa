"""Streams that are not in memory, and atoms in other dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kronscope.gradients.atoms import Atoms, DenseAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.testing.strategies import chunked


def lazy(stream: GradientStream) -> GradientStream:
    """The same atoms, made anew for every pass, as a model's stream makes them."""
    chunks = list(stream)

    def source() -> Iterator[Atoms]:
        for chunk in chunks:
            yield chunk.part(0, len(chunk.weights))

    return GradientStream(source, stream.shape, stream.num_samples, stream.columns, draws=stream.draws)


def formed(stream: GradientStream) -> GradientStream:
    """The same atoms as whole gradients."""
    return chunked(*(chunk.dense() for chunk in stream))


def single(stream: GradientStream) -> GradientStream:
    """The same atoms in float32."""

    def narrow(chunk: Atoms) -> Atoms:
        if isinstance(chunk, DenseAtoms):
            return replace(chunk, grads=chunk.grads.float())
        return replace(chunk, row_factors=chunk.row_factors.float(), col_factors=chunk.col_factors.float())

    return chunked(*(narrow(chunk) for chunk in stream))


def shuffled(stream: GradientStream, seed: int, pieces: int) -> GradientStream:
    """The same samples in another order and in other chunks; sample numbers stay with their samples."""
    samples = [chunk.part(i, i + 1) for chunk in stream for i in range(len(chunk.weights))]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    moved = [samples[i] for i in order]
    if len({(type(s), *(f.shape for f in _factors(s))) for s in moved}) > 1 or pieces >= len(moved):
        return chunked(*moved)
    step = -(-len(moved) // pieces)
    return chunked(*(_joined(moved[at : at + step]) for at in range(0, len(moved), step)))


def _factors(atoms: Atoms) -> list[torch.Tensor]:
    return [atoms.grads] if isinstance(atoms, DenseAtoms) else [atoms.row_factors, atoms.col_factors]


def _joined(parts: list[Atoms]) -> Atoms:
    names = ("grads",) if isinstance(parts[0], DenseAtoms) else ("row_factors", "col_factors")
    joined = {name: torch.cat([getattr(p, name) for p in parts]) for name in (*names, "weights", "samples")}
    make: Any = type(parts[0])
    result: Atoms = make(**joined)
    return result
