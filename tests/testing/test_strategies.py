"""Facts: strategies make what they say, of every kind, and say how to make it again."""

from __future__ import annotations

import builtins
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from torch import Tensor

from kronscope.errors import MissingExtraError, OptionError
from kronscope.gradients.atoms import DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.testing import StreamRecipe, oracle, strategies


def test_every_kind_of_stream_turns_up() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=150)
    @given(strategies.streams())
    def look(stream: GradientStream) -> None:
        chunks = list(stream)
        first = chunks[0]
        weights = torch.cat([chunk.weights for chunk in chunks])
        grads, _ = oracle.atoms(stream)
        m, n = stream.shape
        seen["dense"] += isinstance(first, DenseAtoms)
        if isinstance(first, FactoredAtoms):
            seen["plain"] += first.positions == 1
            seen["shared"] += first.positions > 1
            seen["shared rows"] += first.row_factors.shape[1] == 1 < stream.columns
            seen["shared cols"] += first.col_factors.shape[1] == 1 < stream.columns
            seen["own both"] += min(first.row_factors.shape[1], first.col_factors.shape[1]) > 1
        seen["chunks"] += len(chunks) > 1
        seen["zero weights"] += bool((weights == 0).any())
        seen["one row"] += m == 1
        seen["one column"] += n == 1
        seen["small"] += float(grads.abs().max()) < 1e-3
        seen["large"] += float(grads.abs().max()) > 1e3
        seen["deficient"] += int(torch.linalg.matrix_rank(grads.transpose(0, 1).flatten(1))) < min(m, n * len(grads))
        assert float(weights.sum()) > 0
        assert stream.num_samples == len(weights)

    look()
    expected = "dense plain shared chunks deficient small large"
    for kind in (*expected.split(), "shared rows", "shared cols", "own both", "zero weights", "one row", "one column"):
        assert seen[kind] >= 3, (kind, seen)


def test_a_recipe_makes_the_same_stream_again_whatever_the_cuts() -> None:
    whole = StreamRecipe("shared", (2, 3), samples=5, columns=2, positions=2, weights="zeros", seed=4)
    cut = StreamRecipe("shared", (2, 3), samples=5, columns=2, positions=2, weights="zeros", seed=4, cuts=(2, 9, 2))
    assert len(list(cut.build())) == 2
    assert torch.equal(oracle.second_moment(whole.build()), oracle.second_moment(cut.build()))


def test_ranks_are_those_asked_for() -> None:
    for kind in strategies.KINDS:
        grads, _ = oracle.atoms(StreamRecipe(kind, (5, 6), samples=20, positions=3, row_rank=2, col_rank=4).build())
        assert int(torch.linalg.matrix_rank(grads.transpose(0, 1).flatten(1))) == 2
        assert int(torch.linalg.matrix_rank(grads.flatten(0, 1))) == 4


@given(strategies.psd_matrices())
def test_psd_matrices_are(matrix: Tensor) -> None:
    assert torch.equal(matrix, matrix.T)
    values = torch.linalg.eigvalsh(matrix)
    assert bool(((values > 0.04) | (values.abs() < 1e-13)).all())


def test_examples_shrink_to_small_shapes() -> None:
    smallest = find(strategies.streams(), lambda stream: stream.num_samples >= 2, settings=settings(max_examples=300))
    assert smallest.shape == (1, 1)
    assert smallest.num_samples == 2


def test_wrong_words_are_refused() -> None:
    with pytest.raises(OptionError, match="dense, factored, shared, got 'sparse'"):
        StreamRecipe("sparse")


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("hypothesis"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match="pip install hypothesis"):
        strategies.streams()
