"""Facts: a stream is what it was given, in any number of passes, and says what it cannot take."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kronscope.curvature import SecondMoment
from kronscope.errors import DataError, NonFiniteError, ShapeError
from kronscope.gradients import stream as module
from kronscope.gradients.atoms import DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream, Known
from kronscope.testing import StreamRecipe, oracle


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_whole_gradients_weigh_one_over_their_number_by_default() -> None:
    G = normal(0, 4, 2, 3)
    stream = GradientStream.from_tensors(G)
    grads, weights = oracle.atoms(stream)
    assert torch.equal(grads, G)
    assert weights.tolist() == [0.25] * 4
    assert (stream.shape, stream.num_samples, stream.columns) == ((2, 3), 4, 1)
    assert stream.total_weight() == 1.0
    assert repr(stream) == "GradientStream(2x3, 4 samples, 1 columns)"


def test_factored_gradients_are_products() -> None:
    B, A = normal(0, 4, 5, 2), normal(1, 4, 5, 3)
    grads, _ = oracle.atoms(GradientStream.from_factors(B, A))
    torch.testing.assert_close(grads, B.mT @ A)


def test_every_pass_gives_the_same() -> None:
    stream = StreamRecipe("shared", (2, 3), samples=7, positions=2, cuts=(2, 5)).build()
    assert torch.equal(oracle.second_moment(stream), oracle.second_moment(stream))
    assert len(list(stream)) == len(list(stream)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_low_precision_becomes_single_and_graphs_are_left_behind(dtype: torch.dtype) -> None:
    G = torch.ones(2, 2, 2, dtype=dtype, requires_grad=True)
    (chunk,) = GradientStream.from_tensors(G * 1)
    assert isinstance(chunk, DenseAtoms)
    assert chunk.grads.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not chunk.grads.requires_grad
    (factored,) = GradientStream.from_factors(torch.ones(2, 1, 2, dtype=dtype), torch.ones(2, 1, 2))
    assert isinstance(factored, FactoredAtoms)
    assert factored.row_factors.dtype == factored.col_factors.dtype


def test_the_weights_given_are_copied() -> None:
    weights = torch.tensor([0.5, 0.5])
    stream = GradientStream.from_tensors(torch.ones(2, 1, 1), weights)
    weights.zero_()
    assert stream.total_weight() == 1.0


@pytest.mark.parametrize(
    ("shape", "weights", "error", "text"),
    [
        ((2, 3), None, ShapeError, r"needs gradients \(N, m, n\)"),
        ((0, 2, 3), None, DataError, "at least one sample"),
        ((2, 2, 3), [1.0], ShapeError, r"shape \(2,\), got \(1,\)"),
        ((2, 2, 3), [1.0, -1.0], DataError, "must not be negative"),
        ((2, 2, 3), [1.0, math.nan], NonFiniteError, "weights contain NaN"),
    ],
)
def test_wrong_tensors_are_refused(
    shape: tuple[int, ...], weights: list[float] | None, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        GradientStream.from_tensors(torch.ones(shape), None if weights is None else torch.tensor(weights))


def test_wrong_factors_are_refused() -> None:
    with pytest.raises(ShapeError, match="one N and T"):
        GradientStream.from_factors(torch.ones(2, 3, 1), torch.ones(2, 4, 1))
    with pytest.raises(NonFiniteError, match="drop those samples"):
        GradientStream.from_factors(torch.ones(2, 3, 1), torch.full((2, 3, 1), math.inf))
    with pytest.raises(ShapeError, match="floating-point"):
        GradientStream.from_tensors(torch.ones(2, 3, 1, dtype=torch.long))
    with pytest.raises(DataError, match="at least one gradient"):
        GradientStream.of_chunks()


def test_chunks_in_memory_are_cut_and_joined_to_size(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = StreamRecipe("factored", (2, 3), samples=12, columns=2).build()
    singles = [whole.part(i, i + 1) for i in range(12)]
    (joined,) = GradientStream.of_chunks(*singles)
    assert len(joined.weights) == 12
    monkeypatch.setattr(module, "_CHUNK_BYTES", whole.nbytes // 4)
    cut = GradientStream.of_chunks(whole)
    assert len(list(cut)) == 4
    assert len(list(GradientStream.of_chunks(*singles))) == 4
    expected = oracle.second_moment(GradientStream.of_chunks(joined))
    torch.testing.assert_close(oracle.second_moment(cut), expected)
    assert torch.cat([chunk.samples for chunk in cut]).tolist() == list(range(12))


def test_weights_follow_sample_numbers_and_atoms_are_numbered_on() -> None:
    stream = StreamRecipe("dense", (2, 3), samples=4, cuts=(1, 3)).build()
    changed = stream.reweighted(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert oracle.atoms(changed)[1].tolist() == [1.0, 2.0, 3.0, 4.0]
    # a transposed gradient is no trouble
    grown = changed.with_atom(normal(0, 3, 2).T, 5.0)
    assert [int(number) for chunk in grown for number in chunk.samples] == [0, 1, 2, 3, 4]
    assert oracle.atoms(grown)[1].tolist()[-1] == 5.0
    assert stream.memo == {}


def test_what_is_known_of_a_stream_is_taken_as_given_and_not_handed_on() -> None:
    stream = StreamRecipe("dense", (2, 3), samples=4).build()
    known = Known(torch.eye(2, dtype=torch.float64), torch.eye(3, dtype=torch.float64), 9.0)
    told = SecondMoment(stream.knowing(known))
    assert (told.norm(), told.trace()) == (3.0, 2.0)
    assert torch.equal(told.left(), known.left)  # type: ignore[arg-type]
    assert torch.equal(told.right(), known.right)  # type: ignore[arg-type]
    # other weights make other contractions
    changed = told.stream.reweighted(torch.ones(4))
    torch.testing.assert_close(SecondMoment(changed).norm(), float(oracle.second_moment(changed).norm()))
    torch.testing.assert_close(SecondMoment(stream).norm(), float(oracle.second_moment(stream).norm()))
