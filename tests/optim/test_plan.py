"""Who gets what: layouts, roles, groups, and the tables that say so."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kronscope.errors import OptionError, StateError
from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.kron.operators import Diagonal, KroneckerProduct
from kronscope.kron.roots import CoupledNewton, Ridge
from kronscope.optim import SOAP, Adaptive, CostModel, Eigh, Every, KLShampoo, Shampoo, measure_solvers, param_groups
from kronscope.optim.blocks import LayoutOptions, fit_budget, plan_layout
from kronscope.optim.roles import role_of
from tests.optim.tools import copies, gradients, parameters, train


@given(
    shape=st.lists(st.integers(1, 7), min_size=2, max_size=4).map(tuple),
    block_size=st.one_of(st.none(), st.integers(1, 5)),
    view=st.sampled_from(["matrix", "modes"]),
    merge=st.sampled_from([0, 6, 20]),
)
def test_tiles_cover_every_entry_exactly_once(shape, block_size, view, merge):
    layout = plan_layout(shape, LayoutOptions(block_size=block_size, view=view, merge=merge))
    flat = torch.arange(math.prod(shape)).reshape(layout.view)
    seen = torch.cat([tile.extract(flat).flatten() for tile in layout.tiles])
    assert torch.equal(seen.sort().values, torch.arange(math.prod(shape)))
    rebuilt = torch.full_like(flat, -1)
    for tile in layout.tiles:
        blocks = tile.extract(flat)
        assert blocks.shape == (tile.count, *tile.block)
        assert block_size is None or max(tile.block) <= block_size
        tile.insert(rebuilt, blocks)
    assert torch.equal(rebuilt, flat)


def test_equal_blocks_by_default_and_one_side_where_a_matrix_is_long():
    def planned(*shape: int) -> str:
        return plan_layout(shape, LayoutOptions()).reason

    assert planned(32, 32) == planned(256, 256) == planned(64, 3, 7, 7) == planned(10, 256) == "whole"
    assert planned(1024, 256) == planned(4096, 1024) == planned(20000, 20000).replace("250", "256")
    assert planned(1024, 256) == "blocks of 256x256"
    assert planned(1376, 512) == "blocks of 172x256"
    assert planned(128, 1568) == "blocks of 128x224"
    assert planned(96, 2048) == planned(768, 50257) == "one-sided (dimension 0)"
    assert planned(50257, 768) == "one-sided (dimension 1)"
    assert planned(7) == "1-D"
    # a length without equal parts is cut into nearly equal ones
    assert [tile.block for tile in plan_layout((257, 64), LayoutOptions()).tiles] == [(129, 64), (128, 64)]
    # parts and experts are cut one by one
    assert [tile.block for tile in plan_layout((900, 64), LayoutOptions(split=3)).tiles] == [(150, 64)]
    # the short side of a long matrix is cut too, the other stays whole
    assert [tile.block for tile in plan_layout((512, 8192), LayoutOptions()).tiles] == [(256, 8192)]


def test_positions_of_a_kernel_share_factors_where_channels_fill_a_block():
    def planned(*shape: int, **options) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        layout = plan_layout(shape, LayoutOptions(**options))
        return layout.view, layout.tiles[0].modes, layout.reason

    assert planned(512, 512, 3, 3) == ((512, 512, 9), (0, 1), "blocks of 256x256x9, kernel apart")
    assert planned(64, 256, 3, 3) == ((64, 256, 9), (0, 1), "whole, kernel apart")
    assert planned(512, 300, 2, 2, 2) == ((512, 300, 8), (0, 1), "blocks of 256x150x8, kernel apart")
    # with fewer channels, or more positions, they are flattened
    assert planned(64, 255, 3, 3)[0] == (64, 2295)
    assert planned(192, 3, 16, 16) == ((192, 768), (0, 1), "blocks of 192x256")
    assert planned(64, 512, 65)[0] == (64, 512 * 65)
    assert planned(64, 1024, 1, 1) == planned(64, 1024)
    # and all of them where nobody minds the cost, or a shape is asked for
    for options in ({"block_size": math.inf}, {"block_size": 128}, {"cuts": False}, {"method": "left"}):
        assert planned(128, 256, 3, 3, **options)[0] == (128, 2304)
    # a budget cuts its blocks, and gives the kernel no factor either
    layout = plan_layout((64, 512, 3, 3), LayoutOptions(), budget=8 * 16 * 64**2)
    assert (layout.tiles[0].block, layout.tiles[0].modes) == ((64, 64, 9), (0, 1))


def test_whole_matrices_on_request_and_one_sided_or_blocks_where_they_are_too_large():
    def planned(*shape: int) -> str:
        return plan_layout(shape, LayoutOptions(block_size=math.inf)).reason

    assert planned(1024, 256) == planned(32, 32) == planned(4096, 1024) == planned(64, 3, 7, 7) == "whole"
    assert planned(50257, 768) == "one-sided (dimension 1)"
    assert planned(768, 50257) == "one-sided (dimension 0)"
    assert planned(20000, 20000).startswith("blocks of")
    with pytest.raises(OptionError, match="block_size must be a whole number"):
        LayoutOptions(block_size=2.5)


def test_what_says_otherwise_is_not_cut_by_default():
    """Sums are the original Shampoo, and a memory budget is there to be spent."""
    for options in ({"betas": (0.9, 1.0)}, {"memory_budget": math.inf}, {"block_size": math.inf}):
        (row,) = Shampoo([nn.Parameter(torch.empty(512, 300, device="meta"))], **options).explain().rows
        assert (row.factors, row.method, row.limited) == ((512, 300), "Shampoo (whole)", False)
    plan = Shampoo([nn.Parameter(torch.empty(512, 300, device="meta"))]).explain()
    assert (plan.rows[0].factors, plan.rows[0].blocks, plan.rows[0].limited) == ((256, 150), 4, True)
    assert "block_size=math.inf leaves matrices whole" in str(plan)
    assert "block_size=math.inf" not in str(Shampoo([nn.Parameter(torch.empty(64, 30, device="meta"))]).explain())


def test_a_fused_weight_is_split_on_request():
    layout = plan_layout((12, 4), LayoutOptions(split=3))
    assert [(tile.count, tile.block) for tile in layout.tiles] == [(3, (4, 4))]
    uneven = plan_layout((12, 4), LayoutOptions(split=(2, 10)))
    assert [tile.block for tile in uneven.tiles] == [(2, 4), (10, 4)]
    with pytest.raises(OptionError, match=r"5.*12 rows"):
        plan_layout((12, 4), LayoutOptions(split=5))


def test_a_split_weight_trains_like_its_parts():
    (fused,) = parameters((6, 4))
    parts = [nn.Parameter(part.clone()) for part in fused.detach().chunk(3)]
    grads = gradients((6, 4), 8)
    train(Shampoo([fused], 0.1, split=3, refresh=1), [fused], [grads])
    train(Shampoo(parts, 0.1, refresh=1), parts, [[grad.chunk(3)[i] for grad in grads] for i in range(3)])
    assert torch.allclose(fused, torch.cat([*parts]), rtol=1e-10)


def test_a_memory_budget_is_kept_by_the_largest_giving_way():
    shapes = [(512, 512), (512, 128), (16, 16)]
    options = [LayoutOptions()] * 3
    layouts = [plan_layout(shape, LayoutOptions()) for shape in shapes]
    full = sum(8 * layout.factor_numel() for layout in layouts)
    for budget in (full, full // 2, full // 8, 5000, 0):
        fitted = fit_budget(layouts, options, budget)
        assert sum(8 * layout.factor_numel() for layout in fitted) <= budget
        assert budget < 5000 or fitted[2].reason == "whole"
    optimizer = Shampoo([nn.Parameter(torch.zeros(shape)) for shape in shapes], memory_budget=200_000)
    kinds = [row.method for row in optimizer.explain().rows]
    assert "whole" in kinds[2]
    assert "whole" not in kinds[0]


class Tiny(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(10, 4)
        self.attn = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 10, bias=False)
        if tied:
            self.lm_head.weight = self.token_embedding.weight


def methods(optimizer) -> dict[str, str]:
    return {row.name: row.method for row in optimizer.explain().rows}


@pytest.mark.parametrize("named", ["named_parameters", "param_groups"])
def test_embeddings_and_heads_get_adamw_when_their_names_are_known(named):
    model = Tiny()
    params = model.named_parameters() if named == "named_parameters" else param_groups(model)
    found = methods(Shampoo(params))
    assert found["token_embedding.weight"] == "AdamW (embedding)"
    assert found["lm_head.weight"] == "AdamW (head)"
    assert found["norm.weight"] == "AdamW (1-D)"
    assert found["attn.in_proj_weight"] == found["attn.out_proj.weight"] == "Shampoo (whole)"


def test_from_a_plain_list_shape_alone_decides():
    assert sum("Shampoo" in method for method in methods(Shampoo(Tiny().parameters())).values()) == 4


def test_unless_asked_otherwise():
    found = methods(Shampoo(Tiny().named_parameters(), method="kronecker"))
    assert all("Shampoo" in method for method in found.values())
    found = methods(Shampoo(Tiny().named_parameters(), method="adam"))
    assert all("AdamW" in method for method in found.values())


def test_parameter_groups_of_a_model():
    groups = param_groups(Tiny(), split_qkv=True, overrides={"attn.out*": {"lr": 0.5}})
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name["attn.in_proj_weight"]["split"] == 3
    assert by_name["attn.out_proj.weight"]["lr"] == 0.5
    assert by_name["norm.weight"]["weight_decay"] == 0.0
    assert "weight_decay" not in by_name["lm_head.weight"]
    tied = param_groups(Tiny(tied=True))
    assert [role for group in tied for role in group["roles"] if role] == ["embedding"]
    with pytest.raises(OptionError, match="atn"):
        param_groups(Tiny(), overrides={"atn.*": {}})
    frozen = Tiny()
    frozen.lm_head.weight.requires_grad_(False)
    assert "lm_head.weight" not in {name for group in param_groups(frozen) for name, _ in group["params"]}


def test_the_last_linear_layer_is_the_head_of_a_model_without_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert methods(Shampoo(param_groups(model)))["2.weight"] == "AdamW (head)"
    assert methods(Shampoo(param_groups(model, head=False)))["2.weight"] == "Shampoo (whole)"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("transformer.wte.weight", "embedding"),
        ("model.embed_tokens.weight", "embedding"),
        ("pos_emb", "embedding"),
        ("patch_embed.proj.weight", ""),
        ("head.weight", "head"),
        ("heads.head.weight", "head"),
        ("classifier.weight", "head"),
        ("blocks.1.attn.qkv.weight", ""),
        ("blocks.1.header.weight", ""),
        ("fc.weight", ""),
    ],
)
def test_roles_by_name(name, role):
    assert role_of(name) == role


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_explain_states_the_bytes_that_the_state_will_have(kind):
    params = parameters((6, 4), (5,), (3, 2, 2), dtype=torch.float32)
    optimizer = kind(params)
    plan = optimizer.explain()
    assert sum(row.share for row in plan.rows) == pytest.approx(1.0)
    train(optimizer, params, [gradients(param.shape, 1, dtype=torch.float32) for param in params])
    for param, row in zip(params, plan.rows, strict=True):
        assert row.bytes == sum(t.numel() * t.element_size() for t in optimizer.state[param].values())
    text = str(plan)
    assert all(word in text for word in ("6x4", "AdamW", "GFLOP", "refresh"))


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_diagnostics_measure_what_they_say(kind):
    model = nn.Linear(4, 3, dtype=torch.float64)
    optimizer = kind(model.named_parameters(), 0.01, refresh=5)
    assert optimizer.diagnostics().rows == ()
    params = list(model.parameters())
    history = [gradients(param.shape, 8) for param in params]
    train(optimizer, params, [grads[:-1] for grads in history])
    train(optimizer, params, [grads[-1:] for grads in history])
    before = model.weight.detach().clone()
    row = optimizer.diagnostics().rows[0]
    assert row.name == "weight"
    assert row.step == 8
    assert 0 < row.staleness < 5
    assert row.condition > 1
    assert 1 <= row.effective_rank <= 3
    assert 1e-6 < row.residual < 10
    assert torch.equal(model.weight, before), "looking changes nothing"
    assert row.update_ratio == pytest.approx(0.01, rel=5)
    assert "skipped steps: 0" in str(optimizer.diagnostics())


def test_the_update_ratio_is_that_of_the_last_step():
    (param,) = parameters((4, 3))
    optimizer = Shampoo([param], 0.01, refresh=1, scale="adam", momentum=0.0)
    train(optimizer, [param], [gradients((4, 3), 5)])
    before = param.detach().clone()
    train(optimizer, [param], [gradients((4, 3), 1, seed=7)])
    wanted = (param - before).norm() / param.norm()
    assert optimizer.diagnostics().rows[0].update_ratio == pytest.approx(wanted.item(), rel=1e-9)


def test_work_that_is_not_spread_is_all_done_in_the_same_steps():
    params = parameters((4, 3), (5, 2))
    optimizer = Shampoo(params, 0.01, refresh=Every(4, spread=False))
    for step in range(1, 10):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        taken = {int(t) for p in params for t in optimizer.state[p]["tile0.refreshed"].flatten()}
        assert taken == {1 + 4 * ((step - 1) // 4)}


def test_work_is_staggered_so_that_step_time_is_flat():
    params = parameters(*[(8, 8)] * 10, dtype=torch.float32)
    optimizer = Shampoo(params, refresh=10)
    train(optimizer, params, [gradients((8, 8), 1, dtype=torch.float32)] * 10)
    counts = torch.zeros(10, dtype=torch.int64)
    for param in params:
        counts += torch.bincount(optimizer.state[param]["tile0.phase"].flatten(), minlength=10)
    assert counts.tolist() == [2] * 10


def test_roots_that_are_taken_side_by_side_are_equally_large():
    """Eight equal roots in ten steps: four steps take two each, of different matrices; a single matrix's stay apart."""
    params = parameters(*[(8, 8)] * 4, dtype=torch.float32)
    optimizer = SOAP(params, refresh=10)
    train(optimizer, params, [gradients((8, 8), 1, dtype=torch.float32)] * 4)
    phases = torch.stack([optimizer.state[param]["tile0.phase"][0] for param in params])
    assert sorted(torch.bincount(phases.flatten(), minlength=10).tolist()) == [0] * 6 + [2] * 4
    assert (phases[:, 0] != phases[:, 1]).all()
    alone = Shampoo(params[:1], refresh=10)
    train(alone, params[:1], [gradients((8, 8), 1, dtype=torch.float32)])
    assert len(set(alone.state[params[0]]["tile0.phase"].flatten().tolist())) == 2


@pytest.mark.parametrize("period", [2, 5, 20])
def test_a_period_changed_in_the_middle_of_a_run_still_refreshes_every_root(period):
    params = parameters(*[(5, 4)] * 6)
    optimizer = Shampoo(params, refresh=10)
    train(optimizer, params, [gradients((5, 4), 3)] * 6)
    optimizer.param_groups[0]["refresh"] = Every(period)
    train(optimizer, params, [gradients((5, 4), period)] * 6)
    assert all((optimizer.state[param]["tile0.refreshed"] > 3).all() for param in params)


def test_an_adaptive_schedule_refreshes_what_is_stale_and_nothing_else():
    """One parameter sees the same gradient for ever, the other a new direction at step 6."""
    steady, moving = parameters((4, 4), (4, 4))
    optimizer = Shampoo([steady, moving], 0.01, refresh=Adaptive(0.2))
    grads = gradients((4, 4), 2)
    train(optimizer, [steady, moving], [[grads[0]] * 5, [grads[0]] * 5])
    assert optimizer.state[moving]["tile0.refreshed"].tolist() == [[1, 1]]
    train(optimizer, [steady, moving], [[grads[0]], [10 * grads[1]]])
    assert optimizer.state[steady]["tile0.refreshed"].tolist() == [[1, 1]]
    assert optimizer.state[moving]["tile0.refreshed"].tolist() == [[6, 6]]


def test_operators_of_blocks_sides_tensors_and_vectors():
    params = parameters((5, 4), (6,), (3, 2, 2))
    history = [gradients(param.shape, 6, seed=i) for i, param in enumerate(params)]
    optimizer = Shampoo(params, betas=(0.9, 1.0), block_size=3)
    with pytest.raises(StateError, match="no gradient"):
        optimizer.operator(params[0])
    with pytest.raises(StateError, match="not a parameter"):
        optimizer.operator(copies(params)[0])
    train(optimizer, params, history)
    blocks = optimizer.operator(params[0])
    assert isinstance(blocks, BlockDiagonal)
    assert blocks.shape == (5, 4)
    # the trace of each block's estimate is its share of the gradients' squares, so blocks add up to the whole
    total = sum(grad.square().sum().item() for grad in history[0])
    assert blocks.trace() == pytest.approx(total)
    dense = blocks.to_dense()
    assert blocks.norm() == pytest.approx(dense.norm().item())
    assert blocks.inner(blocks) == pytest.approx(dense.square().sum().item())
    assert torch.allclose(blocks.apply(history[0][0]).flatten(), dense @ history[0][0].flatten())
    assert torch.allclose(
        blocks.power(-0.5).to_dense() @ blocks.power(0.5).to_dense(), torch.eye(20).double(), atol=1e-8
    )
    vector = optimizer.operator(params[1])
    assert isinstance(vector, Diagonal)
    assert torch.allclose(vector.values[0], torch.stack(history[1]).square().sum(0))
    modes = Shampoo(copies(params[2:]), betas=(0.9, 1.0), view="modes")
    tensor = modes.param_groups[0]["params"][0]
    train(modes, [tensor], history[2:])
    live = modes.operator(tensor)
    assert isinstance(live, KroneckerProduct)
    assert live.shape == (3, 4)
    assert live.trace() == pytest.approx(sum(grad.square().sum().item() for grad in history[2]))


def test_a_one_sided_operator_is_the_one_sided_approximation():
    from kronscope import approx
    from kronscope.gradients.stream import GradientStream

    (param,) = parameters((3, 300))
    grads = gradients((3, 300), 4)
    optimizer = Shampoo([param], betas=(0.9, 1.0), memory_budget=1000)
    train(optimizer, [param], [grads])
    assert optimizer.explain().rows[0].factors == (3,)
    fitted = approx.get("one-sided").fit(GradientStream.from_tensors(torch.stack(grads), torch.ones(4).double()))
    other = gradients((3, 300), 1, seed=5)[0]
    assert torch.allclose(optimizer.operator(param).apply(other), fitted.apply(other), rtol=1e-10)


def test_the_cost_model_is_data_and_can_be_measured():
    model, table = measure_solvers(sizes=(8, 16), repeats=1)
    assert isinstance(model, CostModel)
    assert set(table) == {8, 16}
    assert all(seconds > 0 for row in table.values() for seconds in row.values())
    assert CostModel([["cuda", 64]]) == CostModel((("cuda", 64),))  # type: ignore[arg-type]
    for device, size, exponent, damping, newton in (
        ("cpu", 512, -0.5, 1e-4, False),
        ("cuda", 64, -0.5, 1e-4, False),
        ("cuda", 512, -0.5, 1e-4, True),
        ("cuda", 512, -0.3, 1e-4, False),
        ("cuda", 2048, -0.5, 1e-4, False),  # the damping is lost in float32's rounding
        ("cuda", 512, -0.5, 0.0, False),
    ):
        chosen = CostModel((("cuda", 128),)).choice(device, size, exponent, Ridge(damping=damping))
        assert isinstance(chosen, CoupledNewton) == newton, (device, size, exponent, damping)
    params = parameters((4, 3))
    optimizer = Shampoo(params, solver=CostModel((("cpu", 1),)))
    train(optimizer, params, [gradients((4, 3), 3)])
    twins = parameters((4, 3))
    train(Shampoo(twins, solver=Eigh()), twins, [gradients((4, 3), 3)])
    assert torch.allclose(params[0], twins[0], rtol=1e-2)


def test_schedules_check_themselves():
    for bad in (lambda: Every(0), lambda: Adaptive(-1.0), lambda: Adaptive(0.1, check=0)):
        with pytest.raises(OptionError):
            bad()
