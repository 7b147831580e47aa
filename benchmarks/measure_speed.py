"""How fast is measuring? Against the straightforward route and against matrix-vector products of curvlinops.

    python benchmarks/measure_speed.py [--repeats 5] [--threads 2] [--out benchmarks/records/measure_speed.json]

Three parts, each a ratio from interleaved runs in this process:

mlp   784-512-10, first layer, N = 1024, exact labels, float32: the four default approximations and their exact cosines,
      against (a) per-sample gradients for every class by vmap, factors by einsum, the Gram matrix and inner products,
      timed on N/16 samples and scaled by the known growth of each piece, and (b) 50 Gauss-Newton-vector products.
conv  64 -> 64, 3x3, 16x16 pixels, N = 256, ten classes exact, float64: shampoo2, shampoo, kfac-reduce and their exact
      cosines, against (a) in full; then the certified optimum by itself.
growth  time and memory against N.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

import kronscope as ks


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Times of each, taken in turns, so that a busy moment of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(timed(work))
    return times


def summary(values: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


class Route:
    """The straightforward route, piece by piece."""

    def __init__(self, model: nn.Module, name: str, inputs: Tensor, classes: int) -> None:
        self.model, self.name, self.inputs, self.classes = model, name, inputs, classes

    def gradients(self) -> Tensor:
        """Per-sample gradients of every class direction sqrt(p_c)(e_c - p), (N * C, m, n)."""
        weight = dict(self.model.named_parameters())[self.name].detach()

        def of_sample(x: Tensor) -> Tensor:
            logits, pull = vjp(lambda w: functional_call(self.model, {self.name: w}, (x[None],))[0], weight)
            p = logits.softmax(0)
            columns = (torch.diag(p.sqrt()) - torch.outer(p.sqrt(), p)).detach()
            return vmap(pull)(columns)[0]

        grads = vmap(of_sample)(self.inputs).detach()
        return grads.reshape(-1, weight.shape[0], weight[0].numel())

    @staticmethod
    def factors(grads: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Shampoo's factors by einsum."""
        left = torch.einsum("kmn,kpn->mp", grads, grads) / samples
        right = torch.einsum("kmn,kmq->nq", grads, grads) / samples
        return left, right

    @staticmethod
    def norm(grads: Tensor, samples: int) -> float:
        """The norm of H from the whole Gram matrix."""
        flat = grads.flatten(1)
        return float((flat @ flat.T).square().sum().sqrt()) / samples

    @staticmethod
    def inner(grads: Tensor, left: Tensor, right: Tensor, samples: int) -> float:
        """The inner product of H with a Kronecker product."""
        return float((grads * (left @ grads @ right)).sum()) / samples


def root(matrix: Tensor) -> Tensor:
    """The square root of a PSD matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def mlp(repeats: int) -> dict[str, Any]:
    """The linear case."""
    from curvlinops import GGNLinearOperator

    torch.manual_seed(0)
    samples, part = 1024, 16
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    inputs, targets = torch.rand(samples, 784), torch.randint(10, (samples,))
    loss = nn.CrossEntropyLoss()
    data = [(inputs, targets)]
    route = Route(model, "0.weight", inputs[: samples // part], 10)
    few = samples // part
    weight = dict(model.named_parameters())["0.weight"]
    operator = GGNLinearOperator(model, loss, [weight], data, check_deterministic=False)
    vector = torch.randn(weight.numel())
    pieces: dict[str, list[float]] = {"gradients": [], "factors": [], "gram": [], "inner": []}
    times: dict[str, list[float]] = {"kronscope": [], "route": [], "route without inner products": [], "products": []}

    def ours() -> ks.Results:
        return ks.measure(model, loss, data, layers=["0.weight"], progress=False)

    def one_route() -> None:
        start = time.perf_counter()
        grads = route.gradients()
        after_gradients = time.perf_counter()
        left, right = route.factors(grads, few)
        roots = root(left), root(right)
        after_factors = time.perf_counter()
        route.norm(grads, few)
        after_gram = time.perf_counter()
        for a, b in ((left, right), roots, (left, right), (left, right)):
            route.inner(grads, a, b, few)
        after_inner = time.perf_counter()
        # everything but the Gram matrix grows linearly in N
        took = [
            (after_gradients - start) * part,
            (after_factors - after_gradients) * part,
            (after_gram - after_factors) * part**2,
            (after_inner - after_gram) * part,
        ]
        for name, seconds in zip(pieces, took, strict=True):
            pieces[name].append(seconds)
        times["route"].append(sum(took))
        times["route without inner products"].append(sum(took[:3]))

    ours(), operator @ vector
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = ours()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(repeats):
        times["kronscope"].append(timed(ours))
        times["products"].append(timed(lambda: [operator @ vector for _ in range(50)]))
        one_route()
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "times": {name: summary(values) for name, values in times.items()},
        "route pieces": {name: summary(values) for name, values in pieces.items()},
        "route / kronscope": middle["route"] / middle["kronscope"],
        "route without inner products / kronscope": middle["route without inner products"] / middle["kronscope"],
        "kronscope / 50 products": middle["kronscope"] / middle["products"],
        "peak MiB of the process": peak / 1024,
        "peak MiB before": before / 1024,
        "cosines": {row.approximation: row.cosine for row in results},
    }


def conv(repeats: int) -> dict[str, Any]:
    """The convolution."""
    torch.manual_seed(0)
    samples = 256
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    ).double()
    inputs, targets = torch.randn(samples, 64, 16, 16).double(), torch.randint(10, (samples,))
    loss = nn.CrossEntropyLoss()
    route = Route(model, "0.weight", inputs, 10)
    names = ("shampoo2", "shampoo", "kfac-reduce")

    def ours() -> ks.Results:
        return ks.measure(model, loss, [(inputs, targets)], layers=["0.weight"], approximations=names, progress=False)

    def by_route() -> None:
        grads = route.gradients()
        left, right = route.factors(grads, samples)
        route.norm(grads, samples)
        for a, b in ((left, right), (root(left), root(right)), (left, right)):
            route.inner(grads, a, b, samples)

    def by_route_without_inner() -> None:
        grads = route.gradients()
        route.factors(grads, samples)
        route.norm(grads, samples)

    times = interleaved(
        {"kronscope": ours, "route": by_route, "route without inner products": by_route_without_inner}, repeats
    )
    middle = {name: statistics.median(values) for name, values in times.items()}
    optimum = ks.measure(
        model,
        loss,
        [(inputs, targets)],
        layers=["0.weight"],
        approximations=("optimal",),
        details=("spectrum",),
        progress=False,
    )
    spectrum = optimum.details[0]
    return {
        "times": {name: summary(values) for name, values in times.items()},
        "kronscope / route": middle["kronscope"] / middle["route"],
        "kronscope / route without inner products": middle["kronscope"] / middle["route without inner products"],
        "optimum": {
            "seconds beyond capture": optimum.rows[0].seconds,
            "rounds": spectrum.number("rounds"),
            "residual": spectrum.number("residual"),
        },
    }


def growth(repeats: int) -> list[dict[str, float]]:
    """Time against N, for the MLP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    points = []
    for samples in (128, 256, 512, 1024, 2048, 4096):
        data = [(torch.rand(samples, 784), torch.randint(10, (samples,)))]
        taken = [
            timed(lambda data=data: ks.measure(model, nn.CrossEntropyLoss(), data, layers=["0.weight"], progress=False))
            for _ in range(repeats)
        ]
        points.append({"samples": samples, **summary(taken)})
    return points


def main() -> None:
    """Run all parts and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "measure_speed.json")
    parser.add_argument("--parts", default="mlp,conv,growth")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = arguments.parts.split(",")
    record: dict[str, Any] = {
        "command": "python benchmarks/measure_speed.py",
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
            "threads": arguments.threads,
        },
    }
    for name, part in (("mlp", mlp), ("conv", conv), ("growth", growth)):
        if name in chosen:
            record[name] = part(min(arguments.repeats, 2) if name == "growth" else arguments.repeats)
            print(name, json.dumps(record[name], indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
