"""Which learning rate? A small network on Gaussian inputs, where AdamW is ahead at its usual rates.

    python benchmarks/optim_rates.py [--out benchmarks/records/optim_rates.json]

A network 32-128-128-10 learns the classes that another of the same shape gives to Gaussian inputs; 400 fresh batches of
128, constant learning rate, one thread. Loss on 4096 other inputs after 100, 200 and 400 steps, mean of three seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronscope as ks

MAKERS: dict[str, Callable[[nn.Module, float], Any]] = {
    "AdamW": lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0),
    "Shampoo": lambda model, lr: ks.Shampoo(model, lr=lr),
    "KLShampoo": lambda model, lr: ks.KLShampoo(model, lr=lr),
    "SOAP": lambda model, lr: ks.SOAP(model, lr=lr),
}
LOOKS = (100, 200, 400)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def losses(make: Callable[[nn.Module, float], Any], lr: float, seed: int) -> list[float]:
    torch.manual_seed(seed)
    teacher, model = network(), network()
    optimizer = make(model, lr)

    @torch.no_grad()
    def batch(size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, 32)
        return inputs, teacher(inputs).argmax(-1)

    held_out = batch(4096)
    found = []
    for step in range(1, LOOKS[-1] + 1):
        inputs, targets = batch(128)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if step in LOOKS:
            with torch.no_grad():
                found.append(nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "environment": {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()},
        "after": list(LOOKS),
        "loss": {},
    }
    for lr in (1e-3, 3e-3, 1e-2, 3e-2):
        for name, make in MAKERS.items():
            runs = [losses(make, lr, seed) for seed in range(3)]
            means = [round(statistics.fmean(column), 4) for column in zip(*runs, strict=True)]
            record["loss"].setdefault(str(lr), {})[name] = means
            print(f"{lr:<7} {name:<10} {means}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
