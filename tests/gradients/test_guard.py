"""Measuring leaves no trace, whether it succeeds or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kronscope.errors import KronscopeError
from kronscope.gradients.capture import Recorder
from kronscope.gradients.guard import untouched
from kronscope.gradients.matrices import resolve_layers
from tests.gradients.zoo import images


class Lively(nn.Module):
    """Everything that can change in a forward pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.table = nn.Embedding(3, 3, max_norm=0.1)
        self.head = nn.Linear(4, 3)
        self.count: Tensor
        self.cache: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.last = x
        self.count += 1
        self.cache = torch.full((2,), float(self.calls))
        torch.rand(3)
        np.random.rand()  # noqa: NPY002
        random.random()
        x = x + self.table(torch.ones(len(x), x.shape[2], dtype=torch.long)).transpose(1, 2)
        return self.head(self.drop(self.norm(self.conv(x))).mean(2))


class Snapshot:
    def __init__(self, model: nn.Module, loader: Any = None) -> None:
        self.values = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=True).items()}
        self.buffers = {name: (tensor, tensor.clone()) for name, tensor in model.named_buffers()}
        self.parameters: list[Any] = [
            (p, p.requires_grad, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()
        ]
        self.flags = [module.training for module in model.modules()]
        self.attributes = [dict(vars(module)) for module in model.modules()]
        self.hooks = [
            [dict(value) for key, value in sorted(vars(module).items()) if "hooks" in key and value is not None]
            for module in model.modules()
        ]
        self.tensor_hooks = [p._backward_hooks for p in model.parameters()]
        legacy: Any = np.random.get_state()  # noqa: NPY002
        self.random = (torch.get_rng_state(), legacy[1].tobytes(), random.getstate())
        self.loader: Any = None if loader is None else loader.generator.get_state()
        self.modes = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_inference_mode_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        )

    def check(self, model: nn.Module, loader: Any = None) -> None:
        now = Snapshot(model, loader)
        assert self.values.keys() == now.values.keys()
        assert all(torch.equal(value, now.values[name]) for name, value in self.values.items())
        for name, (tensor, value) in self.buffers.items():
            assert now.buffers[name][0] is tensor
            assert torch.equal(tensor, value)
        for one, other in zip(self.parameters, now.parameters, strict=True):
            (p, flag, grad, value), (q, flag_now, grad_now, value_now) = one, other
            assert p is q
            assert flag == flag_now
            assert grad is grad_now
            assert value is None or (value_now is not None and torch.equal(value, value_now))
        assert self.flags == now.flags
        for before, after in zip(self.attributes, now.attributes, strict=True):
            assert before.keys() == after.keys()
            assert all(before[key] is after[key] for key in before)
        assert self.hooks == now.hooks
        assert all(a is b for a, b in zip(self.tensor_hooks, now.tensor_hooks, strict=True))
        assert torch.equal(self.random[0], now.random[0])
        assert self.random[1:] == now.random[1:]
        assert loader is None or torch.equal(self.loader, now.loader)
        assert self.modes == now.modes


def _lively() -> tuple[Lively, DataLoader[Any]]:
    model = Lively().double()
    model.train()
    model.norm.eval()
    model.head.weight.requires_grad_(False)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    model.conv.weight.register_hook(lambda grad: grad * 2)
    model.norm.register_forward_hook(lambda *_: None)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(images(7, 3, 4), torch.randint(0, 3, (7,)))
    return model, DataLoader(data, batch_size=4, generator=generator)


LAYERS = ["conv.weight", "head.weight", "table.weight"]


@pytest.mark.parametrize("backend", ["auto", "func"])
@pytest.mark.parametrize("cache", [True, False])
def test_nothing_changes(backend: str, cache: bool) -> None:
    model, loader = _lively()
    before = Snapshot(model, loader)
    recorder = Recorder(
        model, nn.CrossEntropyLoss(), loader, resolve_layers(model, LAYERS), backend=backend, chunk_bytes=4096
    )
    before.check(model, loader)
    for labels in ("exact", "sampled", "real"):
        streams = recorder.streams(labels, cache=cache)
        before.check(model, loader)
        for stream in streams.values():
            for _ in stream:
                before.check(model, loader)
    before.check(model, loader)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_the_callers_modes_stay(context: Callable[[], Any]) -> None:
    model, loader = _lively()
    with context():
        before = Snapshot(model, loader)
        Recorder(model, nn.CrossEntropyLoss(), loader, resolve_layers(model, LAYERS)).streams()
        before.check(model, loader)


@pytest.mark.parametrize("failure", [RuntimeError("in the middle"), KeyboardInterrupt()])
@pytest.mark.parametrize("calls", [1, 2, 3, 5, 9, 12])
def test_nothing_changes_when_the_model_fails(failure: BaseException, calls: int) -> None:
    model, loader = _lively()
    # Attributes are restored after every chunk, so calls are counted outside of the model.
    total = [0]

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        total[0] += 1
        if total[0] == calls:
            raise failure
        out: Tensor = model(x)
        return out

    def measure() -> None:
        specs = resolve_layers(model, LAYERS)
        recorder = Recorder(model, nn.CrossEntropyLoss(), loader, specs, forward, chunk_bytes=2000)
        for stream in recorder.streams("real", cache=False).values():
            list(stream)

    before = Snapshot(model, loader)
    with pytest.raises((RuntimeError, KeyboardInterrupt, KronscopeError)):
        measure()
    assert total[0] >= calls
    before.check(model, loader)


def test_an_abandoned_stream_leaves_nothing_behind() -> None:
    model, loader = _lively()
    before = Snapshot(model, loader)
    recorder = Recorder(model, nn.CrossEntropyLoss(), loader, resolve_layers(model, LAYERS), chunk_bytes=1000)
    iterator = iter(recorder.streams(cache=False)["conv.weight"])
    next(iterator)
    before.check(model, loader)
    del iterator
    before.check(model, loader)


def test_inside_the_model_is_in_eval_mode_and_only_targets_need_gradients() -> None:
    last = nn.Linear(3, 2)
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(), last)
    last.weight.requires_grad_(False)
    with untouched(model, list(last.parameters())[:1]):
        assert not any(module.training for module in model.modules())
        assert [p.requires_grad for p in model.parameters()] == [False, False, True, False]
        assert not torch.backends.mha.get_fastpath_enabled()
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]


def test_train_overrides_are_not_called() -> None:
    class Merging(nn.Linear):
        """Some adapters merge weights when switched to eval mode."""

        def train(self, mode: bool = True) -> Merging:
            raise AssertionError("train() was called")

    model = Merging(2, 2)
    with untouched(model, []):
        assert not model.training
    assert model.training


def test_old_style_weight_norm_attribute_is_put_back() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = nn.utils.weight_norm(nn.Linear(3, 3))
    model = nn.Sequential(layer, nn.Linear(3, 2)).double()
    model(images(2, 3))
    before = layer.weight
    data = [(images(4, 3), torch.randint(0, 2, (4,)))]
    Recorder(model, nn.CrossEntropyLoss(), data, resolve_layers(model, ["0.weight_v", "1"])).streams()
    assert layer.weight is before
