"""Does training by advice pay? Loss and seconds against the defaults, on three workloads.

    python benchmarks/advice_training.py --data-dir DIR [--seeds 3] [--out benchmarks/records/advice_training.json]

Workloads and models are those of ``optim_training.py``. For each: a first run of the defaults for 50 steps, on whose
model ``ks.advise`` looks at 32 training samples (2 sequences of text); then runs from scratch with the defaults
(``ks.Shampoo(ks.param_groups(model))``) and with ``advice.param_groups(model)``, from the same seeds and batches.
Losses are on held-out data after the last step, seconds are CPU time of one thread, the advice's own apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronscope as ks
from benchmarks.optim_training import STEPS, WORKLOADS

RATES = {"chars": 3e-3, "cifar": 3e-3, "mnist": 1e-3, "digits": 3e-3}
FIRST = 50


def loss_of(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [(float(nn.functional.cross_entropy(model(x), y)), len(y)) for x, y in batches]
    model.train()
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def train(build: Any, batches: Any, seed: int, steps: int, rate: float, groups: Any) -> tuple[nn.Module, float]:
    """Return a trained model and CPU seconds."""
    torch.manual_seed(seed)
    model: nn.Module = build()
    optimizer = ks.Shampoo(groups(model), lr=rate)
    source = batches(seed)
    started = time.thread_time()
    for _ in range(steps):
        x, y = next(source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, time.thread_time() - started


def advice_for(name: str, build: Any, batches: Any, rate: float) -> tuple[Any, float]:
    model, _ = train(build, batches, 10**6, FIRST, rate, ks.param_groups)
    x, y = next(batches(10**6 + 1))
    forward = None
    if name == "chars":
        x, y = x[:2], y.view(len(x), -1)[:2]

        def forward(model: nn.Module, tokens: Tensor) -> Tensor:
            logits: Tensor = model(tokens)
            return logits.unflatten(0, tokens.shape).transpose(1, 2)

    started = time.thread_time()
    advice = ks.advise(
        model, nn.CrossEntropyLoss(), [(x[:32], y[:32])], forward=forward, max_columns=32, accuracy=0.1, progress=False
    )
    return advice, time.thread_time() - started


def compared(name: str, folder: Path, seeds: int) -> dict[str, Any]:
    build, batches, held = WORKLOADS[name](folder)
    rate, steps = RATES[name], STEPS[name]
    advice, seconds = advice_for(name, build, batches, rate)
    print(name, advice, sep="\n", flush=True)
    found: dict[str, Any] = {
        "advice, seconds": round(seconds, 1),
        "recommended": dict(Counter(entry.choice.title for entry in advice.layers)),
        "layers": {entry.layer: [entry.choice.title, round(entry.choice.cosine, 3)] for entry in advice.layers},
        "defaults": {"losses": [], "seconds": []},
        "advised": {"losses": [], "seconds": []},
    }
    for seed in range(seeds):
        for kind, groups in (("defaults", ks.param_groups), ("advised", advice.param_groups)):
            model, taken = train(build, batches, seed, steps, rate, groups)
            found[kind]["losses"].append(round(loss_of(model, held), 4))
            found[kind]["seconds"].append(round(taken, 1))
            print(name, kind, seed, found[kind]["losses"][-1], found[kind]["seconds"][-1], flush=True)
    for kind in ("defaults", "advised"):
        for number in ("losses", "seconds"):
            found[kind][f"mean of {number}"] = round(statistics.mean(found[kind][number]), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", default=["chars", "cifar", "mnist"], choices=list(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = {name: compared(name, args.data_dir, args.seeds) for name in args.workloads}
    if args.out:
        record = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "rates": {name: RATES[name] for name in args.workloads},
            "steps": {name: STEPS[name] for name in args.workloads},
            "workloads": table,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
