"""What does ``optimizer.compile()`` gain on this machine? Steps without roots, plain and compiled, in turns.

    python benchmarks/compiled_step.py [--steps 6] [--out benchmarks/records/compiled_step.json]

Parameter lists: `transformer` (two layers of width 256) and `small` (forty matrices of 32 x 48 and forty biases). Both
optimizers see the same random gradients; the first three steps of each, which compile, are not counted. Seconds are CPU
time of one thread, so that a busy machine disturbs them little.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from kronscope.optim import SOAP, Every, KLShampoo, Shampoo
from kronscope.optim.base import KroneckerOptimizer

FIRST = 3
NEVER = Every(1000)
KINDS: dict[str, Callable[[list[nn.Parameter]], KroneckerOptimizer]] = {
    "Shampoo": lambda p: Shampoo([{"params": p, "method": "auto"}], 1e-3, refresh=NEVER),
    "SOAP": lambda p: SOAP([{"params": p, "method": "auto"}], 1e-3, refresh=NEVER),
    "KLShampoo": lambda p: KLShampoo([{"params": p, "method": "auto"}], 1e-3, refresh=NEVER),
}
LISTS: dict[str, list[tuple[int, ...]]] = {
    "transformer": [(768, 256), (768,), (256, 256), (256,), (1024, 256), (1024,), (256, 1024), (256,)] * 2,
    "small": [(32, 48), (48,)] * 40,
}


class Timed:
    """An optimizer, and what its steps took."""

    def __init__(self, kind: str, name: str, *, compiled: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in LISTS[name]]
        self.optimizer = KINDS[kind](self.params)
        self.optimizer.metrics_every = 0
        if compiled:
            self.optimizer.compile()
        self.seconds: list[float] = []

    def step(self, grads: list[torch.Tensor]) -> None:
        """Take a step, and time it."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        started = time.thread_time()
        self.optimizer.step()
        self.seconds.append(time.thread_time() - started)


def compared(kind: str, name: str, steps: int) -> dict[str, float]:
    """Return seconds of a step, plain and compiled, and of compiling."""
    generator = torch.Generator().manual_seed(1)
    plain, compiled = (Timed(kind, name, compiled=which) for which in (False, True))
    for _ in range(FIRST + steps):
        grads = [torch.randn(shape, generator=generator) for shape in LISTS[name]]
        plain.step(grads)
        compiled.step(grads)
    medians = [statistics.median(one.seconds[FIRST:]) for one in (plain, compiled)]
    return {
        "plain": medians[0],
        "compiled": medians[1],
        "ratio": medians[1] / medians[0],
        "first steps": sum(compiled.seconds[:FIRST]),
        "difference": max(float((a - b).norm() / a.norm()) for a, b in zip(plain.params, compiled.params, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/compiled_step.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in LISTS:
        for kind in KINDS:
            found[f"{kind}, {name}"] = row = compared(kind, name, args.steps)
            print(f"{kind}, {name}: {row}", flush=True)
    environment = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1, "steps": args.steps}
    args.out.write_text(json.dumps({"environment": environment, "steps": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
