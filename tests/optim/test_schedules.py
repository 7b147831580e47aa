"""When roots are taken: the first ones spread over steps, and periods that keep a budget by counted costs."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.errors import OptionError, StateError
from kronscope.optim import SOAP, Budget, KLShampoo, Shampoo, Warmup
from kronscope.optim.config import DEFAULT_REFRESH
from kronscope.optim.costs import refresh_cost
from tests.optim.tools import gradients, parameters, train

KINDS = [Shampoo, KLShampoo, SOAP]


# --- the first roots ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_first_roots_too_can_be_spread_over_steps(kind):
    """Ten steps that took every root made the first twenty several times as long as the later ones."""
    shapes = [(12, 8)] * 10
    params = parameters(*shapes)
    optimizer = kind(params, 1e-2, refresh=Warmup(20, 10, within=5))
    roots = []
    for step in range(40):
        train(optimizer, params, [[gradients(shape, 40)[step]] for shape in shapes])
        roots.append(optimizer.metrics()["roots"])
    assert sum(roots[:5]) == 20, "each factor's first root comes within five steps"
    assert sum(roots[:20]) == 4 * 20
    assert sum(roots[20:30]) == sum(roots[30:]) == 20
    assert max(roots) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_without_a_root_makes_a_tenth_of_adams_step_and_soap_all_of_it(kind):
    params = parameters(*[(6, 4)] * 4)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    grads = [gradients((6, 4), 1, seed=place) for place in range(4)]
    optimizer = kind(params, 1e-2, refresh=Warmup(8, 8, within=4))
    train(optimizer, params, grads)
    train(torch.optim.AdamW(twins, 1e-2 if kind is SOAP else 1e-3, betas=(0.9, 0.95), weight_decay=0.0), twins, grads)
    waiting = [int((optimizer.state[param]["tile0.refreshed"] > 0).sum()) == 0 for param in params]
    assert True in waiting
    for param, twin, waits in zip(params, twins, waiting, strict=True):
        assert torch.allclose(param, twin, rtol=1e-6) == (waits or kind is SOAP)


@pytest.mark.parametrize("scale", ["trace", None, "norm"])
def test_a_block_without_a_root_and_without_a_graft_has_that_of_the_identity(scale):
    (param,) = parameters((6, 4))
    before, (grad,) = param.detach().clone(), gradients((6, 4), 1)
    optimizer = Shampoo([param, *parameters((6, 4))], 1e-2, refresh=Warmup(8, 8, within=8), scale=scale)
    optimizer.param_groups[0]["start"] = 1
    train(optimizer, [param], [[grad]])
    moved = before - param.detach()
    if not int((optimizer.state[param]["tile0.refreshed"] > 0).sum()):
        assert torch.cosine_similarity(moved.flatten(), grad.flatten(), 0) == pytest.approx(1)
    assert torch.isfinite(moved).all()


def test_a_warm_start_decomposes_the_first_time_whenever_that_is():
    params = parameters((6, 4), (6, 4))
    late = SOAP(params, 1e-2, refresh=Warmup(8, 8, within=4), solver=ks.optim.WarmQR())
    train(late, params, [gradients((6, 4), 4)] * 2)
    state = late.state[params[1]]  # the first one's bases come at the first step
    for mode in (0, 1):
        basis = state[f"tile0.basis{mode}"][0]
        assert int(state["tile0.refreshed"][0, mode]) > 0
        assert torch.allclose(basis.T @ basis, torch.eye(len(basis), dtype=basis.dtype))
    assert int(state["tile0.refreshed"].max()) > 1


def test_a_warm_up_has_sensible_periods():
    assert Warmup(10, 10).within == 1
    assert ks.optim.config.decode('{"type": "Warmup", "first": 10, "every": 10, "spread": true}') == Warmup(10, 10)
    with pytest.raises(OptionError, match=r"within=7.*first 5 steps"):
        Warmup(5, 10, within=7)
    for wrong in (0, (), (2, 0), 1.5):
        with pytest.raises(OptionError, match="Warmup\\(within\\) must be a whole number"):
            Warmup(5, 10, within=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"within=\(2, 4\).*first 5 steps"):
        Warmup(5, 10, within=(2, 4))


def test_the_first_steps_can_have_several_periods_of_which_the_last_is_repeated():
    schedule = Warmup(9, 4, within=(1, 2, 3))
    assert [schedule.place_at(step) for step in range(1, 15)] == [
        *[(*place, True) for place in [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (0, 3), (1, 3), (2, 3)]],
        *[(1, 4, False), (2, 4, False), (3, 4, False), (0, 4, False), (1, 4, False)],
    ]
    assert schedule.first_passes == 4
    assert ks.optim.config.decode(ks.optim.config.encode(schedule)) == schedule


SHAPES = [[(12, 8)] * 10, [(9, 5), (4, 7), (30, 30), (6, 1100)], [(40, 300 * 8)]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_in_the_first_steps_both_sides_of_a_block_take_their_roots_together(kind, shapes):
    """A side without a root beside one with a root left an autoencoder 7 % behind; KL-Shampoo's need each other's."""
    params = parameters(*shapes)
    optimizer = kind(params, 1e-2, block_size=8 if shapes == [(40, 300 * 8)] else None)
    period, apart = optimizer.param_groups[0]["refresh"].within[0], int(kind is KLShampoo)
    for step in range(1, 2 * period + 1):
        train(optimizer, params, [[gradients(shape, 2 * period)[step - 1]] for shape in shapes])
        for param in params:
            for tile, layout in enumerate(optimizer._layouts[param].tiles):
                taken = optimizer.state[param][f"tile{tile}.refreshed"][:, list(layout.modes)]
                both = taken.min(1).values > 0
                if taken.shape[1] > 1:
                    difference = (taken[:, 1] - taken[:, 0])[both]
                    assert (difference % period == apart).all()
                    assert apart or both.eq(taken.max(1).values > 0).all()
                assert step < period or both.all(), "every root within the first period"


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_steps_have_about_equally_much_work(kind):
    rng = torch.Generator().manual_seed(3)
    shapes = [tuple(torch.randint(4, 40, (2,), generator=rng).tolist()) for _ in range(24)]
    params = parameters(*shapes)
    optimizer = kind(params, 1e-2)
    (period, *_) = optimizer.param_groups[0]["refresh"].within
    train(optimizer, params, [gradients(shape, 1) for shape in shapes])
    loads, apart = [0.0] * period, int(kind is KLShampoo)
    for param in params:
        (layout,) = optimizer._layouts[param].tiles
        phase = optimizer.state[param]["tile0.phase"][0]
        for place, mode in enumerate(layout.modes):
            turn = int(phase[layout.modes[0]] + place * apart) % period
            loads[turn] += refresh_cost(layout, mode, optimizer._hyper(optimizer.param_groups[0]))
    assert max(loads) < 1.15 * sum(loads) / period


def test_of_blocks_with_one_side_alike_the_larger_ones_choose_their_first_steps_first():
    """In the order of the layers one of the first steps of this network took 1.28 times the roots of their mean."""
    shapes = [(512, 784), (512, 512), (10, 512)]
    params = parameters(*shapes, dtype=torch.float32)
    optimizer = Shampoo(params, 1e-2)
    train(optimizer, params, [gradients(shape, 1, dtype=torch.float32) for shape in shapes])
    loads = [0.0] * 3
    for param in params:
        for tile, layout in enumerate(optimizer._layouts[param].tiles):
            for phases in optimizer.state[param][f"tile{tile}.phase"]:
                hyper = optimizer._hyper(optimizer.param_groups[0])
                loads[int(phases[layout.modes[0]]) % 3] += sum(
                    refresh_cost(layout, mode, hyper) for mode in layout.modes
                )
    assert max(loads) < 1.22 * sum(loads) / 3


@pytest.mark.parametrize("kind", [Shampoo, KLShampoo])
def test_the_sides_of_many_blocks_have_their_roots_at_different_steps_later_on(kind):
    (param,) = parameters((40, 300 * 8))
    optimizer = kind([param], 1e-2, block_size=8)
    train(optimizer, [param], [gradients((40, 300 * 8), 1)])
    phases = optimizer.state[param]["tile0.phase"]
    assert len(phases) > 256
    assert (phases[:, 0] != phases[:, 1]).all()


# --- states of the version before -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_whole_matrices_is_refused_in_words_and_loads_where_matrices_are_whole(kind):
    def made(**options: Any) -> tuple[nn.Parameter, Any]:
        (param,) = parameters((300, 4), dtype=torch.float32)
        return param, kind([("fc.weight", param)], 1e-2, **options)

    param, saver = made(block_size=math.inf, refresh=Warmup(10, 10))
    train(saver, [param], [gradients((300, 4), 2, dtype=torch.float32)])
    saved = saver.state_dict()
    # the version before knew no other plan, and wrote no number for it
    saved["param_groups"][0]["block_size"] = None
    with pytest.raises(StateError, match=r"fc\.weight.*block_size=math\.inf"):
        made()[1].load_state_dict(saved)
    other, loader = made(block_size=math.inf)
    loader.load_state_dict(saved)
    assert loader.param_groups[0]["refresh"] == Warmup(10, 10)
    with torch.no_grad():
        other.copy_(param)
    for which, optimizer in ((param, saver), (other, loader)):
        train(optimizer, [which], [gradients((300, 4), 3, seed=5, dtype=torch.float32)])
    assert torch.equal(param, other)


# --- budgets --------------------------------------------------------------------------------------------------------


def layer(device: str = "meta") -> list[tuple[str, nn.Parameter]]:
    shapes = {"qkv": (768, 256), "out": (256, 256), "up": (1024, 256), "down": (256, 1024)}
    return [(f"layers.0.{name}.weight", nn.Parameter(torch.empty(s, device=device))) for name, s in shapes.items()]


def period(budget: Budget, kind: Any = Shampoo) -> int:
    row = kind(layer(), refresh=budget).explain().rows[0]
    schedule = eval(row.refresh, {"Warmup": Warmup})
    assert schedule.first == 2 * schedule.every
    assert schedule.within == -(-schedule.every // 2)
    return int(schedule.every)


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_takes_roots_as_often_as_its_share_allows(kind):
    periods = [period(Budget(share=0.2, rows=rows), kind) for rows in (256, 1024, 4096, 10**6)]
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] == 1
    assert periods[0] > periods[2] > 1
    shares = [period(Budget(share=share), kind) for share in (0.1, 0.2, 0.5)]
    assert shares == sorted(shares, reverse=True)
    assert period(Budget(share=0.2, rows=1), kind) == Budget().longest


def test_the_period_of_a_budget_is_the_least_that_keeps_it():
    for budget in (Budget(rows=1500), Budget(share=0.4, rows=800), Budget(work=6e9)):
        every = period(budget)
        lines = [line for line in str(Shampoo(layer(), refresh=budget).explain()).splitlines() if "Budget(" in line]
        share = float(lines[0].split(": ")[1].split(" %")[0]) / 100
        assert share <= budget.share + 5e-4
        closer = Budget(budget.share, budget.work, budget.rows, longest=every - 1)
        assert "even with the longest period" in str(Shampoo(layer(), refresh=closer).explain())


def test_auto_is_a_fifth_of_the_run_and_runs_repeat():
    assert Shampoo(layer(), refresh="auto").param_groups[0]["refresh"] == Budget(share=0.2)

    def trained() -> torch.Tensor:
        params = parameters((6, 4), (5, 3))
        optimizer = Shampoo(params, 1e-2, refresh=Budget(rows=10**6))
        train(optimizer, params, [gradients(param.shape, 30) for param in params])
        return torch.cat([param.detach().flatten() for param in params])

    assert torch.equal(trained(), trained())


def test_a_budget_is_saved_and_resumed():
    params = parameters((6, 4), (5, 3))
    saver = Shampoo(params, 1e-2, refresh=Budget(rows=10**6))
    train(saver, params, [gradients(param.shape, 5) for param in params])
    others = [nn.Parameter(param.detach().clone()) for param in params]
    loader = Shampoo(others, 1e-2)
    loader.load_state_dict(saver.state_dict())
    assert loader.param_groups[0]["refresh"] == Budget(rows=10**6)
    for which, optimizer in ((params, saver), (others, loader)):
        train(optimizer, which, [gradients(param.shape, 12, seed=3) for param in which])
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_parameters_that_come_later_count_too():
    named = layer()
    budget = Budget(rows=2000)
    later = Shampoo(named[:1], refresh=budget)
    later.add_param_group({"params": named[1:]})
    together = Shampoo([{"params": named[:1]}, {"params": named[1:]}], refresh=budget)
    found = [{row.refresh for row in optimizer.explain().rows} for optimizer in (later, together)]
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_parameters_that_thaw_are_spread_over_the_period_of_the_new_plan():
    def phases(*, frozen: bool) -> tuple[int, list[torch.Tensor]]:
        params = parameters(*[(4, 40)] * 12, (200_000,))
        for param in params[:-1]:
            param.requires_grad_(not frozen)
        optimizer = Shampoo([(f"{i}.weight", p) for i, p in enumerate(params)], 1e-2, refresh=Budget(rows=300))
        every = int(optimizer._hyper(optimizer.param_groups[0]).refresh.period)
        for param in params:
            param.requires_grad_(True)
        train(optimizer, params, [gradients(param.shape, 1) for param in params])
        # the last matrix is taken for a head
        return every, [optimizer.state[param]["tile0.phase"] for param in params[:-2]]

    (before, late), (after, early) = phases(frozen=True), phases(frozen=False)
    assert before != after
    assert all(map(torch.equal, late, early))


def test_an_option_that_decides_costs_changes_a_budget_s_period_in_the_run_as_in_one_that_is_resumed():
    params = parameters((6, 4), (5, 3))
    optimizer = Shampoo([{"params": params[:1], "refresh": Budget(rows=100)}, {"params": params[1:]}], 1e-2)
    train(optimizer, params, [gradients(param.shape, 2) for param in params])
    optimizer._schedules[Budget(rows=100)] = Warmup(20, 77)
    optimizer.param_groups[1]["power_rounds"] = 4
    train(optimizer, params, [gradients(param.shape, 1) for param in params])
    assert optimizer._schedules[Budget(rows=100)] != Warmup(20, 77)
    assert optimizer._hypers[id(optimizer.param_groups[0])][1].refresh == optimizer._schedules[Budget(rows=100)]


def test_embeddings_do_not_count_as_work_of_a_forward():
    table = ("tok_emb.weight", nn.Parameter(torch.empty(50_000, 256, device="meta")))
    with_table = Shampoo([table, *layer()], refresh=Budget(rows=4096)).explain().rows[1].refresh
    assert eval(with_table, {"Warmup": Warmup}).every >= period(Budget(rows=4096))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 0.0}, "between 0 and 1"),
        ({"share": 1.0}, "between 0 and 1"),
        ({"work": 0.0}, "multiply-adds"),
        ({"rows": 0}, "whole number"),
        ({"longest": 2.5}, "whole number"),
    ],
)
def test_a_budget_checks_its_numbers(options, words):
    with pytest.raises(OptionError, match=words):
        Budget(**options)


def test_a_budget_of_seconds_needs_a_rate():
    assert Budget.of_seconds(0.05, 0.1, rate=1e10) == Budget(share=0.1, work=5e8)
    with pytest.raises(OptionError, match="positive seconds and rate"):
        Budget.of_seconds(0.0, rate=1e10)
    with pytest.raises(OptionError, match="refresh must be an int, 'auto', Every"):
        Shampoo(layer(), refresh="often")  # type: ignore[arg-type]


# --- the share of a step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_explain_says_which_share_of_a_step_to_expect(kind):
    plan = kind(layer()).explain(step_seconds=0.05)
    later, first = plan.milliseconds(), plan.milliseconds(first=True)
    assert plan.share() == pytest.approx(later / (later + 50))
    assert plan.share(first=True) == pytest.approx(first / (first + 50))
    assert later < first
    assert f"share of a step, beside a forward and backward of 50 ms: {100 * plan.share():.1f} %" in str(plan)
    assert kind(layer()).explain().share() is None
    assert "share of a step" not in str(kind(layer()).explain())
    for seconds, wrong in itertools.product([0.0, -1.0, math.inf, "1"], [kind]):
        with pytest.raises(OptionError, match="step_seconds"):
            wrong(layer()).explain(step_seconds=seconds)


def test_explain_says_how_the_first_steps_take_roots():
    assert "the first 20 steps, which take each root 3 times: " in str(Shampoo(layer()).explain())
    once = Warmup(20, 10, within=5)
    assert "the first 20 steps, which take each root 4 times: " in str(SOAP(layer(), refresh=once).explain())
    assert "the first 3 steps, which take every root: " in str(Shampoo(layer(), refresh=Warmup(3, 10)).explain())
    assert Warmup(20, 10, within=(3, 3, 14)) == DEFAULT_REFRESH


@pytest.mark.parametrize("kind", KINDS)
def test_by_default_the_first_twenty_steps_take_one_pass_more_over_the_roots_than_later_ones(kind):
    """It was eleven passes, and ten steps that took all roots; later, twenty steps take two."""
    shapes = [(12, 8)] * 10
    params = parameters(*shapes)
    optimizer = kind(params, 1e-2)
    passes = []
    for step in range(20):
        train(optimizer, params, [[gradients(shape, 20)[step]] for shape in shapes])
        passes.append(optimizer.metrics()["roots"] / 20)
    assert sum(passes) == pytest.approx(3)
    assert max(passes) <= (0.5 if kind is KLShampoo else 0.4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_that_makes_the_state_takes_fewer_roots_and_a_few_blocks_do_not_wait(kind):
    def at_first(shapes: list[tuple[int, int]]) -> list[int]:
        params = parameters(*shapes, dtype=torch.float32)
        optimizer = kind(params, 1e-2, block_size=8)
        train(optimizer, params, [gradients(shape, 1, dtype=torch.float32) for shape in shapes])
        return [int((optimizer.state[param]["tile0.refreshed"] > 0).sum()) for param in params]

    # two roots each of 128 blocks in a period of three or four steps
    (taken,) = at_first([(64, 128)])
    period = kind([nn.Parameter(torch.zeros(2, 2))], 1e-2).param_groups[0]["refresh"].within[0]
    assert 0.7 * 256 / period < taken < 0.95 * 256 / period
    assert at_first([(8, 8)]) == [1 if kind is KLShampoo else 2]


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_the_schedule_of_the_signature_is_the_one_that_is_used(kind: Any) -> None:
    """Handing over what the documentation shows as default changes nothing."""
    shown = inspect.signature(kind).parameters["refresh"].default
    param = torch.nn.Parameter(torch.zeros(8, 6))
    (row,) = kind([("a", param)], method="kronecker").explain().rows
    again = dataclasses.replace(shown)
    (other,) = kind([("a", param)], method="kronecker", refresh=again).explain().rows
    assert row.refresh == other.refresh == str(shown)
