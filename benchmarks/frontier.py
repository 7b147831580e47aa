"""Validation loss against steps and seconds, over the options that decide what roots cost: where is the frontier?

    python benchmarks/frontier.py run [--workloads mlp cnn] [--families shampoo] [--settings default block128-every5]
        [--lrs 0.003] [--seeds 0 1 2] [--scale 1.0] [--out benchmarks/records/frontier]
    python benchmarks/frontier.py report [--out benchmarks/records/frontier]
    python benchmarks/frontier.py settings
    python benchmarks/frontier.py first-roots [--out benchmarks/records/frontier]
    python benchmarks/frontier.py seldom [--out benchmarks/records/frontier]

Workloads that choose: `mlp`, `cnn` (a convolution and a wide linear layer), `gpt` (a character model), and for
convolutions `wide-channels`. Workloads that check, and that nobody may look at before a choice is made: `resnet`,
`vit`, `regression`. Pictures are scikit-learn's digits, text is Python's own documentation of its built-in names, and
the regression is on a random teacher: nothing is downloaded, and a run takes seconds to a few minutes.

Each run is one JSON file, named by all that decides it; runs whose file exists are not repeated, so that an interrupted
sweep goes on where it stopped. `report` compares, for each workload and family, every setting with `before`, the
default of before: final loss, steps and CPU seconds to its final loss, by the mean curve over seeds at the setting's
best learning rate. A setting is on the frontier if no other is better in both. It passes if it needs no more steps,
within `--slack`, on every choosing workload; of those that pass, the cheapest is named, and then looked at on the
workloads that check.
"""

from __future__ import annotations

import argparse
import builtins
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from optim_training import CharGPT, Residual, environment, mlp, reached, schedule, shuffled
from torch import Tensor, nn
from torch.nn import functional

from kronscope.optim import SOAP, Every, KLShampoo, Shampoo, Warmup, blocks
from kronscope.optim.config import Refresh

Batches = Iterator[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its data and its loss.

    Attributes:
        chooses: Whether settings are chosen by it; the others only check.
        steps: Steps of a run.
        load: Returns the model's maker, batches for a seed, and held-out batches.
        loss: Of outputs and targets.
    """

    chooses: bool
    steps: int
    load: Callable[[], tuple[Callable[[], nn.Module], Callable[[int], Batches], list[tuple[Tensor, Tensor]]]]
    loss: Loss = functional.cross_entropy


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)


def pictures(build: Callable[[], nn.Module], batch: int = 64) -> Any:
    x, y = digits()
    # twice the size: convolutions and patches need room
    x = functional.interpolate(x, scale_factor=2, mode="bilinear")
    return build, lambda seed: shuffled(x[:1400], y[:1400], batch, seed), [(x[1400:], y[1400:])]


def wide_cnn() -> nn.Module:
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(32 * 64, 96), nn.ReLU(), nn.Linear(96, 10))


def wide_channels() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1), nn.ReLU()]
    layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    body = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class ViT(nn.Module):
    """A transformer on patches of 4 x 4."""

    def __init__(self, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures (batch, 1, 16, 16) to logits."""
        tokens = self.patches(x).flatten(2).mT + self.positions
        return self.head(self.body(tokens).mean(1))  # type: ignore[no-any-return]


def load_gpt() -> Any:
    text = "\n".join(str(getattr(builtins, name).__doc__) for name in sorted(dir(builtins)))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    cut, context = int(0.9 * len(data)), 64

    def windows(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        index = starts[:, None] + torch.arange(context)
        return source[index], source[index + 1].flatten()

    def batches(seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(data[:cut], torch.randint(cut - context - 1, (16,), generator=generator))

    fixed = torch.linspace(0, len(data) - cut - context - 2, 64).long()
    return lambda: CharGPT(len(letters)), batches, [windows(data[cut:], fixed)]


def load_regression() -> Any:
    generator = torch.Generator().manual_seed(123)
    # inputs of very different size, as raw measurements have
    scales = torch.logspace(0, -2, 64)
    x = torch.randn(4096, 64, generator=generator) * scales
    first = torch.randn(64, 32, generator=generator) / scales[:, None].sqrt()
    y = torch.tanh(x @ first / 4) @ torch.randn(32, 4, generator=generator) / 4
    y = y + 0.05 * torch.randn(y.shape, generator=generator)
    return (
        lambda: mlp((64, 192, 96, 4)),
        lambda seed: shuffled(x[:3500], y[:3500], 64, seed),
        [(x[3500:], y[3500:])],
    )


WORKLOADS = {
    "mlp": Workload(True, 300, lambda: pictures(lambda: mlp((256, 256, 128, 10)))),
    "cnn": Workload(True, 150, lambda: pictures(wide_cnn)),
    "gpt": Workload(True, 250, load_gpt),
    "wide-channels": Workload(True, 100, lambda: pictures(wide_channels)),
    "resnet": Workload(False, 150, lambda: pictures(resnet)),
    "vit": Workload(False, 200, lambda: pictures(ViT)),
    "regression": Workload(False, 300, load_regression, functional.mse_loss),
}
FAMILIES: dict[str, Any] = {"shampoo": Shampoo, "kl-shampoo": KLShampoo, "soap": SOAP}


SCHEDULES: dict[str, Refresh] = {
    "all10": Warmup(10, 10),
    "all3": Warmup(3, 10),
    "all5": Warmup(5, 10),
    "all2": Warmup(2, 10),
    "every10": Every(10),
    "every5": Every(5),
    "within5": Warmup(20, 10, within=5),
    "within10": Warmup(10, 10, within=10),
    "always5": Warmup(5, 5, within=5),
    "within3": Warmup(9, 10, within=3),
    "within2": Warmup(10, 10, within=2),
    "within5-20": Warmup(40, 20, within=5),
    "grow235": Warmup(10, 10, within=(2, 3, 5)),
    "grow2224": Warmup(10, 10, within=(2, 2, 2, 4)),
    "grow2235": Warmup(12, 10, within=(2, 2, 3, 5)),
    "grow28": Warmup(10, 10, within=(2, 8)),
    "grow248": Warmup(14, 10, within=(2, 4, 8)),
    "grow2247": Warmup(15, 10, within=(2, 2, 4, 7)),
    "grow346": Warmup(13, 10, within=(3, 4, 6)),
}


def settings() -> dict[str, dict[str, Any]]:
    """Return what is tried, by name: ``before`` is the default of before, ``default`` takes every gradient.

    ``now`` is what the optimizers do if they are told nothing. Others are BLOCK-RATIO-SCHEDULE.

    BLOCK is the longest side of a block, RATIO that of the sides from which on the long one has no factor. ``first-…``
    are today's defaults with other first roots.
    """
    found: dict[str, dict[str, Any]] = {"default": {}, "before": {"block_size": math.inf, "refresh": Warmup(10, 10)}}
    found["now"] = {"statistics": None}
    for schedule_name, refresh in SCHEDULES.items():
        found[f"whole-{schedule_name}"] = {"block_size": math.inf, "refresh": refresh}
        for block in (64, 128, 192, 256, 512):
            for ratio in (4, 8, 16, 1000):
                found[f"{block}-{ratio}-{schedule_name}"] = {"plan": (block, ratio), "refresh": refresh}
    for within in ((2, 2, 16), (3, 3, 14), (4, 4, 12), (5, 5, 10)):
        found[f"first-{'-'.join(map(str, within))}"] = {"refresh": Warmup(20, 10, within=within)}
    for every in (1, 2, 3, 5, 10):
        found[f"statistics-{every}"] = {"statistics": every}
    found["flat-kernels"] = {"kernel": 0}
    for beta in (0.9, 0.99):
        found[f"before-beta{beta:g}"] = {**found["before"], "betas": (0.9, beta)}
    for beta in (0.9, 0.98, 0.99):
        found[f"beta2-{beta:g}"] = {"betas": (0.9, beta)}
    return found


def made(family: str, model: nn.Module, lr: float, options: dict[str, Any]) -> Any:
    """Return an optimizer; ``plan`` stands in for the constants that the default plan is made with."""
    # what was the default of all families in the first trials
    options = {"statistics": 1, **options}
    before = blocks.DEFAULT_BLOCK, blocks.DEFAULT_RATIO_OF_SIDES, blocks.LARGEST_KERNEL
    plan = (*options.pop("plan", before[:2]), options.pop("kernel", before[2]))
    blocks.DEFAULT_BLOCK, blocks.DEFAULT_RATIO_OF_SIDES, blocks.LARGEST_KERNEL = plan
    try:
        return FAMILIES[family](model.named_parameters(), lr, **options)
    finally:
        blocks.DEFAULT_BLOCK, blocks.DEFAULT_RATIO_OF_SIDES, blocks.LARGEST_KERNEL = before


def train(workload: Workload, loaded: Any, make: Callable[[nn.Module], Any], seed: int, steps: int) -> dict[str, Any]:
    build, batches, held = loaded
    torch.manual_seed(seed)
    model = build()
    optimizer = make(model)
    start = [group["lr"] for group in optimizer.param_groups]
    stream = batches(seed)
    curve: list[list[float]] = []
    seconds = cpu = inside = 0.0
    for step in range(1, steps + 1):
        x, y = next(stream)
        before = time.perf_counter(), time.process_time()
        for group, lr in zip(optimizer.param_groups, start, strict=True):
            group["lr"] = lr * schedule(step - 1, steps)
        optimizer.zero_grad()
        workload.loss(model(x), y).backward()
        began = time.process_time()
        optimizer.step()
        inside += time.process_time() - began
        seconds += time.perf_counter() - before[0]
        cpu += time.process_time() - before[1]
        if step % 10 == 0 or step == steps:
            curve.append([step, validated(model, held, workload.loss), seconds, cpu, inside])
            if not math.isfinite(curve[-1][1]):
                break
    columns = ["step", "validation loss", "seconds", "cpu seconds", "optimizer's cpu seconds"]
    return {"columns": columns, "curve": curve, "final": curve[-1][1]}


@torch.no_grad()
def validated(model: nn.Module, held: Sequence[tuple[Tensor, Tensor]], loss: Loss) -> float:
    model.eval()
    total = sum(float(loss(model(x), y)) * len(y) for x, y in held)
    model.train()
    return total / sum(len(y) for _, y in held)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tried = settings()
    for name in args.workloads:
        workload = WORKLOADS[name]
        loaded, steps = workload.load(), max(10, int(workload.steps * args.scale))
        for seed in args.seeds:
            for family in args.families:
                for setting in args.settings or ("before", "default"):
                    for lr in args.lrs:
                        key = {"workload": name, "family": family, "setting": setting, "lr": lr, "seed": seed}
                        path = args.out / f"{name}-{family}-{setting}-lr{lr:g}-seed{seed}-steps{steps}.json"
                        if path.exists():
                            continue
                        found = train(
                            workload, loaded, lambda m, f=family, s=setting, r=lr: made(f, m, r, tried[s]), seed, steps
                        )
                        scratch = path.with_suffix(".part")
                        scratch.write_text(json.dumps({**key, "steps": steps, **found, "environment": environment()}))
                        os.replace(scratch, path)
                        last = found["curve"][-1]
                        print(
                            f"{path.stem}: {found['final']:.4f}, {last[3]:.1f} s ({last[4]:.1f} of them ours)",
                            flush=True,
                        )


def report(args: argparse.Namespace) -> None:
    by_place: dict[tuple[str, str], dict[str, dict[float, list[dict[str, Any]]]]] = {}
    for path in sorted(args.out.glob("*-seed*.json")):
        record = json.loads(path.read_text())
        place = by_place.setdefault((record["family"], record["workload"]), {})
        place.setdefault(record["setting"], {}).setdefault(record["lr"], []).append(record)
    summary: dict[str, Any] = {}
    for (family, workload), tried in sorted(by_place.items()):
        if "before" not in tried:
            continue
        best = {setting: min(by_lr.values(), key=_mean_final) for setting, by_lr in tried.items()}
        target = _mean_final(best["before"])
        rows = {
            setting: {
                "final": _mean_final(runs),
                "steps": reached(_mean_curve(runs), target, 0),
                "cpu seconds": reached(_mean_curve(runs), target, 3),
                "seeds": len(runs),
            }
            for setting, runs in best.items()
        }
        kind = "chooses" if WORKLOADS[workload].chooses else "checks"
        print(f"\n{family} on {workload} ({kind}): the default of before ends at {target:.4f}")
        for setting, row in sorted(rows.items(), key=lambda item: item[1]["final"]):
            beaten = any(o["steps"] < row["steps"] and o["cpu seconds"] < row["cpu seconds"] for o in rows.values())
            mark = " " if beaten or math.isinf(row["steps"]) else "*"
            print(
                f"{mark} {setting:28}{row['final']:9.4f}{row['steps']:8.0f} steps{row['cpu seconds']:8.1f} s"
                f"{row['seeds']:4} seeds"
            )
        summary.setdefault(family, {})[workload] = rows
    for family, rows in summary.items():
        _choose(family, rows, args.slack)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


# When the first roots are taken, as `Warmup(20, 10, within=...)`: in the runs called `default`, and by default now.
FIRST = {"shampoo": "3-3-14", "kl-shampoo": "3-3-14", "soap": "4-4-12"}
FIRST_NOW = {**FIRST, "kl-shampoo": "4-4-12"}


def first_roots(folder: Path) -> str:
    """Return the table of docs/optimizer-trials.md: final losses at a learning rate of 0.003 with other first roots."""
    rows = []
    for family, ours in FIRST.items():
        tried = {
            path.name.split("-first-")[1].split("-lr")[0] for path in folder.glob(f"mlp-{family}-first-*-lr0.003-*")
        }
        for within in sorted(tried | {ours}):
            setting = "default" if within == ours else f"first-{within}"
            is_default = ", the default" * (within == FIRST_NOW[family])
            title = f"`{FAMILIES[family].__name__}` `({within.replace('-', ', ')})`{is_default}"
            rows.append((title, family, setting))
    return _finals(rows, folder)


def seldom(folder: Path) -> str:
    """Return the table of docs/optimizer-trials.md: the same with every gradient in the factors, and with fewer."""
    rows = []
    for family, kind in FAMILIES.items():
        for every in (1, 2, 5):
            # when the runs of the default were made, they took every gradient
            names = [f"statistics-{every}", *["default"] * (every == 1)]
            if any(any(folder.glob(f"*-{family}-{name}-lr0.003-*")) for name in names):
                rows.append((f"`{kind.__name__}(statistics={every})`", family, *names))
        if any(folder.glob(f"mlp-{family}-now-lr0.003-*")):
            rows.append((f"`{kind.__name__}()`, as it is now", family, "now"))
    return _finals(rows, folder)


def seldom_check(records: Path) -> str:
    """Return the table after it: the runs of `optim_training.py` with every gradient, and as it is now."""
    workloads = ("chars", "mnist", "cnn", "vit", "autoencoder")
    lines = [["", *workloads], ["---"] * (1 + len(workloads))]
    for family in ("kl-shampoo", "soap"):
        name = FAMILIES[family].__name__
        rows = {f"`{name}(statistics=1)`": "optim_comparison", f"`{name}()`, as it is now": "optim_training_seldom"}
        now = {one: next((records / "optim_training_seldom").glob(f"{one}-{family}-lr*")) for one in workloads}
        for title, folder in rows.items():
            # at the rate that was best before
            patterns = {one: f"{path.name.partition('-seed')[0]}-seed*.json" for one, path in now.items()}
            found = [
                [json.loads(path.read_text())["final"] for path in (records / folder).glob(pattern)]
                for pattern in patterns.values()
            ]
            spreads = [(max(finals) - min(finals)) / 2 for finals in found]
            means = [statistics.mean(finals) for finals in found]
            lines.append([title, *(f"{mean:.4f} ± {half:.4f}" for mean, half in zip(means, spreads, strict=True))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _finals(rows: Sequence[tuple[str, ...]], folder: Path) -> str:
    """Return a table of final losses at a learning rate of 0.003.

    Args:
        rows: Title, family and settings of each row; of several settings, which mean the same, all seeds count.
        folder: Where the records are.
    """
    workloads = ("mlp", "cnn", "gpt", "regression", "resnet", "vit")
    lines = [["", *workloads], ["---"] * (1 + len(workloads))]
    for title, family, *names in rows:
        cells = []
        for name in workloads:
            paths = [path for setting in names for path in folder.glob(f"{name}-{family}-{setting}-lr0.003-*")]
            runs = [json.loads(path.read_text()) for path in paths]
            finals = list({one["seed"]: one["final"] for one in runs}.values())
            digit = 4 if name == "regression" else 3
            spread = f" ± {(max(finals) - min(finals)) / 2:.{digit}f}" if len(finals) > 1 else ", one seed"
            cells.append(f"{statistics.mean(finals):.{digit}f}{spread}" if finals else "")
        lines.append([title, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _choose(family: str, rows: dict[str, dict[str, dict[str, float]]], slack: float) -> None:
    choosing = [name for name in rows if WORKLOADS[name].chooses]
    common = set.intersection(*(set(rows[name]) for name in choosing)) if choosing else set()
    passing = {
        setting: sum(rows[name][setting]["cpu seconds"] / rows[name]["before"]["cpu seconds"] for name in choosing)
        for setting in common
        if all(rows[name][setting]["steps"] <= (1 + slack) * rows[name]["before"]["steps"] for name in choosing)
    }
    if not passing:
        return
    best = min(passing, key=passing.__getitem__)
    print(f"\n{family}: {best} by {', '.join(choosing)}; on those that check:")
    for name in (name for name in rows if not WORKLOADS[name].chooses and best in rows[name]):
        found, usual = rows[name][best], rows[name]["before"]
        ratios = (found[what] / usual[what] for what in ("steps", "cpu seconds"))
        print("  {}: {:.2f} of the default's steps, {:.2f} of its seconds".format(name, *ratios))


def _mean_curve(runs: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return the mean over seeds of each column at each look; a run that ended early ends the mean."""
    looks = zip(*(one["curve"] for one in runs), strict=False)
    return [[statistics.mean(column) for column in zip(*rows, strict=True)] for rows in looks]


def _mean_final(runs: Sequence[dict[str, Any]]) -> float:
    return statistics.mean(one["final"] if math.isfinite(one["final"]) else math.inf for one in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    command.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    command.add_argument("--settings", nargs="+", choices=settings())
    command.add_argument("--lrs", nargs="+", type=float, default=[0.001, 0.003, 0.01])
    command.add_argument("--seeds", nargs="+", type=int, default=[0])
    command.add_argument("--scale", type=float, default=1.0, help="part of the usual number of steps")
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--out", type=Path, default=Path("benchmarks/records/frontier"))
    command.set_defaults(function=run)
    command = commands.add_parser("report")
    command.add_argument("--slack", type=float, default=0.05)
    command.add_argument("--out", type=Path, default=Path("benchmarks/records/frontier"))
    command.set_defaults(function=report)
    command = commands.add_parser("first-roots")
    command.add_argument("--out", type=Path, default=Path("benchmarks/records/frontier"))
    command.set_defaults(function=lambda args: print(first_roots(args.out), end=""))
    command = commands.add_parser("seldom")
    command.add_argument("--out", type=Path, default=Path("benchmarks/records/frontier"))
    command.set_defaults(function=lambda args: print(seldom(args.out), seldom_check(args.out.parent), sep="\n", end=""))
    command = commands.add_parser("settings")
    command.set_defaults(function=lambda _: print("\n".join(f"{k}: {v}" for k, v in settings().items())))
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
