"""The runs of the paper's experiments, and their records: what `benchmarks/reproduction.py` makes its tables of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from kronscope import Results
from kronscope.measures.rows import Detail, Row

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records" / "reproduction"
PICTURES = ROOT / "docs" / "images" / "reproduction"

# Everything that decides a run, by its name.
_SHORT = "--workload cifar-resnet18"
_RESNET = "--workload cifar-resnet18 --dataset cifar-10 --batch 32 --samples 256"
_LONG = f"{_RESNET} --steps 3125"
_VIT = "--workload cifar-vit --dataset cifar-10 --batch 32 --steps 1600 --samples 128 --lr 3e-4 --warmup 100"
_CONVNEXT = "--workload imagenet-convnext --dataset imagenet-sample --batch 32 --steps 160 --samples 128"
_WARM = f"{_CONVNEXT} --accuracy 0.02 --lr 5e-4 --warmup 100"
_GRID = "--measure-at 0,100,200,400,700,1000,1400,1900,2500,3125"
RUNS = {
    "mnist2": "all --workload mnist2 --probes 5",
    "mnist2-1": "all --workload mnist2 --seed 1",
    "mnist2-2": "all --workload mnist2 --seed 2",
    "mnist2-sampled": "figure1 --workload mnist2 --labels sampled",
    "mnist2-all": "all --workload mnist2 --scale paper --held-out 2115 --probes 5",
    "cifar-resnet18": f"figures {_SHORT} --steps 300 --samples 128 --measure-at 0,10,30,100,300 --probes 5",
    "cifar-resnet18-spectrum": f"figure2 {_SHORT} --steps 100 --samples 32 --measure-at 0,100",
    "cifar-resnet18-long": f"figures {_LONG} {_GRID}",
    "cifar-resnet18-long-1": f"all {_LONG} --measure-at 3125 --seed 1",
    "cifar-resnet18-sampled": f"figure1 {_RESNET} --steps 200 --measure-at 100,200 --labels sampled",
    "cifar-vit": "figure5 --workload cifar-vit --steps 1000 --samples 128 --measure-at 0,50,150,400,1000",
    "cifar-vit-short": "figure5 --workload cifar-vit --steps 100 --samples 32 --measure-at 0,100",
    "cifar-vit-long": f"figure5 {_VIT} --measure-at 0,200,800,1600",
    "imagenet-convnext": "figures --workload imagenet-convnext --steps 60 --samples 16 --measure-at 0,20,60",
    "imagenet-convnext-long": f"figures {_WARM} --measure-at 0,30,60,90,120,160",
    "imagenet-convnext-constant": f"figure4 {_CONVNEXT} --accuracy 0.05 --measure-at 0,160",
}
# The verdicts' columns: a title, and records of the same network and length (several seeds).
NETWORKS = {
    "MNIST, 2,048 samples": ("mnist2", "mnist2-1", "mnist2-2"),
    "MNIST, all 12,665": ("mnist2-all",),
    "ResNet18, 300 steps": ("cifar-resnet18", "cifar-resnet18-spectrum"),
    "ResNet18, 3,125 steps": ("cifar-resnet18-long", "cifar-resnet18-long-1"),
    "ViT, 1,000 steps": ("cifar-vit", "cifar-vit-short"),
    "ViT, 1,600 steps": ("cifar-vit-long",),
    "ConvNeXt-T, 60 steps": ("imagenet-convnext",),
    "ConvNeXt-T, 160 steps": ("imagenet-convnext-long",),
    "character GPT": ("language-model",),
}


# Runs of networks that had learned next to nothing when they ended: thin and grey in the figures.
SHORT = ("ResNet18, 300 steps", "ViT, 1,000 steps", "ConvNeXt-T, 60 steps")


def loaded(name: str) -> Results:
    return language_model() if name == "language-model" else Results.load(RECORDS / f"{name}.json")


def language_model(optimizer: str = "adamw") -> Results:
    """What `benchmarks/language_model.py` measured along one optimizer's run."""
    record = json.loads((RECORDS.parent / "language_model" / f"{optimizer}-seed0.json").read_text(encoding="utf-8"))
    rows = [
        Row(
            item["layer"],
            *(512 if item["layer"] == wide else 128 for wide in ("fc1", "fc2")),
            part["step"],
            "gauss_newton",
            "exact",
            1,
            item["approximation"],
            item["cosine"],
            stderr=item["stderr"],
        )
        for part in record["cosines"]
        for item in part["rows"]
    ]
    details = [
        Detail(item["layer"], part["step"], "gauss_newton", "exact", 1, "traces", {"alpha": item["alpha"]})
        for part in record.get("rounds", ())
        for item in part["rows"]
    ]
    return Results(rows, details, settings={"data": "tiny-shakespeare", "seed": 0, "partial": False})


def there(names: Iterable[str]) -> list[Results]:
    """The records there are."""
    paths = {name: RECORDS / f"{name}.json" for name in names}
    paths["language-model"] = RECORDS.parent / "language_model" / "adamw-seed0.json"
    return [loaded(name) for name in names if paths[name].exists()]


def number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*out, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def named(rows: Iterable[Row], approximation: str) -> Row | None:
    return next((row for row in rows if row.approximation == approximation), None)


def cosine(rows: Iterable[Row], approximation: str) -> float | None:
    found = named(rows, approximation)
    return None if found is None else found.cosine


def together(one: Row, two: Row) -> float:
    """A standard error of the difference of two cosines, as if they were independent; 0 where both are exact.

    Both come from the same columns or records, and move together, so that it errs on the large side.
    """
    return math.hypot(*(0.0 if math.isnan(row.stderr) else row.stderr for row in (one, two)))


def estimate(row: Row | None) -> str:
    """A cosine, with its standard error if it has one."""
    if row is None or math.isnan(row.cosine):
        return "–"
    return f"{row.cosine:.3f}" + ("" if math.isnan(row.stderr) else f" ± {row.stderr:.3f}")


def by_step(results: Results, truth: str, labels: str, batch: int = 1) -> dict[tuple[str, int], list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in results:
        if (row.truth, row.labels, row.batch_size) == (truth, labels, batch):
            found.setdefault((row.layer, row.step), []).append(row)
    return found


def own_labels(results: Results, truth: str) -> str:
    """The labels of the main rows: exact, or sampled where there were too many classes."""
    if truth == "adagrad":
        return "real"
    return "exact" if any(row.labels == "exact" for row in results) else "sampled"
