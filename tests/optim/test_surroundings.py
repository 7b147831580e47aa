"""What a program does around an optimizer: default devices, inference mode, models without data, groups taken out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kronscope.errors import GradientError, OptionError, StateError
from kronscope.optim import SOAP, KLShampoo, Shampoo

FAMILIES: dict[str, Callable[..., Any]] = {
    "shampoo": Shampoo,
    "kl": KLShampoo,
    "soap": SOAP,
    "soap, published": lambda p, lr: SOAP(p, lr, reference=True),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def steps(model: nn.Module, optimizer: Any, number: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 4, generator=generator, device="cpu")
    for _ in range(number):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.fixture
def another_default_device(default_device_put_back: None) -> None:
    """Set one that no number can be read from, so that a tensor which lands there is noticed."""
    torch.set_default_device("meta")


@every_family
def test_a_default_device_is_for_models_and_not_for_what_steers_a_step(
    family: str, another_default_device: None
) -> None:
    with torch.device("cpu"):
        model, twin = network(), network()
        plain = FAMILIES[family](twin, 0.01)
        steps(twin, plain, 6)
    optimizer = FAMILIES[family](model, 0.01)
    steps(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer)
    assert same(model, twin)
    assert str(optimizer.diagnostics()) == str(plain.diagnostics())
    assert str(optimizer.explain()) == str(plain.explain())
    assert optimizer.operator("0.weight").trace() == plain.operator("0.weight").trace()


@every_family
def test_a_first_step_in_inference_mode_is_no_trap_for_the_next(family: str) -> None:
    model, twin = network(), network()
    optimizer = FAMILIES[family](model, 0.01)
    model(torch.ones(2, 4)).sum().backward()
    twin(torch.ones(2, 4)).sum().backward()
    with torch.inference_mode():
        optimizer.step()
    plain = FAMILIES[family](twin, 0.01)
    plain.step()
    steps(model, optimizer)
    steps(twin, plain)
    assert same(model, twin)


def test_a_model_without_data_is_refused_and_not_silently_left_as_it_is() -> None:
    with torch.device("meta"):
        model = network()
    optimizer = Shampoo(model, 0.01)
    model(torch.ones(2, 4, device="meta")).sum().backward()
    with pytest.raises(GradientError, match=r"0\.weight is on the meta device.*optimizer after"):
        optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(network().state_dict(), assign=True)
    with pytest.raises(GradientError, match=r"would never change. Make the optimizer after"):
        steps(model, optimizer, 1)


def test_a_state_without_data_is_refused_and_changes_nothing() -> None:
    model = network()
    optimizer = Shampoo(model, 0.01)
    steps(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for tensors in saved["state"].values():
        tensors.update({name: tensor.to("meta") for name, tensor in tensors.items()})
    with pytest.raises(StateError, match=r"0\.weight: 'step' of the saved state is on the meta device.*map_location"):
        optimizer.load_state_dict(saved)
    assert not any(tensor.is_meta for tensors in optimizer.state.values() for tensor in tensors.values())


def test_lazy_parameters_are_refused_with_the_way() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(OptionError, match=r"'0\.weight' is lazy.*call the model once"):
        Shampoo(model, 0.01)
    with pytest.raises(OptionError, match=r"'0\.weight' is lazy"):
        Shampoo(model.named_parameters(), 0.01)
    with pytest.raises(OptionError, match="one of the parameters is lazy"):
        Shampoo(list(model.parameters()), 0.01)
    optimizer = Shampoo(model[1], 0.01)
    with pytest.raises(OptionError, match="one of the parameters is lazy"):
        optimizer.add_param_group({"params": model[0].parameters()})
    assert len(optimizer.param_groups) == 1


def test_frozen_parameters_may_have_any_dtype() -> None:
    frozen = nn.Parameter(torch.zeros(3, 3).to(torch.float8_e4m3fn), requires_grad=False)
    model = network()
    optimizer = Shampoo([*model.named_parameters(), ("quantised", frozen)], 0.01)
    steps(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert "quantised" in str(optimizer.explain(rows=True))


@every_family
def test_a_group_may_be_taken_out_and_the_others_go_on(family: str) -> None:
    model = network()
    optimizer = FAMILIES[family](
        [{"params": list(model[0].named_parameters())}, {"params": list(model[2].named_parameters())}], 0.01
    )
    steps(model, optimizer)
    group = optimizer.param_groups.pop(0)
    before = copy.deepcopy(model)
    steps(model, optimizer)
    assert same(model[0], before[0])
    assert not same(model[2], before[2])
    saved = copy.deepcopy(optimizer.state_dict())
    assert [int(tensors["step"]) for tensors in saved["state"].values()] == [6, 6]
    optimizer.load_state_dict(saved)
    twin, copied = copy.deepcopy((model, optimizer))
    steps(twin, copied)
    steps(model, optimizer)
    assert same(model, twin)
    optimizer.param_groups.append(group)
    with pytest.raises(OptionError, match=r"2 groups, of which 1 were planned.*add_param_group"):
        optimizer.step()


def test_copies_keep_what_was_set_on_the_optimizer() -> None:
    model = network()
    optimizer = Shampoo(model, 0.01)
    optimizer.fast_products, optimizer.metrics_every = True, 3
    copied = copy.deepcopy(optimizer)
    assert (copied.fast_products, copied.metrics_every) == (True, 3)


def test_weights_that_are_lost_are_told_from_a_bad_gradient() -> None:
    model = network()
    optimizer = Shampoo(model, 0.01)
    with torch.no_grad():
        model.get_parameter("2.weight")[0, 0] = math.nan
    with pytest.warns(RuntimeWarning, match=r"2\.weight itself is not finite.*checkpoint; this step is skipped"):
        steps(model, optimizer, 1)
    model = network()
    optimizer = Shampoo(model, 0.01)
    (math.inf * model(torch.ones(2, 4))).sum().backward()
    with pytest.warns(RuntimeWarning) as told:
        optimizer.step()
    assert "itself" not in str(told[0].message)
