"""What a user changes in a group, a model or between optimizers is taken up, or refused before anything moves."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from kronscope.errors import OptionError, StateError
from kronscope.optim import SOAP, Adaptive, CoupledNewton, Eigh, Every, Graft, KLShampoo, Norm, Shampoo, WarmQR
from kronscope.optim import param_groups as groups_of
from kronscope.optim.roles import roles_of
from tests.optim.tools import copies, gradients, parameters, train

KINDS = (Shampoo, SOAP, KLShampoo)


# --- options changed in the middle of a run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("scale", "norm", Norm()), ("scale", "rmsprop", Graft("rmsprop")), ("refresh", 3, Every(3))],
)
def test_a_spelling_set_during_a_run_means_what_it_means_to_the_constructor(name, text, value):
    params = parameters((6, 4))
    twins = copies(params)
    runs = [Shampoo(params, 0.01), Shampoo(twins, 0.01)]
    history = [gradients((6, 4), 14)]
    for optimizer, tensors, setting in zip(runs, (params, twins), (text, value), strict=True):
        train(optimizer, tensors, [history[0][:4]])
        optimizer.param_groups[0][name] = setting
        train(optimizer, tensors, [history[0][4:]])
    assert torch.equal(params[0], twins[0])


def test_betas_changed_in_place_are_taken_up():
    params = parameters((6, 4))
    twins, plain = copies(params), copies(params)
    grads = gradients((6, 4), 6)
    ours = Shampoo([{"params": params, "betas": [0.9, 0.95]}], 0.01)
    theirs = Shampoo(twins, 0.01)
    train(ours, params, [grads[:3]])
    train(theirs, twins, [grads[:3]])
    ours.param_groups[0]["betas"][1] = 0.5
    theirs.param_groups[0]["betas"] = (0.9, 0.5)
    train(ours, params, [grads[3:]])
    train(theirs, twins, [grads[3:]])
    train(Shampoo(plain, 0.01), plain, [grads])
    assert torch.equal(params[0], twins[0])
    assert not torch.allclose(params[0], plain[0])


def test_tensor_betas_changed_in_place_are_taken_up():
    params = parameters((6, 4))
    twins = copies(params)
    grads = gradients((6, 4), 6)
    ours = Shampoo([{"params": params, "betas": (0.9, torch.tensor(0.95, dtype=torch.float64))}], 0.01)
    theirs = Shampoo(twins, 0.01, betas=(0.9, 0.95))
    train(ours, params, [grads[:3]])
    train(theirs, twins, [grads[:3]])
    ours.param_groups[0]["betas"][1].fill_(0.5)
    theirs.param_groups[0]["betas"] = (0.9, 0.5)
    train(ours, params, [grads[3:]])
    train(theirs, twins, [grads[3:]])
    assert torch.equal(params[0], twins[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", "typo"), ("refresh", "often"), ("solver", 3), ("decay", "decopled"), ("block_size", 2)],
)
def test_a_wrong_value_set_during_a_run_is_refused_before_anything_changes(name, value):
    params = parameters((6, 4))
    optimizer = Shampoo(params, 0.01)
    train(optimizer, params, [gradients((6, 4), 2)])
    before = copy.deepcopy(optimizer.state_dict()["state"]), params[0].detach().clone()
    kept = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    with pytest.raises(OptionError, match=name):
        train(optimizer, params, [gradients((6, 4), 1)])
    optimizer.param_groups[0][name] = kept
    assert torch.equal(params[0], before[1])
    for key, tensor in optimizer.state_dict()["state"][0].items():
        assert torch.equal(tensor, before[0][0][key]), key


@pytest.mark.parametrize("use", [copy.deepcopy, lambda optimizer: optimizer.state_dict()])
def test_a_layout_changed_during_a_run_is_not_saved_or_copied(use):
    params = parameters((6, 4))
    optimizer = Shampoo(params, 0.01)
    train(optimizer, params, [gradients((6, 4), 2)])
    optimizer.param_groups[0]["block_size"] = 2
    with pytest.raises(OptionError, match="block_size cannot be changed"):
        use(optimizer)


def test_a_changed_exponent_reaches_all_roots_at_once():
    params = parameters((6, 4), (6, 4))
    twins = copies(params)
    history = [gradients((6, 4), 8, seed=i) for i in range(2)]
    optimizer = Shampoo(params, 0.01, refresh=Every(100), scale=None, betas=(0.0, 0.9))
    train(optimizer, params, [h[:7] for h in history])
    optimizer.param_groups[0]["exponent"] = -0.25
    before = [p.detach().clone() for p in params]
    train(optimizer, params, [h[7:] for h in history])
    other = Shampoo(twins, 0.01, refresh=1, scale=None, betas=(0.0, 0.9), exponent=-0.25)
    for step in range(8):
        start = [p.detach().clone() for p in twins]
        train(other, twins, [h[step : step + 1] for h in history])
    for param, old, twin, base in zip(params, before, twins, start, strict=True):
        assert torch.allclose(param - old, twin - base, rtol=1e-9)


# --- what an algorithm does not have --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (KLShampoo, {"betas": (0.9, 1.0)}),
        (KLShampoo, {"exponent": -0.25}),
        (SOAP, {"scale": "adam"}),
        (SOAP, {"scale": "trace"}),
        (SOAP, {"momentum": 0.9}),
        (SOAP, {"damping": 1e-3}),
        (SOAP, {"solver": CoupledNewton()}),
        (SOAP, {"reference": True, "decay": "coupled"}),
        (SOAP, {"reference": True, "block_size": 2}),
        (Shampoo, {"solver": CoupledNewton(), "exponent": -0.3}),
        (Shampoo, {"solver": CoupledNewton(), "damping": 0.0}),
        (Shampoo, {"refresh": Adaptive(0.1), "exponent": -0.3}),
        (Shampoo, {"lr": torch.tensor([0.1])}),
        (Shampoo, {"lr": math.inf}),
        (Shampoo, {"learning_rate": 0.1}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else ",".join(value),
)
def test_a_group_is_refused_what_the_constructor_refuses(kind, options):
    (param,) = parameters((4, 3))
    with pytest.raises(OptionError):
        kind([{"params": [param], **options}])
    optimizer = kind(parameters((4, 3)))
    with pytest.raises(OptionError):
        optimizer.add_param_group({"params": [param], **options})
    assert len(optimizer.param_groups) == 1


def test_a_group_as_published_has_the_published_schedule():
    params = parameters((4, 3), (4, 3))
    optimizer = SOAP([{"params": params[:1], "reference": True}, {"params": params[1:]}])
    assert optimizer.param_groups[0]["refresh"] == Every(10)
    assert optimizer.param_groups[1]["refresh"] != Every(10)


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_state_goes_on_in_another_float_width(kind, pair):
    saved, wanted = pair
    first = parameters((6, 4), (5,), dtype=saved)
    optimizer = kind(first, 0.01)
    train(optimizer, first, [gradients((6, 4), 3, dtype=saved), gradients((5,), 3, dtype=saved)])
    second = [nn.Parameter(p.detach().to(wanted)) for p in first]
    other = kind(second, 0.01)
    other.load_state_dict(optimizer.state_dict())
    train(other, second, [gradients((6, 4), 3, seed=1, dtype=wanted), gradients((5,), 3, seed=1, dtype=wanted)])
    train(optimizer, first, [gradients((6, 4), 3, seed=1, dtype=saved), gradients((5,), 3, seed=1, dtype=saved)])
    for ours, theirs in zip(second, first, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-2, atol=2e-3)
        assert torch.isfinite(ours).all()


def test_a_model_made_wider_in_the_middle_of_a_run_goes_on():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = Shampoo(model.parameters(), 0.01)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
    weight, bias = list(model.parameters())[:2]
    assert optimizer.state[weight]["tile0.factor0"].dtype == torch.float64
    assert optimizer.state[bias]["exp_avg"].dtype == torch.float64


@pytest.mark.parametrize(("saver", "loader"), [(Shampoo, KLShampoo), (KLShampoo, Shampoo), (SOAP, Shampoo)])
def test_a_state_of_another_algorithm_is_refused_by_name(saver, loader):
    params = parameters((6, 4))
    optimizer = saver(params, 0.01)
    train(optimizer, params, [gradients((6, 4), 1)])
    other = loader(params, 0.01)
    with pytest.raises(StateError, match=f"saved by {saver.__name__}; this optimizer is {loader.__name__}"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_hooks_of_loading_see_what_torch_promises():
    params = parameters((6, 4))
    optimizer = Shampoo(params, 0.01)
    train(optimizer, params, [gradients((6, 4), 2)])
    saved = optimizer.state_dict()
    seen = []
    other = Shampoo(params, 0.5)

    def change(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(state_dict["state"]))
        return {**state_dict, "param_groups": [{**group, "lr": 0.25} for group in state_dict["param_groups"]]}

    other.register_load_state_dict_pre_hook(change)
    other.register_load_state_dict_post_hook(lambda loaded: seen.append(len(loaded.state)))
    other.load_state_dict(saved)
    assert seen == [1, 1]
    assert other.param_groups[0]["lr"] == 0.25
    assert saved["param_groups"][0]["lr"] == 0.01


# --- roles, budgets, messages ---------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
        self.heads = nn.ModuleList(nn.ModuleDict({"key": nn.Linear(4, 4), "value": nn.Linear(4, 4)}) for _ in range(2))
        self.classifier = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_only_the_last_layer_of_a_classifier_is_the_head_however_it_is_wrapped(prefix):
    named = [(prefix + name, param) for name, param in Classifier().named_parameters()]
    roles = roles_of([name for name, _ in named], [param for _, param in named])
    assert [name.removeprefix(prefix) for (name, _), role in zip(named, roles, strict=True) if role == "head"] == [
        "classifier.2.weight"
    ]


def test_the_layers_of_a_module_called_embedding_are_ordinary_ones():
    model = Classifier()
    roles = {name: role for g in groups_of(model) for (name, _), role in zip(g["params"], g["roles"], strict=True)}
    assert {name for name, role in roles.items() if role} == {"classifier.2.weight"}


def test_a_fused_weight_that_is_stored_transposed_is_left_whole_with_a_warning():
    model = nn.Module()
    model.c_attn = nn.Module()
    model.c_attn.weight = nn.Parameter(torch.randn(6, 18))
    with pytest.warns(UserWarning, match="side by side"):
        groups = groups_of(model, split_qkv=True)
    assert all("split" not in group for group in groups)


def test_a_memory_budget_allows_more_than_the_default_and_counts_what_a_warm_start_keeps():
    param = nn.Parameter(torch.empty(8000, 100, device="meta"))

    def method(**options: Any) -> str:
        return Shampoo([param], **options).explain().rows[0].method

    assert "one-sided" in method()
    assert "whole" in method(memory_budget=1e9)
    assert "whole" in method(memory_budget=math.inf)
    warm = parameters((512, 512), dtype=torch.float32)
    optimizer = Shampoo(warm, solver=WarmQR(), memory_budget=4 * 2**20)
    train(optimizer, warm, [gradients((512, 512), 1, dtype=torch.float32)])
    names = ("factor", "root", "basis")
    held = [t for name, t in optimizer.state[warm[0]].items() if name.split(".")[-1].startswith(names)]
    assert sum(tensor.numel() * tensor.element_size() for tensor in held) <= 4 * 2**20


@pytest.mark.parametrize("make", [lambda p: SOAP(p, 0.1, scale=Norm(0.01)), lambda p: Shampoo(p, 0.1, momentum=0.9)])
def test_the_update_ratio_counts_a_fixed_norm_and_momentum_once(make):
    params = parameters((6, 4))
    optimizer = make(params)
    for grad in gradients((6, 4), 4):
        before = params[0].detach().clone()
        train(optimizer, params, [[grad]])
        wanted = float((params[0].detach() - before).norm() / params[0].detach().norm())
        assert optimizer.diagnostics().rows[0].update_ratio == pytest.approx(wanted, rel=1e-3)


def test_the_warning_of_a_skipped_step_points_at_the_call():
    params = parameters((3, 2))
    optimizer = Shampoo(params, solver=Eigh())
    params[0].grad = torch.full_like(params[0], math.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [warning.filename for warning in caught if "skipped" in str(warning.message)] == [__file__]
