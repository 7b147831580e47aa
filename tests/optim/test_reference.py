"""The fast update of stacks equals the readable update of one block, for every family and option."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kronscope.kron import triangles
from kronscope.kron.roots import Eigh, WarmQR
from kronscope.kron.triangles import unpack
from kronscope.optim import pieces
from kronscope.optim.config import Every, Graft, Hyper, Norm, Trace
from kronscope.optim.update import batched_update, new_state, reference_update
from tests.optim.tools import gradients

BASE = Hyper(
    family="shampoo",
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    exponents=(-0.5,),
    scale=None,
    refresh=Every(3),
    damping=1e-3,
    start=1,
    power_rounds=1,
    momentum=0.0,
    nesterov=False,
    solver=Eigh(),
)
SCALES = [None, Trace(), Trace(bound=0.7), Graft("adam"), Graft("sgd"), Graft("rmsprop"), Graft("adagrad"), Norm(0.3)]

hypers = st.builds(
    lambda family, **options: replace(BASE, family=family, **options),
    st.sampled_from(["shampoo", "kl"]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.0, 0.95, 1.0]),
    eps=st.sampled_from([1e-8, 1e-2]),
    exponents=st.sampled_from([(-0.5,), (-0.25,), (-0.3, -0.6), (0.2,)]),
    scale=st.sampled_from(SCALES),
    start=st.sampled_from([1, 3, math.inf]),
    power_rounds=st.sampled_from([1, 2, 3]),
    momentum=st.sampled_from([0.0, 0.5]),
    nesterov=st.booleans(),
).map(lambda h: replace(h, exponents=(-0.5,), beta2=min(h.beta2, 0.95)) if h.family == "kl" else h)


def compare(hyper: Hyper, block: tuple[int, ...], factored: tuple[bool, ...], steps: int = 7, count: int = 3) -> None:
    device = torch.device("cpu")
    stack = new_state(block, factored, hyper, count, torch.float64, device)
    single = []
    for _ in range(count):
        one = new_state(block, factored, hyper, 1, torch.float64, device, packs=False)
        single.append({name: tensor[0] for name, tensor in one.items()})
    grads = [gradients(block, steps, seed=place) for place in range(count)]
    for step in range(1, steps + 1):
        # every block has another phase; roots are taken first at `start`
        at = hyper.schedule_step(step)
        flags = [[hyper.refresh.is_due(at, (place + mode) % 3) for mode in range(len(block))] for place in range(count)]
        due = []
        for mode, has_factor in enumerate(factored):
            index = torch.tensor([place for place in range(count) if flags[place][mode]], dtype=torch.int64)
            due.append(index if has_factor and index.numel() else None)
        fast = batched_update(stack, torch.stack([grad[step - 1] for grad in grads]), factored, hyper, step, due)
        for place in range(count):
            slow = reference_update(single[place], grads[place][step - 1], factored, hyper, step, flags[place])
            assert torch.allclose(fast[place], slow, rtol=1e-8, atol=1e-10 * slow.abs().max().item()), (step, place)
            for name, tensor in single[place].items():
                ours = unpack(stack[name])[place] if name[:-1] in ("factor", "root") else stack[name][place]
                assert torch.allclose(ours, tensor, rtol=1e-7, atol=1e-9, equal_nan=True), (step, name)


@contextmanager
def everything_packed() -> Iterator[None]:
    """Pack factors and roots of every size, in panels of two rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triangles, "_LEAST", 1)
        patch.setattr(triangles.Triangle.__init__, "__defaults__", (2,))
        patch.setattr(pieces, "_PACKED_ROOT", 1)
        patch.setattr(pieces, "_PACKED_COLUMNS", 1)
        yield


@given(hyper=hypers, shape=st.sampled_from([((5, 3), (True, True)), ((4, 3), (True, False)), ((3, 2, 4), (True,) * 3)]))
def test_packed_triangles_give_the_same_updates(hyper, shape):
    block, factored = shape
    if len(block) != len(hyper.exponents) > 1:
        return
    with everything_packed():
        state = new_state(block, factored, hyper, 1, torch.float64, torch.device("cpu"))
        assert state["factor0"].shape == (1, block[0] * (block[0] + 1) // 2)
        assert state["root0"].ndim == 2
        compare(hyper, block, factored)


@pytest.mark.parametrize("solver", [Eigh(), WarmQR()])
def test_packed_triangles_give_the_same_updates_for_soap(solver):
    with everything_packed():
        compare(replace(BASE, family="soap", solver=solver), (4, 4), (True, True))


@given(hyper=hypers)
def test_batched_equals_reference_for_matrices(hyper):
    compare(hyper, (4, 3), (True, True))


@given(hyper=hypers, factored=st.sampled_from([(True, False), (False, True)]))
def test_batched_equals_reference_one_sided(hyper, factored):
    compare(hyper, (4, 3), factored)


@given(hyper=hypers.filter(lambda h: len(h.exponents) == 1))
def test_batched_equals_reference_for_tensors(hyper):
    compare(hyper, (3, 2, 4), (True, True, True))


@pytest.mark.parametrize("solver", [Eigh(), WarmQR()])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("beta2", [0.9, 1.0])
@pytest.mark.parametrize("scale", [None, Norm(0.3)])
def test_batched_equals_reference_for_soap(solver, beta1, beta2, scale):
    hyper = replace(BASE, family="soap", solver=solver, beta1=beta1, beta2=beta2, scale=scale)
    # square blocks only: the basis of a null space is arbitrary
    compare(hyper, (4, 4), (True, True))
    compare(hyper, (4, 4), (True, False))
