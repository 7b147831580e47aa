"""The order of the data is a pure function of seed and step, and what is measured is fixed by the seed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kronscope.errors import DataError, OptionError
from kronscope.paper import data
from kronscope.paper.data.dataset import Dataset, Normalization, TensorImages, _permutation


@given(st.integers(1, 60), st.data(), st.integers(0, 2**40))
def test_an_epoch_sees_no_sample_twice(samples, draw, seed):
    batch = draw.draw(st.integers(1, samples))
    steps = samples // batch
    for epoch in range(2):
        seen = torch.cat([data.batch_indices(samples, batch, seed, epoch * steps + step) for step in range(steps)])
        assert len(seen) == steps * batch
        assert len(seen.unique()) == len(seen)
        assert 0 <= int(seen.min()) <= int(seen.max()) < samples


def test_batches_depend_on_seed_and_step_only():
    forward = [data.batch_indices(100, 8, 3, step) for step in range(40)]
    _permutation.cache_clear()
    torch.manual_seed(99)
    for step in reversed(range(40)):
        assert torch.equal(data.batch_indices(100, 8, 3, step), forward[step])
    assert not torch.equal(data.batch_indices(100, 8, 4, 0), forward[0])
    assert not torch.equal(data.batch_indices(100, 100, 3, 0), data.batch_indices(100, 100, 3, 1))


def test_drawing_batches_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    data.batch_indices(100, 8, 3, 7)
    data.load("digits").sample(10, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_batch_size_means_all_samples_in_order():
    assert data.batch_indices(7, None, 0, 3).tolist() == list(range(7))


@pytest.mark.parametrize("batch", [0, -1, 11])
def test_a_batch_that_does_not_fit_is_explained(batch):
    with pytest.raises(OptionError, match=r"between 1 and 10.*--batch"):
        data.batch_indices(10, batch, 0, 0)


def test_samples_can_be_iterated_twice_and_follow_the_seed():
    dataset = data.load("digits")
    samples = dataset.sample(100, seed=1, batch=32)
    first, second = list(samples), list(samples)
    assert [len(targets) for _, targets in first] == [32, 32, 32, 4]
    assert len(samples) == 4
    assert samples.num_samples == 100
    for (a, b), (c, d) in zip(first, second, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    other = torch.cat([inputs for inputs, _ in dataset.sample(100, seed=2)])
    assert not torch.equal(other, torch.cat([inputs for inputs, _ in first]))
    with pytest.raises(OptionError, match="at least 1"):
        dataset.sample(0, seed=0)


def test_the_digits_are_standardised():
    inputs, targets = data.load("digits").batch(torch.arange(1797))
    assert inputs.shape == (1797, 1, 8, 8)
    assert abs(float(inputs.mean())) < 1e-3
    assert abs(float(inputs.std()) - 1) < 1e-3
    assert sorted(targets.unique().tolist()) == list(range(10))


def test_the_two_digits_are_zeros_and_ones():
    dataset = data.load("digits2")
    inputs, targets = dataset.batch(torch.arange(len(dataset)))
    assert inputs.shape == (360, 64)
    assert targets.unique().tolist() == [0.0, 1.0]


def _dataset(pixels: torch.Tensor, targets: torch.Tensor) -> Dataset:
    return Dataset("x", "X", TensorImages(pixels), targets, 10, Normalization((0.0,), (1.0,)))


def test_the_fingerprint_tells_data_apart():
    pixels = torch.arange(200, dtype=torch.uint8).view(50, 1, 2, 2)
    same = _dataset(pixels, torch.zeros(50, dtype=torch.long)).fingerprint()
    assert same == _dataset(pixels.clone(), torch.zeros(50, dtype=torch.long)).fingerprint()
    changed = pixels.clone()
    changed[17, 0, 1, 1] ^= 1
    labels = torch.zeros(50, dtype=torch.long)
    labels[3] = 1
    assert same != _dataset(changed, torch.zeros(50, dtype=torch.long)).fingerprint()
    assert same != _dataset(pixels, labels).fingerprint()


def test_data_without_images_or_with_missing_labels_is_refused():
    pixels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    with pytest.raises(DataError, match="no images"):
        _dataset(pixels[:0], torch.zeros(0))
    with pytest.raises(DataError, match="3 images but 2 labels"):
        _dataset(pixels, torch.zeros(2))
    with pytest.raises(DataError, match="channels"):
        TensorImages(pixels[0])
