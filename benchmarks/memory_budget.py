"""How much memory does measuring take, beside the budget it was given?

    python benchmarks/memory_budget.py [--only NAME ...] [--record FILE]

Each case runs in a process of its own. The model, the data and a first small measurement (which loads what torch loads
when it is first used) come before; what counts is by how much the peak of the process's resident memory grows after
that. The bar is 1.2 times the budget, plus what the model itself takes: four times its parameters, and the memory of
one forward and backward pass over the largest batch, which is measured too.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronscope as ks

RECORD = Path(__file__).parent / "records" / "memory_budget.json"
MIB = 1 << 20
Case = tuple[nn.Module, nn.Module, list[tuple[Any, Tensor]], dict[str, Any]]


def linear(rows: int, cols: int, samples: int, classes: int = 10) -> Case:
    """One layer of a size, read out by a small head."""
    model = nn.Sequential(nn.Linear(cols, rows, bias=False), nn.Tanh(), nn.Linear(rows, classes))
    data = list(zip(torch.randn(samples, cols).split(64), torch.randint(classes, (samples,)).split(64), strict=True))
    return model, nn.CrossEntropyLoss(), data, {"layers": ["0.weight"]}


def convolution(samples: int) -> Case:
    """Two convolutions with many positions."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    model(torch.randn(1, 3, 32, 32))
    images, labels = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
    return (
        model,
        nn.CrossEntropyLoss(),
        list(zip(images.split(32), labels.split(32), strict=True)),
        {"layers": ["0.weight", "2.weight"]},
    )


def layer(module: nn.Module, shape: tuple[int, ...], samples: int) -> Case:
    """One convolution of any kind, whose outputs are pooled and read out."""
    model = nn.Sequential(module, nn.ReLU(), nn.Flatten(2), nn.AdaptiveAvgPool1d(16), nn.Flatten(), nn.LazyLinear(10))
    inputs, labels = torch.randn(samples, *shape), torch.randint(10, (samples,))
    model(inputs[:1])
    data = list(zip(inputs.split(16), labels.split(16), strict=True))
    return model, nn.CrossEntropyLoss(), data, {"layers": ["0.weight"]}


class Tokens(nn.Module):
    """A small language model without attention: each token sees the mean of those before it."""

    def __init__(self, words: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits, words second."""
        hidden = self.embedding(text)
        for block in self.blocks:
            mean = hidden.cumsum(1) / torch.arange(1, 1 + hidden.shape[1]).view(1, -1, 1)
            hidden = hidden + block(hidden + mean)
        logits: Tensor = self.head(hidden).transpose(1, 2)
        return logits


def language(words: int, width: int, samples: int, tokens: int) -> Case:
    """The matrices of the blocks, from random columns."""
    model = Tokens(words, width, 2)
    text = torch.randint(words, (samples, tokens))
    data = [(part, part.roll(-1, 1)) for part in text.split(4)]
    return model, nn.CrossEntropyLoss(), data, {"layers": "blocks.*.weight", "accuracy": 0.05}


CASES: dict[str, tuple[int, Callable[[], Case]]] = {
    "1 x 1": (16, lambda: linear(1, 1, 256)),
    "16 x 16": (16, lambda: linear(16, 16, 256)),
    "64 x 512": (64, lambda: linear(64, 512, 512)),
    "512 x 512": (128, lambda: linear(512, 512, 128)),
    "1024 x 256": (256, lambda: linear(1024, 256, 128)),
    "4096 x 1024": (2048, lambda: linear(4096, 1024, 16, 4)),
    "convolutions": (128, lambda: convolution(16)),
    "1 x 1 convolution": (64, lambda: layer(nn.Conv2d(256, 256, 1), (256, 14, 14), 16)),
    "depthwise convolution": (32, lambda: layer(nn.Conv2d(128, 128, 3, groups=128), (128, 28, 28), 32)),
    "long sequence": (32, lambda: layer(nn.Conv1d(16, 64, 9), (16, 4000), 32)),
    "transposed convolution": (256, lambda: layer(nn.ConvTranspose2d(64, 128, 3, 2), (64, 8, 8), 32)),
    "language model": (64, lambda: language(1000, 32, 8, 32)),
    "wider language model": (256, lambda: language(4000, 96, 8, 64)),
}


def resident() -> int:
    """Bytes of this process that are in memory now."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


class Peak:
    """The largest resident memory while it is open, looked at every few milliseconds."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.largest = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.largest = max(self.largest, resident())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.largest = max(self.largest, resident())

    @property
    def grown(self) -> int:
        """By how much it grew."""
        return self.largest - self.before


def one(name: str) -> dict[str, Any]:
    """Run a case in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    budget, make = CASES[name]
    small = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    ks.measure(small, nn.CrossEntropyLoss(), [(torch.randn(8, 3), torch.randint(3, (8,)))], progress=False)
    model, loss, data, options = make()
    with Peak() as alone:
        inputs, targets = max(data, key=lambda batch: len(batch[1]))
        loss(model(inputs), targets).backward()
    model.zero_grad(set_to_none=True)
    own = 4 * sum(parameter.numel() for parameter in model.parameters()) * 4
    started, cpu = time.perf_counter(), time.process_time()
    with Peak() as peak:
        results = ks.measure(model, loss, data, memory_budget=budget * MIB, progress=False, **options)
    bar = 1.2 * budget * MIB + own + alone.grown
    return {
        "case": name,
        "budget MiB": budget,
        "model MiB": (own + alone.grown) / MIB,
        "peak MiB": peak.grown / MIB,
        "over the bar": (peak.grown - own - alone.grown) / (budget * MIB),
        "within": peak.grown <= bar,
        "answers": sum(row.cosine == row.cosine for row in results),
        "rows": len(results.rows),
        "seconds": time.perf_counter() - started,
        "CPU seconds": time.process_time() - cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one)))
        return
    known = json.loads(args.record.read_text(encoding="utf-8"))["cases"] if args.record.exists() else {}
    for name in args.only:
        done = subprocess.run([sys.executable, __file__, "--one", name], stdout=subprocess.PIPE, text=True, check=True)
        known[name] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(known[name]), flush=True)
        content = {
            "command": "python benchmarks/memory_budget.py",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cases": known,
        }
        args.record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
