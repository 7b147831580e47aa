"""The numbers, verdicts and pictures of docs/reproduction.md and docs/reproduction-summary.md.

    python benchmarks/reproduction.py commands                            # the runs, one line each
    python benchmarks/reproduction.py run NAME ... --data-dir DIR --out RUNS   # run some of them, or go on with them
    python benchmarks/reproduction.py collect RUN [RUN ...]               # copy results and pictures of run folders
    python benchmarks/reproduction.py tables                              # write the documents' tables from the records
    python benchmarks/reproduction.py figures                             # draw the summary's figures from the records

A table stands between `<!-- table KIND [RUN] [TRUTH] -->` and `<!-- end -->` in a document; a test checks that
every one of them is what the records give.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kronscope import Results, figures
from kronscope.measures.rows import Detail, Row
from kronscope.paper import plans, results_so_far
from kronscope.paper.outputs import columns_of

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records" / "reproduction"
DOCUMENTS = tuple(ROOT / "docs" / name for name in ("reproduction.md", "reproduction-summary.md"))
PICTURES = ROOT / "docs" / "images" / "reproduction"
MARK = re.compile(r"(<!-- table (?P<what>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
SHAMPOOS = ("optimal", "shampoo2", "shampoo")
TITLES = {"optimal": "optimal", "shampoo2": "Shampoo²", "shampoo": "Shampoo", "kfac-reduce": "K-FAC"}


# Everything that decides a run, by its name.
_SHORT = "--workload cifar-resnet18"
_RESNET = "--workload cifar-resnet18 --dataset cifar-10 --batch 32 --samples 256"
_LONG = f"{_RESNET} --steps 3125"
_VIT = "--workload cifar-vit --dataset cifar-10 --batch 32 --steps 1600 --samples 128 --lr 3e-4 --warmup 100"
_CONVNEXT = (
    "--workload imagenet-convnext --dataset imagenet-sample --batch 32 --steps 160 --samples 128 --accuracy 0.02"
)
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
    "cifar-resnet18-long-1": f"figure4 {_LONG} --measure-at 3125 --seed 1",
    "cifar-resnet18-sampled": f"figure1 {_RESNET} --steps 200 --measure-at 100,200 --labels sampled",
    "cifar-vit": "figure5 --workload cifar-vit --steps 1000 --samples 128 --measure-at 0,50,150,400,1000",
    "cifar-vit-short": "figure5 --workload cifar-vit --steps 100 --samples 32 --measure-at 0,100",
    "cifar-vit-long": f"figure5 {_VIT} --history-every 4 --measure-at 0,200,800,1600",
    "imagenet-convnext": "figures --workload imagenet-convnext --steps 60 --samples 16 --measure-at 0,20,60",
    "imagenet-convnext-long": f"figures {_CONVNEXT} --lr 5e-4 --warmup 100 --measure-at 0,30,60,90,120,160",
    "imagenet-convnext-constant": f"figure4 {_CONVNEXT} --measure-at 0,60,160",
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


def commands() -> str:
    """The runs as one would type them."""
    return "".join(f"kronscope paper {words} --data-dir DATA --out runs/{name}\n" for name, words in RUNS.items())


def run(names: Iterable[str], data_dir: Path, out: Path) -> None:
    for name in names:
        words = [*RUNS[name].split(), "--data-dir", str(data_dir), "--out", str(out / name), "--resume"]
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            subprocess.run([sys.executable, "-m", "kronscope", "paper", *words], check=True)
        finally:
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            add_cost(out / f"{name}.cost.json", time.monotonic() - began, after.ru_utime - before.ru_utime)


def add_cost(path: Path, wall: float, cpu: float) -> None:
    """What a run took, all its parts together if it was stopped and went on."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"wall_seconds": 0.0, "cpu_seconds": 0.0}
    known = {"wall_seconds": known["wall_seconds"] + wall, "cpu_seconds": known["cpu_seconds"] + cpu}
    path.write_text(json.dumps(known) + "\n", encoding="utf-8")


def collect(folders: Iterable[Path]) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        results = results_so_far(folder)
        name = folder.resolve().name
        results.save(RECORDS / f"{name}.json")
        cost = folder.with_name(f"{name}.cost.json")
        if cost.exists():
            shutil.copyfile(cost, RECORDS / cost.name)
        if (folder / "probes.json").exists():
            Results.load(folder / "probes.json").save(RECORDS / f"{name}-probes.json")
        if results.partial:  # a run that was stopped has not drawn anything
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            for picture, figure in plans.get(config["figure"]).draw(columns_of({config["title"]: results})).items():
                figures.save(figure, PICTURES / f"{name}-{picture}.png")
        for picture in sorted(folder.glob("*.png")):
            shutil.copyfile(picture, PICTURES / f"{name}-{picture.name}")


# --- tables ---------------------------------------------------------------------------------------------------------


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
    return Results(rows, settings={"data": "tiny-shakespeare", "seed": 0, "partial": False})


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


def main_table(workload: str, truth: str) -> str:
    results = loaded(workload)
    groups = by_step(results, truth, own_labels(results, truth))
    extra = ("kfac-reduce",) if any(cosine(rows, "kfac-reduce") is not None for rows in groups.values()) else ()
    names = (*SHAMPOOS, *(extra if truth != "adagrad" else ()))
    several = len({layer for layer, _ in groups}) > 1
    head = [*(["layer"] if several else []), "step", *(TITLES[name] for name in names)]
    return table(
        head,
        (
            [*([layer] if several else []), str(step), *(estimate(named(rows, name)) for name in names)]
            for (layer, step), rows in sorted(groups.items())
        ),
    )


def details(workload: str, kind: str, truth: str) -> list[Detail]:
    return [item for item in loaded(workload).details if item.kind == kind and item.truth == truth]


def spectrum_table(workload: str, truth: str) -> str:
    return table(
        ["step", "σ₁/‖σ‖", "L", "R"],
        (
            [str(item.step), *(number(item.number(name)) for name in ("ratio", "left", "right"))]
            for item in details(workload, "spectrum", truth)
        ),
    )


def alpha_table(workload: str, truth: str) -> str:
    lines = []
    for item in details(workload, "spectrum", truth):
        sigma = item.series("sigma")
        if len(sigma) < 2:
            continue
        ratios = [
            [value / item.series(name)[0] for value in item.series(name)[1:]] for name in ("alpha_left", "alpha_right")
        ]
        lines.append(
            [str(item.step), str(len(sigma)), number(sigma[1] / sigma[0]), *(number(max(side)) for side in ratios)]
        )
    return table(["step", "triples", "σ₂/σ₁", "largest tr Uᵢ/tr U₁, i ≥ 2", "largest tr Vᵢ/tr V₁, i ≥ 2"], lines)


def labels_table(workload: str, truth: str) -> str:
    results = loaded(workload)
    one, many = (by_step(results, truth, "real", batch) for batch in (1, 256))
    return table(
        ["step", "optimal", "Shampoo², B = 1", "Shampoo², B = 256", "Shampoo, B = 1", "Shampoo, B = 256"],
        (
            [
                str(step),
                number(cosine(one[layer, step], "optimal")),
                *(number(cosine(group[layer, step], name)) for name in SHAMPOOS[1:] for group in (one, many)),
            ]
            for layer, step in sorted(one)
        ),
    )


def probes_table(workload: str, truth: str) -> str:
    exact, probed = loaded(workload), loaded(f"{workload}-probes")
    mine, theirs = (by_step(results, truth, own_labels(results, truth)) for results in (exact, probed))

    head = ["step", *(f"{TITLES[name]}{kind}" for name in SHAMPOOS for kind in (", exact", ", five probes"))]
    lines = (
        [
            str(key[1]),
            *(text for name in SHAMPOOS for text in (number(cosine(rows, name)), estimate(named(theirs[key], name)))),
        ]
        for key, rows in sorted(mine.items())
    )
    return table(head, lines)


def exponent_table(workload: str, truth: str) -> str:
    lines = []
    for item in details(workload, "exponents", truth):
        curve = dict(zip(item.series("exponent"), item.series("cosine"), strict=True))
        best = max(curve, key=lambda p: curve[p])
        lines.append([str(item.step), f"{best:g}", *(number(curve[p]) for p in (best, 1.0, 0.5))])
    return table(["step", "best p", "(L ⊗ R)^p", "p = 1", "p = ½"], lines)


def sampled_table(workload: str, truth: str) -> str:
    """Shampoo² fitted on exact labels, on labels that the model draws, and on real ones; a run and its sampled twin."""
    usual, twin = loaded(workload), loaded(f"{workload.removesuffix('-long')}-sampled")
    exact, real = (by_step(usual, truth, labels) for labels in ("exact", "real"))
    return table(
        ["step", "optimal", "exact labels", "labels drawn by the model", "real labels"],
        (
            [
                str(key[1]),
                number(cosine(exact[key], "optimal")),
                *(number(cosine(rows[key], "shampoo2")) for rows in (exact, drawn, real)),
            ]
            for drawn in (by_step(twin, truth, "sampled"),)
            for key in sorted(drawn)
            if key in exact
        ),
    )


def seeds_table(workload: str, truth: str) -> str:
    """The last measurement of runs that differ in their seeds alone: every number, and half its range."""
    names = next(names for names in NETWORKS.values() if workload in names)
    records = [loaded(name) for name in names if (RECORDS / f"{name}.json").exists()]
    lines, values = [], []
    for results in records:
        groups = by_step(results, truth, own_labels(results, truth))
        last = max(step for _, step in groups)
        (rows,) = (rows for (_, step), rows in groups.items() if step == last)
        values.append([cosine(rows, name) for name in TITLES])
        lines.append([str(results.settings["seed"]), str(last), *map(number, values[-1])])
    spread = [
        number((max(column) - min(column)) / 2) if None not in column else "–" for column in zip(*values, strict=True)
    ]
    return table(["seed", "step", *TITLES.values()], [*lines, ["± half the range", "", *spread]])


def family_table(workload: str, truth: str) -> str:
    results = loaded(workload)
    groups = by_step(results, truth, own_labels(results, truth))
    steps = sorted(groups)
    names = [row.approximation for row in groups[steps[-1]]]
    head = ["approximation", *(f"step {step}" for _, step in (steps[0], steps[-1]))]
    return table(
        head, ([name, *(number(cosine(groups[key], name)) for key in (steps[0], steps[-1]))] for name in names)
    )


# --- verdicts -------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A number a statement is judged by, at one layer and step, and its standard error if it is an estimate."""

    layer: str
    step: int
    value: float
    stderr: float = 0.0


class Statement(NamedTuple):
    """A statement of the paper: it holds at a point if the point's value is at most ``limit``."""

    name: str
    text: str
    rule: str
    limit: float
    values: Callable[[Results], list[Point]]

    def verdict(self, records: Iterable[Results]) -> str:
        """Held if it holds at every point, partly if at half of them or more."""
        points = [point for record in records for point in self.values(record)]
        if not points:
            return "–"
        good = sum(point.value <= self.limit + 1e-9 for point in points)
        word = "held" if good == len(points) else "**partly**" if 2 * good >= len(points) else "**not held**"
        worst = max(points, key=lambda point: point.value)
        bar = f" ± {worst.stderr:.3f}" if worst.stderr else ""
        near = sum(0 < abs(point.value - self.limit) < 2 * point.stderr for point in points)
        return f"{word} {good}/{len(points)}, {worst.value:.3f}{bar}" + (f" ({near} open)" if near else "")


def pairs(truth: str, low: str, high: str, labels: str | None = None, batch: int = 1) -> Callable[..., list[Point]]:
    """The cosine of ``high`` minus that of ``low``, at each layer and step."""

    def values(results: Results) -> list[Point]:
        groups = by_step(results, truth, labels or own_labels(results, truth), batch)
        found = [(key, *(named(rows, name) for name in (low, high))) for key, rows in sorted(groups.items())]
        return [
            Point(*key, two.cosine - one.cosine, together(one, two))
            for key, one, two in found
            if one is not None and two is not None and not math.isnan(one.cosine + two.cosine)
        ]

    return values


def batches(results: Results) -> list[Point]:
    """Shampoo² on real labels: batches of 256 minus batches of 1."""
    one, many = (by_step(results, "gauss_newton", "real", batch) for batch in (1, 256))
    found = [(key, *(named(group.get(key, ()), "shampoo2") for group in (one, many))) for key in sorted(one)]
    return [
        Point(*key, large.cosine - small.cosine, together(small, large))
        for key, small, large in found
        if small is not None and large is not None
    ]


def rounds(truth: str) -> Callable[[Results], list[Point]]:
    """What one round leaves of the distance to 1, for the worse of the two factors."""

    def values(results: Results) -> list[Point]:
        found = []
        for item in results.details:
            if item.kind == "spectrum" and item.truth == truth:
                before, after = 1 - item.number("ratio"), 1 - min(item.number("left"), item.number("right"))
                found.append(Point(item.layer, item.step, after / before if before > 1e-9 else 0.0))
        return found

    return values


def traces(results: Results) -> list[Point]:
    """The largest trace of a singular vector beyond the first, over that of the first."""
    return [
        Point(item.layer, item.step, max(value / item.series(name)[0] for value in item.series(name)[1:]))
        for item in results.details
        if item.kind == "spectrum" and len(item.series("sigma")) > 1
        for name in ("alpha_left", "alpha_right")
    ]


GN, ADA = "gauss_newton", "adagrad"
_CLOSE, _NEAR = "Shampoo² is very close to the optimal product", "optimal − Shampoo² ≤ 0.05"
_WORSE, _BELOW = "Shampoo is significantly worse than Shampoo²", "Shampoo − Shampoo² ≤ −0.05"
_ROUND, _LEFT = "one round from the identity comes much closer to 1 than σ₁/‖σ‖", "distance to 1 left / before ≤ 0.5"
STATEMENTS = (
    Statement("close", f"{_CLOSE}, Gauss–Newton", _NEAR, 0.05, pairs(GN, "shampoo2", "optimal")),
    Statement("close-adagrad", f"{_CLOSE}, Adagrad", _NEAR, 0.05, pairs(ADA, "shampoo2", "optimal")),
    Statement("worse", f"{_WORSE}, Gauss–Newton", _BELOW, -0.05, pairs(GN, "shampoo2", "shampoo")),
    Statement("worse-adagrad", f"{_WORSE}, Adagrad", _BELOW, -0.05, pairs(ADA, "shampoo2", "shampoo")),
    Statement("round", f"{_ROUND}, Gauss–Newton", _LEFT, 0.5, rounds(GN)),
    Statement("round-adagrad", f"{_ROUND}, Adagrad", _LEFT, 0.5, rounds(ADA)),
    Statement("traces", "α₁ exceeds the other αᵢ", "largest αᵢ/α₁ ≤ 1", 1.0, traces),
    Statement("real", "real labels, B = 1, track the optimum", _NEAR, 0.05, pairs(GN, "shampoo2", "optimal", "real")),
    Statement("batch", "B = 256 is worse than B = 1", "Shampoo², B = 256 − B = 1 ≤ 0", 0.0, batches),
    Statement(
        "kfac", "Shampoo² is at or above K-FAC", "K-FAC − Shampoo² ≤ 0", 0.0, pairs(GN, "shampoo2", "kfac-reduce")
    ),
)


def verdicts_table(group: str, truth: str) -> str:
    """Each statement for each network of which there is a record."""
    columns = {title: records for title, names in NETWORKS.items() if (records := there(names))}
    return table(
        ["statement, and when it holds at a point", *columns],
        (
            [f"{item.text}: *{item.rule}*", *(item.verdict(records) for records in columns.values())]
            for item in STATEMENTS
        ),
    )


def runs_table(group: str, truth: str) -> str:
    """What each recorded run was."""
    lines = []
    for name in RUNS:
        if not (RECORDS / f"{name}.json").exists():
            lines.append([f"`{name}`", *["–"] * 5, "**not run**", "–"])
            continue
        results = loaded(name)
        facts = results.settings
        held = (facts.get("held_out") or [{}])[-1]
        accuracy = f"{held['accuracy']:.1%} on {held['samples']:,}, step {held['step']:,}" if held else "not recorded"
        reached = f"{max(results.steps):,} of {facts['steps']:,}" if results.partial else f"{facts['steps']:,}"
        batch = "all" if facts["batch"] is None else str(facts["batch"])
        lines.append(
            [
                f"`{name}`",
                facts["data"],
                reached,
                batch,
                f"{facts['samples']:,}",
                str(facts["seed"]),
                accuracy,
                cost(name),
            ]
        )
    return table(["run", "data", "steps", "batch", "measured on", "seed", "test accuracy", "took"], lines)


def cost(name: str) -> str:
    """The time a run took, training and measuring together."""
    path = RECORDS / f"{name}.cost.json"
    if not path.exists():
        return "–"
    seconds = json.loads(path.read_text(encoding="utf-8"))
    return f"{seconds['wall_seconds'] / 60:.0f} min, {seconds['cpu_seconds'] / 60:.0f} of CPU"


def live_table(group: str, truth: str) -> str:
    """What optimizers hold, beside the best product, at the last step measured."""
    lines = []
    for optimizer in ("shampoo", "soap", "kl-shampoo"):
        if not (RECORDS.parent / "language_model" / f"{optimizer}-seed0.json").exists():
            continue
        results = language_model(optimizer)
        groups = by_step(results, "gauss_newton", "exact")
        lines += [
            [optimizer, str(step), layer, *(number(cosine(rows, name)) for name in ("optimal", "shampoo2", "live"))]
            for (layer, step), rows in groups.items()
            if step == max(results.steps)
        ]
    return table(["optimizer", "step", "layer", "optimal", "Shampoo²", "in use"], lines)


def steps_table(group: str, truth: str) -> str:
    """Whether a better cosine goes with a better step, by damping: ranks of what was compared at one layer and step."""
    found: dict[float, list[tuple[float, bool, float, float]]] = {}
    for path in sorted((RECORDS.parent / "language_model").glob("*.json")):
        for part in json.loads(path.read_text(encoding="utf-8")).get("steps", ()):
            for layer, damping in dict.fromkeys((row["layer"], row["damping"]) for row in part["rows"]):
                rows = [row for row in part["rows"] if (row["layer"], row["damping"]) == (layer, damping)]
                scored = [(row["matrix cosine"], row["decrease"]) for row in rows]
                best = max(scored)[1]
                found.setdefault(damping, []).append(
                    (
                        rank_correlation(scored),
                        best == max(step for _, step in scored),
                        best,
                        rows[0]["plain_decrease"],
                    )
                )
    return table(
        ["damping", "compared", "rank correlation", "best cosine has the best step", "its decrease", "the gradient's"],
        (
            [
                f"{damping:g}",
                str(len(groups)),
                f"{statistics.fmean(item[0] for item in groups):.2f}",
                f"{sum(item[1] for item in groups)} of {len(groups)}",
                *(f"{statistics.median(item[place] for item in groups):.3f}" for place in (2, 3)),
            ]
            for damping, groups in sorted(found.items())
        ),
    )


def rank_correlation(scored: Iterable[tuple[float, float]]) -> float:
    """Spearman's correlation of pairs without ties.

    >>> rank_correlation([(1.0, 10.0), (2.0, 20.0), (3.0, 15.0)])
    0.5
    """
    first, second = zip(*scored, strict=True)
    ranks = [[sorted(side).index(value) for value in side] for side in (first, second)]
    return statistics.correlation(*ranks)


def draw() -> None:
    """One picture for each statement: the numbers it is judged by, and its limit."""
    import matplotlib.pyplot as plt

    for statement in STATEMENTS:
        figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
        learned = [title for title in NETWORKS if title not in SHORT]
        for title in (*SHORT, *learned):
            short = title in SHORT
            style: dict[str, Any] = {
                "color": f"{0.55 + 0.13 * SHORT.index(title)}" if short else f"C{learned.index(title)}",
                "marker": "^sD"[SHORT.index(title)] if short else "o",
                "ms": 3 if short else 4,
                "lw": 0.6 if short else 1.2,
                "label": title,
            }
            for record in there(NETWORKS[title]):
                points = sorted(statement.values(record), key=lambda point: point.step)
                for layer in dict.fromkeys(point.layer for point in points):
                    mine = [point for point in points if point.layer == layer]
                    steps, values = [point.step for point in mine], [point.value for point in mine]
                    # of several values at a step no line can say which belong together
                    line = "-" if len(set(steps)) == len(steps) else ""
                    bars = [2 * point.stderr for point in mine]
                    axes.errorbar(steps, values, bars if any(bars) else None, ls=line, clip_on=False, **style)
                    style["label"] = None
        axes.axhline(statement.limit, color="black", ls="--", lw=1, label="limit")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=-0.1)
        axes.set_xlabel("training step")
        axes.set_ylabel(statement.rule.split(" ≤")[0], fontsize=9)
        axes.set_title(statement.text, fontsize=9)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        figures.save(figure, PICTURES / f"summary-{statement.name}.png")
        plt.close(figure)


KINDS: dict[str, Callable[[str, str], str]] = {
    "main": main_table,
    "spectrum": spectrum_table,
    "alpha": alpha_table,
    "labels": labels_table,
    "probes": probes_table,
    "exponents": exponent_table,
    "family": family_table,
    "seeds": seeds_table,
    "sampled": sampled_table,
    "verdicts": verdicts_table,
    "runs": runs_table,
    "live": live_table,
    "steps": steps_table,
}


def filled(text: str) -> str:
    """The document with every table as the records give it."""

    def fill(match: re.Match[str]) -> str:
        kind, *rest = match["what"].split()
        workload, truth = [*rest, *["all", "gauss_newton"][len(rest) :]]
        return match[1] + KINDS[kind](workload, truth) + match[3]

    return MARK.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_subparsers(dest="command", required=True)
    asked.add_parser("commands")
    running = asked.add_parser("run")
    running.add_argument("names", nargs="+", choices=RUNS)
    running.add_argument("--data-dir", type=Path, required=True)
    running.add_argument("--out", type=Path, default=Path("runs"))
    asked.add_parser("collect").add_argument("runs", nargs="+", type=Path)
    asked.add_parser("tables")
    asked.add_parser("figures")
    args = parser.parse_args()
    if args.command == "commands":
        print(commands(), end="")
    elif args.command == "run":
        run(args.names, args.data_dir, args.out)
    elif args.command == "collect":
        collect(args.runs)
    elif args.command == "figures":
        draw()
    else:
        for document in DOCUMENTS:
            document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
