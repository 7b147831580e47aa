"""Measuring on any device gives the CPU's numbers, and leaves torch's settings alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.measures.budget import parse_budget
from tests.devices.pretend import Machine

DEVICES = ["cuda:0", "mps"]
ALL = [name for name in ks.approx.names() if name != "optimal-paper"]


class Convolution(nn.Module):
    """A convolution and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.conv(x)).flatten(1))
        return out


def model_and_data(device: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(3)
    model = Convolution()
    data = [(torch.randn(6, 1, 3, 3), torch.randint(3, (6,))) for _ in range(2)]
    return model.to(device), [(x.to(device), y.to(device)) for x, y in data]


def cosines(results: ks.Results) -> list[float]:
    return [row.cosine for row in results.rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"approximations": ALL},
        {"truth": "empirical_fisher", "batch_size": 4},
        {"labels": "sampled", "draws": 2},
        {"population": True},
        {"details": ("spectrum", "exponents")},
        {"max_columns": 1, "approximations": ("optimal", "shampoo2")},
        {"backend": "func"},
        {"estimator": "probes", "approximations": ("optimal", "shampoo2")},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*estimated from.*:UserWarning")
def test_measuring_gives_the_numbers_of_the_cpu(device, options):
    loss = nn.CrossEntropyLoss()
    model, data = model_and_data("cpu")
    here = ks.measure(model, loss, data, progress=False, **options)
    with Machine():
        model, data = model_and_data(device)
        there = ks.measure(model, loss, data, progress=False, **options)
        assert all(parameter.device.type == torch.device(device).type for parameter in model.parameters())
    assert cosines(there) == pytest.approx(cosines(here), rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("labels", ["exact", "sampled", "real"])
def test_every_loss_works_on_every_device(device, loss, labels):
    def answer(place: str) -> list[float]:
        torch.manual_seed(1)
        model = nn.Linear(4, 3).to(place)
        data = [(torch.randn(8, 4).to(place), torch.rand(8, 3).to(place))]
        return cosines(ks.measure(model, loss, data, labels=labels, progress=False))

    here = answer("cpu")
    with Machine():
        assert answer(device) == pytest.approx(here, rel=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_one_layer_and_live_operators(device):
    loss = nn.CrossEntropyLoss()

    def answer(place: str) -> list[float]:
        model, data = model_and_data(place)
        optimizer = ks.Shampoo(model.parameters(), lr=1e-2)
        for x, y in data:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        truth = ks.second_moment(model, loss, data, layer="head.weight", progress=False)
        results = ks.measure(model, loss, data, operators={"live": optimizer}, progress=False)
        weight = model.get_parameter("head.weight")
        return [ks.cosine(truth, optimizer.operator(weight)), truth.norm(), *cosines(results)]

    here = answer("cpu")
    with Machine():
        assert answer(device) == pytest.approx(here, rel=1e-3)


@pytest.mark.parametrize("device", [*DEVICES, "two devices"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_history_in_memory_is_kept_on_the_host_and_measured(device, dtype):
    """It used to fail: weights and numbers were on the CPU, records on the GPU, whose memory they filled."""

    def answer(places: tuple[str, str], machine: Machine | None) -> list[float]:
        torch.manual_seed(2)
        first, second = nn.Linear(4, 3).to(places[0]), nn.Linear(3, 2).to(places[1])
        model = nn.ModuleDict({"first": first, "second": second})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        history = ks.GradientHistory.attach(optimizer, model, layers=["first.weight", "second.weight"], dtype=dtype)
        for step in range(4):
            x = torch.sin(torch.arange(20.0) + step).view(5, 4).to(places[0])
            optimizer.zero_grad()
            second(torch.tanh(first(x)).to(places[1])).square().sum().backward()
            live = machine.live if machine is not None else 0
            optimizer.step()
            # the only thing that stays is on the host
            assert machine is None or machine.live <= live
        history.detach()
        return cosines(ks.measure_history(history, at=[2, 4], beta=0.9, progress=False))

    here = answer(("cpu", "cpu"), None)
    with Machine() as machine:
        places = ("cuda:0", "cuda:1") if device == "two devices" else (device, device)
        assert answer(places, machine) == pytest.approx(here, rel=1e-4)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_products_are_exact_while_measuring_and_as_before_afterwards(device):
    """TF32 changes cosines in the third digit."""
    seen = []

    class Watching(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().forward(input)

    torch.set_float32_matmul_precision("high")
    try:
        with Machine():
            model = Watching(4, 3).to(device)
            data = [(torch.randn(8, 4).to(device), torch.randint(3, (8,)).to(device))]
            ks.measure(model, nn.CrossEntropyLoss(), data, progress=False)
            assert torch.get_float32_matmul_precision() == "high"
            assert set(seen) == {"highest"}
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_default_budget_is_that_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 12 << 30))
    assert parse_budget(None, torch.device("cuda:0")) == 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11 << 30, 12 << 30))
    assert parse_budget(None, torch.device("cuda:0")) == 4 << 30
    assert parse_budget("1GiB", torch.device("cuda:0")) == 1 << 30
    assert parse_budget(None, torch.device("cpu")) == parse_budget(None)
