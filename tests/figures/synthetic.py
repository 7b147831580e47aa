"""Made-up results with the shapes that real ones have, for tests of tables, figures and the report."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from kronscope.measures.results import Detail, Results, Row

FOUR = ("optimal", "shampoo2", "shampoo", "kfac-reduce")
ALL = (
    *FOUR,
    "kfac-expand",
    "ekfac",
    "soap",
    "tnt",
    "caspr",
    "kl",
    "one-sided",
    "diagonal",
    "identity",
)
_LEVEL = {
    "optimal": 0.0,
    "shampoo2": 0.03,
    "shampoo": 0.3,
    "kfac-reduce": 0.06,
    "kfac-expand": 0.2,
    "ekfac": 0.04,
    "soap": -0.02,
    "tnt": 0.03,
    "caspr": 0.36,
    "kl": 0.12,
    "one-sided": 0.4,
    "diagonal": 0.5,
    "identity": 0.62,
}
GAUSS_NEWTON = ("gauss_newton", "exact", 1)
ADAGRAD = ("adagrad", "real", 1)
Condition = tuple[str, str, int]


def make_rows(
    layer: str = "fc.weight",
    shape: tuple[int, int] = (10, 64),
    steps: Sequence[int] = (0,),
    condition: Condition = GAUSS_NEWTON,
    names: Sequence[str] = FOUR,
    *,
    level: float = 0.9,
    error: float = math.nan,
    seed: int = 0,
) -> list[Row]:
    noise = random.Random(f"{layer}{condition}{seed}")
    tilt = noise.uniform(-0.1, 0.1)
    rows = []
    for place, step in enumerate(steps):
        drift = tilt * place / max(len(steps) - 1, 1) + noise.gauss(0, 0.01)
        for name in names:
            cosine = min(1.0, max(0.0, level + drift - _LEVEL.get(name, 0.2) * level * (1 + tilt)))
            rows.append(
                Row(
                    layer=layer,
                    rows=shape[0],
                    cols=shape[1],
                    step=step,
                    truth=condition[0],
                    labels=condition[1],
                    batch_size=condition[2],
                    approximation=name,
                    cosine=cosine,
                    stderr=error * noise.uniform(0.5, 1.5),
                    relative_error=math.sqrt(1 - cosine**2),
                    samples=1024,
                    seconds=noise.uniform(0.01, 0.4),
                )
            )
    return rows


def make_details(
    layer: str = "fc.weight", steps: Sequence[int] = (0,), condition: Condition = GAUSS_NEWTON
) -> list[Detail]:
    details = []
    noise = random.Random(f"{layer}{condition}")
    for place, step in enumerate(steps):
        part = place / max(len(steps) - 1, 1)
        ratio = 0.85 - 0.2 * part + noise.gauss(0, 0.01)
        sigma = [1.0, *(0.4 * 0.75**i * noise.uniform(0.8, 1.2) for i in range(15))]
        alpha = [7.0, *(noise.gauss(0, 0.8) for _ in range(15))]
        other = [2.8, *(noise.gauss(0, 0.4) for _ in range(15))]
        spectrum = {
            "sigma": sigma,
            "alpha_left": other,
            "alpha_right": alpha,
            "ratio": ratio,
            "left": 0.97 - 0.03 * part,
            "right": 0.99 - 0.02 * part,
        }
        exponents = [i / 20 for i in range(2, 41)]
        curve = [0.9 * math.exp(-((p - 0.8 - 0.4 * part) ** 2) / 1.5) for p in exponents]
        sizes = [2.0**i for i in range(11)]
        batches = {
            "batch_size": sizes,
            "optimal": [0.9] * 11,
            "shampoo2": [0.86 / (1 + 0.02 * size**0.5) for size in sizes],
            "shampoo": [0.6 / (1 + 0.04 * size**0.5) for size in sizes],
        }
        for kind, values in (
            ("spectrum", spectrum),
            ("exponents", {"exponent": exponents, "cosine": curve}),
            ("batch_sizes", batches),
        ):
            details.append(Detail(layer, step, *condition, kind, values))  # type: ignore[arg-type]
    return details


def one_step(layers: int = 8, names: Sequence[str] = FOUR, *, error: float = math.nan) -> Results:
    """A whole model at one step: what ``measure`` returns."""
    rows = []
    for number in range(layers):
        name = f"encoder.layer.{number}.mlp.{'up' if number % 2 else 'down'}.weight"
        rows += make_rows(name, (64 + number, 256), names=names, level=0.95 - 0.05 * (number % 7), error=error)
    settings = {"seed": 0, "population": not math.isnan(error), "loss": "CrossEntropyLoss", "device": "cpu"}
    return Results(rows, settings=settings)


def training_run(steps: Sequence[int] = tuple(range(0, 1001, 100)), *, level: float = 0.85, seed: int = 0) -> Results:
    """One layer over training, against every truth of the paper."""
    layer, shape, names = "layer1.1.conv1.weight", (64, 576), ("optimal", "shampoo2", "shampoo", "kfac-reduce")
    rows, details = [], []
    for condition in (GAUSS_NEWTON, ADAGRAD, ("gauss_newton", "real", 1), ("gauss_newton", "real", 256)):
        low = 0.25 if condition[2] == 256 else 0.0
        use = names if condition[0] == "gauss_newton" else names[:3]
        rows += make_rows(layer, shape, steps, condition, use, level=level - low, error=0.01, seed=seed)
        details += make_details(layer, steps, condition) if condition in (GAUSS_NEWTON, ADAGRAD) else []
    settings = {
        "workload": "cifar-resnet18",
        "optimizer": {"name": "SGD", "lr": 0.02, "momentum": 0.9, "batch": 128},
        "seed": 0,
        "cut": ["1,000 training steps instead of 10,000", "1,024 samples measured"],
        "environment": {"torch": "2.13.0", "python": "3.11.7", "device": "cpu"},
    }
    return Results(rows, details, settings)


def transformer_run(steps: Sequence[int] = (0, 50, 100, 200, 400)) -> Results:
    """Three layers over training, with a cosine that does not exist."""
    rows, details = [], []
    for number, layer in enumerate(("blocks.3.mlp.fc1.weight", "blocks.3.mlp.fc2.weight", "blocks.3.attn.qkv[0:1024]")):
        for condition in (GAUSS_NEWTON, ADAGRAD):
            rows += make_rows(layer, (512, 512), steps, condition, level=0.9 - 0.2 * number)
            details += make_details(layer, steps, condition)
    missing = "K-FAC needs inputs and output gradients, but only whole gradients were recorded"
    rows = [
        dataclasses.replace(row, cosine=math.nan, relative_error=math.nan, note=missing)
        if row.truth == "adagrad" and row.approximation == "kfac-reduce"
        else row
        for row in rows
    ]
    return Results(rows, details, {"workload": "cifar-vit", "cut": {"width": "128 instead of 512"}}, partial=True)
