"""Data is checked before it is used, and watched while it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from kronscope.errors import DataError, OptionError
from kronscope.gradients.data import Batches, map_tensors, tensors_of

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


class Shuffled:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(10)
        return iter([(X[order[:5]], Y[order[:5]]), (X[order[5:]], Y[order[5:]])])


class Exhausted:
    """Looks re-iterable, but holds one iterator."""

    def __init__(self) -> None:
        self._inner = iter([(X, Y)])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._inner


def test_samples_are_numbered_in_data_order() -> None:
    batches = Batches(DataLoader(TensorDataset(X, Y), batch_size=4))
    assert batches.num_samples == 10
    for _ in range(2):
        seen = list(batches)
        assert [(batch.first, batch.size) for batch in seen] == [(0, 4), (4, 4), (8, 2)]
        assert torch.equal(torch.cat([batch.inputs for batch in seen]), X)
    assert seen[1].take(slice(1, 3)).samples.tolist() == [5, 6]
    assert seen[1].describe() == "4 to 7"


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1]), (4, [4]), (7, [4, 3]), (10, [4, 4, 2]), (99, [4, 4, 2])])
def test_max_samples(limit: int, sizes: list[int]) -> None:
    batches = Batches(DataLoader(TensorDataset(X, Y), batch_size=4), limit)
    assert [batch.size for batch in batches] == sizes
    assert batches.num_samples == sum(sizes)


def test_max_samples_does_not_read_further() -> None:
    class Endless:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                yield X, Y

    assert Batches(Endless(), 25).num_samples == 25


def test_inputs_may_be_nested() -> None:
    class Pair(NamedTuple):
        left: Tensor
        right: Any

    inputs = {"a": X, "pair": Pair(X + 1, [Y, None]), "flag": True, "scale": torch.tensor(2.0)}
    (batch,) = Batches([(inputs, Y)], 3)
    assert batch.inputs["pair"].left.shape == (3, 2)
    assert batch.inputs["pair"].right[0].tolist() == [0, 1, 2]
    assert batch.inputs["flag"] is True
    assert batch.inputs["scale"].dim() == 0
    assert len(tensors_of(inputs)) == 4
    assert map_tensors(lambda t: t, inputs).keys() == inputs.keys()


def test_mappings_of_other_types_become_dictionaries() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": Y, "attention_mask": Y})
    (batch,) = Batches([(encoding, Y)], 4)
    assert {key: value.shape[0] for key, value in batch.inputs.items()} == {"input_ids": 4, "attention_mask": 4}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "empty"),
        ([(X[:0], Y[:0])], "empty"),
        (X, "one tensor"),
        ((X, Y), "pair .* got a Tensor"),
        (iter([(X, Y)]), "only once"),
        (((x, y) for x, y in [(X, Y)]), "only once"),
        (3, "iterable of batches"),
        ({"x": X}, "iterable of batches"),
        ([X], "pair"),
        ([(X, Y, Y)], "length 3"),
        ([{"input_ids": X, "labels": Y}], "pair"),
        ([(X, 3)], "targets of batch 0 must be a tensor.* got int"),
        ([(X, torch.tensor(3))], "single sample"),
        ([(X, Y[:5])], "inputs \\[10\\], targets 5"),
        ([({"a": X, "b": X[:3]}, Y)], "first dimensions differ"),
        ([("text", Y)], "no tensor"),
        (TensorDataset(X, Y), "Wrap a dataset in a DataLoader"),
        (DataLoader(TensorDataset(X, Y), shuffle=True), "shuffles \\(RandomSampler\\).*shuffle=False"),
        (DataLoader(TensorDataset(X, Y), sampler=RandomSampler(X)), "shuffles"),
        (DataLoader(TensorDataset(X, Y), sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
    ],
)
def test_data_that_cannot_be_used(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Batches(data)


def test_an_iterator_is_refused_before_anything_is_consumed() -> None:
    iterator = iter([(X, Y)])
    with pytest.raises(DataError):
        Batches(iterator)
    assert next(iterator) is not None


@pytest.mark.parametrize("limit", [0, -1])
def test_max_samples_must_be_positive(limit: int) -> None:
    with pytest.raises(OptionError, match="max_samples"):
        Batches([(X, Y)], limit)


def test_shuffling_of_any_kind_is_noticed() -> None:
    batches = Batches(Shuffled())
    with pytest.raises(DataError, match=r"another order each time.*shuffle=False.*list"):
        list(batches)


def test_random_augmentation_is_noticed() -> None:
    loader = DataLoader(
        TensorDataset(X, Y),
        batch_size=5,
        collate_fn=lambda items: (
            torch.stack([i[0] for i in items]) + torch.rand(()),
            torch.stack([i[1] for i in items]),
        ),
    )
    with pytest.raises(DataError, match="augmentation"):
        list(Batches(loader))


def test_samples_swapped_within_a_batch_are_noticed() -> None:
    data = [(X.clone(), Y.clone())]
    batches = Batches(data)
    data[0] = (X[torch.tensor([1, 0, *range(2, 10)])], Y)
    with pytest.raises(DataError, match="Batch 0 differs"):
        list(batches)


def test_hidden_one_shot_iterators_and_changed_lengths_are_noticed() -> None:
    with pytest.raises(DataError, match="Batch 0 differs"):
        list(Batches(Exhausted()))
    data = [(X, Y)]
    batches = Batches(data)
    data.append((X, Y))
    with pytest.raises(DataError, match="Batch 1 differs"):
        list(batches)


def test_large_batches_are_compared_by_evenly_spaced_entries() -> None:
    big = torch.randn(64, 10_000)
    data = [(big, torch.zeros(64))]
    batches = Batches(data)
    list(batches)
    data[0] = (big.roll(1, 0), torch.zeros(64))
    with pytest.raises(DataError):
        list(batches)


def test_reading_data_leaves_all_random_states_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, generator=generator)
    before, own = torch.get_rng_state(), generator.get_state()
    list(Batches(loader))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)


def test_worker_processes() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, num_workers=1)
    batches = Batches(loader, 6)
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), X[:6])
