"""States that no run of ours has: refused in words, and nothing is changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.errors import StateError

FAMILIES: dict[str, Callable[[nn.Module], Any]] = {
    "Shampoo": lambda model: ks.Shampoo(model, 0.02, scale="adam"),
    "KLShampoo": lambda model: ks.KLShampoo(model, 0.02),
    "SOAP": lambda model: ks.SOAP(model, 0.02),
    "SOAP, published": lambda model: ks.SOAP(model, 0.02, reference=True),
}
Tensors = dict[str, torch.Tensor]


def trained(family: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    optimizer = FAMILIES[family](model)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def set_to(name: str, value: float) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        key = next(key for key in tensors if key.split(".")[-1] == name)
        tensors[key] = tensors[key].clone()
        tensors[key].view(-1)[-1] = value

    return damage


def replace_by(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        key = next(key for key in tensors if key.split(".")[-1] == name)
        tensors[key] = change(tensors[key])

    return damage


def remove(name: str) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        del tensors[next(key for key in tensors if key.split(".")[-1] == name)]

    return damage


DAMAGES: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "NaN in a moment": (set_to("exp_avg", math.nan), "NaN or infinity.*earlier checkpoint"),
    "infinity in a factor": (set_to("factor0", math.inf), "NaN or infinity"),
    "a negative step": (set_to("step", -1), "'step'.*is -1"),
    "a step that is NaN": (set_to("step", math.nan), "'step'.*is nan"),
    "half a step": (set_to("step", 2.5), "'step'.*is 2.5"),
    "an infinite step": (set_to("step", math.inf), "'step'.*is inf"),
    "a root of the future": (set_to("refreshed", 10), "ahead of the step"),
    "a negative phase": (set_to("phase", -3), "is negative"),
    "whole numbers for a moment": (replace_by("exp_avg", lambda t: t.to(torch.int64)), "dtype torch.int64"),
    "complex numbers for a moment": (replace_by("exp_avg", lambda t: t.to(torch.complex64)), "dtype torch.complex64"),
    "fractions for a phase": (replace_by("phase", lambda t: t.float()), "dtype torch.float32"),
    "another shape": (replace_by("exp_avg", lambda t: t[..., :-1]), "another shape"),
    "no tensor": (replace_by("factor0", lambda t: "gone"), "gone"),
    "no step": (remove("step"), "no 'step'"),
    "no factor": (remove("factor1"), "no 'tile0.factor1'"),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("betas", (2.0, 0.5)),
        ("betas", None),
        ("eps", "small"),
        ("refresh", '{"type": "Every", "stepz": 3}'),
        ("refresh", '{"type": "Every", "steps": 0}'),
        ("refresh", '{"type": "Every", "ste'),
        ("refresh", '{"type": "Sometimes", "steps": 3}'),
        ("refresh", "often"),
        ("lr", math.nan),
    ],
    ids=str,
)
def test_a_damaged_option_is_refused_and_changes_nothing(name: str, value: object) -> None:
    _, optimizer = trained("Shampoo")
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0][name] = value
    with pytest.raises(StateError, match=f"option of group 0 of the saved state cannot be read: {name}"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    optimizer.load_state_dict(before)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_state_is_refused_and_changes_nothing(family: str, damage: str) -> None:
    model, optimizer = trained(family)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    # the second matrix
    key = 2
    change, words = DAMAGES[damage]
    change(saved["state"][key])
    with pytest.raises(StateError, match=words) as caught:
        optimizer.load_state_dict(saved)
    assert "1.weight" in str(caught.value)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for place, tensors in before["state"].items():
        assert all(torch.equal(tensor, after["state"][place][name]) for name, tensor in tensors.items())
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["exp_avg_sq", "graft_sq"])
def test_a_negative_second_moment_is_refused(name: str) -> None:
    _, optimizer = trained("SOAP" if name == "exp_avg_sq" else "Shampoo")
    saved = copy.deepcopy(optimizer.state_dict())
    set_to(name, -1.0)(saved["state"][2])
    with pytest.raises(StateError, match="negative in places"):
        optimizer.load_state_dict(saved)


def test_a_vector_s_state_is_looked_at_too() -> None:
    _, optimizer = trained("Shampoo")
    saved = copy.deepcopy(optimizer.state_dict())
    set_to("exp_avg", math.nan)(saved["state"][3])
    with pytest.raises(StateError, match=r"1\.bias.*NaN"):
        optimizer.load_state_dict(saved)
