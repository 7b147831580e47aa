"""What do the numbers of ``metrics()`` cost? The time they take within a step, as a part of the step's.

    python benchmarks/metrics_cost.py [--periods 3] [--out benchmarks/records/metrics_cost.json]

The model is a character GPT: 6 layers of width 256, 4.7 million parameters, with random gradients. An optimizer that
looks at its updates in every step, and whose ``metrics()`` is called after every step, makes periods of 10 steps; the
clock is stopped around what it does only for that. By default it looks every tenth step. Seconds are CPU time of the
one thread, and both parts are taken from the same steps, so that a busy machine disturbs their ratio little; the first
period, which takes the first roots, is not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from kronscope.optim import SOAP, KLShampoo, Shampoo
from kronscope.optim.base import KroneckerOptimizer
from kronscope.optim.metrics import Put, UpdateLog

PERIOD = 10
KINDS: dict[str, Callable[[list[nn.Parameter]], KroneckerOptimizer]] = {
    "Shampoo": lambda p: Shampoo(p, 1e-3, refresh=PERIOD),
    "SOAP": lambda p: SOAP(p, 1e-3, refresh=PERIOD),
    "KLShampoo": lambda p: KLShampoo(p, 1e-3, refresh=PERIOD),
}


def shapes() -> list[tuple[int, ...]]:
    layer: list[tuple[int, ...]] = [(768, 256), (768,), (256, 256), (256,), (1024, 256), (1024,), (256, 1024), (256,)]
    return [*(layer + [(256,)] * 4) * 6, (256,), (256,)]


class Clock:
    """Adds up the time that is spent in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def call(*args: Any) -> Any:
            started = time.thread_time()
            result = function(*args)
            self.seconds += time.thread_time() - started
            return result

        return call


def measured(kind: str, periods: int) -> tuple[float, float, float]:
    """Return seconds of a step without looking, of looking, and of ``metrics()``."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes()]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer = KINDS[kind](params)
    optimizer.metrics_every = 1
    steps, asking, looking, handing = Clock(), Clock(), Clock(), Clock()
    listening = UpdateLog.listening

    def timed(log: UpdateLog, put: Put) -> Put:
        return looking.timed(listening(log, handing.timed(put)))

    with mock.patch.object(UpdateLog, "listening", timed):
        for step in range((1 + periods) * PERIOD):
            if step == PERIOD:
                for clock in (steps, asking, looking, handing):
                    clock.seconds = 0.0
            steps.timed(optimizer.step)()
            asking.timed(optimizer.metrics)()
    look, count = looking.seconds - handing.seconds, periods * PERIOD
    return (steps.seconds - look) / count, look / count, asking.seconds / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--periods", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        step, look, ask = measured(kind, args.periods)
        table[kind] = {
            "step, milliseconds": round(1e3 * step, 2),
            "every tenth step, per cent": round(100 * (look / PERIOD + ask) / step, 3),
            "every step, per cent": round(100 * (look + ask) / step, 3),
        }
        print(kind, table[kind])
    if args.out:
        record = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "parameters": sum(torch.Size(shape).numel() for shape in shapes()),
            "periods": args.periods,
            "cost": table,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
