"""Do the population error bars keep their promise? Coverage, bias and spread on a population that is known exactly.

    python benchmarks/population_coverage.py [--replications 200] [--out benchmarks/records/population_coverage.json]

Gradients are drawn from a mixture of three Kronecker Gaussians with heavy-tailed sizes, so the population's H is known
and so is every approximation's cosine with it. From N of them: the estimate with ``population=True``, its standard
error, and the plug-in cosine of the N samples (whose distance from the truth is its bias).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kronscope as ks
from kronscope.measures.population import PopulationHalves

NAMES = ("shampoo2", "shampoo", "optimal", "soap", "diagonal", "identity")
SIZES = (20, 50, 200)
SHAPE = (6, 8)
SPREAD = 0.3


class Population:
    """A mixture of three Kronecker Gaussians, each gradient times a log-normal number."""

    def __init__(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parts = [
            tuple(torch.randn(size, size, generator=generator, dtype=torch.float64) for size in SHAPE) for _ in range(3)
        ]

    def sample(self, count: int, seed: int) -> ks.GradientStream:
        """Return N gradients."""
        generator = torch.Generator().manual_seed(seed)
        kinds = torch.randint(0, 3, (count,), generator=generator)
        normal = torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64)
        sizes = torch.exp(SPREAD * torch.randn(count, 1, 1, generator=generator, dtype=torch.float64))
        left, right = (torch.stack([part[side] for part in self.parts])[kinds] for side in (0, 1))
        return ks.GradientStream.from_tensors(left @ (normal * sizes) @ right)

    def matrix(self) -> Tensor:
        """Return the population's H."""
        size = torch.exp(torch.tensor(2 * SPREAD**2, dtype=torch.float64))
        return size * torch.stack([torch.kron(a @ a.T, b.T @ b) for a, b in self.parts]).mean(0)

    def stream(self) -> ks.GradientStream:
        """Return atoms whose second moment is the population's H: its eigenvectors."""
        values, vectors = torch.linalg.eigh(self.matrix())
        return ks.GradientStream.from_tensors(vectors.T.reshape(-1, *SHAPE), weights=values.clamp_min(0))


def cosines(stream: ks.GradientStream) -> dict[str, float]:
    """Every approximation's plug-in cosine."""
    return {name: ks.cosine(ks.SecondMoment(stream), ks.approx.get(name).fit(stream)) for name in NAMES}


def table_of(population: Population, count: int, replications: int, truth: dict[str, float]) -> list[dict[str, Any]]:
    """One line per approximation for samples of one size."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in NAMES}
    for seed in range(replications):
        stream = population.sample(count, seed)
        plug_in, halves = cosines(stream), PopulationHalves(stream, stream)
        for name in NAMES:
            approximation = ks.approx.get(name)
            if halves.knows(approximation, stream):
                estimate = halves.cosine(approximation)
            else:
                estimate = halves.refits.cosine(approximation.fit)
            found[name].append((estimate.value, estimate.stderr, plug_in[name]))
    lines = []
    for name in NAMES:
        value, stderr, plug_in_value = torch.tensor(found[name], dtype=torch.float64).T
        off = (value - truth[name]).abs()
        lines.append(
            {
                "samples": count,
                "approximation": name,
                "truth": truth[name],
                "mean estimate": float(value.mean()),
                "mean plug-in": float(plug_in_value.mean()),
                "plug-in bias": float(plug_in_value.mean()) - truth[name],
                "standard deviation": float(value.std()),
                "mean standard error": float(stderr.mean()),
                "coverage at 1 stderr": float((off <= stderr).double().mean()),
                "coverage at 2 stderr": float((off <= 2 * stderr).double().mean()),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "population_coverage.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    population = Population()
    truth = cosines(population.stream())
    lines = []
    for count in SIZES:
        for line in table_of(population, count, asked.replications, truth):
            lines.append(line)
            print(
                f"N={count:<4} {line['approximation']:<9} truth {line['truth']:.4f}"
                f"  estimate {line['mean estimate']:.4f}  plug-in {line['mean plug-in']:.4f}"
                f"  sd {line['standard deviation']:.4f}  stderr {line['mean standard error']:.4f}"
                f"  within 1: {line['coverage at 1 stderr']:.2f}  within 2: {line['coverage at 2 stderr']:.2f}",
                flush=True,
            )
    record = {
        "command": f"python benchmarks/population_coverage.py --replications {asked.replications}",
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kronscope": ks.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "shape": list(SHAPE),
        "replications": asked.replications,
        "seconds": round(time.perf_counter() - started, 1),
        "table": lines,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {asked.out.name}")


if __name__ == "__main__":
    main()
