"""Do the paper's statements hold for a language model, and how good is the preconditioner that is in use?

    python benchmarks/language_model.py run --data-dir DIR --optimizer adamw [--steps 2400] [--seed 0] --out RUNS
    python benchmarks/language_model.py measure --data-dir DIR RUNS/language-model-* [--steps 100 300] [--judge]
    python benchmarks/language_model.py explain --data-dir DIR RUNS/language-model-adamw-* [--steps 300 2400]
    python benchmarks/language_model.py collect RUNS        # one record for each run, to benchmarks/records
    python benchmarks/language_model.py summary             # what the records say

A character GPT (width 128, 4 layers, 4 heads, 64 characters) on tiny-shakespeare, batches of 32 windows, trained with
AdamW, Shampoo, SOAP or KL-Shampoo at learning rate 0.003 (a warm-up of 50 steps, constant, a linear fall over the last
fifth). A run that is stopped goes on from its last checkpoint in RUNS. At some steps model and optimizer are kept, and
measured afterwards: the six matrices of the third block against the Gauss-Newton matrix of the loss on 32 windows of
the training text, with fits and with what the optimizer holds (`live`). These cosines are estimates from random
columns; the record has their standard errors.

With `--judge`, steps are judged by `ks.step_quality` for two of the matrices: the matrix is that of 16 windows, from
256 columns each, what is fitted is fitted on 16 other windows, and the gradient is that of the next training batch, so
that nothing is judged by what it was fitted on.

`explain` asks why Shampoo² is far below the optimum for one matrix and not for another: it is one round of power
iteration from the identity, so it measures further rounds, and how the two largest singular triples (sigma, U, V) of
the rearranged matrix see the identity: alpha = tr V / sqrt(n) for unit V, which the first round multiplies by sigma.

There are records of AdamW's run (seed 0, 2,400 steps) and of the others (600 steps), those with `--judge` at steps 100
and 600.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optim_training
import torch
from torch import Tensor, nn
from torch.nn import functional

import kronscope as ks
from kronscope.paper.data import derive_seed

RECORDS = Path(__file__).parent / "records" / "language_model"
CONTEXT, BATCH, RATE, WARMUP, BLOCK = 64, 32, 3e-3, 50, 2
LAYERS = {name: f"blocks.{BLOCK}.{name}.weight" for name in ("query", "key", "value", "out", "fc1", "fc2")}
JUDGED = ("query", "fc1")
EXPLAINED = ("key", "query")
FITS = ("optimal", "shampoo2", "shampoo", "kfac-reduce")
# five rounds of power iteration stand for the optimum here: what is left is small beside what a step can show
STEPS_OF = {
    "optimal": ks.approx.get("optimal-paper", rounds=5),
    **{name: ks.approx.get(name) for name in ("shampoo2", "shampoo", "diagonal")},
}
DAMPING = (1.0, 10.0)
WINDOWS = 32
POINTS = (0, 10, 30, 100, 300, 600, 1000, 1600)
STEPS = {"adamw": 2400, "shampoo": 600, "soap": 600, "kl-shampoo": 600}


class Block(nn.Module):
    """A pre-norm transformer block with separate projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class CharGPT(optim_training.CharGPT):
    """The character language model of the training trials, with these blocks."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary, layers=4, context=CONTEXT, block=Block)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, time) to logits (batch, vocabulary, time)."""
        return super().forward(tokens).unflatten(0, tokens.shape).transpose(1, 2)


class Text:
    """Windows of the text: nine tenths to train on, the last tenth held out."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")
        letters = sorted(set(text))
        data = torch.tensor([letters.index(letter) for letter in text])
        cut = int(0.9 * len(data))
        self.letters, self.train, self.held = len(letters), data[:cut], data[cut:]

    def windows(self, source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Characters, and the characters after each."""
        index = starts[:, None] + torch.arange(CONTEXT)
        return source[index], source[index + 1]

    def random(self, count: int, *seed: int) -> tuple[Tensor, Tensor]:
        """Windows of the training text."""
        generator = torch.Generator().manual_seed(derive_seed(*seed, "windows"))
        return self.windows(self.train, torch.randint(len(self.train) - CONTEXT - 1, (count,), generator=generator))

    def held_out(self, count: int = 512) -> list[tuple[Tensor, Tensor]]:
        """Windows spread evenly over the text that is held out."""
        starts = torch.linspace(0, len(self.held) - CONTEXT - 2, count).long()
        return [self.windows(self.held, part) for part in starts.split(64)]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0),
    "shampoo": lambda model: ks.Shampoo(model.named_parameters(), RATE),
    "soap": lambda model: ks.SOAP(model.named_parameters(), RATE),
    "kl-shampoo": lambda model: ks.KLShampoo(model.named_parameters(), RATE),
}


def rate(step: int, steps: int) -> float:
    return RATE * min(1.0, (step + 1) / WARMUP, (steps - step) / max(steps // 5, 1))


@torch.no_grad()
def validate(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    losses = [float(functional.cross_entropy(model(x), y)) for x, y in batches]
    model.train()
    return statistics.fmean(losses)


def run(args: argparse.Namespace) -> None:
    """Train; keep model and optimizer at the steps to measure at."""
    text, steps = Text(args.data_dir), args.steps or STEPS[args.optimizer]
    folder = args.out / f"language-model-{args.optimizer}-seed{args.seed}-steps{steps}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    model = CharGPT(text.letters)
    optimizer = OPTIMIZERS[args.optimizer](model)
    record: dict[str, Any] = {
        "optimizer": args.optimizer,
        "seed": args.seed,
        "steps": steps,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "train_cpu_seconds": 0.0,
        "validation": [],
    }
    first, held = 0, text.held_out()
    if (folder / "state.pt").exists():
        state = load_state(folder / "state.pt", model, optimizer)
        first, record = state["step"], json.loads(state["record"])

    def save(step: int, name: str) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**state, "record": json.dumps(record)}, folder / "new.pt")
        (folder / "new.pt").replace(folder / name)

    for step in range(first, steps + 1):
        if step % 100 == 0 or step in POINTS or step == steps:
            loss = validate(model, held)
            record["validation"] = [item for item in record["validation"] if item[0] < step] + [[step, loss]]
            print(f"step {step}: validation {loss:.4f}, {record['train_cpu_seconds']:.0f} s of CPU", flush=True)
            save(step, "state.pt")
            if step in POINTS or step == steps:
                save(step, f"step-{step}.pt")
            write(folder / "training.json", record)
        if step == steps:
            break
        started = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        x, y = text.random(BATCH, args.seed, step)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        record["train_cpu_seconds"] += time.process_time() - started


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    if state["optimizer"]["state"] or state["step"]:
        optimizer.load_state_dict(state["optimizer"])
    return state


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Measure what a run has kept; what is measured already is not measured again."""
    text = Text(args.data_dir)
    for folder in args.runs:
        training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        model = CharGPT(text.letters)
        optimizer = OPTIMIZERS[training["optimizer"]](model)
        kept = sorted((int(path.stem.removeprefix("step-")), path) for path in folder.glob("step-*.pt"))
        for step, path in kept:
            if args.steps is not None and step not in args.steps:
                continue
            load_state(path, model, optimizer)
            for kind in wanted(args, step):
                target, work = folder / f"{kind}-{step}.json", WORK[kind]
                if target.exists():
                    continue
                started = time.process_time()
                rows = work(model, optimizer, text, step, training["seed"])
                seconds = time.process_time() - started
                write(target, {"step": step, "rows": rows, "cpu_seconds": seconds})
                print(f"{folder.name}: {kind} at step {step}, {seconds:.0f} s of CPU", flush=True)


def wanted(args: argparse.Namespace, step: int) -> tuple[str, ...]:
    if args.command == "explain":
        return ("rounds",)
    # before the first step no optimizer holds anything
    return ("cosines", "steps") if args.judge and step else ("cosines",)


def cosines(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, step: int, seed: int
) -> list[dict[str, Any]]:
    """Cosines of the third block's matrices."""
    x, y = text.random(WINDOWS, 10**6)
    results = ks.measure(
        model,
        nn.CrossEntropyLoss(),
        list(zip(x.split(8), y.split(8), strict=True)),
        list(LAYERS.values()),
        approximations=FITS,
        operators={"live": optimizer} if step else None,
        accuracy=0.02,
        progress=False,
    )
    names = {spec: name for name, spec in LAYERS.items()}
    return [
        {"layer": names[row.layer], "approximation": row.approximation, "cosine": row.cosine, "stderr": row.stderr}
        for row in results
        if not math.isnan(row.cosine)
    ]


def judged(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, step: int, seed: int
) -> list[dict[str, Any]]:
    """Steps with what is in use, and with fits, for some matrices."""
    parameters = dict(model.named_parameters())
    model.zero_grad()
    x, y = text.random(BATCH, seed, step)
    functional.cross_entropy(model(x), y).backward()
    found = []
    for name in JUDGED:
        truth, other = (
            ks.second_moment(
                model,
                nn.CrossEntropyLoss(),
                [text.random(WINDOWS // 2, 10**6 + place)],
                LAYERS[name],
                max_columns=16,
                progress=False,
            )
            for place in (1, 2)
        )
        operators = {fit: fitted.fit(other.stream) for fit, fitted in STEPS_OF.items()}
        if isinstance(optimizer, ks.Shampoo | ks.SOAP | ks.KLShampoo):
            operators["live"] = optimizer.operator(parameters[LAYERS[name]])
        gradient = parameters[LAYERS[name]].grad
        assert gradient is not None
        for fit, answers in ks.step_quality(truth, operators, gradient, DAMPING).items():
            cosine = ks.cosine(truth, operators[fit])
            found += [
                {"layer": name, "approximation": fit, "matrix cosine": cosine, **vars(quality)} for quality in answers
            ]
    model.zero_grad()
    return found


def explained(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, step: int, seed: int
) -> list[dict[str, Any]]:
    """Further rounds of power iteration, and the two largest singular triples, for some matrices."""
    found = []
    for name in EXPLAINED:
        batch = [text.random(WINDOWS // 2, 10**6 + 1)]
        truth = ks.second_moment(model, nn.CrossEntropyLoss(), batch, LAYERS[name], max_columns=32, progress=False)
        rounds = {
            str(count): ks.cosine(truth, ks.approx.get("optimal-paper", rounds=count).fit(truth.stream))
            for count in (1, 2, 3, 5)
        }
        triples = ks.approx.singular_triples(truth, 2, tolerance=1e-3, max_rounds=300)
        alphas = [float(right.trace()) / right.shape[0] ** 0.5 for right in triples.right]
        found.append(
            {
                "layer": name,
                "cosine after rounds": rounds,
                "optimal": ks.cosine(truth, ks.approx.get("optimal").fit(truth.stream)),
                "sigma2 / sigma1": float(triples.sigma[1] / triples.sigma[0]),
                "alpha": alphas,
            }
        )
        print(f"step {step}: {found[-1]}", flush=True)
    return found


WORK: dict[str, Callable[..., list[dict[str, Any]]]] = {"cosines": cosines, "steps": judged, "rounds": explained}


def collect(folder: Path) -> None:
    """One record for each run: its training and all that was measured."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("language-model-*/training.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for kind in WORK:
            parts = [json.loads(part.read_text(encoding="utf-8")) for part in path.parent.glob(f"{kind}-*.json")]
            record[kind] = sorted(parts, key=lambda part: int(part["step"]))
        rounded = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.5g}"))
        name = f"{record['optimizer']}-seed{record['seed']}.json"
        (RECORDS / name).write_text(json.dumps(rounded) + "\n", encoding="utf-8")


def summary() -> None:
    """Print the records."""
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        print(f"{path.stem}: step and validation loss {record['validation'][-1]}")
        for part in record["cosines"]:
            for layer in LAYERS:
                rows = [row for row in part["rows"] if row["layer"] == layer]
                values = (f"{row['approximation']} {row['cosine']:.3f} ± {row['stderr']:.3f}" for row in rows)
                print(f"  step {part['step']}, {layer}:", *values)
        for part in record["steps"]:
            for row in part["rows"]:
                print(
                    f"  step {part['step']}, {row['layer']}, damping {row['damping']:g}, {row['approximation']}: "
                    f"cosine {row['matrix cosine']:.3f}, decrease {row['decrease']:.3f}, "
                    f"of the gradient {row['plain_decrease']:.3f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--data-dir", type=Path, required=True)
    runs.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    runs.add_argument("--steps", type=int)
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--out", type=Path, default=Path("runs"))
    for name in ("measure", "explain"):
        measuring = commands.add_parser(name)
        measuring.add_argument("runs", nargs="+", type=Path)
        measuring.add_argument("--data-dir", type=Path, required=True)
        measuring.add_argument("--steps", nargs="+", type=int)
        if name == "measure":
            measuring.add_argument("--judge", action="store_true", help="judge steps too")
    commands.add_parser("collect").add_argument("runs", type=Path)
    commands.add_parser("summary")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*column.*")
    if args.command == "run":
        run(args)
    elif args.command in ("measure", "explain"):
        measure(args)
    elif args.command == "collect":
        collect(args.runs)
    else:
        summary()


if __name__ == "__main__":
    main()
