"""The plan of a whole model: experts, adapters, frozen parameters, budgets, groups that come later."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from kronscope.errors import OptionError
from kronscope.optim import SOAP, KLShampoo, Shampoo, param_groups
from tests.optim.tools import gradients, parameters, train

KINDS = (Shampoo, SOAP, KLShampoo)
MIB = 2**20


def methods(optimizer: Shampoo | SOAP | KLShampoo) -> list[str]:
    return [row.method for row in optimizer.explain().rows]


# --- experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"block_size": 3}, {"memory_budget": 2000}], ids=str)
def test_experts_train_as_separate_matrices_do(kind, options):
    experts, shape = 4, (5, 7)
    (stacked,) = parameters((experts, *shape))
    apart = [nn.Parameter(matrix.clone()) for matrix in stacked.detach()]
    grads = gradients((experts, *shape), 12)
    one = kind([("moe.experts.w1", stacked)], 0.1, **options)
    many = kind(apart, 0.1, **options)
    assert [row.factors for row in one.explain().rows] == [many.explain().rows[0].factors]
    # the roots of equal blocks are taken at different steps, so both have the same phases only if all are taken at once
    for optimizer in (one, many):
        for group in optimizer.param_groups:
            group["refresh"] = type(group["refresh"])(first=100)
    train(one, [stacked], [grads])
    train(many, apart, [[grad[index] for grad in grads] for index in range(experts)])
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in apart]), rtol=1e-9, atol=1e-12)


def test_experts_can_be_asked_for_and_convolutions_are_none():
    conv = nn.Conv1d(4, 6, 3)
    assert Shampoo(conv.named_parameters()).explain().rows[0].view == (6, 12)
    (param,) = parameters((3, 5, 4))
    row = Shampoo([param], view="experts").explain().rows[0]
    assert (row.blocks, row.factors, row.method) == (3, (5, 4), "Shampoo (whole, 3 experts)")
    fused = Shampoo([("experts.gate_up_proj", parameters((3, 6, 4))[0])], split=2).explain().rows[0]
    assert (fused.blocks, fused.factors) == (6, (3, 4))
    modes = Shampoo([("experts.w1", param)], view="modes").explain().rows[0]
    assert modes.factors == (3, 5, 4), "asked for"
    with pytest.raises(OptionError, match="'experts'"):
        Shampoo([param], view="expert")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_without_tokens_does_no_harm(kind):
    """It stays where it is; the others go where they would without it; and it learns when its first token comes."""
    (param,) = parameters((3, 6, 4))
    (others,) = parameters((3, 6, 4))
    others = nn.Parameter(others.detach()[:2].clone())
    start = param.detach().clone()
    grads = gradients((3, 6, 4), 15)
    for grad in grads:
        grad[2] = 0
    optimizer, reference = kind([("experts.w", param)], 0.1), kind([("experts.w", others)], 0.1)
    for one in (optimizer, reference):
        one.param_groups[0]["refresh"] = type(one.param_groups[0]["refresh"])(first=100)
    train(optimizer, [param], [grads])
    train(reference, [others], [[grad[:2] for grad in grads]])
    assert torch.equal(param[2], start[2])
    torch.testing.assert_close(param.detach()[:2], others.detach(), rtol=1e-9, atol=1e-12)
    late = gradients((3, 6, 4), 15, seed=3)
    train(optimizer, [param], [late])
    assert torch.isfinite(param).all()
    moved = (param[2] - start[2]).abs().max()
    assert 0.01 < moved < 10 * 0.1 * 15


# --- adapters, and budgets of a whole model -------------------------------------------------------------------------


def adapters(layers: int, width: int, rank: int) -> list[tuple[str, nn.Parameter]]:
    named = []
    for layer in range(layers):
        for which in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for side, shape in (("A", (rank, width)), ("B", (width, rank))):
                weight = nn.Parameter(torch.empty(shape, device="meta"))
                named.append(
                    (f"base_model.model.model.layers.{layer}.self_attn.{which}.lora_{side}.default.weight", weight)
                )
    return named


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "width"), [(22, 2048), (12, 768)])
def test_adapters_need_little_more_memory_than_with_adamw(kind, layers, width):
    named = adapters(layers, width, rank=8)
    adamw = 2 * 4 * sum(param.numel() for _, param in named)
    plan = kind(named).explain()
    assert {row.factors for row in plan.rows} == {(8,)}
    assert plan.total_bytes < 2 * adamw


def test_skinny_matrices_have_both_sides_when_asked():
    def factors(shape: tuple[int, int], **options: Any) -> tuple[int, ...]:
        return Shampoo([nn.Parameter(torch.empty(shape, device="meta"))], **options).explain().rows[0].factors

    assert factors((8, 2048)) == (8,)
    assert factors((2048, 8)) == (8,)
    assert factors((8, 2048), memory_budget=math.inf) == (8, 2048)
    assert factors((8, 2048), method="kronecker") == (8, 256)
    assert factors((8, 2048), method="kronecker", block_size=math.inf) == (8, 2048)
    assert factors((10, 784)) == (10,)
    assert factors((10, 784), block_size=math.inf) == (10, 784), "small enough to have both"
    assert factors((10, 250)) == (10, 250), "no longer than a block"
    assert factors((2048, 1)) == (), "one column has nothing to precondition"


def test_a_memory_budget_is_for_the_model_and_not_for_each_group():
    shapes = [(512, 512), (512, 500), (512, 480)]
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    together = Shampoo([{"params": [param]} for param in params], memory_budget=6 * MIB)
    assert methods(together) == methods(Shampoo(params, memory_budget=6 * MIB))
    assert methods(together) != ["Shampoo (whole)"] * 3
    own = Shampoo([{"params": params[:1], "memory_budget": 5 * MIB}, {"params": params[1:]}], memory_budget=9 * MIB)
    assert methods(own) == ["Shampoo (whole)"] * 3
    later = Shampoo(params[:1], memory_budget=6 * MIB)
    later.add_param_group({"params": params[1:]})
    assert methods(later)[0] == "Shampoo (whole)", "what is planned stays"
    assert "whole" not in methods(later)[1]


# --- frozen parameters ----------------------------------------------------------------------------------------------


def frozen_and_head() -> Any:
    model: Any = nn.Sequential(nn.Linear(400, 500), nn.Linear(500, 300), nn.Linear(300, 4)).double()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_need_nothing_and_enter_when_they_thaw(kind):
    model = frozen_and_head()
    budget = 2 * 8 * (500 * 500 + 300 * 300)
    optimizer = kind(model, lr=1e-2, memory_budget=budget)
    rows = {row.name: row for row in optimizer.explain().rows}
    assert rows["0.weight"].method == "frozen"
    assert rows["0.weight"].bytes == 0
    assert "whole" in rows["1.weight"].method, "the budget is for what trains"

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 400).double()).square().sum().backward()
        optimizer.step()

    before = model[0].weight.detach().clone()
    step()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state
    model[0].requires_grad_(True)
    step()
    assert not torch.equal(model[0].weight, before)
    rows = {row.name: row for row in optimizer.explain().rows}
    assert "frozen" not in rows["0.weight"].method
    assert "whole" in rows["1.weight"].method, "what is planned stays"
    assert "whole" not in rows["0.weight"].method, "what is left of the budget is not enough for both sides"


def test_a_run_with_a_thawed_layer_is_saved_copied_and_resumed():
    model = frozen_and_head()
    optimizer = Shampoo(model, lr=1e-2)

    def loss(one: Any) -> Any:
        return one(torch.ones(2, 400).double()).square().sum()

    loss(model).backward()
    optimizer.step()
    model[0].requires_grad_(True)
    loss(model).backward()
    optimizer.step()
    other_model = frozen_and_head()
    other_model.load_state_dict(model.state_dict())
    other = Shampoo(other_model, lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    other_model[0].requires_grad_(True)
    twin_model, twin = copy.deepcopy((model, optimizer))
    kept_model, kept = pickle.loads(pickle.dumps((model, optimizer)))
    for one, stepper in ((model, optimizer), (other_model, other), (twin_model, twin), (kept_model, kept)):
        stepper.zero_grad()
        loss(one).backward()
        stepper.step()
    for one in (other_model, twin_model, kept_model):
        for ours, theirs in zip(one.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_gradient_given_by_hand_counts_as_training():
    param = torch.zeros(4, 3, dtype=torch.float64)
    optimizer = Shampoo([param], 0.1)
    param.grad = gradients((4, 3), 1)[0]
    optimizer.step()
    assert param.abs().max() > 0.01


# --- groups that come later -----------------------------------------------------------------------------------------


def test_groups_without_names_join_groups_with_names_and_the_other_way_round():
    """Lightning's BaseFinetuning adds what it thaws without names."""
    model = frozen_and_head()
    optimizer = Shampoo([(name, param) for name, param in model.named_parameters() if param.requires_grad])
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-4})
    model(torch.ones(2, 400).double()).square().sum().backward()
    optimizer.step()
    assert [row.name for row in optimizer.explain().rows][4:] == [
        "group 1 parameter 0 (500, 400)",
        "group 1 parameter 1 (500,)",
    ]
    assert "Shampoo" in methods(optimizer)[4]
    unnamed = Shampoo(parameters((4, 3)))
    unnamed.add_param_group({"params": [("lm_head.weight", parameters((5, 3))[0])]})
    assert methods(unnamed) == ["Shampoo (whole)", "AdamW (head)"]


def test_the_layer_added_last_is_no_head():
    optimizer = Shampoo(param_groups(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))))
    optimizer.add_param_group({"params": list(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).named_parameters())})
    assert [how for how in methods(optimizer) if "head" in how] == ["AdamW (head)"]


def _actor_and_critic() -> tuple[nn.Module, nn.Module]:
    """Return two models with an encoder in common; their last layers have the same names."""
    torch.manual_seed(0)
    encoder = nn.Linear(6, 5)
    return nn.Sequential(encoder, nn.Linear(5, 4)), nn.Sequential(encoder, nn.Linear(5, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("are_named", [True, False])
def test_a_parameter_that_is_listed_twice_is_trained_once(kind, are_named):
    def listed(models: tuple[nn.Module, nn.Module]) -> list[Any]:
        return [entry for m in models for entry in (m.named_parameters() if are_named else m.parameters())]

    ours, theirs = listed(_actor_and_critic()), listed(_actor_and_critic())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twice = kind(ours, 0.01)
        once = kind(theirs[:4] + theirs[6:], 0.01)
    assert sum("duplicate parameters" in str(one.message) for one in caught) == 1
    assert len(twice.explain().rows) == len(twice.param_groups[0]["params"]) == 6
    for optimizer in (twice, once):
        params = optimizer.param_groups[0]["params"]
        train(optimizer, params, [gradients(p.shape, 3, dtype=torch.float32) for p in params])
    assert all(map(torch.equal, twice.param_groups[0]["params"], once.param_groups[0]["params"]))
    twice.load_state_dict(once.state_dict())


def test_a_parameter_that_is_added_twice_keeps_its_first_name_and_role():
    optimizer = Shampoo(parameters((4, 3)))
    first, second = parameters((4, 4), (4,))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer.add_param_group({"params": [("a", first), ("b", second), ("c", first)], "roles": ["head", "", ""]})
    group = optimizer.param_groups[1]
    assert [group[name] for name in ("params", "param_names", "roles")] == [[first, second], ["a", "b"], ["head", ""]]
