"""A small model with every kind of parameter, and the same training on one process or several."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kronscope.optim import SOAP, Graft, KLShampoo, Shampoo, Trace
from kronscope.optim.base import KroneckerOptimizer

BATCH = 12


class Mixed(nn.Module):
    """Linear, convolution, embedding tied to the head, 1-D and 0-D parameters; float64.

    Args:
        square: Make every side a multiple of four, so that ``block_size=4`` gives square blocks of full rank only.
        scalar: Have a 0-D parameter, which ``fully_shard`` does not take, and not one of a single element.
    """

    def __init__(self, square: bool = False, scalar: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, width, kernel, hidden = (8, 4, 2, 8) if square else (7, 5, 3, 9)
        self.embedding = nn.Embedding(self.tokens, width)
        self.conv = nn.Conv2d(1, 4, kernel)
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(4 * (6 - kernel) * (width - kernel + 1), hidden)
        self.out = nn.Linear(hidden, width, bias=False)
        self.gain = nn.Parameter(torch.ones(() if scalar else 1))
        self.head = nn.Linear(width, self.tokens, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens)).unsqueeze(1)
        x = torch.tanh(self.conv(x)).flatten(1)
        return self.head(self.gain * self.out(torch.tanh(self.fc(x))))  # type: ignore[no-any-return]


def batch(step: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocabulary, (BATCH, 5), generator=generator)
    return tokens, (tokens.sum(1) + torch.randint(2, (BATCH,), generator=generator)) % vocabulary


MAKERS: dict[str, Callable[..., KroneckerOptimizer]] = {
    "shampoo": lambda p, **more: Shampoo(p, 3e-3, momentum=0.5, weight_decay=0.1, refresh=3, block_size=4, **more),
    "shampoo, whole": lambda p, **more: Shampoo(
        p, 3e-3, weight_decay=0.1, decay="cautious", scale=Trace(1.0), refresh=4, **more
    ),
    "shampoo, sums": lambda p, **more: Shampoo(
        p, 1e-2, betas=(0.9, 1.0), eps=1e-3, exponent=-0.25, scale=Graft("rmsprop", beta2=0.9), decay="coupled",
        weight_decay=0.01, nesterov=True, momentum=0.3, method="kronecker", **more,
    ),
    "soap, square": lambda p, **more: SOAP(p, 3e-3, weight_decay=0.1, refresh=3, block_size=4, **more),
    # every gradient: what rounding decides in a null space grows with the steps, and with fewer gradients
    "soap, whole": lambda p, **more: SOAP(p, 3e-3, weight_decay=0.1, refresh=3, statistics=1, **more),
    "kl": lambda p, **more: KLShampoo(p, 3e-3, momentum=0.5, weight_decay=0.1, refresh=3, block_size=8, **more),
}  # fmt: skip


def made(mode: str, name: str, params: Any) -> KroneckerOptimizer:
    """The optimizer of a run; "divided" is DDP with the state divided too."""
    return MAKERS[name](params, **({"parallel": "divided"} if mode == "divided" else {}))


def wrapped(mode: str, square: bool = False, scalar: bool = False) -> nn.Module:
    """The model, with the same values on every process, made parallel."""
    model = Mixed(square, scalar)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if mode in ("ddp", "divided"):
        return DistributedDataParallel(model)
    if mode in ("fsdp2", "hsdp"):
        if mode == "fsdp2":
            mesh = init_device_mesh("cpu", (size,))
        else:
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model.fc, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module, step: int) -> None:
    """Set the gradients of a step: of a batch, or sometimes of two, of which each process takes its part."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    accumulate = 2 if step % 4 == 1 else 1
    for micro in range(accumulate):
        vocabulary = next(m for m in model.modules() if isinstance(m, Mixed)).tokens
        tokens, targets = batch(2 * step + micro, vocabulary)
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        loss = nn.functional.cross_entropy(model(tokens[mine]), targets[mine]) / accumulate
        loss.backward()


def spoil(model: nn.Module, where: str, rank: int) -> None:
    """Make a gradient not finite: on one process only, or everywhere."""
    here = dist.get_rank() if dist.is_initialized() else 0
    if where == "everywhere" or rank == here:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        locals_ = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        max(locals_, key=lambda g: g.numel()).view(-1)[0] = float("nan")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], *, bad: Sequence[tuple[int, str]] = ()
) -> None:
    for step in steps:
        optimizer.zero_grad()
        gradients(model, step)
        for bad_step, where in bad:
            if bad_step == step:
                spoil(model, where, rank=(dist.get_world_size() - 1) if dist.is_initialized() else 0)
        with warnings.catch_warnings():
            if any(bad_step == step for bad_step, _ in bad):
                warnings.filterwarnings("ignore", message=".*is skipped")
            optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, whole and flat."""
    found = {}
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        found[name.removeprefix("module.")] = whole.detach().clone().view(-1)
    return found
