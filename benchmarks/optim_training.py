"""Which optimizer gets where, in how many steps and seconds? Learning-rate sweeps with seeds, on real data.

    python benchmarks/optim_training.py run --data-dir DIR --workloads chars --optimizers adamw shampoo soap
        --lrs 0.001 0.003 0.01 --seeds 0 1 2 [--steps 250] [--out benchmarks/records/optim_training]
    python benchmarks/optim_training.py report [--out benchmarks/records/optim_training]
    python benchmarks/optim_training.py compare [--out benchmarks/records/optim_comparison]

Workloads: `cifar` (CIFAR-10, a small ResNet), `resnet` (the same with batches of 64), `chars` (tiny-shakespeare, a
character GPT of 2 layers and width 128), `vit` (CIFAR-10, a transformer of 3 layers and width 96 on patches), `mnist`
(an MLP), `cnn` (MNIST, two convolutions and a layer of 128 x 1568), `autoencoder` (MNIST, a regression through 16
numbers), `digits` (an MLP on scikit-learn's digits). Each run is one JSON file, named by all that decides it, with the
validation loss against steps and seconds; runs whose file exists are not repeated, so an interrupted sweep goes on
where it stopped. Seconds are those of training only. Every optimizer gets the same learning rates, the same batches and
the same schedule (constant, then a linear fall over the last fifth). `report` prints, for each workload and optimizer,
the best learning rate by the final loss of the first seed, the mean over all seeds there, and the steps and seconds to
AdamW's mean final loss, and draws the curves. So a sweep needs all learning rates for the first seed, and the best of
them for the others: `run --best` makes these. `compare` prints, as tables for docs/optimizer-trials.md, the final
losses and, by the mean curve over seeds, steps and CPU seconds to AdamW's mean final loss in parts of AdamW's whole
run, and draws all workloads in one picture. The CPU seconds of a step there are the optimizer's own and the median of
all runs' forward and backward passes, which are the same work for all and differ only by what else the machine does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kronscope.optim import SOAP, Graft, KLShampoo, Norm, Shampoo, Trace, Warmup, param_groups

Batches = Iterator[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


# --- workloads ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with a fused projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class CharGPT(nn.Module):
    """A character language model."""

    def __init__(
        self,
        vocabulary: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        context: int = 64,
        block: Callable[[int, int], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        nn.init.normal_(self.tok_emb.weight, std=0.02)
        nn.init.normal_(self.pos_emb.weight, std=0.02)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, time) to logits (batch * time, vocabulary)."""
        x = self.tok_emb(tokens) + self.pos_emb.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x)).flatten(0, 1)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions and a short cut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = (
            nn.Conv2d(before, after, 1, stride, bias=False) if (before, stride) != (after, 1) else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, before, h, w) to (batch, after, h / stride, w / stride)."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.short(x))


def small_resnet() -> nn.Module:
    widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    body = [Residual(*width) for width in widths]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def wide_cnn() -> nn.Module:
    first = [nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10))


class ViT(nn.Module):
    """A transformer on patches of 8 x 8 pixels."""

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures (batch, 3, 32, 32) to logits."""
        tokens = self.patches(x).flatten(2).mT + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))  # type: ignore[no-any-return]


def mlp(widths: Sequence[int] = (784, 256, 128, 10)) -> nn.Module:
    layers = [[nn.Linear(before, after), nn.ReLU()] for before, after in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *[module for pair in layers for module in pair][:-1])


def shuffled(x: Tensor, y: Tensor, batch: int, seed: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(x), generator=generator).split(batch):
            if len(index) == batch:
                yield x[index], y[index]


Loaded = tuple[Callable[[], nn.Module], Callable[[int], Batches], list[tuple[Tensor, Tensor]]]


def load_chars(folder: Path) -> Loaded:
    text = (folder / "text" / "tinyshakespeare.txt").read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    train, held = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    context, batch = 64, 16

    def windows(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        index = starts[:, None] + torch.arange(context)
        return source[index], source[index + 1].flatten()

    def batches(seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(train, torch.randint(len(train) - context, (batch,), generator=generator))

    fixed = torch.linspace(0, len(held) - context - 1, 256).long()
    return lambda: CharGPT(len(letters)), batches, [windows(held, part) for part in fixed.split(64)]


def load_cifar(
    folder: Path, build: Callable[[], nn.Module] = small_resnet, batch: int = 128, held_out: int = 2000
) -> Loaded:
    def read(name: str) -> tuple[Tensor, Tensor]:
        with lzma.open(folder / "cifar10" / f"{name}.bin.xz") as file:
            rows = np.frombuffer(file.read(), np.uint8).reshape(-1, 3073)
        pixels = torch.from_numpy(rows[:, 1:].copy()).view(-1, 3, 32, 32).float()
        return (pixels - 121) / 64, torch.from_numpy(rows[:, 0].copy()).long()

    parts = [read(f"data_batch_{i}") for i in range(1, 6)]
    x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    test = read("test_batch")
    held = list(zip(test[0][:held_out].split(1000), test[1][:held_out].split(1000), strict=True))
    return build, lambda seed: shuffled(x, y, batch, seed), held


def load_mnist(folder: Path, build: Callable[[], nn.Module] = mlp) -> Loaded:
    def read(name: str, header: int) -> Tensor:
        with gzip.open(folder / "mnist" / f"{name}-ubyte.gz") as file:
            raw = file.read()
        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).copy())

    x, y = read("train-images-idx3", 16).view(-1, 784).float() / 128 - 1, read("train-labels-idx1", 8).long()
    tx, ty = read("t10k-images-idx3", 16).view(-1, 784).float() / 128 - 1, read("t10k-labels-idx1", 8).long()
    return build, lambda seed: shuffled(x, y, 128, seed), list(zip(tx.split(2000), ty.split(2000), strict=True))


def load_autoencoder(folder: Path) -> Loaded:
    _, batches, held = load_mnist(folder)
    build = lambda: mlp((784, 256, 64, 16, 64, 256, 784))  # noqa: E731
    return build, lambda seed: ((x, x) for x, _ in batches(seed)), [(x, x) for x, _ in held]


def load_digits(folder: Path) -> Loaded:
    from sklearn.datasets import load_digits as load  # type: ignore[import-untyped]

    x, y = load(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return lambda: mlp((64, 128, 128, 10)), lambda seed: shuffled(x[:1200], y[:1200], 64, seed), [(x[1200:], y[1200:])]


WORKLOADS: dict[str, Callable[[Path], Loaded]] = {
    "chars": load_chars,
    "cifar": load_cifar,
    "digits": load_digits,
    "mnist": load_mnist,
    "cnn": lambda folder: load_mnist(folder, wide_cnn),
    "resnet": lambda folder: load_cifar(folder, small_resnet, 64, 1000),
    "vit": lambda folder: load_cifar(folder, ViT, 64, 1000),
    "autoencoder": load_autoencoder,
}
STEPS = {
    "chars": 250,
    "cifar": 200,
    "digits": 400,
    "mnist": 300,
    "cnn": 150,
    "resnet": 200,
    "vit": 250,
    "autoencoder": 400,
}
LOSSES = {"autoencoder": functional.mse_loss}


# --- optimizers -----------------------------------------------------------------------------------------------------


class Muon32(torch.optim.Optimizer):
    """Muon in float32: orthogonalised Nesterov momentum for matrices (torch's casts to bf16, which CPUs emulate)."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            for param in group["params"]:
                buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(buffer, group["momentum"]).flatten(1)
                tall = update.shape[0] > update.shape[1]
                x = update.T if tall else update
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
                x = x.T if tall else x
                # the length that matches AdamW's learning rates
                param.add_(x.view_as(param), alpha=-group["lr"] * 0.2 * max(update.shape) ** 0.5)


class Pair:
    """Muon for hidden matrices, AdamW for the rest."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        groups = param_groups(model)
        hidden = [
            p for g in groups for (_, p), role in zip(g["params"], g["roles"], strict=True) if p.ndim > 1 and not role
        ]
        chosen = set(hidden)
        rest = [p for p in model.parameters() if p not in chosen]
        self.parts = [Muon32(hidden, lr), torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0)]
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Take one step with both."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients of both."""
        for part in self.parts:
            part.zero_grad()


def named(model: nn.Module) -> Any:
    return model.named_parameters()


def shampoo(**options: Any) -> Callable[[nn.Module, float], Any]:
    return lambda model, lr: Shampoo(named(model), lr, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module, float], Any]] = {
    "adamw": lambda model, lr: torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0),
    "muon": Pair,
    "soap-published": lambda model, lr: SOAP(model.parameters(), lr, betas=(0.95, 0.95), refresh=10, reference=True),
    "shampoo": shampoo(),
    "soap": lambda model, lr: SOAP(named(model), lr),
    "kl-shampoo": lambda model, lr: KLShampoo(named(model), lr),
    # what the defaults were chosen from
    "trace-d4-b1": shampoo(scale=Trace(bound=1.0), damping=1e-4, refresh=Warmup(30, 10)),
    "trace-d4-b03": shampoo(scale=Trace(bound=0.3), damping=1e-4, refresh=Warmup(30, 10)),
    "trace-d3-b1": shampoo(scale=Trace(bound=1.0), damping=1e-3, refresh=Warmup(30, 10)),
    "trace-d4-every10": shampoo(scale=Trace(bound=1.0), damping=1e-4, refresh=10),
    "trace-d4-unbounded": shampoo(scale=Trace(), damping=1e-4, refresh=Warmup(30, 10)),
    "adam-half": shampoo(scale="adam", exponent=-0.5, damping=1e-4, refresh=Warmup(30, 10)),
    "adam-half-every10": shampoo(scale="adam", exponent=-0.5, damping=1e-4, refresh=10),
    "adam-third": shampoo(scale="adam", exponent=-1 / 3, damping=1e-4, refresh=10),
    "adam-quarter": shampoo(scale="adam", exponent=-0.25, damping=1e-6, refresh=10),
    "norm-half": shampoo(scale=Norm(0.2), exponent=-0.5, damping=1e-4, refresh=10),
    "rms-half": shampoo(scale=Graft("rmsprop"), exponent=-0.5, damping=1e-4, refresh=10),
    "warm30": shampoo(refresh=Warmup(30, 10)),
    "warm10": shampoo(refresh=Warmup(10, 10)),
    "warm5": shampoo(refresh=Warmup(5, 10)),
    "first-3": shampoo(refresh=Warmup(20, 10, within=(3, 3, 14))),
    "first-4": shampoo(refresh=Warmup(20, 10, within=(4, 4, 12))),
    "warm10-d34": shampoo(refresh=Warmup(10, 10), damping=3e-4),
    "warm10-d3": shampoo(refresh=Warmup(10, 10), damping=1e-3),
    "kl-warm10": lambda model, lr: KLShampoo(named(model), lr, refresh=Warmup(10, 10)),
    "soap-warm10": lambda model, lr: SOAP(named(model), lr, refresh=Warmup(10, 10)),
    "soap-95": lambda model, lr: SOAP(named(model), lr, betas=(0.95, 0.95)),
    "soap-every1": lambda model, lr: SOAP(named(model), lr, refresh=1),
    "kl-trace-b1": lambda model, lr: KLShampoo(named(model), lr, scale=Trace(bound=1.0)),
    "kl-all": lambda model, lr: KLShampoo(model.parameters(), lr),
    "shampoo-all": lambda model, lr: Shampoo(model.parameters(), lr),
    "soap-all": lambda model, lr: SOAP(model.parameters(), lr),
}


def distributed_shampoo(folder: str) -> Callable[[nn.Module, float], Any]:
    sys.path.insert(0, folder)
    import distributed_shampoo as ds  # type: ignore[import-not-found]

    return lambda model, lr: ds.DistributedShampoo(
        model.parameters(),
        lr=lr,
        betas=(0.9, 0.95),
        epsilon=1e-12,
        max_preconditioner_dim=1024,
        precondition_frequency=10,
        start_preconditioning_step=10,
        grafting_config=ds.AdamPreconditionerConfig(beta2=0.95, epsilon=1e-8),
    )


def published_soap(folder: str) -> Callable[[nn.Module, float], Any]:
    sys.path.insert(0, folder)
    import soap  # type: ignore[import-not-found]

    return lambda model, lr: soap.SOAP(model.parameters(), lr=lr, betas=(0.95, 0.95), weight_decay=0.0)


# --- runs -----------------------------------------------------------------------------------------------------------


def schedule(step: int, steps: int) -> float:
    return min(1.0, (steps - step) / max(steps // 5, 1))


@torch.no_grad()
def validate(model: nn.Module, held: list[tuple[Tensor, Tensor]], loss: Loss) -> float:
    model.eval()
    total = sum(loss(model(x), y).item() * len(y) for x, y in held)
    model.train()
    return total / sum(len(y) for _, y in held)


def train(
    workload: Loaded, loss: Loss, make: Callable[[nn.Module, float], Any], lr: float, seed: int, steps: int
) -> dict[str, Any]:
    build, batches, held = workload
    torch.manual_seed(seed)
    model = build()
    optimizer = make(model, lr)
    stream = batches(seed)
    curve: list[list[float]] = []
    seconds = cpu = inside = 0.0
    for step in range(1, steps + 1):
        x, y = next(stream)
        before = time.perf_counter(), time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step - 1, steps)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        began = time.process_time()
        optimizer.step()
        inside += time.process_time() - began
        seconds += time.perf_counter() - before[0]
        cpu += time.process_time() - before[1]
        if step % 10 == 0 or step == steps:
            curve.append([step, validate(model, held, loss), seconds, cpu, inside])
            if not np.isfinite(curve[-1][1]):
                break
    columns = ["step", "validation loss", "seconds", "cpu seconds", "optimizer's cpu seconds"]
    return {"columns": columns, "curve": curve, "final": curve[-1][1]}


def environment() -> dict[str, Any]:
    return {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    registry = dict(OPTIMIZERS)
    if args.distributed_shampoo:
        registry["distributed-shampoo"] = distributed_shampoo(args.distributed_shampoo)
    if args.published_soap:
        registry["soap-published"] = published_soap(args.published_soap)
    for workload in args.workloads:
        loaded, loss = WORKLOADS[workload](args.data_dir), LOSSES.get(workload, functional.cross_entropy)
        steps = args.steps or STEPS[workload]
        best = chosen(by_optimizer(records_in(args.out), workload)) if args.best else {}
        for seed in args.seeds:
            for lr in args.lrs:
                for name in args.optimizers:
                    path = args.out / f"{workload}-{name}-lr{lr:g}-seed{seed}-steps{steps}.json"
                    if path.exists() or (args.best and best[name][0] != lr):
                        continue
                    key = {"workload": workload, "optimizer": name, "lr": lr, "seed": seed, "steps": steps}
                    found = train(loaded, loss, registry[name], lr, seed, steps)
                    scratch = path.with_suffix(".part")
                    scratch.write_text(json.dumps({**key, **found, "environment": environment()}) + "\n")
                    os.replace(scratch, path)
                    last = found["curve"][-1]
                    print(f"{path.stem}: {found['final']:.4f} ({last[3]:.0f} s, {last[4]:.0f} in it)", flush=True)


# --- report ---------------------------------------------------------------------------------------------------------


def reached(curve: list[list[float]], target: float, column: int) -> float:
    """Where the loss passes the target, on the straight line between two looks; inf if it never does."""
    place = next((place for place, row in enumerate(curve) if row[1] <= target), None)
    if place is None:
        return math.inf
    after, before = curve[place], curve[max(place - 1, 0)]
    part = 1.0 if before[1] <= after[1] else (before[1] - target) / (before[1] - after[1])
    return before[column] + part * (after[column] - before[column])


Table = dict[str, dict[float, list[dict[str, Any]]]]


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-seed*.json"))]


def by_optimizer(records: list[dict[str, Any]], workload: str) -> Table:
    """Return one workload's runs by optimizer and learning rate."""
    table: Table = {}
    for record in records:
        if record["workload"] == workload:
            table.setdefault(record["optimizer"], {}).setdefault(record["lr"], []).append(record)
    return table


def chosen(table: Table) -> dict[str, tuple[float, list[dict[str, Any]]]]:
    """Return each optimizer's best learning rate by the final loss of the first seed, and the runs with it."""
    first = min(run["seed"] for by_lr in table.values() for runs in by_lr.values() for run in runs)

    def final(item: tuple[float, list[dict[str, Any]]]) -> float:
        # a run that ended with NaN is the worst
        return min(run["final"] if math.isfinite(run["final"]) else math.inf for run in item[1] if run["seed"] == first)

    return {
        name: min(((lr, runs) for lr, runs in by_lr.items() if any(run["seed"] == first for run in runs)), key=final)
        for name, by_lr in table.items()
    }


def report(args: argparse.Namespace) -> None:
    records = records_in(args.out)
    summary: dict[str, Any] = {}
    for workload in sorted({record["workload"] for record in records}):
        table = by_optimizer(records, workload)
        best = chosen(table)
        target = statistics.mean(r["final"] for r in best["adamw"][1]) if "adamw" in best else float("-inf")
        print(f"\n{workload}: AdamW's best final loss {target:.4f}")
        print(
            f"{'optimizer':22}{'best lr':>9}{'final':>9}{'spread':>8}{'seeds':>6}{'steps to it':>13}{'CPU s to it':>13}"
            "  all lrs"
        )
        rows = {}
        ranked = sorted(best.items(), key=lambda item: statistics.mean(r["final"] for r in item[1][1]))
        for name, (lr, runs) in ranked:
            finals = [r["final"] for r in runs]
            steps, cpu = (statistics.median(reached(r["curve"], target, c) for r in runs) for c in (0, 3))
            sweep = {f"{k:g}": statistics.mean(r["final"] for r in v) for k, v in sorted(table[name].items())}
            rows[name] = {"lr": lr, "finals": finals, "steps_to_adamw": steps, "cpu_to_adamw": cpu, "sweep": sweep}
            cells = " ".join(f"{key}:{value:.3f}" for key, value in sweep.items())
            spread = max(finals) - min(finals)
            rows[name]["spread"] = spread
            print(
                f"{name:22}{lr:9g}{statistics.mean(finals):9.4f}{spread:8.4f}{len(runs):6}{steps:13.0f}{cpu:13.1f}"
                f"  {cells}"
            )
        summary[workload] = {"adamw_final": target, "optimizers": rows}
        draw(workload, best, args.out)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def mean_curve(runs: list[dict[str, Any]]) -> list[list[float]]:
    """Return the mean over seeds of each column at each look; a run that ended early ends the mean."""
    looks = zip(*(one["curve"] for one in runs), strict=False)
    return [[statistics.mean(column) for column in zip(*rows, strict=True)] for rows in looks]


def median_passes(runs: Iterable[dict[str, Any]]) -> float:
    """Return the CPU seconds of a forward and backward, which all optimizers have in common: the median of all runs."""
    return statistics.median((run["curve"][-1][3] - run["curve"][-1][4]) / run["curve"][-1][0] for run in runs)


def with_equal_passes(curve: list[list[float]], passes: float) -> list[list[float]]:
    """The curve with CPU seconds of its own optimizer, and of forward and backward those that all have in common."""
    return [[step, loss, seconds, step * passes + inside, inside] for step, loss, seconds, _, inside in curve]


LABELS = {
    "adamw": "AdamW",
    "muon": "Muon (float32)",
    "soap-published": "published SOAP",
    "distributed-shampoo": "Distributed Shampoo",
    "shampoo": "`Shampoo`",
    "kl-shampoo": "`KLShampoo`",
    "soap": "`SOAP`",
}


def comparison(folder: Path) -> str:
    """Return the tables: final losses, then steps and CPU seconds to AdamW's final loss in parts of AdamW's."""
    records = records_in(folder)
    best = {name: chosen(by_optimizer(records, name)) for name in STEPS if any(r["workload"] == name for r in records)}
    passes = {name: median_passes(run for _, runs in found.values() for run in runs) for name, found in best.items()}
    curves = {
        name: {key: with_equal_passes(mean_curve(runs), passes[name]) for key, (_, runs) in found.items()}
        for name, found in best.items()
    }
    targets = {name: found["adamw"][-1][1] for name, found in curves.items()}

    def part(workload: str, optimizer: str, column: int) -> str:
        whole = curves[workload]["adamw"][-1][column]
        value = reached(curves[workload][optimizer], targets[workload], column) / whole
        return "never" if math.isinf(value) else f"{value:.2f}"

    def final(workload: str, optimizer: str) -> str:
        rate, runs = best[workload][optimizer]
        finals = [run["final"] for run in runs]
        return f"{statistics.mean(finals):.4f} ± {(max(finals) - min(finals)) / 2:.4f}, {rate:g}"

    def table(title: str, cell: Callable[[str, str], str], *more: list[str]) -> str:
        lines = [[title, *best], ["---"] * (len(best) + 1), *more]
        run_everywhere = [key for key in LABELS if all(key in found for found in best.values())]
        lines += [[LABELS[key], *(cell(name, key) for name in best)] for key in run_everywhere]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    return "\n".join(
        (
            table("final loss ± half the spread of seeds, learning rate", final),
            table("steps to AdamW's loss / AdamW's", lambda name, key: part(name, key, 0)),
            table(
                "CPU time to AdamW's loss / AdamW's",
                lambda name, key: part(name, key, 3),
                ["*forward and backward, ms*", *(f"*{1e3 * passes[name]:.0f}*" for name in best)],
            ),
        )
    )


def compare(args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    print(comparison(args.out), end="")
    records = records_in(args.out)
    names = [name for name in STEPS if any(record["workload"] == name for record in records)]
    figure = Figure(figsize=(2.6 * len(names), 5), layout="constrained")
    grid = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        for place, (key, (_, runs)) in enumerate(sorted(chosen(by_optimizer(records, name)).items())):
            curve = np.array(mean_curve(runs))
            style = "-" if key in ("shampoo", "kl-shampoo", "soap") else "--"
            for row, axis in enumerate((0, 3)):
                grid[row, column].plot(curve[:, axis], curve[:, 1], style, color=f"C{place}", lw=1.2, label=key)
        # what comes after the first tenth is what differs
        values = [line.get_ydata() for line in grid[0, column].lines]
        low, high = (
            min(y[-1] for y in values),
            min(2.2 * max(y[-1] for y in values), max(y[len(y) // 10] for y in values)),
        )
        for row, label in enumerate(("steps", "CPU seconds")):
            grid[row, column].set(xlabel=label, ylim=(1.05 * low - 0.05 * high, high))
        grid[0, column].set_title(name)
    for axes in grid[:, 0]:
        axes.set_ylabel("validation loss")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    figure.savefig(args.out / "comparison.png", dpi=110)


def draw(workload: str, best: dict[str, tuple[float, list[dict[str, Any]]]], out: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, column, label in zip(figure.subplots(1, 2, sharey=True), (0, 3), ("steps", "CPU seconds"), strict=True):
        for name, (lr, runs) in best.items():
            length = min(len(r["curve"]) for r in runs)
            mean = np.mean([np.array(r["curve"][:length]) for r in runs], axis=0)
            axes.plot(mean[:, column], mean[:, 1], label=f"{name}, lr {lr:g}", linewidth=1.2)
        axes.set(xlabel=label, ylabel="validation loss" if column == 0 else "", yscale="log")
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
        axes.tick_params(axis="y", which="minor", labelsize=7)
    figure.axes[1].legend(fontsize=7)
    figure.savefig(out / f"{workload}.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    default = Path("benchmarks/records/optim_training")
    running = commands.add_parser("run")
    running.add_argument("--data-dir", type=Path, required=True)
    running.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    running.add_argument("--optimizers", nargs="+", default=["adamw", "muon", "soap-published", "shampoo", "soap"])
    running.add_argument("--lrs", nargs="+", type=float, default=[0.001, 0.003, 0.01])
    running.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    running.add_argument("--steps", type=int)
    running.add_argument("--threads", type=int, default=1)
    running.add_argument("--best", action="store_true", help="only each optimizer's best of the rates, from the record")
    running.add_argument("--distributed-shampoo", metavar="DIR")
    running.add_argument("--published-soap", metavar="DIR", help="else our own reproduction of it")
    running.add_argument("--out", type=Path, default=default)
    running.set_defaults(command=run)
    reporting = commands.add_parser("report")
    reporting.add_argument("--out", type=Path, default=default)
    reporting.set_defaults(command=report)
    comparing = commands.add_parser("compare")
    comparing.add_argument("--out", type=Path, default=default.with_name("optim_comparison"))
    comparing.set_defaults(command=compare)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
