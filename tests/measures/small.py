"""A small model, measured without a progress bar: what the tests of ``ks.measure`` share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from tests.gradients import zoo

SHAMPOOS = ("optimal", "shampoo2", "shampoo")
Data = list[tuple[Any, Tensor]]


def mlp(samples: int = 12, classes: int = 3) -> tuple[nn.Module, Data]:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, classes)).double()
    data = (zoo.images(samples, 5), torch.randint(0, classes, (samples,)))
    return model, [(x, y) for x, y in zip(data[0].split(5), data[1].split(5), strict=True)]


def measure(model: nn.Module, data: Any, loss: nn.Module | None = None, **options: Any) -> ks.Results:
    return ks.measure(model, loss or nn.CrossEntropyLoss(), data, progress=False, **options)


def cosines_of(results: ks.Results) -> dict[tuple[str, str], float]:
    return {(row.layer, row.approximation): row.cosine for row in results}


def assert_same(one: ks.Results, other: ks.Results, tolerance: float = 1e-9) -> None:
    first, second = cosines_of(one), cosines_of(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert value == pytest.approx(second[key], abs=tolerance, nan_ok=True), key
