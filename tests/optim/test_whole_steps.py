"""A step is taken as a whole or not at all: interrupts wait, and what fails leaves nothing behind."""

from __future__ import annotations

import copy
import os
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kronscope as ks
from kronscope.errors import StateError

FAMILIES: dict[str, Callable[[nn.Module], Any]] = {
    "Shampoo": lambda model: ks.Shampoo(model, 0.02, refresh=2),
    "KLShampoo": lambda model: ks.KLShampoo(model, 0.02, refresh=2),
    "SOAP": lambda model: ks.SOAP(model, 0.02, refresh=2),
    "SOAP, published": lambda model: ks.SOAP(model, 0.02, refresh=2, reference=True),
}


class At(TorchDispatchMode):
    """Do something at one of the operations inside."""

    def __init__(self, number: float, action: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number, self.action = number, action
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.count == self.number:
            self.action()
        self.count += 1
        return func(*args, **(kwargs or {}))


def network(width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 3), nn.Linear(3, 2))


def backward(model: nn.Module, step: int, width: int = 4) -> None:
    model.zero_grad()
    torch.manual_seed(step)
    model(torch.randn(8, width)).square().mean().backward()


def snapshot(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = [*model.parameters(), *(state[key][name] for key in sorted(state) for name in sorted(state[key]))]
    return [tensor.detach().clone() for tensor in tensors]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def trained(family: str, steps: int) -> tuple[nn.Module, Any, list[list[torch.Tensor]]]:
    model = network()
    optimizer = FAMILIES[family](model)
    seen = [snapshot(model, optimizer)]
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        seen.append(snapshot(model, optimizer))
    return model, optimizer, seen


def operations(family: str, step: int) -> int:
    model, optimizer, _ = trained(family, step)
    backward(model, step)
    with At(float("inf"), lambda: None) as mode:
        optimizer.step()
    count: int = mode.count
    return count


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupt_at_any_operation_leaves_a_whole_step_and_the_run_goes_on(family: str, step: int) -> None:
    _, _, seen = trained(family, 4)
    count = operations(family, step)
    for place in range(0, count, max(1, count // 5)):
        model, optimizer, _ = trained(family, step)
        backward(model, step)
        with pytest.raises(KeyboardInterrupt), At(place, lambda: signal.raise_signal(signal.SIGINT)):
            optimizer.step()
        found = snapshot(model, optimizer)
        assert same(found, seen[step]) or same(found, seen[step + 1]), place
        for later in range(step + same(found, seen[step + 1]), 4):
            backward(model, later)
            optimizer.step()
        assert same(snapshot(model, optimizer), seen[4]), place


@pytest.mark.parametrize("family", ["Shampoo", "SOAP"])
def test_an_interrupt_while_threads_take_roots_waits_for_the_step(family: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = []
        for interrupted in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70))
            optimizer = FAMILIES[family](model)
            backward(model, 0, 70)
            if interrupted:
                calls = threading.Semaphore(1)
                true = torch.linalg.eigh

                def eigh(matrix: torch.Tensor, calls: Any = calls, true: Any = true) -> Any:
                    if calls.acquire(blocking=False):
                        os.kill(os.getpid(), signal.SIGINT)
                    return true(matrix)

                with mock.patch.object(torch.linalg, "eigh", eigh), pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            else:
                optimizer.step()
            seen.append(snapshot(model, optimizer))
        assert same(*seen)
    finally:
        torch.set_num_threads(before)


def test_a_second_interrupt_is_not_held_back_and_the_next_step_says_so() -> None:
    model, optimizer, seen = trained("Shampoo", 2)

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    backward(model, 2)
    with pytest.raises(KeyboardInterrupt), At(operations("Shampoo", 2) // 2, twice):
        optimizer.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(StateError, match="KeyboardInterrupt"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    assert same(snapshot(model, optimizer), seen[2])
    optimizer.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_step_that_fails_has_changed_nothing(family: str) -> None:
    """As on a device that lacks an operation."""
    _, _, seen = trained(family, 2)
    count = operations(family, 0)

    def fail() -> None:
        raise NotImplementedError("this device has no such operation")

    failed = 0
    for place in range(count // 8, count - count // 3, max(1, count // 8)):
        model = network()
        optimizer = FAMILIES[family](model)
        backward(model, 0)
        try:
            with At(place, fail), warnings.catch_warnings():
                # a root that fails is no reason to stop
                warnings.simplefilter("ignore", RuntimeWarning)
                optimizer.step()
        except NotImplementedError:
            failed += 1
            assert same(snapshot(model, optimizer), seen[0]), place
            for step in range(2):
                backward(model, step)
                optimizer.step()
            assert same(snapshot(model, optimizer), seen[2]), place
    assert failed


def test_a_later_step_that_fails_is_said_by_the_next_and_a_checkpoint_mends_it() -> None:
    model, optimizer, _ = trained("Shampoo", 2)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    backward(model, 2)

    def fail() -> None:
        raise MemoryError("no more")

    with pytest.raises(MemoryError), At(operations("Shampoo", 2) // 2, fail):
        optimizer.step()
    with pytest.raises(StateError, match="no more"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    optimizer.step()
