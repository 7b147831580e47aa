"""Under DDP one process saves for all: what rank 0 has is the whole state, and continues on any number of processes."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import kronscope as ks
from kronscope.errors import StateError
from kronscope.kron.roots import WarmQR
from kronscope.optim import SOAP, Adaptive, KLShampoo, Shampoo
from kronscope.optim.schedule import stale_blocks
from kronscope.optim.step import Portion
from tests.optim.parallel.model import MAKERS, made, train, values, wrapped
from tests.optim.parallel.pool import Pool
from tests.optim.tools import gradients, parameters

HALF, STEPS = 5, 10


def start(mode: str, name: str, file: str) -> dict[str, Tensor]:
    """Train, save on rank 0 alone as trainers do, and go on."""
    model = wrapped(mode, "square" in name)
    optimizer = made(mode, name, model.named_parameters())
    train(model, optimizer, range(HALF))
    if not dist.is_initialized() or dist.get_rank() == 0:
        inner = getattr(model, "module", model)
        torch.save({"model": inner.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(HALF, STEPS))
    return values(model)


def resume(mode: str, name: str, file: str) -> dict[str, Tensor]:
    """Continue from the one file, which all processes read."""
    if dist.is_initialized():
        dist.barrier()
    saved = torch.load(file, weights_only=True)
    model = wrapped(mode, "square" in name)
    set_model_state_dict(model, saved["model"], options=StateDictOptions(full_state_dict=True))
    optimizer = made(mode, name, model.named_parameters())
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(HALF, STEPS))
    return values(model)


@pytest.mark.parametrize("name", ["shampoo", "soap, square", "kl"])
def test_what_rank_zero_saves_continues_on_any_number_of_processes(pool: Pool, tmp_path: Path, name: str) -> None:
    file = str(tmp_path / "rank0.pt")
    expected = pool.run(start, 2, mode="ddp", name=name, file=file)
    for found in pool.run(resume, 2, mode="ddp", name=name, file=file):
        for key, value in expected[0].items():
            assert torch.equal(found[key], value), key
    others = [*pool.run(resume, 3, mode="ddp", name=name, file=file), resume("single", name, file)]
    others += pool.run(resume, 2, mode="fsdp2", name=name, file=file)
    for found in others:
        for key, value in expected[0].items():
            assert float((found[key] - value).abs().max()) < 1e-9 * float(value.abs().max()), key


def refused(file: str) -> str:
    model = wrapped("divided")
    optimizer = made("divided", "shampoo", model.named_parameters())
    train(model, optimizer, range(2))
    said = ""
    if dist.get_rank() == 0:
        try:
            torch.save({"optimizer": optimizer.state_dict()}, file)
        except StateError as error:
            said = str(error)
    # nobody waited for anybody: all can go on
    train(model, optimizer, range(2, 4))
    return said


def test_a_part_of_a_divided_state_is_not_handed_out_for_the_whole(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "rank0.pt"
    said = pool.run(refused, 2, file=str(file))[0]
    for words in ("parallel='divided'", "parallel='auto'", "torch.distributed.checkpoint", "state_dict(part=True)"):
        assert words in said
    assert not file.exists()


SHAPES = ((9, 5), (70, 66), (6, 6), (6, 6), (4,))
KINDS: dict[str, Any] = {
    "warm": lambda p: Shampoo(p, 0.01, solver=WarmQR(), refresh=2, momentum=0.5),
    "adaptive": lambda p: Shampoo(p, 0.01, refresh=Adaptive(0.3), exponent=-0.25),
    "adaptive kl": lambda p: KLShampoo(p, 0.01, refresh=Adaptive(0.3, check=2)),
    "adaptive soap": lambda p: SOAP(p, 0.01, refresh=Adaptive(0.3), block_size=2),
    "published soap": lambda p: SOAP(p, 0.01, refresh=2, reference=True),
    "late": lambda p: Shampoo(p, 0.01, start=4, refresh=3),
}


def with_kind(kind: str, disagree: bool = False) -> list[Tensor]:
    """Some steps with the same gradients everywhere; ``disagree``: rank 1 finds no root due that is looked at."""
    params: list[nn.Parameter] = parameters(*SHAPES)
    history = [gradients(shape, 6, seed=i) for i, shape in enumerate(SHAPES)]
    optimizer = KINDS[kind](params)
    found = stale_blocks
    if disagree and dist.get_rank() == 1:
        found = lambda *arguments: stale_blocks(*arguments)[:0]  # noqa: E731
    with mock.patch("kronscope.optim.step.stale_blocks", found):
        for step, grads in enumerate(zip(*history, strict=True)):
            for param, grad in zip(params, grads, strict=True):
                # a parameter that joins later has another step than those of its shape
                param.grad = None if param is params[2] and step == 0 else grad.clone()
            optimizer.step()
    return [param.detach().clone() for param in params]


kind_alone = cache(with_kind)


@pytest.mark.parametrize(("kind", "size"), [(kind, (4, 2)[i % 2]) for i, kind in enumerate(KINDS)])
def test_shared_roots_of_every_kind_are_those_of_one_process(pool: Pool, kind: str, size: int) -> None:
    expected = kind_alone(kind)
    found = pool.run(with_kind, size, kind=kind)
    for one in found:
        for value, wanted, first in zip(one, expected, found[0], strict=True):
            assert torch.allclose(value, wanted, rtol=1e-9, atol=1e-11)
            assert torch.equal(value, first)


@pytest.mark.parametrize("kind", ["adaptive", "adaptive soap"])
def test_processes_that_find_other_roots_due_take_them_together(pool: Pool, kind: str) -> None:
    expected = kind_alone(kind)
    for one in pool.run(with_kind, 2, kind=kind, disagree=True):
        for value, wanted in zip(one, expected, strict=True):
            assert torch.allclose(value, wanted, rtol=1e-9, atol=1e-11)


def roots_taken() -> list[int]:
    """How many roots this process takes in each of four steps."""
    params = parameters(*[(12, 8)] * 6)
    optimizer = Shampoo(params, 0.01, refresh=3)
    real, taken = Portion.refresh, [0]

    def counted(self: Portion, mode: int, index: Tensor) -> Tensor | None:
        taken[-1] += index.numel()
        return real(self, mode, index)

    with mock.patch.object(Portion, "refresh", counted):
        for grads in zip(*[gradients((12, 8), 4, seed=i) for i in range(6)], strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.step()
            taken.append(0)
    return taken[:-1]


def test_roots_are_taken_once_and_divided_evenly(pool: Pool) -> None:
    alone = roots_taken()
    assert alone == [12, 4, 4, 4]
    found = pool.run(roots_taken, 2)
    assert [sum(step) for step in zip(*found, strict=True)] == alone
    assert found[0][0] == found[1][0] == 6
    assert all(0 < count < 4 for one in found for count in one[1:])


@cache
def undisturbed(name: str) -> dict[str, Tensor]:
    model = wrapped("single")
    train(model, MAKERS[name](model.named_parameters()), range(STEPS))
    return values(model)


def copied_on_rank_zero() -> dict[str, Tensor]:
    model = wrapped("ddp")
    optimizer = made("ddp", "shampoo", model.named_parameters())
    for step in range(STEPS):
        train(model, optimizer, [step])
        if dist.get_rank() == 0:
            copy.deepcopy(optimizer)
    return values(model)


def test_a_copy_is_made_by_one_process_alone(pool: Pool) -> None:
    for one in pool.run(copied_on_rank_zero, 2):
        for key, value in undisturbed("shampoo").items():
            assert torch.allclose(one[key], value, rtol=1e-9), key


def looked_at_on_rank_zero(mode: str) -> dict[str, Any]:
    """Rank 0 looks alone, the others train on."""
    model = wrapped(mode, square=True)
    optimizer = made(mode, "shampoo", model.named_parameters())
    rows: tuple[Any, ...] = ()
    for step in range(3):
        train(model, optimizer, [step])
        if not dist.is_initialized() or dist.get_rank() == 0:
            rows = optimizer.diagnostics().rows
    return {row.name.removeprefix("module."): row for row in rows}


@pytest.mark.parametrize("mode", ["ddp", "divided", "fsdp2"])
def test_rank_zero_may_look_alone_and_sees_its_part(pool: Pool, mode: str) -> None:
    expected = looked_at_on_rank_zero("single")
    found = pool.run(looked_at_on_rank_zero, 2, mode=mode)[0]
    assert set(found) == set(expected) if mode == "ddp" else set() < set(found) <= set(expected)
    for name, row in found.items():
        whole = expected[name]
        assert row.step == whole.step
        # the worst of some blocks is no worse than the worst of all
        assert (row.condition is None) == (row.effective_rank is None) == (whole.condition is None)
        if row.condition is not None:
            assert row.condition <= whole.condition * (1 + 1e-6)
            assert row.effective_rank >= whole.effective_rank * (1 - 1e-6)
        if mode == "ddp":
            assert row.update_ratio == pytest.approx(whole.update_ratio, rel=1e-9)
        else:
            assert row.update_ratio is None or row.update_ratio == pytest.approx(whole.update_ratio, rel=1e-9)
    if mode == "divided":
        assert any(row.update_ratio is not None for row in found.values())


def metrics_on_rank_zero(mode: str) -> dict[str, float]:
    model = wrapped(mode, square=True)
    optimizer = made(mode, "shampoo", model.named_parameters())
    optimizer.metrics_every = 1
    found: dict[str, float] = {}
    for step in range(3):
        train(model, optimizer, [step])
        if not dist.is_initialized() or dist.get_rank() == 0:
            found = optimizer.metrics()
    return found


@pytest.mark.parametrize("mode", ["ddp", "divided", "fsdp2"])
def test_metrics_are_each_process_own(pool: Pool, mode: str) -> None:
    expected = metrics_on_rank_zero("single")
    found = pool.run(metrics_on_rank_zero, 2, mode=mode)[0]
    assert found.keys() == expected.keys()
    assert found["step"] == 3
    assert 0 < found["roots"] < expected["roots"]
    if mode == "ddp":
        for name in ("update_rms", "cosine", "worst_cosine"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9)


def measured() -> str:
    model = wrapped("fsdp2")
    data = [(torch.zeros(4, 5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))]
    try:
        ks.measure(model, nn.CrossEntropyLoss(), data, progress=False)
    except ks.errors.ModelError as error:
        return str(error)
    return ""


def test_measuring_a_sharded_model_is_refused_with_the_way(pool: Pool) -> None:
    for said in pool.run(measured, 2):
        assert "DTensor" in said
        assert "full_state_dict=True" in said
