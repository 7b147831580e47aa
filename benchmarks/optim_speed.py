"""How long does a step take? Against Distributed Shampoo, the published SOAP, AdamW and Muon, in turns in one process.

    python benchmarks/optim_speed.py [--sets transformer resnet18 squares] [--threads 1] [--periods 5]
        [--distributed-shampoo DIR] [--published-soap DIR] [--out benchmarks/records/optim_speed.json]

Parameter sets: `transformer` (6 layers of width 256, embedding, norms, biases), `resnet18`, `squares` (four 1024²).
Gradients are random and the same for all. Every optimizer makes one refresh period (10 steps) in turn, several times
over; the first period, which takes the first roots, is not counted. With the same algorithm: exponent -1/4, blocks of
1024, refresh every 10, Adam grafting, float32. Peers are imported from a checkout given by its folder.

`cpu` are seconds of CPU time of this process, which a busy machine disturbs less than `wall`; with one thread they are
the same on an idle one. `products` are the bare matrix products of a Shampoo step in its own view, matrix by matrix;
`Shampoo, no refresh` takes roots in the first period only. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.optim import SOAP, Eigh, Every, KLShampoo, Shampoo

PERIOD = 10


def transformer() -> list[tuple[int, ...]]:
    layer: list[tuple[int, ...]] = [(768, 256), (768,), (256, 256), (256,), (1024, 256), (1024,), (256, 1024), (256,)]
    return [(512, 256), *(layer + [(256,)] * 4) * 6, (256,), (256,)]


def resnet18() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for out in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(out, width, 3, 3), (out,), (out,), (out, out, 3, 3), (out,), (out,)]
            if block == 0 and out != 64:
                shapes += [(out, width, 1, 1), (out,), (out,)]
            width = out
    return [*shapes, (1000, 512), (1000,)]


SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "transformer": transformer,
    "resnet18": resnet18,
    "squares": lambda: [(1024, 1024)] * 4,
}


def fresh(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]


def view_of(name: str) -> dict[str, Any]:
    """The view in which Distributed Shampoo sees a parameter set."""
    return {"view": "modes", "merge": 1024} if name == "resnet18" else {}


def candidates(name: str, args: argparse.Namespace) -> dict[str, Callable[[list[nn.Parameter]], Any]]:
    same: dict[str, Any] = {"betas": (0.9, 0.999), "block_size": 1024, "refresh": PERIOD, **view_of(name)}
    found: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "Shampoo, as theirs": lambda p: Shampoo(
            p, 1e-3, exponent=-0.25, scale="adam", damping=1e-6, solver=Eigh(float64=False), **same
        ),
        "Shampoo, as theirs, no refresh": lambda p: Shampoo(
            p, 1e-3, exponent=-0.25, scale="adam", damping=1e-6, solver=Eigh(float64=False), **same
        ),
        "Shampoo": lambda p: Shampoo(p, 1e-3),
        "SOAP": lambda p: SOAP(p, 1e-3, refresh=PERIOD),
        "KLShampoo": lambda p: KLShampoo(p, 1e-3),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
        "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    }
    if args.distributed_shampoo:
        sys.path.insert(0, args.distributed_shampoo)
        import distributed_shampoo as ds  # type: ignore[import-not-found]

        def theirs(params: list[nn.Parameter], packed: bool) -> Any:
            return ds.DistributedShampoo(
                params,
                lr=1e-3,
                betas=(0.9, 0.999),
                epsilon=1e-12,
                max_preconditioner_dim=1024,
                precondition_frequency=PERIOD,
                start_preconditioning_step=PERIOD,
                grafting_config=ds.AdamPreconditionerConfig(beta2=0.999, epsilon=1e-8),
                preconditioner_config=ds.RootInvShampooPreconditionerConfig(use_symmetric_packing=packed),
            )

        found["Distributed Shampoo"] = lambda p: theirs(p, True)
        found["Distributed Shampoo, unpacked"] = lambda p: theirs(p, False)
    if args.published_soap:
        sys.path.insert(0, args.published_soap)
        import soap  # type: ignore[import-not-found]

        found["published SOAP"] = lambda p: soap.SOAP(p, lr=1e-3, betas=(0.9, 0.95), precondition_frequency=PERIOD)
        if name == "resnet18":
            found["SOAP, as published's view"] = lambda p: SOAP(p, 1e-3, refresh=PERIOD, view="modes")
    if args.only:
        found = {name: make for name, make in found.items() if any(word in name for word in args.only)}
    return found


class Runner:
    """One optimizer with its own parameters and gradients."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Any], shapes: list[tuple[int, ...]]) -> None:
        self.params = fresh(shapes)
        self.optimizer = make(self.params)
        self.generator = torch.Generator().manual_seed(1)
        self.wall: list[list[float]] = []
        self.cpu: list[list[float]] = []

    def period(self, grads: list[list[Tensor]]) -> None:
        """Make and time one step for each set of gradients."""
        wall, cpu = [], []
        for step in grads:
            for param, grad in zip(self.params, step, strict=True):
                param.grad = grad
            before = time.perf_counter(), time.process_time()
            self.optimizer.step()
            wall.append(time.perf_counter() - before[0])
            cpu.append(time.process_time() - before[1])
        self.wall.append(wall)
        self.cpu.append(cpu)

    def stop_refreshing(self) -> None:
        """Put the next refresh out of reach."""
        for group in self.optimizer.param_groups:
            group["refresh"] = Every(10**9)


class Products:
    """The bare products of a Shampoo step: for each side of each matrix a Gram matrix and a multiplication.

    A tensor with a factor per mode is a matrix for each of them, with that mode in front and its data in order.
    """

    def __init__(self, shapes: list[tuple[int, ...]], view: dict[str, Any]) -> None:
        optimizer = Shampoo(
            [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes], block_size=1024, **view
        )
        generator = torch.Generator().manual_seed(1)
        self.sides = []
        for row in optimizer.explain().rows:
            for size in row.factors:
                columns = int(torch.Size(row.shape).numel()) // size
                rows = torch.randn(size, columns, generator=generator)
                self.sides.append((rows, torch.randn(size, size, generator=generator)))
        self.wall: list[list[float]] = []
        self.cpu: list[list[float]] = []

    def period(self, grads: list[list[Tensor]]) -> None:
        """Time the products once."""
        before = time.perf_counter(), time.process_time()
        for rows, root in self.sides:
            torch.mm(rows, rows.T)
            torch.mm(root, rows)
        self.wall.append([time.perf_counter() - before[0]])
        self.cpu.append([time.process_time() - before[1]])


def state_bytes(optimizer: Any) -> int:
    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif hasattr(value, "__dict__") or hasattr(value, "__slots__"):
            names = list(getattr(value, "__dict__", {})) + list(getattr(value, "__slots__", ()))
            for attribute in names:
                walk(getattr(value, attribute, None))

    for state in optimizer.state.values():
        walk(state)
    return sum(seen.values())


def summary(runner: Runner | Products) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        counted = getattr(runner, clock)[1:]
        means = [statistics.mean(period) for period in counted]
        # the typical time of each step of the period, so that one interruption is not taken for the slowest step
        typical = [statistics.median(column) for column in zip(*counted, strict=True)]
        out[clock] = {
            "mean_step": statistics.median(means),
            "spread": [min(means), max(means)],
            "slowest_step": max(typical),
            "fastest_step": min(typical),
            "first_period_mean": statistics.mean(getattr(runner, clock)[0]),
        }
    return out


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    shapes = SETS[name]()
    runners: dict[str, Runner | Products] = {"products": Products(shapes, view_of(name))}
    runners |= {label: Runner(make, shapes) for label, make in candidates(name, args).items()}
    generator = torch.Generator().manual_seed(2)
    for period in range(args.periods + 1):
        grads = [[1e-3 * torch.randn(shape, generator=generator) for shape in shapes] for _ in range(PERIOD)]
        for label, runner in runners.items():
            runner.period(grads)
            if label.endswith("no refresh") and isinstance(runner, Runner):
                runner.stop_refreshing()
        print(f"{name}: period {period} of {args.periods} done", file=sys.stderr)
    result = {label: summary(runner) for label, runner in runners.items()}
    entries = sum(int(torch.Size(shape).numel()) for shape in shapes)
    for label, runner in runners.items():
        if isinstance(runner, Runner):
            result[label]["state_bytes_per_parameter"] = state_bytes(runner.optimizer) / entries
    return result


def ratios(result: dict[str, Any], clock: str) -> dict[str, float]:
    def mean(label: str) -> float:
        return float(result[label][clock]["mean_step"])

    pairs = {
        "Shampoo / Distributed Shampoo": ("Shampoo, as theirs", "Distributed Shampoo"),
        "Shampoo / Distributed Shampoo, unpacked": ("Shampoo, as theirs", "Distributed Shampoo, unpacked"),
        "SOAP / published SOAP": ("SOAP", "published SOAP"),
        "SOAP, as published's view / published SOAP": ("SOAP, as published's view", "published SOAP"),
        "Shampoo / AdamW fused": ("Shampoo", "AdamW fused"),
        "Shampoo / AdamW foreach": ("Shampoo", "AdamW foreach"),
    }
    out = {key: mean(a) / mean(b) for key, (a, b) in pairs.items() if a in result and b in result}
    if "Shampoo, as theirs" in result:
        ours = result["Shampoo, as theirs"][clock]
        out["slowest step / mean step"] = ours["slowest_step"] / ours["mean_step"]
    if "Shampoo, as theirs, no refresh" in result:
        out["step without refresh / bare products"] = mean("Shampoo, as theirs, no refresh") / mean("products")
    return out


def environment(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": args.threads,
        "periods": args.periods,
        "load": Path("/proc/loadavg").read_text().split()[:3] if Path("/proc/loadavg").exists() else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--periods", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="parts of the names of the optimizers to run")
    parser.add_argument("--distributed-shampoo", metavar="DIR")
    parser.add_argument("--published-soap", metavar="DIR")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # sets that an earlier run left in the same file stay
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"sets": {}}
    for name in args.sets:
        place = environment(args)
        result = run(name, args)
        record["sets"][name] = {
            "environment": {**place, "load_after": environment(args)["load"]},
            "times": result,
            "ratios": {c: ratios(result, c) for c in ("wall", "cpu")},
        }
        print(f"\n{name:34}{'wall ms':>10}{'cpu ms':>10}{'slowest':>10}{'fastest':>10}{'bytes/p':>10}")
        for label, row in result.items():
            wall, cpu = row["wall"], row["cpu"]
            size = row.get("state_bytes_per_parameter", float("nan"))
            print(
                f"{label:34}{1e3 * wall['mean_step']:10.1f}{1e3 * cpu['mean_step']:10.1f}"
                f"{1e3 * cpu['slowest_step']:10.1f}{1e3 * cpu['fastest_step']:10.1f}{size:10.1f}"
            )
        for key, value in record["sets"][name]["ratios"]["cpu"].items():
            print(f"  {key}: {value:.2f} (cpu), {record['sets'][name]['ratios']['wall'][key]:.2f} (wall)")
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
