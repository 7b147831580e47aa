"""What each process does, keeps and receives: divided evenly, and as counted beforehand."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kronscope.optim import Shampoo
from kronscope.optim.blocks import LayoutOptions, plan_layout
from kronscope.optim.config import Every, Graft, Hyper
from kronscope.optim.costs import block_work, layout_work
from kronscope.optim.elementwise import elementwise_state
from kronscope.optim.parallel.assign import BlockWork, Rows, assign_blocks, assign_rows, lower_bound
from kronscope.optim.parallel.distributed import Distributed
from kronscope.optim.parallel.division import Division
from kronscope.optim.parallel.placement import Planned
from kronscope.optim.rules.shampoo import ShampooRule
from kronscope.optim.solvers import CostModel
from kronscope.optim.stacks import initial_state
from tests.optim.parallel.model import wrapped
from tests.optim.parallel.pool import Pool

HYPER = Hyper(ShampooRule(), 0.9, 0.95, 1e-8, (-0.5,), Graft(), Every(10), 1e-4, 1, 1, 0.0, False, CostModel())


def gpt2(layers: int = 12, width: int = 768) -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...]]] = [("wte.weight", (50257, width)), ("wpe.weight", (1024, width))]
    for layer in range(layers):
        shapes = {"attn.qkv": (3 * width, width), "attn.out": (width, width)}
        shapes |= {"mlp.up": (4 * width, width), "mlp.down": (width, 4 * width)}
        for name, shape in shapes.items():
            found += [(f"{layer}.{name}.weight", shape), (f"{layer}.{name}.bias", shape[:1])]
        found += [(f"{layer}.ln{i}.{part}", (width,)) for i in (1, 2) for part in ("weight", "bias")]
    return found


def planned(shapes: list[tuple[str, tuple[int, ...]]]) -> list[Planned]:
    entries = []
    for name, shape in shapes:
        role = "embedding" if name.startswith("w") else ""
        layout = plan_layout(shape, LayoutOptions(role=role))
        entries.append(Planned(name, torch.empty(shape, device="meta"), layout, HYPER))
    return entries


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 16, 24, 32, 48, 64, 256])
def test_work_on_gpt2_is_within_ten_per_cent_of_the_best_possible_division(size: int) -> None:
    entries = planned(gpt2())
    division = Division(size)
    division.add(entries, {entry.param: None for entry in entries})
    works = [BlockWork(t.total, block_work(t, HYPER)[1], 0) for entry in entries for t in entry.layout.tiles]
    total = sum(layout_work(entry.layout, HYPER, entry.param.numel())[1] for entry in entries)
    assert sum(division.loads) == pytest.approx(total)
    assert max(division.loads) <= 1.1 * lower_bound(works, total, size)
    # nothing is left out, nothing is done twice
    for entry in entries:
        counts = [tile.total for tile in entry.layout.tiles] or [entry.param.shape[0]]
        for count, by_process in zip(counts, division.ranges[entry.param], strict=True):
            assert [a for a, _ in by_process] == [0, *(b for _, b in by_process[:-1])]
            assert by_process[-1][1] == count


def test_the_greedy_division_is_improved_where_it_is_not_the_best() -> None:
    works = [BlockWork(1, cost, 0) for cost in (3.0, 3.0, 2.0, 2.0, 2.0)]
    loads = [0.0, 0.0]
    assign_blocks(works, loads)
    assert max(loads) == 6.0  # the longest first alone gives 7


def test_elementwise_work_evens_out_the_bytes() -> None:
    loads, sizes = [10.0, 10.0, 0.0], [100, 0, 0]
    ranges = assign_rows([Rows(10, 1e-3, 10), Rows(20, 1e-3, 10)], loads, sizes)
    assert max(sizes) - min(sizes) <= 10
    assert sum(b - a for a, b in ranges[0]) == 10
    assert max(loads) < 10.2


def counted(mode: str, layers: int, steps: int = 2) -> dict[str, Any]:
    """Bytes of state, and bytes received in a step: planned and measured."""
    rank, size = dist.get_rank(), dist.get_world_size()
    params: list[nn.Parameter] = []
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(0)
    for _ in range(layers):
        for shape in ((16, 12), (12,)):
            value = torch.randn(shape, generator=generator)
            params.append(nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]) if mode == "sharded" else value))
    optimizer = Shampoo(params, 1e-2, refresh=2, parallel="auto" if mode == "sharded" else "divided")
    received = 0

    def count(name: str, numbers: Any) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal received
            received += numbers(*args)
            return real(*args, **kwargs)

        return call

    def others(output: Tensor, given: Tensor, receive: list[int], send: list[int]) -> int:
        return (sum(receive) - receive[rank]) * output.element_size()

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    patches = {
        "all_to_all_single": count("all_to_all_single", others),
        gather: count(gather, lambda output, given: (len(output) - len(given)) * output.element_size()),
        "broadcast": count("broadcast", lambda piece: piece.numel() * piece.element_size()),
    }
    for step in range(steps):
        for param in params:
            grad = torch.full(param.shape, 0.1).fill_diagonal_(1.0 + step) if param.ndim > 1 else torch.ones(12)
            param.grad = distribute_tensor(grad, mesh, [Shard(0)]) if isinstance(param, DTensor) else grad
        saved = {name: getattr(dist, name) for name in patches}
        received = 0
        for name, patch in patches.items() if step else ():
            setattr(dist, name, patch)
        try:
            optimizer.step()
        finally:
            for name, value in saved.items():
                setattr(dist, name, value)
    placement = optimizer._placement
    assert isinstance(placement, Distributed)
    state = [(name, t) for tensors in optimizer.state.values() for name, t in tensors.items()]
    sizes = {}
    for param in params:
        ghost, layout = torch.empty(param.shape, device="meta"), optimizer._layouts[param]
        hyper = optimizer._hyper(optimizer.param_groups[0])
        kept = elementwise_state(ghost, ghost.dtype) if layout.is_elementwise else initial_state(ghost, layout, hyper)
        sizes[cast(Tensor, param)] = {name: t.numel() * t.element_size() for name, t in kept.items()}
    return {
        "planned state": placement.division.state_bytes(sizes)[rank],
        "factors": sum(t.numel() * t.element_size() for n, t in state if "factor" in n or "root" in n),
        "state": sum(t.numel() * t.element_size() for _, t in state),
        "received": received,
        "planned": placement.division.traffic()[rank],
        "least": placement.division.traffic(least=True)[rank],
        "words": optimizer.explain().parallel,
    }


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_memory_falls_with_the_number_of_processes_and_traffic_is_near_the_least(pool: Pool, mode: str) -> None:
    layers, parameter = 8, (16 * 12 + 12) * 4
    factors = layers * 2 * (16 * 16 + 12 * 12) * 4
    for size in (1, 2, 4):
        if mode == "replicated" and size == 1:
            continue
        found = pool.run(counted, size, mode=mode, layers=layers)
        assert [one["factors"] for one in found] == [factors / size] * size
        for one in found:
            assert one["state"] == one["planned state"]
            assert one["received"] == one["planned"]
            assert one["least"] <= one["received"] <= 1.125 * one["least"]
            assert f"over {size} processes" in one["words"]
        # what no method can do without: each parameter's new value, or gradient and update, where it is not computed
        everywhere = sum(one["least"] for one in found)
        if mode == "replicated":
            assert everywhere == layers * parameter * (size - 1)
        else:
            assert everywhere == layers * 16 * 12 * 4 * 2 * (size - 1) / size


def more_processes_than_blocks() -> list[int]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = Shampoo(model.parameters(), 1e-2, parallel="divided")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [t.numel() for n, t in optimizer.state[model.weight].items() if "factor" in n]


def test_processes_without_work_keep_nothing(pool: Pool) -> None:
    found = pool.run(more_processes_than_blocks, 4)
    assert sorted(sum(one) for one in found) == [0, 0, 0, 25 + 36]


def explained(parallel: Literal["auto", "divided"]) -> str:
    model = wrapped("ddp")
    return str(Shampoo(model.named_parameters(), 1e-2, parallel=parallel).explain())


@pytest.mark.parametrize(
    ("parallel", "wanted"),
    [
        ("auto", ["replicated over 3 processes", "keeps all", "a share of the roots", "a step brings a process"]),
        (
            "divided",
            ["replicated over 3 processes", "MiB of state", "times the mean work", "a step brings a process"],
        ),
    ],
)
def test_the_plan_says_who_keeps_and_receives_what(pool: Pool, parallel: str, wanted: list[str]) -> None:
    texts = pool.run(explained, 3, parallel=parallel)
    assert len(set(texts)) == 1
    last = texts[0].splitlines()[-1]
    for words in wanted:
        assert words in last
