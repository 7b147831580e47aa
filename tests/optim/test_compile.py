"""A compiled step is whole graphs, and does what a plain one does."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from kronscope.optim import SOAP, KLShampoo, Shampoo
from kronscope.optim.config import EARLY_STEPS
from tests.optim.tools import copies, gradients, parameters, train

# 264: one-sided by default, kept as a triangle where matrices are whole
SHAPES: list[tuple[int, ...]] = [(264, 5), (6, 5), (6, 5), (3,)]
# Each kind of block is traced on its own, which takes a second: what treats some as others do is not given them.
# A convolution is a matrix like others, unless all of its modes have factors, or positions share them.
CHOSEN: dict[str, list[tuple[int, ...]]] = {
    "shampoo": [(264, 5), (6, 5), (6, 5), (4, 3, 2, 2), (3,)],
    "shampoo, whole": [(264, 5)],
    "shampoo, modes, late": [(4, 3, 2, 2), (4, 3, 2, 2)],
}

MAKERS: dict[str, Any] = {
    "shampoo": lambda p: Shampoo(p, 0.01, refresh=3),
    "shampoo, whole": lambda p: Shampoo(p, 0.01, refresh=3, block_size=math.inf),
    "shampoo, sums": lambda p: Shampoo(p, 0.01, betas=(0.0, 1.0), eps=1e-4, exponent=-0.25, scale=None, refresh=2),
    "shampoo, rounds, momentum": lambda p: Shampoo(p, 0.01, power_rounds=2, momentum=0.9, scale="trace"),
    "shampoo, modes, late": lambda p: Shampoo(p, 0.01, view="modes", method="kronecker", start=3),
    "soap": lambda p: SOAP(p, 0.01, refresh=3, solver="auto"),
    "kl": lambda p: KLShampoo(p, 0.01, refresh=3),
}


@pytest.fixture(autouse=True)
def _no_graphs_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # for a log that nobody reads, torch empties the processor's caches and times the guards of every graph
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*parameters without names.*:UserWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_a_compiled_step_is_the_plain_step(name):
    """``fullgraph=True`` raises where a graph would break; both backends run the graph as it was traced.

    aot_eager also rewrites what it does in place, as compilers want it, and takes longer: once for every family.
    """
    steps, shapes = 5, CHOSEN.get(name, SHAPES)
    params = parameters(*shapes)
    twins = copies(params)
    history = [gradients(shape, steps, seed=i) for i, shape in enumerate(shapes)]
    plain, compiled = MAKERS[name](twins), MAKERS[name](params)
    compiled.compile(backend="aot_eager" if name in ("shampoo", "soap", "kl") else "eager")
    torch._dynamo.utils.counters.clear()
    train(compiled, params, history)
    found = torch._dynamo.utils.counters
    assert found["stats"]["unique_graphs"] >= 2
    assert not found["graph_break"]
    train(plain, twins, history)
    for one, two in zip(params, twins, strict=True):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*parameters without names.*:UserWarning")
def test_later_steps_compile_nothing_and_copies_are_plain():
    params = parameters((6, 5), (4, 4))
    optimizer = Shampoo(params, 0.01, refresh=3)
    optimizer.compile(backend="eager")
    history = [gradients(tuple(param.shape), 12, seed=i) for i, param in enumerate(params)]
    train(optimizer, params, [grads[:4] for grads in history])
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(optimizer, params, [grads[4:] for grads in history])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    twin = copy.deepcopy(optimizer)
    twins: list[nn.Parameter] = twin.param_groups[0]["params"]
    train(twin, twins, [grads[:2] for grads in history])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    train(optimizer, params, [grads[:2] for grads in history])
    for one, two in zip(params, twins, strict=True):
        assert torch.allclose(one, two, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*parameters without names.*:UserWarning")
@pytest.mark.parametrize("kind", [KLShampoo, SOAP])
def test_steps_that_leave_gradients_out_are_compiled_once(kind):
    params = parameters((6, 5))
    twins = copies(params)
    plain, compiled = kind(twins, 0.01, statistics=3), kind(params, 0.01, statistics=3)
    compiled.compile(backend="eager")
    history = gradients((6, 5), EARLY_STEPS + 24)
    # the first of them, one that gathers and one that does not
    for begin, end in ((0, EARLY_STEPS), (EARLY_STEPS, EARLY_STEPS + 6), (EARLY_STEPS + 6, EARLY_STEPS + 24)):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train(compiled, params, [history[begin:end]])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    train(plain, twins, [history])
    assert torch.allclose(params[0], twins[0], rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*parameters without names.*:UserWarning")
def test_a_model_of_many_shapes_is_compiled_whole():
    """Torch gives up on a function after eight graphs, here after two, unless it is told not to."""
    params = parameters((4, 3), (5, 4), (6, 5))
    optimizer = KLShampoo(params, 0.01)
    optimizer.compile(backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        train(optimizer, params, [gradients(tuple(param.shape), 1, seed=i) for i, param in enumerate(params)])
    assert all(bool(torch.isfinite(param).all()) for param in params)
