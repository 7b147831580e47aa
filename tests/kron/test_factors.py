"""Facts: sums, means and exponential means equal their closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kronscope.errors import OptionError, ShapeError
from kronscope.kron import Averaging, Ema, FactorState, Mean, Sum


def grams(count: int) -> Tensor:
    rows = torch.randn(count, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return rows.mT @ rows


def accumulated(averaging: Averaging, count: int, weights: list[float]) -> Tensor:
    state = FactorState.zeros(3, averaging, dtype=torch.float64)
    for gram, weight in zip(grams(count), weights, strict=True):
        state.update(gram, weight)
    return state.read()


positive = st.lists(st.floats(0.1, 5), min_size=1, max_size=6)


@given(positive)
def test_a_sum(weights: list[float]) -> None:
    expected = torch.einsum("k,kij->ij", torch.tensor(weights).double(), grams(len(weights)))
    torch.testing.assert_close(accumulated(Sum(), len(weights), weights), expected, rtol=1e-6, atol=1e-6)


@given(positive)
def test_a_mean(weights: list[float]) -> None:
    w = torch.tensor(weights, dtype=torch.float64)
    expected = torch.einsum("k,kij->ij", w / w.sum(), grams(len(weights)))
    torch.testing.assert_close(accumulated(Mean(), len(weights), weights), expected)


@given(positive, st.floats(0, 0.99))
def test_an_exponential_mean_is_bias_corrected(weights: list[float], decay: float) -> None:
    w = torch.tensor(weights, dtype=torch.float64)
    age = torch.arange(len(weights) - 1, -1, -1, dtype=torch.float64)
    kernel = (1 - decay) * torch.tensor(decay, dtype=torch.float64) ** age * w
    expected = torch.einsum("k,kij->ij", kernel / kernel.sum(), grams(len(weights)))
    torch.testing.assert_close(accumulated(Ema(decay), len(weights), weights), expected)


def test_a_wrong_update_raises_and_changes_nothing() -> None:
    state = FactorState.zeros(3, Mean())
    state.update(torch.eye(3))
    before = state.read(), state.weight
    with pytest.raises(ShapeError, match=r"\(3, 3\), got an update \(2, 2\)"):
        state.update(torch.eye(2))
    assert torch.equal(state.read(), before[0])
    assert state.weight == before[1]


@pytest.mark.parametrize("averaging", [Sum(), Mean(), Ema(0.9)])
def test_nothing_seen_reads_as_zero_and_reading_hands_out_a_copy(averaging: Averaging) -> None:
    state = FactorState.zeros(2, averaging)
    assert not state.read().any()
    state.update(torch.eye(2))
    state.read().zero_()
    assert state.read().any()


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_an_exponential_mean_checks_its_decay(decay: float) -> None:
    with pytest.raises(OptionError, match="for sums use Sum"):
        Ema(decay)


def test_a_factor_keeps_its_dtype() -> None:
    state = FactorState.zeros(2, Sum(), dtype=torch.float32)
    state.update(torch.eye(2, dtype=torch.float64))
    assert state.read().dtype == torch.float32
