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
from torch import Tensor

from kronscope.kron import triangles
from kronscope.kron.roots import Eigh, WarmQR
from kronscope.kron.triangles import unpack
from kronscope.optim import block_state, config
from kronscope.optim.block_state import Blocks, Tensors
from kronscope.optim.config import Every, Graft, Hyper, Norm, Trace, Warmup
from kronscope.optim.reference import reference_update
from kronscope.optim.rules.kl import KLRule
from kronscope.optim.rules.published_soap import PublishedSoapRule
from kronscope.optim.rules.shampoo import ShampooRule
from kronscope.optim.rules.soap import SoapRule
from tests.optim.tools import gradients

BASE = Hyper(
    rule=ShampooRule(),
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
    lambda rule, **options: replace(BASE, rule=rule, **options),
    st.sampled_from([ShampooRule(), KLRule()]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.0, 0.95, 1.0]),
    eps=st.sampled_from([1e-8, 1e-2]),
    exponents=st.sampled_from([(-0.5,), (-0.25,), (-0.3, -0.6), (0.2,)]),
    scale=st.sampled_from(SCALES),
    start=st.sampled_from([1, 3, math.inf]),
    refresh=st.sampled_from([Every(3), Warmup(6, 3, within=3)]),
    power_rounds=st.sampled_from([1, 2, 3]),
    momentum=st.sampled_from([0.0, 0.5]),
    nesterov=st.booleans(),
    statistics=st.sampled_from([1, 2, 3]),
).map(lambda h: replace(h, exponents=(-0.5,), beta2=min(h.beta2, 0.95)) if isinstance(h.rule, KLRule) else h)


@pytest.fixture(autouse=True, scope="module")
def few_early_steps() -> Iterator[None]:
    """Let gradients be left out from the third step on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "EARLY_STEPS", 2)
        yield


def new_state(hyper: Hyper, block: tuple[int, ...], modes: list[int], count: int, *, packs: bool = True) -> Tensors:
    packs = packs and hyper.rule.packs
    return hyper.rule.new_state(Blocks(block, modes, count, torch.float64, torch.device("cpu"), packs), hyper)


def stack_update(
    state: Tensors, grads: Tensor, modes: list[int], hyper: Hyper, step: int, flags: list[list[bool]]
) -> Tensor:
    """What a step does with a stack, whose blocks take their roots where their flags say so."""
    rule = hyper.rule
    moments = rule.accumulate(state, grads, modes, hyper, step)
    for mode in modes:
        index = torch.tensor([place for place, due in enumerate(flags) if due[mode]], dtype=torch.int64)
        if index.numel() and step >= hyper.start:
            found = rule.refresh(state, mode, index, hyper, step)
            if found is not None:
                rule.carry(state, mode, index, found, hyper, step)
    return rule.direction(state, moments, modes, hyper, step)


def compare(hyper: Hyper, block: tuple[int, ...], factored: tuple[bool, ...], steps: int = 7, count: int = 3) -> None:
    modes = [mode for mode, has_factor in enumerate(factored) if has_factor]
    stack = new_state(hyper, block, modes, count)
    single = []
    for _ in range(count):
        one = new_state(hyper, block, modes, 1, packs=False)
        single.append({name: tensor[0] for name, tensor in one.items()})
    grads = [gradients(block, steps, seed=place) for place in range(count)]
    for step in range(1, steps + 1):
        # every block has another phase; roots are taken first at `start`, by some schedules not all of them
        at = hyper.schedule_step(step)
        all_due = hyper.refresh.period_at(at) == 1
        flags = [[all_due or (at - 1 - place - mode) % 3 == 0 for mode in range(len(block))] for place in range(count)]
        fast = stack_update(stack, torch.stack([grad[step - 1] for grad in grads]), modes, hyper, step, flags)
        for place in range(count):
            slow = reference_update(single[place], grads[place][step - 1], modes, hyper, step, flags[place])
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
        patch.setattr(block_state, "_PACKED_ROOT", 1)
        patch.setattr(block_state, "_PACKED_COLUMNS", 1)
        yield


@given(hyper=hypers, shape=st.sampled_from([((5, 3), (True, True)), ((4, 3), (True, False)), ((3, 2, 4), (True,) * 3)]))
def test_packed_triangles_give_the_same_updates(hyper, shape):
    block, factored = shape
    if len(block) != len(hyper.exponents) > 1:
        return
    with everything_packed():
        state = new_state(hyper, block, [mode for mode, has_factor in enumerate(factored) if has_factor], 1)
        assert state["factor0"].shape == (1, block[0] * (block[0] + 1) // 2)
        assert state["root0"].ndim == 2
        compare(hyper, block, factored)


@pytest.mark.parametrize("solver", [Eigh(), WarmQR()])
def test_packed_triangles_give_the_same_updates_for_soap(solver):
    with everything_packed():
        compare(replace(BASE, rule=SoapRule(), solver=solver), (4, 4), (True, True))


@given(hyper=hypers)
def test_batched_equals_reference_for_matrices(hyper):
    compare(hyper, (4, 3), (True, True))


@given(hyper=hypers, factored=st.sampled_from([(True, False), (False, True)]))
def test_batched_equals_reference_one_sided(hyper, factored):
    compare(hyper, (4, 3), factored)


@given(hyper=hypers)
def test_batched_equals_reference_where_positions_share_factors(hyper):
    compare(hyper, (4, 3, 2), (True, True, False))


@given(hyper=hypers.filter(lambda h: len(h.exponents) == 1))
def test_batched_equals_reference_for_tensors(hyper):
    compare(hyper, (3, 2, 4), (True, True, True))


@pytest.mark.parametrize("solver", [Eigh(), WarmQR()])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("beta2", [0.9, 1.0])
@pytest.mark.parametrize(("scale", "statistics"), [(None, 1), (None, 2), (Norm(0.3), 3)])
def test_batched_equals_reference_for_soap(solver, beta1, beta2, scale, statistics):
    hyper = replace(BASE, rule=SoapRule(), solver=solver, beta1=beta1, beta2=beta2, scale=scale, statistics=statistics)
    # square blocks only: the basis of a null space is arbitrary
    compare(hyper, (4, 4), (True, True))
    compare(hyper, (4, 4), (True, False))


def test_rounding_is_not_blown_up_to_full_steps():
    """Gradients along one direction, turned into the bases, are rounding errors everywhere else."""
    # what the first steps, in other bases, left in the second moment is soon forgotten
    hyper = replace(BASE, rule=SoapRule(), solver=WarmQR(), eps=1e-12, beta2=0.3)
    state = hyper.rule.new_state(Blocks((40, 33), (0, 1), 1, torch.float32, torch.device("cpu")), hyper)
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(40, 1, generator=generator), torch.randn(1, 33, generator=generator)
    along = left @ right / (left.norm() * right.norm())
    for step in range(1, 41):
        update = stack_update(state, along.unsqueeze(0) * 10.0 ** (step % 3), [0, 1], hyper, step, [[step < 3] * 2])[0]
    across = update - (update * along).sum() * along
    assert across.norm() < 0.1 * update.norm()


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_blocks_of_a_stack_do_not_mix_in_the_published_soap(beta1):
    hyper = replace(BASE, rule=PublishedSoapRule(), beta1=beta1)
    compare(hyper, (4, 4), (True, True))
    compare(hyper, (3, 3, 3), (True, True, True))
