"""Parameters in every supported layout, named errors for the others, and what a run tells about itself."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from kronscope.errors import DistributedError, GradientError, KronscopeError, OptionError
from kronscope.optim import SOAP, KLShampoo, Shampoo, Trace
from tests.optim.parallel.model import made, train, values, wrapped
from tests.optim.parallel.pool import Pool
from tests.optim.tools import gradients, parameters

# the last one has so many channels that the positions of its kernel share factors
SHAPES = ((9, 5), (3, 7), (2, 3), (4, 2, 3), (5,), (6, 6), (1, 1), (3, 256, 2))
LAYOUTS: list[Placement | None] = [Shard(1), Shard(0), Shard(0), Shard(1), Shard(0), Replicate(), None, Shard(1)]
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "blocks": {"block_size": 2},
    "modes": {"view": "modes"},
    "split": {"split": [1, 1], "scale": Trace(1.0)},
}


def mixed_layouts(option: str) -> list[Tensor]:
    """Steps with the same gradients as one process has, on parameters of many layouts; the parameters afterwards."""
    options = OPTIONS[option]
    chosen = [2] if option == "split" else list(range(len(SHAPES)))
    params: list[nn.Parameter] = parameters(*(SHAPES[i] for i in chosen))
    history = [gradients(SHAPES[i], 6, seed=i) for i in chosen]
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        places = [LAYOUTS[i] for i in chosen]
        params = [
            nn.Parameter(p.detach() if place is None else distribute_tensor(p.detach(), mesh, [place]))
            for p, place in zip(params, places, strict=True)
        ]
        history = [
            [g if place is None else distribute_tensor(g, mesh, [place]) for g in grads]
            for grads, place in zip(history, places, strict=True)
        ]
    optimizer = Shampoo(params, 0.05, momentum=0.5, weight_decay=0.1, decay="coupled", refresh=2, **options)
    for step in zip(*history, strict=True):
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in params]


mixed_alone = cache(mixed_layouts)


# shards are empty only on four
@pytest.mark.parametrize(("option", "size"), [*((option, 4) for option in OPTIONS), ("whole", 2)])
def test_rows_columns_uneven_and_empty_shards_and_plain_parameters_mix(pool: Pool, option: str, size: int) -> None:
    expected = mixed_alone(option)
    for found in pool.run(mixed_layouts, size, option=option):
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def all_refused(cases: list[str]) -> dict[str, list[str]]:
    """What is said about each of the runs that cannot work, one after another."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    return {case: refused(case, mesh, square) for case in cases}


def refused(case: str, mesh: DeviceMesh, square: DeviceMesh) -> list[str]:
    rank = dist.get_rank()

    def make(shape: tuple[int, ...], places: list[Placement], on: Any = mesh) -> list[tuple[str, nn.Parameter]]:
        return [("layer.weight", nn.Parameter(distribute_tensor(torch.ones(shape), on, places)))]

    try:
        if case == "two dimensions":
            Shampoo(make((4, 4), [Shard(0), Shard(1)], square), 0.1)
        elif case == "same dimension twice":
            Shampoo(make((8, 4), [Shard(0), Shard(0)], square), 0.1)
        elif case == "partial":
            param = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
            Shampoo([("layer.weight", nn.Parameter(param))], 0.1)
        elif case == "swapped":
            (plain,) = parameters((4, 4))
            optimizer = Shampoo([("layer.weight", plain)], 0.1)
            optimizer.param_groups[0]["params"] = [make((4, 4), [Shard(0), Shard(1)], square)[0][1]]
            try:
                optimizer.step()
            finally:
                # refused, it is as before
                optimizer.param_groups[0]["params"] = [plain]
                plain.grad = torch.ones_like(plain)
                optimizer.step()
        elif case == "no rectangle":
            Shampoo(make((4, 3, 2), [Shard(2)]), 0.1)
        elif case == "two meshes":
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            half = DeviceMesh.from_group(pairs[rank // 2], "cpu")
            other = [("other.weight", p) for _, p in make((4, 4), [Shard(0)], half)]
            Shampoo(make((4, 4), [Shard(0)]) + other, 0.1)
        elif case == "single":
            Shampoo(make((4, 4), [Shard(0)]), 0.1, parallel="single")
        elif case == "option":
            Shampoo(parameters((3, 2)), 0.1 if rank != 2 else 0.2)
        elif case == "object":
            Shampoo(parameters((3, 2)), 0.1, refresh=3 if rank != 1 else 4)
        elif case == "shape":
            Shampoo([("a", parameters((3, 2))[0]), ("b", parameters((3, 2 + rank % 2))[0])], 0.1)
        elif case == "count":
            Shampoo(parameters(*[(3, 2)] * (1 + rank // 3)), 0.1)
        else:
            optimizer = Shampoo([("a", p) for p in parameters((3, 2), seed=rank if case == "values" else 0)], 0.1)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if not (case == "missing gradient" and rank == 1):
                        param.grad = torch.ones_like(param) * (rank if case == "gradients" else 1)
            optimizer.step()
    except KronscopeError as error:
        return [type(error).__name__, str(error)]
    return []


REFUSED: list[tuple[str, type[Exception], list[str]]] = [
    ("two dimensions", DistributedError, ["layer.weight", "sharded along one only"]),
    ("same dimension twice", DistributedError, ["layer.weight", "sharded along one only"]),
    ("partial", DistributedError, ["layer.weight", "sharded along one only"]),
    ("swapped", DistributedError, ["layer.weight", "tensor parallelism without fully_shard"]),
    ("no rectangle", DistributedError, ["layer.weight", "dimension 2", "view='modes'"]),
    ("two meshes", DistributedError, ["layer.weight", "other.weight", "one optimizer for"]),
    ("single", OptionError, ["layer.weight", "DTensor"]),
    ("option", DistributedError, ["option lr of group 0 is 0.1 on rank 0 but 0.2 on rank 2", "parallel='single'"]),
    ("object", DistributedError, ["option refresh of group 0", "rank 1"]),
    ("shape", DistributedError, ["parameter 1 of group 0 is b: (3, 2)", "(3, 3)", "rank 1"]),
    ("count", DistributedError, ["number of parameters in group 0 is 1 on rank 0 but 2 on rank 3"]),
    ("values", DistributedError, ["a has different values", "DistributedDataParallel"]),
    ("gradients", DistributedError, ["the gradient of a differs", "DistributedDataParallel"]),
    ("missing gradient", GradientError, ["a has a gradient on 3 of 4 processes"]),
]


@pytest.fixture(scope="module")
def refusals(pool: Pool) -> list[dict[str, list[str]]]:
    """By process and case, of four processes that come together once."""
    return pool.run(all_refused, 4, cases=[case for case, _, _ in REFUSED])


@pytest.mark.parametrize(("case", "kind", "words"), REFUSED)
def test_what_cannot_work_is_named(
    refusals: list[dict[str, list[str]]], case: str, kind: type[Exception], words: list[str]
) -> None:
    for one in refusals:
        found = one[case]
        assert found, "nothing was said"
        assert found[0] == kind.__name__
        for word in words:
            assert word in found[1]


def alone() -> bool:
    """Processes that train models of their own say so, and are left alone."""
    params = parameters((3, 2), seed=dist.get_rank())
    optimizer = Shampoo(params, 0.1, parallel="single")
    params[0].grad = torch.ones_like(params[0]) * (1 + dist.get_rank())
    optimizer.step()
    return optimizer.explain().parallel == ""


def test_a_process_may_be_on_its_own(pool: Pool) -> None:
    assert all(pool.run(alone, 2))
    with pytest.raises(OptionError, match="init_process_group"):
        Shampoo(parameters((3, 2)), 0.1, parallel="replicated")
    with pytest.raises(OptionError, match="'auto', 'single', 'replicated' or 'divided'"):
        Shampoo(parameters((3, 2)), 0.1, parallel="ddp")  # type: ignore[arg-type]


def looks(mode: str) -> dict[str, Any]:
    """Operators and diagnostics of all three optimizers."""
    options: dict[str, Any] = {"parallel": "divided"} if mode == "divided" else {}
    found: dict[str, Any] = {}
    for kind in (Shampoo, SOAP, KLShampoo):
        model = wrapped(mode, square=True)
        optimizer = kind(model.named_parameters(), 3e-3, block_size=4, refresh=3, **options)
        train(model, optimizer, range(5))
        for name, param in model.named_parameters():
            found[f"{kind.__name__} {name.removeprefix('module.')}"] = optimizer.operator(param).to_dense()
        rows = optimizer.diagnostics(gather=True).rows
        found[f"{kind.__name__} rows"] = torch.tensor(
            [
                [-1.0 if number is None else number for number in (one.condition, one.effective_rank, one.update_ratio)]
                + [one.step, one.staleness]
                for one in rows
            ]
        )
    return found


looks_alone = cache(looks)


@pytest.mark.parametrize(("mode", "size"), [("ddp", 3), ("divided", 3), ("hsdp", 4)])
def test_operators_and_diagnostics_are_those_of_one_process_on_every_process(pool: Pool, mode: str, size: int) -> None:
    expected = looks_alone("single")
    for found in pool.run(looks, size, mode=mode):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-8 * float(value.abs().max())), name


def groups_added_later(mode: str = "single") -> dict[str, Tensor]:
    model = wrapped(mode)
    named = list(model.named_parameters())
    optimizer = made(mode, "shampoo", named[:3])
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": named[3:], "lr": 1e-2})
    train(model, optimizer, range(2, 6))
    return values(model)


@pytest.mark.parametrize("mode", ["ddp", "divided"])
def test_groups_can_be_added_during_a_run(pool: Pool, mode: str) -> None:
    expected = groups_added_later()
    for found in pool.run(groups_added_later, 3, mode=mode):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-9), name


def half_precision(parallel: Literal["auto", "divided"] = "auto") -> list[Tensor]:
    """bfloat16 parameters: gathered as they are, sharded ones updated in float32; in the memory format of the user."""
    conv = nn.Conv2d(2, 4, 3, bias=False).to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    linear = nn.Linear(5, 3).to(torch.bfloat16)
    params = [conv.weight, *linear.parameters()]
    with torch.no_grad():
        for i, param in enumerate(params):
            param.copy_(gradients(param.shape, 1, seed=9 + i)[0])
    history = [gradients(p.shape, 4, seed=i, dtype=torch.bfloat16) for i, p in enumerate(params)]
    optimizer = Shampoo(params, 0.05, refresh=2, parallel=parallel)
    for step in zip(*history, strict=True):
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("parallel", ["auto", "divided"])
def test_half_precision_and_memory_formats(pool: Pool, parallel: str) -> None:
    torch.manual_seed(0)
    expected = half_precision()
    for found in pool.run(half_precision, 3, parallel=parallel):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def swapped(first: str, second: str, after: int) -> dict[str, Tensor]:
    """What Accelerate does: the optimizer is made for one model, and given the parameters of its sharded copy."""
    model = wrapped(first)
    optimizer = made(first, "shampoo", model.named_parameters())
    train(model, optimizer, range(after))
    saved = values(model)
    other = wrapped(second)
    with torch.no_grad():
        for name, param in other.named_parameters():
            value = saved[name.removeprefix("module.")].view(param.shape)
            like: Any = param
            is_cut = isinstance(like, DTensor)
            like.copy_(distribute_tensor(value, like.device_mesh, like.placements) if is_cut else value)
    for group in optimizer.param_groups:
        group["params"] = list(other.parameters())
    if not after and (not dist.is_initialized() or dist.get_rank() == 0):
        # looking is for any process alone
        assert "over" in optimizer.explain().parallel or second == "single"
    train(other, optimizer, range(after, 6))
    return values(other)


@pytest.mark.parametrize(
    ("first", "second", "size", "after"),
    [("single", "fsdp2", 1, 0), ("ddp", "fsdp2", 2, 0), ("ddp", "hsdp", 4, 3), ("fsdp2", "ddp", 2, 3)],
)
def test_parameters_that_are_sharded_after_the_optimizer_was_made_are_planned_anew(
    pool: Pool, first: str, second: str, size: int, after: int
) -> None:
    expected = swapped("single", "single", after)
    for found in pool.run(swapped, size, first=first, second=second, after=after):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-11), name
