"""Do the population error bars keep their promise on a classifier? Sure and unsure ones, single labels and sequences.

    python benchmarks/population_models.py [--replications 50] [--out benchmarks/records/population_models.json]

A network of 6-8-4 units classifies Gaussian inputs that vary more in some directions than in others; a "sure" one has
its last layer fifteen times as large. For samples drawn anew each time: the first layer's cosines with
``population=True``, their standard errors, and how often the value of 20,000 other samples lies within two of them. Two
kinds of inputs may take turns, and the directions may be alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronscope as ks

LOSS = nn.CrossEntropyLoss()
MANY = 20_000


@dataclass(frozen=True)
class Case:
    """What is measured: the model, its data, and the fits."""

    title: str
    samples: int
    sureness: float = 1.0
    tokens: int = 1
    in_turns: bool = False
    directions_alike: bool = False
    batch_size: int = 1
    names: tuple[str, ...] = ("optimal", "shampoo2", "shampoo", "kfac-expand", "soap", "ekfac", "diagonal")


REAL = ("shampoo2", "shampoo")
CASES = (
    Case("unsure", 64),
    Case("unsure, kinds in turns", 64, in_turns=True),
    Case("sure", 64, sureness=15.0),
    Case("sure", 200, sureness=15.0),
    Case("sure, 3 tokens", 32, sureness=15.0, tokens=3),
    Case("sure, directions alike", 200, sureness=15.0, directions_alike=True, names=("kfac-expand", "soap", "ekfac")),
    Case("real labels, batches of 64", 64, batch_size=64, names=REAL),
    Case("real labels, batches of 64", 200, batch_size=64, names=REAL),
)


class Network(nn.Module):
    """Two layers; with several tokens the second sees sums over those before."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last, self.tokens = nn.Linear(6, 8), nn.Linear(8, 4), case.tokens
        self.last.weight.data *= case.sureness

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.first(x).tanh()
        logits: Tensor = self.last(hidden.cumsum(1) if self.tokens > 1 else hidden)
        return logits.transpose(1, 2) if self.tokens > 1 else logits


def draw(case: Case, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and labels."""
    inputs = torch.randn(count, case.tokens, 6, generator=generator)
    if not case.directions_alike:
        inputs *= torch.linspace(0.4, 1.6, 6)
    if case.in_turns:
        inputs[0::2] = inputs[0::2] * 0.3 + torch.tensor([2.0, 0, 0, 0, 0, 0])
    labels = torch.randint(4, (count, case.tokens), generator=generator)
    return (inputs, labels) if case.tokens > 1 else (inputs[:, 0], labels[:, 0])


def rows_of(case: Case, model: nn.Module, data: tuple[Tensor, Tensor], *, population: bool) -> dict[str, ks.Row]:
    """Measure the first layer."""
    labels = "real" if case.batch_size > 1 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ks.measure(
            model, LOSS, [data], "first.weight", approximations=case.names, labels=labels,
            batch_size=case.batch_size, population=population, progress=False,
        )  # fmt: skip
    return {row.approximation: row for row in found}


def table_of(case: Case, replications: int) -> list[dict[str, Any]]:
    """One line for each approximation."""
    model, generator = Network(case), torch.Generator().manual_seed(7)
    truth = rows_of(case, model, draw(case, MANY, generator), population=False)
    drawn = [rows_of(case, model, draw(case, case.samples, generator), population=True) for _ in range(replications)]
    lines = []
    for name in case.names:
        value, stderr = torch.tensor([(rows[name].cosine, rows[name].stderr) for rows in drawn]).double().T
        said = ~value.isnan()
        value, stderr = value[said], stderr[said]
        inside = (value - truth[name].cosine).abs() <= 2 * stderr
        lines.append(
            {
                "case": case.title,
                "samples": case.samples,
                "approximation": name,
                "truth": truth[name].cosine,
                "mean estimate": float(value.mean()),
                "standard deviation": float(value.std()),
                "mean standard error": float(stderr.mean()),
                "coverage at 2 stderr": float(inside.double().mean()),
                "answers": int(said.sum()),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "population_models.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    lines = []
    for case in CASES:
        for line in table_of(case, asked.replications):
            lines.append(line)
            print(
                f"{line['case']:<27} N={line['samples']:<4} {line['approximation']:<11} truth {line['truth']:.4f}"
                f"  estimate {line['mean estimate']:.4f}  sd {line['standard deviation']:.4f}"
                f"  stderr {line['mean standard error']:.4f}  within 2: {line['coverage at 2 stderr']:.2f}"
                f"  of {line['answers']}",
                flush=True,
            )
    record = {
        "command": f"python benchmarks/population_models.py --replications {asked.replications}",
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kronscope": ks.__version__,
            "machine": platform.machine(),
        },
        "replications": asked.replications,
        "seconds": round(time.perf_counter() - started, 1),
        "table": lines,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {asked.out.name}")


if __name__ == "__main__":
    main()
