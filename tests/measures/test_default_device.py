"""A default device other than the CPU is for the user's tensors, not for ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks

Data = list[tuple[Tensor, Tensor]]


@pytest.fixture
def model_and_data() -> tuple[nn.Module, Data]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, [(torch.randn(7, 5), torch.randint(3, (7,))), (torch.randn(4, 5), torch.randint(3, (4,)))]


@pytest.mark.usefixtures("default_device_put_back")
def test_setting_it_back_to_none_is_no_device(model_and_data: tuple[nn.Module, Data]) -> None:
    """torch 2.8 then has no answer to what the default device is."""
    model, data = model_and_data
    torch.set_default_device("cpu")
    torch.set_default_device(None)
    assert ks.measure(model, nn.CrossEntropyLoss(), data, progress=False)
    optimizer = ks.Shampoo(model)
    nn.functional.cross_entropy(model(data[0][0]), data[0][1]).backward()
    optimizer.step()


@pytest.mark.usefixtures("default_device_put_back")
@pytest.mark.parametrize("options", [{}, {"max_columns": 1}], ids=["exact", "random columns"])
def test_measuring_does_not_depend_on_it(model_and_data: tuple[nn.Module, Data], options: dict[str, Any]) -> None:
    model, data = model_and_data
    expected = ks.measure(model, nn.CrossEntropyLoss(), data, progress=False, **options)
    torch.set_default_device("meta")
    found = ks.measure(model, nn.CrossEntropyLoss(), data, progress=False, **options)
    assert torch.get_default_device().type == "meta"
    assert [row.cosine for row in found] == pytest.approx([row.cosine for row in expected])
    assert [row.stderr for row in found] == pytest.approx([row.stderr for row in expected], nan_ok=True)


@pytest.mark.usefixtures("default_device_put_back")
def test_the_model_sees_it(model_and_data: tuple[nn.Module, Data]) -> None:
    model, data = model_and_data
    seen: set[str] = set()

    def forward(module: nn.Module, inputs: Tensor) -> Tensor:
        seen.add(torch.zeros(1).device.type)
        return module(inputs)  # type: ignore[no-any-return]

    torch.set_default_device("meta")
    ks.measure(model, nn.CrossEntropyLoss(), data, forward=forward, progress=False)
    assert seen == {"meta"}


@pytest.mark.usefixtures("default_device_put_back")
def test_a_history_does_not_depend_on_it(model_and_data: tuple[nn.Module, Data]) -> None:
    model, data = model_and_data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = ks.GradientHistory.attach(optimizer, model)
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    expected = ks.measure_history(history, progress=False)
    torch.set_default_device("meta")
    found = ks.measure_history(history, progress=False)
    assert [row.cosine for row in found] == pytest.approx([row.cosine for row in expected])
