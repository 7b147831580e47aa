"""Large blocks: packed state, roots in threads, and all that looks at them."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kronscope.optim import SOAP, Eigh, KLShampoo, Shampoo, WarmQR
from kronscope.optim.work import Work, take_roots
from tests.optim.tools import copies, gradients, parameters, train

MAKERS: dict[str, Any] = {
    "shampoo": lambda p: Shampoo(p, 1e-2, refresh=3),
    "warm": lambda p: Shampoo(p, 1e-2, refresh=3, solver=WarmQR()),
    "soap": lambda p: SOAP(p, 1e-2, refresh=3),
    "kl": lambda p: KLShampoo(p, 1e-2, refresh=3),
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def all_due(optimizer: Any, grads: list[torch.Tensor]) -> Work:
    """Begin a step at which every root is due, in a copy of the state."""
    stack = optimizer._stacks[0]
    stack.tensors = {name: tensor.clone() for name, tensor in stack.tensors.items()}
    stack.phase.zero_()
    work = Work(stack, stack.members, torch.stack(grads), optimizer._hyper(optimizer.param_groups[0]), 4)
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


@pytest.mark.parametrize("name", MAKERS)
def test_packed_factors_survive_a_file_and_can_be_looked_at(name):
    params = parameters((260, 20), dtype=torch.float32)
    grads = gradients((260, 20), 8, dtype=torch.float32)
    optimizer = MAKERS[name](params)
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
    resumed = MAKERS[name](other)
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
    optimizer = Shampoo([torch.nn.Parameter(torch.empty(1024, 1024, device="meta"))], exponent=-0.25, scale="adam")
    triangles = 4 * 1024 * 1025 // 2
    assert optimizer.explain().total_bytes <= 4 * (triangles + 2 * 1024 * 1024) + 200
