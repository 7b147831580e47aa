"""Large blocks: packed state, roots in threads, and all that looks at them."""

from __future__ import annotations

import copy
import io
import math
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from kronscope.errors import OptionError
from kronscope.optim import SOAP, Eigh, KLShampoo, Shampoo, WarmQR
from kronscope.optim import step as step_module
from kronscope.optim.block_math import short_inside
from kronscope.optim.step import Portion, portions, take_roots
from tests.optim.tools import copies, gradients, parameters, train

MAKERS: dict[str, Any] = {
    "shampoo": lambda p, **more: Shampoo(p, 1e-2, refresh=3, **more),
    "warm": lambda p, **more: Shampoo(p, 1e-2, refresh=3, solver=WarmQR(), **more),
    "soap": lambda p, **more: SOAP(p, 1e-2, refresh=3, **more),
    "kl": lambda p, **more: KLShampoo(p, 1e-2, refresh=3, **more),
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def all_due(optimizer: Any, grads: list[torch.Tensor]) -> Portion:
    """Begin a step at which every root is due, in a copy of the state."""
    stack = optimizer._stacks[0]
    stack.tensors = {name: tensor.clone() for name, tensor in stack.tensors.items()}
    stack.phase.zero_()
    work = Portion(stack, stack.members, [grad[None] for grad in grads], optimizer._hyper(optimizer.param_groups[0]), 4)
    work.take_in()
    assert sum(index.numel() for _, index in work.due) == 4
    return work


@pytest.mark.parametrize("name", MAKERS)
def test_roots_in_threads_are_those_of_one_thread_to_the_last_bit(name, two_threads):
    params = parameters((80, 70), (80, 70), dtype=torch.float32)
    grads = [gradients((80, 70), 4, seed=i, dtype=torch.float32) for i in range(2)]
    optimizer = MAKERS[name](params)
    train(optimizer, params, [g[:3] for g in grads])
    twin = copy.deepcopy((params, optimizer))[1]
    results = []
    for one, threads in ((optimizer, 2), (twin, 1)):
        one._initialise(dict.fromkeys(one.param_groups[0]["params"], 0), [one._hyper(one.param_groups[0])])
        torch.set_num_threads(1)
        work = all_due(one, [g[3] for g in grads])
        torch.set_num_threads(threads)
        take_roots([work])
        results.append(work.state)
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (9, 8, 9)])
def test_moments_are_carried_mode_by_mode_whichever_modes_are_large(shape, monkeypatch):
    """SOAP's second moment ends with the sums of the last mode: in threads or not, that is the same mode."""
    found = []
    for least in (1, 9, 100):  # all modes in threads, some, none
        monkeypatch.setattr(step_module, "_LEAST_IN_THREADS", least)
        params = parameters(shape, shape)
        optimizer = SOAP(params, 1e-2, refresh=1, view="modes", method="kronecker")
        train(optimizer, params, [gradients(shape, 4, seed=i) for i in range(2)])
        found.append([tensors["tile0.exp_avg_sq"] for tensors in optimizer.state_dict()["state"].values()])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.allclose(one, two, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [*MAKERS, "grafted", "blocks", "momentum"])
def test_portions_in_threads_give_the_numbers_of_one_stack(name, two_threads, monkeypatch):
    """Also where some members have no gradient, so that a portion has gaps, and where a parameter has several tiles."""
    makers = {
        **MAKERS,
        "grafted": lambda p: Shampoo(p, 1e-2, refresh=3, exponent=-0.25, scale="adam", betas=(0.9, 0.99)),
        "blocks": lambda p: Shampoo(p, 1e-2, refresh=3, block_size=4),
        "momentum": lambda p: Shampoo(p, 1e-2, refresh=3, momentum=0.5, weight_decay=0.1, decay="cautious"),
    }
    shapes = [(6, 5)] * 7 + [(5, 6)] * 2 + [(4, 3, 2, 2)] * 3
    params, grads = parameters(*shapes), [gradients(shape, 8, seed=i) for i, shape in enumerate(shapes)]
    others = copies(params)
    plain, cut = makers[name](params), makers[name](others)

    def step(optimizer: Any, targets: list[Any], number: int) -> None:
        for place, (param, grad) in enumerate(zip(targets, grads, strict=True)):
            param.grad = None if (place + number) % 5 == 0 and number > 2 else grad[number].clone()
        optimizer.step()

    for number in range(8):
        step(plain, params, number)
        with monkeypatch.context() as patch:
            patch.setattr(step_module, "_PORTION", 70)
            patch.setattr(step_module, "_LEAST_COST", 0)
            patch.setattr(step_module, "_LEAST_IN_THREADS", 1)
            step(cut, others, number)
        for mine, theirs in zip(params, others, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["grafted", "soap", "kl"])
def test_moments_of_tensors_lie_as_a_step_wants_them_also_after_loading(name):
    makers: dict[str, Any] = {
        "grafted": lambda p: Shampoo(p, 1e-2, refresh=3, exponent=-0.25, scale="adam", betas=(0.9, 0.99), view="modes"),
        "soap": lambda p: SOAP(p, 1e-2, refresh=3, view="modes"),
        "kl": lambda p: KLShampoo(p, 1e-2, refresh=3, view="modes", merge=9),
    }
    params = parameters((40, 36, 3, 3), (40, 36, 3, 3), dtype=torch.float32)
    grads = [gradients((40, 36, 3, 3), 8, seed=i, dtype=torch.float32) for i in range(2)]
    optimizer = makers[name](params)
    train(optimizer, params, [g[:4] for g in grads])
    other = copies(params)
    resumed = makers[name](other)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(optimizer, params, [g[4:] for g in grads])
    train(resumed, other, [g[4:] for g in grads])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(params, other, strict=True))
    for one in (optimizer, resumed):
        mean = one._stacks[0].tensors["exp_avg"]
        assert mean.shape[1:3] == (40, 36)
        assert mean.stride()[1:3] == (9 * 36, 1)
        assert short_inside(mean) is mean


def test_a_portion_has_neighbours_only_and_is_small():
    params = parameters(*[(6, 5)] * 7)
    optimizer = Shampoo(params, 1e-2)
    train(optimizer, params, [gradients((6, 5), 1, seed=i) for i in range(7)])
    stack = optimizer._stacks[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "_PORTION", 70)
        found = list(portions(stack, stack.members))
    assert [[member.start for member in portion] for portion in found] == [[0, 1], [2, 3], [4, 5], [6]]
    assert len(list(portions(stack, stack.members))) == 1


@pytest.mark.parametrize("name", MAKERS)
def test_packed_factors_survive_a_file_and_can_be_looked_at(name):
    params = parameters((260, 20), dtype=torch.float32)
    grads = gradients((260, 20), 8, dtype=torch.float32)
    optimizer = MAKERS[name](params, block_size=math.inf)
    train(optimizer, params, [grads[:4]])
    assert optimizer.state[params[0]]["tile0.factor0"].shape == (1, 260 * 261 // 2)
    row = optimizer.diagnostics().rows[0]
    assert 1 <= row.effective_rank <= 260
    assert row.residual == row.residual
    assert optimizer.operator(params[0]).shape == (260, 20)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = copies(params)
    resumed = MAKERS[name](other, block_size=math.inf)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(optimizer, params, [grads[4:]])
    train(resumed, other, [grads[4:]])
    assert torch.equal(params[0], other[0])


def test_the_operator_of_packed_factors_is_that_of_the_gradients():
    params = parameters((260, 6))
    grads = gradients((260, 6), 3)
    optimizer = Shampoo(params, 1e-2, betas=(0.9, 1.0), solver=Eigh())
    train(optimizer, params, [grads])
    left = torch.stack([grad @ grad.T for grad in grads]).sum(0)
    right = torch.stack([grad.T @ grad for grad in grads]).sum(0)
    probe = gradients((260, 6), 1, seed=9)[0]
    assert torch.allclose(optimizer.operator(params[0]).apply(probe), left @ probe @ right / left.trace(), rtol=1e-9)


def test_state_takes_no_more_memory_than_packed_triangles_and_two_moments():
    """As many bytes as Distributed Shampoo with symmetric packing: triangles of factors and roots, and two moments."""
    weight = torch.nn.Parameter(torch.empty(1024, 1024, device="meta"))
    optimizer = Shampoo([weight], exponent=-0.25, scale="adam", block_size=math.inf)
    triangles = 4 * 1024 * 1025 // 2
    assert optimizer.explain().total_bytes <= 4 * (triangles + 2 * 1024 * 1024) + 200


@pytest.mark.parametrize("safe", [True, False])
def test_a_solver_of_the_user_s_own_says_whether_threads_may_use_it(safe, two_threads):
    class Mine:
        tolerance, is_warm, is_thread_safe = 1e-3, False, safe
        names: ClassVar[set[str]] = set()

        def check(self, exponent, ridge):
            pass

        def solve(self, factors, exponent, ridge, warm=None):
            self.names.add(threading.current_thread().name)
            return Eigh().solve(factors, exponent, ridge)

    params = parameters((80, 70), dtype=torch.float32)
    optimizer = Shampoo(params, 1e-2, solver=Mine())
    train(optimizer, params, [gradients((80, 70), 1, dtype=torch.float32)])
    assert all(name.startswith("kronscope") == safe for name in Mine.names)
    assert Mine.names


def test_a_solver_is_asked_which_exponents_it_takes():
    class Picky:
        tolerance, is_warm, is_thread_safe = 1e-3, False, True

        def check(self, exponent, ridge):
            if exponent != -0.5:
                raise OptionError(f"only -1/2, got {exponent}; use Eigh().")

        def solve(self, factors, exponent, ridge, warm=None):
            return Eigh().solve(factors, exponent, ridge)

    Shampoo(parameters((4, 3)), solver=Picky())
    with pytest.raises(OptionError, match=r"only -1/2, got -0\.25"):
        Shampoo(parameters((4, 3)), solver=Picky(), exponent=-0.25)


def test_a_solver_that_does_not_say_what_it_can_is_refused_in_words():
    class Old:
        tolerance, is_warm = 1e-3, False

        def solve(self, factors, exponent, ridge, warm=None):
            return Eigh().solve(factors, exponent, ridge)

    with pytest.raises(OptionError, match="has no is_thread_safe, check"):
        Shampoo(parameters((4, 3)), solver=Old())  # type: ignore[arg-type]
