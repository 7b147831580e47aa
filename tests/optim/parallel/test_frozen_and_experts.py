"""Layers that thaw in the middle of a run and stacks of experts, on several processes as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from kronscope.optim import SOAP, KLShampoo, Shampoo
from tests.optim.parallel.pool import Pool

KINDS: dict[str, Any] = {"shampoo": Shampoo, "soap": SOAP, "kl": KLShampoo}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 6, 5))
        self.w2 = nn.Parameter(torch.randn(4, 5, 6))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.experts = Experts()
        self.second = nn.Linear(8, 6)
        self.double()


def trained(mode: str, kind: str) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Train with given gradients; the first layer thaws half way."""
    model = Model()
    model.first.requires_grad_(False)
    if mode == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    options = {"parallel": mode} if mode == "divided" else {}
    optimizer = KINDS[kind](model, lr=1e-2, refresh=3, **options)
    for step in range(8):
        if step == 4:
            model.first.requires_grad_(True)
        for index, param in enumerate(model.parameters()):
            if param.requires_grad:
                generator = torch.Generator().manual_seed(100 * step + index)
                grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                own: Tensor = param
                if isinstance(own, DTensor):
                    grad = distribute_tensor(grad, own.device_mesh, own.placements)
                param.grad = grad
        optimizer.step()
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n: p.detach().clone() for n, p in whole.items()}, {r.name: r.factors for r in optimizer.explain().rows}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["replicated", "divided", "fsdp2"])
def test_thawed_layers_and_experts_train_as_on_one_process(pool: Pool, mode: str, kind: str) -> None:
    wanted, factors = trained("single", kind)
    assert factors["experts.w1"] == (6, 5)
    assert factors["first.weight"] == (8, 6)
    for values, found in pool.run(trained, 2, mode=mode, kind=kind):
        assert found == factors
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, rtol=1e-7, atol=1e-9)
