"""What is looked at before measuring stays small where outputs are large, and the answers are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.gradients import Recorder, capture, probe, resolve_layers


def model_and_data() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7))
    data = [(torch.randn(4, 5, generator=generator), torch.randint(7, (4,), generator=generator)) for _ in range(6)]
    return model, data


def remainders(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return Recorder(model, nn.CrossEntropyLoss(), data, resolve_layers(model)).remainders(6)


def test_the_size_of_columns_is_found_from_some_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = model_and_data()
    third = remainders(model, data[::3])
    monkeypatch.setattr(capture, "_OUTPUT_NUMBERS", 24 * 7 // 3)
    torch.testing.assert_close(remainders(model, data), third)


def test_fewer_samples_to_try_on_choose_the_same_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = model_and_data()
    sizes: list[int] = []
    reference = probe._Reference.of.__func__  # type: ignore[attr-defined]

    def counted(cls: type, forward: object, batch: object, *rest: object) -> object:
        sizes.append(batch.size)  # type: ignore[attr-defined]
        return reference(cls, forward, batch, *rest)

    monkeypatch.setattr(probe._Reference, "of", classmethod(counted))
    whole = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
    expected = ks.measure(model, nn.CrossEntropyLoss(), whole, progress=False)
    monkeypatch.setattr(probe, "_LARGE_OUTPUT", 0)
    found = ks.measure(model, nn.CrossEntropyLoss(), whole, progress=False)
    assert sizes == [3, 8, 3, 2]
    assert [row.cosine for row in found] == [row.cosine for row in expected]
