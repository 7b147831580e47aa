"""State: tensors only, loadable everywhere, and a resumed run is the same run to the last bit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from kronscope.errors import DistributedError, OptionError, StateError
from kronscope.optim import SOAP, Adaptive, Eigh, Graft, KLShampoo, Shampoo, Trace, WarmQR, Warmup
from tests.optim.tools import copies, gradients, parameters, train

SHAPES = ((6, 4), (6, 4), (5,), (3, 2, 2), ())
MAKERS: dict[str, Any] = {
    "shampoo": lambda p: Shampoo(p, 0.05),
    "shampoo, graft, momentum": lambda p: Shampoo(p, 0.05, scale="adam", momentum=0.5, refresh=4),
    "shampoo, blocks": lambda p: Shampoo(p, 0.05, block_size=4, refresh=3),
    "shampoo, sums": lambda p: Shampoo(p, 0.05, betas=(0.0, 1.0), eps=1e-3, exponent=-0.25, scale=None, refresh=3),
    "shampoo, adaptive": lambda p: Shampoo(p, 0.05, refresh=Adaptive(0.05)),
    "shampoo, warm": lambda p: Shampoo(p, 0.05, solver=WarmQR(), refresh=2),
    "soap": lambda p: SOAP(p, 0.05, refresh=3),
    "soap, published": lambda p: SOAP(p, 0.05, refresh=3, reference=True),
    "kl": lambda p: KLShampoo(p, 0.05, refresh=3),
}


def history(steps: int, shapes=SHAPES):
    return [gradients(shape, steps, seed=i) for i, shape in enumerate(shapes)]


def run(params, optimizer, start: int, stop: int, steps: int = 20) -> None:
    train(optimizer, params, [grads[start:stop] for grads in history(steps)])


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_is_bit_exact(name):
    params = parameters(*SHAPES)
    optimizer = MAKERS[name](params)
    run(params, optimizer, 0, 9)
    other = copies(params)
    resumed = MAKERS[name](other)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    run(params, optimizer, 9, 20)
    run(other, resumed, 9, 20)
    for a, b in zip(params, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_or_pickled_run_is_bit_exact(name, how):
    params = parameters(*SHAPES)
    optimizer = MAKERS[name](params)
    run(params, optimizer, 0, 7)
    pair = (params, optimizer)
    other, twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    run(params, optimizer, 7, 15)
    assert not torch.equal(params[0], other[0])
    run(other, twin, 7, 15)
    for a, b in zip(params, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MAKERS)
def test_state_holds_tensors_and_groups_plain_values(name):
    params = parameters(*SHAPES)
    optimizer = MAKERS[name](params)
    run(params, optimizer, 0, 2)
    state = optimizer.state_dict()
    for tensors in state["state"].values():
        assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    plain = (int, float, str, bool, type(None), tuple, list)
    assert all(isinstance(value, plain) for group in state["param_groups"] for value in group.values())


def test_loading_restores_the_options_too():
    params = parameters((4, 3))
    optimizer = Shampoo(params, 0.05, refresh=Warmup(3, 7), scale=Graft("rmsprop"), solver=Eigh(float64=True))
    run_one = [gradients((4, 3), 2)]
    train(optimizer, params, run_one)
    other = Shampoo(copies(params), 0.1)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    group = other.param_groups[0]
    assert (group["lr"], group["refresh"], group["scale"], group["solver"]) == (
        0.05,
        Warmup(3, 7),
        Graft("rmsprop"),
        Eigh(float64=True),
    )


def test_loading_copies_the_tensors():
    params = parameters((4, 3))
    optimizer = Shampoo(params, 0.05)
    train(optimizer, params, [gradients((4, 3), 3)])
    other = copies(params)
    resumed = Shampoo(other, 0.05)
    state = optimizer.state_dict()
    resumed.load_state_dict(state)
    before = state["state"][0]["tile0.factor0"].clone()
    train(resumed, other, [gradients((4, 3), 3, seed=9)])
    assert torch.equal(state["state"][0]["tile0.factor0"], before)


def test_factors_of_half_precision_parameters_stay_float32_through_loading():
    params = parameters((4, 3), (3,), dtype=torch.bfloat16)
    optimizer = Shampoo(params, 0.05)
    grads = [gradients((4, 3), 3, dtype=torch.bfloat16), gradients((3,), 3, dtype=torch.bfloat16)]
    train(optimizer, params, grads)
    other = copies(params)
    resumed = Shampoo(other, 0.05)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for param in other:
        floats = [value for value in resumed.state[param].values() if value.is_floating_point()]
        assert all(value.dtype == torch.float32 for value in floats)
    train(optimizer, params, grads)
    train(resumed, other, grads)
    assert torch.equal(params[0], other[0])


def test_regrouped_parameters_keep_their_state():
    """The same parameters in other groups: state follows the parameter, and equal options give the same numbers."""
    params = parameters((4, 3), (5, 2), (4, 3))
    optimizer = Shampoo([{"params": params[:1]}, {"params": params[1:]}], 0.05, refresh=3)
    grads = [gradients(param.shape, 12, seed=i) for i, param in enumerate(params)]
    train(optimizer, params, [g[:5] for g in grads])
    saved = optimizer.state_dict()
    saved = {
        "state": saved["state"],
        "param_groups": [{**saved["param_groups"][0], "params": [0, 1, 2], "roles": [""] * 3}],
    }
    other = copies(params)
    regrouped = Shampoo(other, 0.05, refresh=3)
    regrouped.load_state_dict(saved)
    train(optimizer, params, [g[5:] for g in grads])
    train(regrouped, other, [g[5:] for g in grads])
    for a, b in zip(params, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_a_mismatch_names_the_parameter_and_the_reason_and_changes_nothing():
    named = [("layers.0.weight", parameters((4, 3))[0]), ("layers.1.weight", parameters((5, 2))[0])]
    optimizer = Shampoo(named, 0.05, scale="trace")
    train(optimizer, [p for _, p in named], [gradients((4, 3), 2), gradients((5, 2), 2)])
    saved = optimizer.state_dict()
    changed = [("layers.0.weight", parameters((4, 3))[0]), ("layers.1.weight", parameters((5, 3))[0])]
    other = Shampoo(changed, 0.7, scale="trace")
    with pytest.raises(StateError, match=r"layers\.1\.weight.*exp_avg.*\(1, 5, 2\).*\(1, 5, 3\)"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.7
    assert not other.state
    with pytest.raises(StateError, match=r"2 parameters.*1"):
        Shampoo(parameters((4, 3)), 0.05).load_state_dict({**saved, "param_groups": saved["param_groups"]})
    with pytest.raises(StateError, match="groups"):
        Shampoo([{"params": [p]} for _, p in changed], 0.05).load_state_dict(saved)
    fresh = Shampoo([("layers.0.weight", parameters((4, 3))[0]), ("layers.1.weight", parameters((5, 2))[0])], 0.05)
    groups = [{**saved["param_groups"][0], "scale": '{"type": "Graft"}'}]
    with pytest.raises(StateError, match="graft_sq"):
        fresh.load_state_dict({**saved, "param_groups": groups})


def test_a_checkpoint_of_another_optimizer_is_refused_in_words():
    params = parameters((4, 3))
    adam = torch.optim.AdamW(params, 0.1)
    train(adam, params, [gradients((4, 3), 2)])
    with pytest.raises(StateError, match="another optimizer"):
        Shampoo(params, 0.1).load_state_dict(adam.state_dict())


def test_groups_added_in_the_middle_of_a_run():
    first, second = parameters((4, 3), (4, 3))
    alone = copies([first])
    optimizer = Shampoo([first], 0.05, refresh=3)
    grads = gradients((4, 3), 12)
    train(optimizer, [first], [grads[:5]])
    optimizer.add_param_group({"params": [second], "lr": 0.2, "weight_decay": 0.1})
    late = gradients((4, 3), 7, seed=4)
    train(optimizer, [first, second], [grads[5:], late])
    twin = copies(parameters((4, 3), (4, 3))[1:])
    reference = Shampoo(twin, 0.2, weight_decay=0.1, refresh=3)
    train(Shampoo(alone, 0.05, refresh=3), alone, [grads])
    train(reference, twin, [late])
    assert torch.allclose(first, alone[0], rtol=1e-12)
    # its roots are staggered otherwise, but its first steps are those of a run of its own
    assert int(optimizer.state[second]["step"]) == 7
    assert torch.isfinite(second).all()
    saved = through_a_file(optimizer.state_dict())
    resumed = Shampoo([{"params": copies([first])}, {"params": copies([second])}], 0.05)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[1]["lr"] == 0.2


def test_a_wrong_group_is_refused_and_not_added():
    optimizer = Shampoo(parameters((4, 3)), 0.05)
    for options in ({"exponent": float("nan")}, {"splot": 3}, {"split": 3}, {"refresh": 0}, {"betas": (1.0, 0.9)}):
        with pytest.raises(OptionError):
            optimizer.add_param_group({"params": parameters((4, 4)), **options})
        assert len(optimizer.param_groups) == 1


def _plan_of(optimizer: Shampoo) -> tuple[Any, ...]:
    return [dict(group) for group in optimizer.param_groups], dict(optimizer._layouts), list(optimizer._planned_with)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"roles": []}, OptionError, "'roles' of a group must be a list of strings, one for each of its 1 parameters"),
        ({"roles": "a"}, OptionError, "'roles' of a group must be a list.*got 'a'"),
        ({"param_names": ["a", "b"]}, OptionError, "'param_names' of a group must be a list.*got 2 of them"),
        ({"split": [6.0]}, OptionError, "split"),
        ({"params": [torch.zeros(2), "no"]}, TypeError, "can only optimize Tensors"),
        ({"params": "first"}, ValueError, "more than one parameter group"),
    ],
    ids=str,
)
def test_whatever_is_wrong_with_a_group_nothing_is_added(wrong, error, words):
    first, second = parameters((4, 3), (6, 4))
    optimizer = Shampoo([first], 0.05)
    before = _plan_of(optimizer)
    group = {"params": iter([second]), **wrong}
    if wrong.get("params") == "first":
        group["params"] = [("named", first)]
    names = set(group)
    with pytest.raises(error, match=words):
        optimizer.add_param_group(group)
    assert _plan_of(optimizer) == before
    assert set(group) == names
    train(optimizer, [first], [gradients((4, 3), 1)])
    optimizer.add_param_group({"params": second})
    train(optimizer, [first, second], [gradients((4, 3), 1), gradients((6, 4), 1)])


@pytest.mark.parametrize("error", [DistributedError("others have no such group"), KeyboardInterrupt()], ids=repr)
def test_a_group_that_cannot_be_placed_is_not_added(error, monkeypatch):
    first, second = parameters((4, 3), (6, 4))
    optimizer = Shampoo([first], 0.05)
    before = _plan_of(optimizer)

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._placement, "compare", fail)
        with pytest.raises(type(error)):
            optimizer.add_param_group({"params": [("second", second)]})
    assert _plan_of(optimizer) == before
    optimizer.add_param_group({"params": [("second", second)]})
    train(optimizer, [first, second], [gradients((4, 3), 2), gradients((6, 4), 2)])


def test_groups_with_different_options_share_stacks_where_only_lr_and_decay_differ():
    params = parameters((4, 3), (4, 3), (4, 3))
    optimizer = Shampoo(
        [
            {"params": params[:1], "lr": 0.1},
            {"params": params[1:2], "weight_decay": 0.5},
            {"params": params[2:], "scale": Trace()},
        ],
        0.01,
    )
    train(optimizer, params, [gradients((4, 3), 4) for _ in params])
    assert sorted(stack.count for stack in optimizer._stacks) == [1, 2]


def test_options_changed_during_a_run_are_taken_up():
    """Schedulers change betas and more; a momentum buffer that was not there is made."""
    params = parameters((4, 3))
    optimizer = Shampoo(params, 0.01)
    train(optimizer, params, [gradients((4, 3), 3)])
    optimizer.param_groups[0].update(momentum=0.9, betas=(0.8, 0.99))
    train(optimizer, params, [gradients((4, 3), 3)])
    assert "tile0.momentum" in optimizer.state[params[0]]


def test_a_solver_of_the_user_s_own_is_used_and_left_out_of_the_state_dict():
    class Loud(nn.Module):
        tolerance, is_warm, is_thread_safe, calls = 1e-3, False, False, 0

        def check(self, exponent, ridge):
            pass

        def solve(self, factors, exponent, ridge, warm=None):
            Loud.calls += 1
            return Eigh().solve(factors, exponent, ridge)

    params = parameters((4, 3))
    optimizer = Shampoo(params, 0.01, solver=Loud())
    train(optimizer, params, [gradients((4, 3), 2)])
    assert Loud.calls > 0
    state = through_a_file(optimizer.state_dict())
    assert "solver" not in state["param_groups"][0]
    optimizer.load_state_dict(state)
    assert isinstance(optimizer.param_groups[0]["solver"], Loud)
