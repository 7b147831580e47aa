"""What does it cost that every process keeps the whole state? Replicated beside divided, on 2 and 4 processes.

    python benchmarks/ddp_modes.py [--processes 2 4] [--periods 2] [--out benchmarks/records/ddp_modes.json]

The model is a character GPT: 2 layers of width 256, 1.6 million parameters, with random gradients, the same on all
processes. Both modes make periods of 10 steps in turn (one refresh period; the first, which takes the first roots, is
not counted), with one thread per process and gloo. For each optimizer and mode: MiB of state on the fullest process,
MiB that reach a process in a step (counted at the collectives, mean over a period), and the time of a step: CPU time of
the process that has most to do, which does not depend on how many cores the processes share, and wall time, which does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kronscope.optim import SOAP, KLShampoo, Shampoo
from kronscope.optim.base import KroneckerOptimizer

PERIOD = 10
Mode = Literal["replicated", "divided"]
MODES: tuple[Mode, ...] = ("replicated", "divided")
KINDS: dict[str, Callable[..., KroneckerOptimizer]] = {"Shampoo": Shampoo, "SOAP": SOAP, "KLShampoo": KLShampoo}


def shapes() -> list[tuple[int, ...]]:
    """The parameters of a character GPT."""
    layer: list[tuple[int, ...]] = [(768, 256), (768,), (256, 256), (256,), (1024, 256), (1024,), (256, 1024), (256,)]
    return [*(layer + [(256,)] * 4) * 2, (256,), (256,)]


@contextmanager
def counted(received: list[int]) -> Iterator[None]:
    """Add up the bytes that the collectives of a step bring to this process."""
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    numbers: dict[str, Callable[..., int]] = {
        gather: lambda output, given, **_: (len(output) - len(given)) * output.element_size(),
        "broadcast": lambda piece, src=0, **_: 0 if src == dist.get_rank() else piece.numel() * piece.element_size(),
        "all_reduce": lambda tensor, **_: tensor.numel() * tensor.element_size(),
    }

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            received[0] += numbers[name](*args, **kwargs)
            return real(*args, **kwargs)

        return call

    patches = [mock.patch.object(dist, name, wrapped(name)) for name in numbers]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


class Runner:
    """One optimizer with its own parameters."""

    def __init__(self, kind: str, mode: Mode) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes()]
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator)
        self.optimizer = KINDS[kind](self.params, 1e-3, refresh=PERIOD, parallel=mode)
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.received: list[float] = []

    def period(self) -> None:
        """Make a refresh period."""
        dist.barrier()
        received = [0]
        with counted(received):
            started, cpu = time.perf_counter(), time.process_time()
            for _ in range(PERIOD):
                self.optimizer.step()
            self.cpu.append((time.process_time() - cpu) / PERIOD)
            self.wall.append((time.perf_counter() - started) / PERIOD)
        self.received.append(received[0] / PERIOD)

    def row(self) -> dict[str, float]:
        """Return the numbers of the process that has most of each."""
        state = sum(t.numel() * t.element_size() for tensors in self.optimizer.state.values() for t in tensors.values())
        mine = [state, statistics.median(self.received[1:]), *(statistics.median(t[1:]) for t in (self.cpu, self.wall))]
        everyone = [torch.empty(4, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.tensor(mine, dtype=torch.float64))
        most: Tensor = torch.stack(everyone).amax(0)
        return {
            "state, MiB": round(float(most[0]) / 2**20, 2),
            "received in a step, MiB": round(float(most[1]) / 2**20, 3),
            "CPU, ms": round(1e3 * float(most[2]), 1),
            "wall, ms": round(1e3 * float(most[3]), 1),
        }


def work(rank: int, size: int, store: str, periods: int, results: Any) -> None:
    """Run all optimizers in both modes, in turn."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    found = {}
    for kind in KINDS:
        runners = {mode: Runner(kind, mode) for mode in MODES}
        for _ in range(1 + periods):
            for runner in runners.values():
                runner.period()
        found[kind] = {mode: runner.row() for mode, runner in runners.items()}
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--periods", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "parameters": sum(torch.Size(shape).numel() for shape in shapes()),
        "periods": args.periods,
        "processes": {},
    }
    for size in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            results = context.SimpleQueue()
            arguments = (size, f"{folder}/store", args.periods, results)
            processes = torch.multiprocessing.spawn(work, arguments, nprocs=size, join=False)
            found = results.get()
            processes.join()
        record["processes"][str(size)] = found
        for kind, rows in found.items():
            for mode, row in rows.items():
                print(f"{size} processes, {kind}, {mode}: {row}")
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
