"""How long does a step take with everyone's defaults, on shapes nobody tuned for? The first steps, and the later ones.

    python benchmarks/optim_defaults.py [--lists cnn mlp ...] [--threads 2] [--steps 20] [--runs 3] [--only Shampoo]
        [--distributed-shampoo DIR] [--published-soap DIR] [--out benchmarks/records/optim_defaults.json]

Shape lists: `cnn` (two convolutions, a 128 x 1568 layer), `mlp` (784-512-512-10), `llama` (a block of width 512),
`vit` (width 192, 4 layers), `lstm` (two layers of width 320), `resnet18`, `transformer` (6 layers of width 256), `gpt2`
(the first two layers of GPT-2 small). Gradients are random and the same for all; parameters have no names, so that ours
precondition every matrix, as the others do. All take ten steps in turn; steps 1-20 are the first, then come as many
later ones as `--steps` says. Times are of the process: `wall`, and `cpu` seconds, which a busy machine disturbs less.
Of several runs (`--runs`) the median of each step counts, and the mean of each run is kept.
Before, each makes three steps with a small matrix, so that nobody pays for loading libraries.

Peers are imported from a checkout given by its folder. Distributed Shampoo takes roots at every step by default, which
nobody can afford; here it does every 10 steps from step 10 on, with Adam's graft, and else its own defaults (blocks of
1024). Published SOAP has its own defaults.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from optim_speed import fresh, resnet18, transformer
from torch import Tensor

from kronscope.optim import SOAP, KLShampoo, Shampoo
from kronscope.optim.costs import _products

Shape = tuple[int, ...]
TURN, FIRST = 10, 20


def vit() -> list[Shape]:
    layer: list[Shape] = [(192,), (192,), (576, 192), (576,), (192, 192), (192,), (192,), (192,)]
    layer += [(768, 192), (768,), (192, 768), (192,)]
    return [(192, 3, 16, 16), (192,), (197, 192), *layer * 4, (192,), (192,), (100, 192), (100,)]


def gpt2() -> list[Shape]:
    layer: list[Shape] = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,)]
    return [*layer, (3072, 768), (3072,), (768, 3072), (768,)] * 2


LISTS: dict[str, Callable[[], list[Shape]]] = {
    "cnn": lambda: [(16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (128, 1568), (128,), (10, 128), (10,)],
    "mlp": lambda: [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)],
    "llama": lambda: [*[(512, 512)] * 4, (1376, 512), (1376, 512), (512, 1376), (512,), (512,)],
    "vit": vit,
    "lstm": lambda: [(1500, 320), *[(1280, 320), (1280, 320), (1280,), (1280,)] * 2, (1500, 320), (1500,)],
    "resnet18": resnet18,
    "transformer": transformer,
    "gpt2": gpt2,
}


def candidates(args: argparse.Namespace) -> dict[str, Callable[[list[Tensor]], Any]]:
    found: dict[str, Callable[[Any], Any]] = {"Shampoo": Shampoo, "KLShampoo": KLShampoo, "SOAP": SOAP}
    if args.distributed_shampoo:
        sys.path.insert(0, args.distributed_shampoo)
        import distributed_shampoo as ds  # type: ignore[import-not-found]

        found["Distributed Shampoo"] = lambda params: ds.DistributedShampoo(
            params,
            lr=1e-3,
            betas=(0.9, 0.999),
            precondition_frequency=10,
            start_preconditioning_step=10,
            grafting_config=ds.AdamPreconditionerConfig(beta2=0.999, epsilon=1e-8),
        )
    if args.published_soap:
        sys.path.insert(0, args.published_soap)
        import soap  # type: ignore[import-not-found]

        found["published SOAP"] = soap.SOAP
    found["AdamW"] = lambda params: torch.optim.AdamW(params, fused=True)
    return {name: make for name, make in found.items() if not args.only or name in args.only}


def warm_up(args: argparse.Namespace) -> None:
    for make in candidates(args).values():
        params = fresh([(300, 40), (8,)])
        optimizer = make(list(params))
        for _ in range(3):
            for param in params:
                param.grad = 1e-3 * torch.ones_like(param)
            optimizer.step()


def run(shapes: list[Shape], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    params = {name: fresh(shapes) for name in candidates(args)}
    optimizers = {name: make(list(params[name])) for name, make in candidates(args).items()}
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in params}
    generator = torch.Generator().manual_seed(2)
    for turn in range(0, FIRST + args.steps, TURN):
        grads = [[1e-3 * torch.randn(shape, generator=generator) for shape in shapes] for _ in range(TURN)]
        for name, optimizer in optimizers.items():
            for step in grads:
                for param, grad in zip(params[name], step, strict=True):
                    param.grad = grad
                before = time.perf_counter(), time.process_time()
                optimizer.step()
                times[name]["wall"].append(time.perf_counter() - before[0])
                times[name]["cpu"].append(time.process_time() - before[1])
        print(f"  step {turn + TURN}", file=sys.stderr, flush=True)
    return times


def summary(runs: list[list[float]]) -> dict[str, Any]:
    seconds = [statistics.median(step) for step in zip(*runs, strict=True)]
    first, later = seconds[:FIRST], seconds[FIRST:]
    # the typical time of each step of a period, so that one interruption is not taken for the slowest step
    typical = [statistics.median(later[place::TURN]) for place in range(TURN)]
    return {
        "first": 1e3 * statistics.mean(first),
        "later": 1e3 * statistics.mean(later),
        "mean": 1e3 * statistics.mean(seconds),
        "mean of each run": [1e3 * statistics.mean(one) for one in runs],
        "first / later": statistics.mean(first) / statistics.mean(later),
        "slowest / mean, first": max(first) / statistics.mean(first),
        "slowest / mean, later": max(typical) / statistics.mean(typical),
    }


def ratios(found: dict[str, dict[str, Any]], clock: str) -> dict[str, float]:
    peers = {"Distributed Shampoo": 0.7, "published SOAP": 0.6}
    return {
        f"{name} / {peer}": found[name][clock]["mean"] / found[peer][clock]["mean"]
        for name in ("Shampoo", "KLShampoo", "SOAP")
        for peer in peers
        if name in found and peer in found
    }


TITLES = {
    "cnn": "CNN, 128 × 1568",
    "mlp": "MLP 784-512-512-10",
    "llama": "Llama block, 512",
    "vit": "ViT, 192",
    "lstm": "LSTM, 320",
    "resnet18": "ResNet18",
    "transformer": "transformer, 256",
    "gpt2": "GPT-2 small, 2 layers",
}


def table(record: dict[str, Any], clock: str) -> str:
    """Return the tables of docs/performance.md."""
    lists = [name for name in TITLES if name in record]
    times = {name: record[name]["times"] for name in lists}
    ours, peers = ("Shampoo", "KLShampoo", "SOAP"), ("Distributed Shampoo", "published SOAP")
    rows = [[f"{clock} ms of a step, first 20 / later", *(TITLES[name] for name in lists)], ["---"] * (1 + len(lists))]
    for label in (*peers, *ours):
        cells = [times[name][label][clock] for name in lists]
        rows.append(
            [f"`{label}`" if label in ours else label, *(f"{c['first']:.0f} / {c['later']:.0f}" for c in cells)]
        )
    for label in ours:
        for peer in peers:
            ratio = [times[name][label][clock]["mean"] / times[name][peer][clock]["mean"] for name in lists]
            rows.append([f"mean, `{label}` / {peer}", *(f"{one:.2f}" for one in ratio)])
    for label in ours:
        cells = [times[name][label][clock] for name in lists]
        keys = ("first / later", "slowest / mean, first", "slowest / mean, later")
        text = [f"{c[keys[0]]:.2f}; {c[keys[1]]:.2f}, {c[keys[2]]:.2f}" for c in cells]
        rows.append([f"`{label}`: first 20 / later; slowest / mean of the first, of the later", *text])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def products(name: str) -> dict[str, float]:
    """Return the multiply-adds of a step's products with factors and roots, in parts of Distributed Shampoo's.

    It has a factor for each dimension, kernels merged, in blocks of 1024, and makes two products with each.
    """
    shapes = [shape for shape in LISTS[name]() if len(shape) > 1]
    kernels = [math.prod(shape[2:]) for shape in shapes]
    sides = [(*shape[:2], kernel) if kernel > 1 else shape[:2] for shape, kernel in zip(shapes, kernels, strict=True)]
    theirs = sum(2.0 * math.prod(shape) * min(size, 1024) for shape in sides for size in shape)
    found = {}
    for kind in (Shampoo, KLShampoo, SOAP):
        optimizer = kind([torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes])
        hyper = optimizer._hyper(optimizer.param_groups[0])
        tiles = [tile for layout in optimizer._layouts.values() for tile in layout.tiles]
        found[kind.__name__] = sum(tile.total * _products(tile, hyper, hyper.statistics) for tile in tiles) / theirs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", nargs="+", default=list(LISTS), choices=list(LISTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="later steps, a multiple of ten")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of the optimizers to run")
    parser.add_argument("--distributed-shampoo", metavar="DIR")
    parser.add_argument("--published-soap", metavar="DIR")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--products", action="store_true", help="count products beside Distributed Shampoo's, and stop")
    parser.add_argument("--table", choices=["wall", "cpu"], help="print the tables of what is in OUT, and stop")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*without names")
    if args.products:
        for name in args.lists:
            print(name, {kind: round(part, 2) for kind, part in products(name).items()})
        return
    if args.table:
        print(table(json.loads(args.out.read_text()), args.table))
        return
    torch.set_num_threads(args.threads)
    # lists that an earlier run left in the same file stay
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    warm_up(args)
    for name in args.lists:
        runs = [run(LISTS[name](), args) for _ in range(args.runs)]
        found = {
            label: {clock: summary([one[label][clock] for one in runs]) for clock in ("wall", "cpu")}
            for label in runs[0]
        }
        place = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        place |= {"threads": args.threads, "steps": args.steps, "runs": args.runs, "load": os.getloadavg()}
        record[name] = {"environment": place, "times": found, "ratios": {c: ratios(found, c) for c in ("wall", "cpu")}}
        print(f"\n{name + ', cpu ms':24}{'first 20':>10}{'later':>10}{'ratio':>8}{'slowest':>9}{'':>9}{'wall':>10}")
        for label, row in found.items():
            cpu = row["cpu"]
            slow = f"{cpu['slowest / mean, first']:9.2f}{cpu['slowest / mean, later']:9.2f}"
            later = row["wall"]["later"]
            print(f"{label:24}{cpu['first']:10.1f}{cpu['later']:10.1f}{cpu['first / later']:8.2f}{slow}{later:10.1f}")
        print(
            "  " + "; ".join(f"{key}: {value:.2f}" for key, value in record[name]["ratios"]["cpu"].items()), flush=True
        )
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
