"""A saved state finds its parameters by name, whatever their order; what does not fit is refused before it changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import DistributedError, OptionError, StateError
from kronscope.optim import SOAP, KLShampoo, Shampoo
from tests.optim.tools import gradients, train

# two of a shape, so that only a name tells them apart
SHAPES = {"a.weight": (4, 3), "b.weight": (4, 3), "c.weight": (5, 2), "c.bias": (5,), "d.bias": (5,)}


def named(prefix: str = "") -> dict[str, nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    return {
        prefix + name: nn.Parameter(torch.randn(shape, generator=drawn, dtype=torch.float64))
        for name, shape in SHAPES.items()
    }


def steps(optimizer: Any, params: dict[str, nn.Parameter], start: int, stop: int) -> None:
    """Give each parameter the gradients of its own name."""
    history = {name: gradients(shape, 12, seed=seed)[start:stop] for seed, (name, shape) in enumerate(SHAPES.items())}
    own = [next(history[short] for short in history if name.endswith(short)) for name in params]
    train(optimizer, list(params.values()), own)


def half_trained(kind: Any = Shampoo, prefix: str = "") -> tuple[dict[str, nn.Parameter], Any]:
    params = named(prefix)
    optimizer = kind(params.items(), 0.05, refresh=3)
    steps(optimizer, params, 0, 5)
    return params, optimizer


def taken_over(params: dict[str, nn.Parameter], names: list[str]) -> dict[str, nn.Parameter]:
    """Copies of parameters, in another order and perhaps with something in front of their names."""
    return {
        name: nn.Parameter(next(value for key, value in params.items() if name.endswith(key)).detach().clone())
        for name in names
    }


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_parameters_in_another_order_find_their_own_state(kind: Any) -> None:
    params, optimizer = half_trained(kind)
    other = taken_over(params, ["d.bias", "b.weight", "c.bias", "c.weight", "a.weight"])
    resumed = kind(other.items(), 0.05, refresh=3)
    resumed.load_state_dict(optimizer.state_dict())
    steps(optimizer, params, 5, 12)
    steps(resumed, other, 5, 12)
    for name, value in params.items():
        assert torch.allclose(value, other[name], rtol=1e-12, atol=0), name


def test_groups_in_another_order_keep_their_options() -> None:
    params = named()
    vectors = {"params": [(n, p) for n, p in params.items() if "bias" in n], "lr": 0.2}
    matrices = {"params": [(n, p) for n, p in params.items() if "weight" in n], "weight_decay": 0.1}
    optimizer = Shampoo([copy.copy(vectors), copy.copy(matrices)], 0.05)
    steps(optimizer, {name: params[name] for name in params}, 0, 3)
    resumed = Shampoo([copy.copy(matrices), {"params": vectors["params"]}], 0.7)
    resumed.load_state_dict(optimizer.state_dict())
    assert [(group["lr"], group["weight_decay"]) for group in resumed.param_groups] == [(0.05, 0.1), (0.2, 0.0)]
    assert resumed.param_groups[0]["param_names"] == ["a.weight", "b.weight", "c.weight"]
    assert torch.equal(
        resumed.state[params["b.weight"]]["tile0.factor0"], optimizer.state[params["b.weight"]]["tile0.factor0"]
    )
    # one group of both cannot have both learning rates
    with pytest.raises(StateError, match=r"several groups of the saved run, where '(lr|weight_decay)' is"):
        Shampoo(params.items(), 0.05).load_state_dict(optimizer.state_dict())


def test_other_names_are_refused_with_what_to_do_and_nothing_changes() -> None:
    params, optimizer = half_trained()
    saved = optimizer.state_dict()
    other = {("e.weight" if name == "b.weight" else name): value for name, value in named().items()}
    fresh = Shampoo(other.items(), 0.7)
    with pytest.raises(StateError, match=r"nothing for e\.weight, and b\.weight of it is not in this.*param_names"):
        fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == 0.7
    assert not fresh.state
    # what the text says to do, where a layer was only renamed
    for group in saved["param_groups"]:
        del group["param_names"]
    fresh.load_state_dict(saved)
    moved = fresh.state[other["e.weight"]]["tile0.exp_avg"]
    assert torch.equal(moved, optimizer.state[params["b.weight"]]["tile0.exp_avg"])
    assert fresh.param_groups[0]["param_names"] == list(other)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "network."])
def test_wrappers_and_a_module_around_the_model_do_not_count(prefix: str) -> None:
    params, optimizer = half_trained(prefix=prefix)
    wanted = list(SHAPES) if prefix != "network." else [prefix + name for name in SHAPES]
    assert optimizer.param_groups[0]["param_names"] == wanted
    other = named()
    other = {name: other[name] for name in sorted(other, reverse=True)}
    resumed = Shampoo(other.items(), 0.05, refresh=3)
    resumed.load_state_dict(optimizer.state_dict())
    for name, value in other.items():
        assert torch.equal(resumed.state[value]["step"], torch.tensor(5.0))
        assert torch.equal(
            next(iter(resumed.state[value].values())), next(iter(optimizer.state[params[prefix + name]].values()))
        )
    for key in ("a.weight", "b.weight"):
        ours, theirs = resumed.state[other[key]], optimizer.state[params[prefix + key]]
        assert torch.equal(ours["tile0.factor0"], theirs["tile0.factor0"])


def test_frozen_parameters_may_be_on_one_side_only() -> None:
    params = named()
    params["b.weight"].requires_grad_(False)
    optimizer = Shampoo(params.items(), 0.05)
    some = {name: value for name, value in params.items() if name != "b.weight"}
    steps(optimizer, some, 0, 3)
    fewer = Shampoo(some.items(), 0.05)
    fewer.load_state_dict(optimizer.state_dict())
    assert len(fewer.state) == 4
    again = Shampoo(params.items(), 0.05)
    again.load_state_dict(fewer.state_dict())
    assert torch.equal(again.state[params["c.bias"]]["exp_avg"], optimizer.state[params["c.bias"]]["exp_avg"])


def test_a_refused_state_thaws_nothing() -> None:
    _, optimizer = half_trained()
    saved = optimizer.state_dict()
    saved["state"][2] = {"step": torch.tensor(5.0)}
    params = named()
    params["a.weight"].requires_grad_(False)
    fresh = Shampoo(params.items(), 0.05)
    with pytest.raises(StateError, match=r"c\.weight"):
        fresh.load_state_dict(saved)
    assert fresh.explain().rows[0].method == "frozen"


# --- another optimizer's state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [((4, 3), (5,)), ((5,), (3,))], ids=["a matrix", "vectors only"])
@pytest.mark.parametrize("trained", [True, False])
def test_the_state_of_adamw_is_refused_whatever_the_parameters(shapes: Any, trained: bool) -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    adam = torch.optim.AdamW(params, 0.1)
    if trained:
        train(adam, params, [gradients(shape, 2, dtype=torch.float32) for shape in shapes])
    ours = Shampoo(params, 0.7)
    with pytest.raises(StateError, match=r"another optimizer.*load the model's weights.*warm-up"):
        ours.load_state_dict(adam.state_dict())
    assert not ours.state
    assert ours.param_groups[0]["lr"] == 0.7


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(StateError, match=r"what state_dict\(\) returned.*'model', 'optimizer'"):
        Shampoo([nn.Parameter(torch.zeros(2, 2))], 0.1).load_state_dict({"model": {}, "optimizer": {}})


# --- names ----------------------------------------------------------------------------------------------------------


class _Wrapped(nn.Module):
    """What DistributedDataParallel does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("pattern", ["0.*", "*0.weight", "module._orig_mod.0.*"])
def test_patterns_fit_names_with_and_without_wrappers(pattern: str) -> None:
    model = _Wrapped(torch.compile(network(), backend="eager"))  # type: ignore[arg-type]
    groups = ks.param_groups(model, overrides={pattern: {"lr": 0.5}})
    fitting = [name for group in groups if group.get("lr") == 0.5 for name, _ in group["params"]]
    assert fitting[0] == "0.weight"
    plan = Shampoo(groups, 0.1).explain()
    assert {row.name for row in plan.rows} == {name for name, _ in network().named_parameters()}
    for given in (model, model.named_parameters()):
        assert Shampoo(given, 0.1).param_groups[0]["param_names"] == [n for n, _ in network().named_parameters()]


def test_operators_can_be_asked_for_by_name() -> None:
    model = network()
    optimizer = Shampoo(model, 0.1)
    model[0].bias.requires_grad_(False)
    with pytest.raises(StateError, match=r"0\.weight has had no gradient yet"):
        optimizer.operator("0.weight")
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()

    def dense(name: Any) -> Tensor:
        return optimizer.operator(name).to_dense()

    assert torch.equal(dense("0.weight"), dense(model[0].weight))
    assert torch.equal(dense("0.weight"), dense("_orig_mod.0.weight"))
    # AdamW's is diagonal
    assert torch.equal(dense("4.weight"), dense("4.weight").diagonal().diag())
    with pytest.raises(StateError, match=r"'0\.wieght', which this optimizer does not have; it has \['0\.weight'"):
        optimizer.operator("0.wieght")
    with pytest.raises(StateError, match=r"of shape \(2, 2\) that is not a parameter of this optimizer"):
        optimizer.operator(torch.zeros(2, 2))
    with pytest.raises(StateError, match="takes a parameter or its name, got int"):
        optimizer.operator(0)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"parameters without names.*Shampoo\(model"):
        Shampoo(list(model.parameters()), 0.1, method="kronecker").operator("0.weight")


def test_a_list_of_modules_is_refused_with_the_way() -> None:
    with pytest.raises(OptionError, match=r"list of modules.*nn\.ModuleList\(\[first, second\]\)"):
        Shampoo([network(), network()], 0.1)
    assert len(Shampoo(nn.ModuleList([network(), network()]), 0.1).explain().rows) == 12


@pytest.mark.parametrize(
    ("given", "words"),
    [(nn.ReLU(), "the ReLU given has no parameters"), (None, "takes a model.*got NoneType"), (3, "got int")],
)
def test_what_has_no_parameters_is_refused_with_the_way(given: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Shampoo(given, 0.1)


def test_parameters_of_fsdp1_are_refused_with_the_way() -> None:
    """FSDP1 marks parameters, and flattens them in place also after the optimizer was made."""
    model = network()
    optimizer = Shampoo(model, 0.1)
    model(torch.randn(3, 4)).sum().backward()
    model.get_parameter("0.weight")._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(DistributedError, match=r"0\.weight.*FSDP1.*Use FSDP2: .*fully_shard"):
        optimizer.step()
    assert not optimizer.state
    with pytest.raises(DistributedError, match="fsdp_version=2"):
        Shampoo(model, 0.1)
