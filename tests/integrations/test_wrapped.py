"""Our optimizer inside wrappers, and names for the parameters of a framework's groups; needs no other package."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.errors import OptionError
from kronscope.integrations import named_groups, unwrap


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_unwrap_finds_our_optimizer_at_any_depth() -> None:
    ours = ks.SOAP(nn.Linear(3, 2).named_parameters(), lr=1e-3)
    assert unwrap(ours) is ours
    assert unwrap(Wrapper(Wrapper(ours))) is ours


def test_unwrap_says_what_it_was_given() -> None:
    other = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    with pytest.raises(OptionError, match="got a Wrapper without one inside"):
        unwrap(Wrapper(other))


def model() -> Any:
    return nn.ModuleDict(
        {"tokens": nn.Embedding(7, 4), "body": nn.Linear(4, 4), "frozen": nn.Linear(4, 4), "out": nn.Linear(4, 7)}
    )


def test_bare_groups_get_the_plan_of_named_ones() -> None:
    """The groups of Trainer and timm: by weight decay, without names."""
    net = model()
    net["frozen"].requires_grad_(False)
    matrices = [param for param in net.parameters() if param.ndim > 1]
    vectors = [param for param in net.parameters() if param.ndim < 2]
    bare = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    named = named_groups(net, bare)
    assert [group["weight_decay"] for group in named] == [0.1, 0.0]
    plan = {row.name: row.method for row in ks.Shampoo(named, lr=1e-3).explain().rows}
    assert plan == {row.name: row.method for row in ks.Shampoo(ks.param_groups(net), lr=1e-3).explain().rows}
    assert plan["tokens.weight"] == "AdamW (embedding)"
    assert plan["out.weight"] == "AdamW (head)"
    assert "frozen.weight" not in plan


def test_a_group_of_frozen_parameters_is_left_out() -> None:
    net = model()
    net["frozen"].requires_grad_(False)
    groups = [{"params": net["frozen"].parameters()}, {"params": net["body"].weight, "lr": 0.5}]
    (group,) = named_groups(net, groups)
    assert [name for name, _ in group["params"]] == ["body.weight"]
    assert group["lr"] == 0.5


def test_a_parameter_of_another_model_is_refused() -> None:
    with pytest.raises(OptionError, match=r"shape \(5, 5\) that is not one of the model's"):
        named_groups(model(), [{"params": [nn.Parameter(torch.zeros(5, 5))]}])


def test_a_part_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.startswith("lightning.")]  # another test may have imported it
    for name in ("lightning", *loaded):
        monkeypatch.setitem(sys.modules, name, None)  # which import reads as: there is none
    monkeypatch.delitem(sys.modules, "kronscope.integrations.lightning", raising=False)
    monkeypatch.delitem(vars(ks.integrations), "lightning", raising=False)
    with pytest.raises(ks.errors.MissingExtraError, match="needs the package lightning: pip install lightning"):
        ks.integrations.lightning  # noqa: B018


def test_an_unknown_part_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        ks.integrations.keras  # noqa: B018
