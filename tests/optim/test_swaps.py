"""Others may put other tensors into the groups of a finished optimizer; it notices, and goes on where it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronscope.errors import GradientError, StateError
from kronscope.optim import SOAP, KLShampoo, Shampoo
from tests.optim.tools import gradients, parameters

SHAPES = ((6, 4), (5, 3), (4,))
KINDS: dict[str, Any] = {
    "shampoo": lambda p: Shampoo(p, 0.05, momentum=0.5, refresh=2),
    "soap": lambda p: SOAP(p, 0.05, refresh=2),
    "kl": lambda p: KLShampoo(p, 0.05, refresh=2),
}


def named(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer{i}", param) for i, param in enumerate(params)]


def steps(optimizer: torch.optim.Optimizer, history: list[list[Tensor]], which: range) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in which:
        for param, grads in zip(params, history, strict=True):
            param.grad = grads[step].clone()
        optimizer.step()


def swap(optimizer: torch.optim.Optimizer, shapes: dict[int, tuple[int, ...]] | None = None) -> list[nn.Parameter]:
    """Put copies of the parameters in their places, as wrappers do that make parameters anew."""
    (group,) = optimizer.param_groups
    fresh = [nn.Parameter(param.detach().clone()) for param in group["params"]]
    for index, shape in (shapes or {}).items():
        fresh[index] = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    group["params"] = fresh
    return fresh


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 3])
def test_swapped_parameters_keep_state_and_place(kind: str, after: int) -> None:
    history = [gradients(shape, 6, seed=i) for i, shape in enumerate(SHAPES)]
    undisturbed = parameters(*SHAPES)
    steps(KINDS[kind](named(undisturbed)), history, range(6))
    params = parameters(*SHAPES)
    optimizer = KINDS[kind](named(params))
    steps(optimizer, history, range(after))
    before = [param.detach().clone() for param in params]
    fresh = swap(optimizer)
    steps(optimizer, history, range(after, 6))
    for param, old, start, wanted in zip(fresh, params, before, undisturbed, strict=True):
        assert torch.equal(param, wanted)
        assert torch.equal(old, start)
        assert old not in optimizer.state


def test_everything_but_a_step_notices_too() -> None:
    params = parameters(*SHAPES)
    optimizer = Shampoo(named(params), 0.05)
    history = [gradients(shape, 3, seed=i) for i, shape in enumerate(SHAPES)]
    steps(optimizer, history, range(2))
    saved = optimizer.state_dict()
    fresh = swap(optimizer)
    assert len(optimizer.explain().rows) == len(optimizer.diagnostics().rows) == 3
    swap(optimizer)
    again = optimizer.state_dict()
    for key, tensors in saved["state"].items():
        assert all(torch.equal(again["state"][key][name], tensor) for name, tensor in tensors.items())
    fresh = swap(optimizer)
    optimizer.load_state_dict(saved)
    assert optimizer.operator(fresh[0]).shape == (6, 4)


def test_a_parameter_of_another_shape_starts_anew_and_that_is_said() -> None:
    optimizer = Shampoo(named(parameters(*SHAPES)), 0.05)
    steps(optimizer, [gradients(shape, 2, seed=i) for i, shape in enumerate(SHAPES)], range(2))
    fresh = swap(optimizer, {1: (3, 3)})
    for param in fresh:
        param.grad = torch.ones_like(param)
    with pytest.warns(RuntimeWarning, match=r"layer1 stands in the place of one of shape \(5, 3\)"):
        optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in fresh] == [3, 1, 3]


def test_parameters_may_be_left_out_and_must_be_added_properly() -> None:
    params = parameters(*SHAPES)
    optimizer = Shampoo(named(params), 0.05)
    steps(optimizer, [gradients(shape, 2, seed=i) for i, shape in enumerate(SHAPES)], range(2))
    (more,) = parameters((3, 3))
    optimizer.param_groups[0]["params"] = [*params, more]
    with pytest.raises(StateError, match=r"hold 4 parameters, some of them new, where 3 were planned.*add_param_group"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = params[1:]
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 3, 3]


def reshape(param: nn.Parameter, shape: tuple[int, ...]) -> None:
    """Replace a parameter's data, as torch.nn.utils and vocabularies that grow do."""
    param.data = torch.ones(shape, dtype=param.dtype)
    param.grad = torch.ones(shape, dtype=param.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("index", "shape"), [(0, (9, 4)), (2, (100_000,)), (2, (2,))])
def test_data_of_another_shape_than_the_state_is_refused_until_the_state_is_gone(
    kind: str, index: int, shape: tuple[int, ...]
) -> None:
    params = parameters(*SHAPES)
    optimizer = KINDS[kind](named(params))
    steps(optimizer, [gradients(s, 2, seed=i) for i, s in enumerate(SHAPES)], range(2))
    reshape(params[index], shape)
    before = [param.detach().clone() for param in params]
    words = rf"layer{index} has shape \({shape[0]},.*was made for \({SHAPES[index][0]},.*state\.pop\(parameter\)"
    for use in (optimizer.step, optimizer.step, optimizer.state_dict):
        with pytest.raises(StateError, match=words):
            use()
    assert all(map(torch.equal, params, before))
    optimizer.state.pop(params[index])
    optimizer.step()
    counted = [int(optimizer.state[param]["step"]) for param in params]
    assert counted == [1 if place == index else 3 for place in range(3)]
    assert not any(map(torch.equal, params, before))
    assert [row.shape for row in optimizer.explain().rows] == [tuple(param.shape) for param in params]


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_another_shape_before_the_first_step_is_planned_anew(kind: str) -> None:
    params, twins = parameters(*SHAPES), parameters(*SHAPES)
    late = KINDS[kind](named(params))
    for tensors in (params, twins):
        reshape(tensors[0], (9, 4))
        reshape(tensors[1], (5, 3))
        reshape(tensors[2], (100_000,))
    early = KINDS[kind](named(twins))
    for _ in range(3):
        late.step()
        early.step()
    assert all(map(torch.equal, params, twins))


def test_a_gradient_of_another_shape_than_its_parameter_is_refused() -> None:
    params = parameters(*SHAPES)
    optimizer = Shampoo(named(params), 0.05)
    for param in params:
        param.grad = torch.ones_like(param)
    params[2].data = torch.zeros(100_000, dtype=torch.float64)
    with pytest.raises(GradientError, match=r"layer2 has shape \(100000,\), its gradient \(4,\).*backward"):
        optimizer.step()
    assert not optimizer.state
