"""The numbers, verdicts and pictures of docs/reproduction.md and docs/reproduction-summary.md.

    python benchmarks/reproduction.py commands                            # the runs, one line each
    python benchmarks/reproduction.py run NAME ... --data-dir DIR --out RUNS   # run some of them, or go on with them
    python benchmarks/reproduction.py collect RUN [RUN ...]               # copy results of runs, and the pictures shown
    python benchmarks/reproduction.py ranks RUN [RUN ...] --at STEP ...   # how far the gradients a run has kept spread
    python benchmarks/reproduction.py tables                              # write the documents' tables from the records
    python benchmarks/reproduction.py figures                             # draw the summary's figures from the records

A table stands between `<!-- table KIND [RUN] [TRUTH] -->` and `<!-- end -->` in a document; a test checks that
every one of them is what the records give.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from reproduction_records import (
    NETWORKS,
    PICTURES,
    RECORDS,
    ROOT,
    RUNS,
    by_step,
    cosine,
    estimate,
    language_model,
    loaded,
    named,
    number,
    own_labels,
    table,
)
from reproduction_verdicts import draw, verdicts_table

from kronscope import GradientHistory, Results, SecondMoment, figures
from kronscope.measures.rows import Detail
from kronscope.paper import plans, results_so_far
from kronscope.paper.outputs import columns_of

DOCUMENTS = tuple(ROOT / "docs" / name for name in ("reproduction.md", "reproduction-summary.md"))
MARK = re.compile(r"(<!-- table (?P<what>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
RANKS = RECORDS.parent / "reproduction_ranks.json"
SHAMPOOS = ("optimal", "shampoo2", "shampoo")
TITLES = {"optimal": "optimal", "shampoo2": "Shampoo²", "shampoo": "Shampoo", "kfac-reduce": "K-FAC"}


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
    shown = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
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
                if f"{name}-{picture}.png" in shown:
                    figures.save(figure, PICTURES / f"{name}-{picture}.png")
        for picture in sorted(folder.glob("*.png")):
            if f"{name}-{picture.name}" in shown:
                shutil.copyfile(picture, PICTURES / f"{name}-{picture.name}")


def ranks(folders: Iterable[Path], at: Sequence[int]) -> None:
    """Record over how many directions the gradients that runs have kept spread, and the factors they make."""
    record = json.loads(RANKS.read_text(encoding="utf-8")) if RANKS.exists() else {}
    for folder in folders:
        history = GradientHistory.open(folder / "history")
        (layer,) = history.layers
        rows = []
        for step in at:
            stream = history.stream(layer, step)
            moment = SecondMoment(stream)
            squares = (torch.linalg.svdvals(grads).square() for part in stream for grads in part.dense().grads[:, 0])
            rows.append(
                {
                    "step": step,
                    "single gradient": statistics.fmean(float(values[0] / values.sum()) for values in squares),
                    "left": effective_rank(moment.left()),
                    "right": effective_rank(moment.right()),
                    "matrix": (moment.trace() / moment.norm()) ** 2,
                }
            )
        record[folder.resolve().name] = rows
    RANKS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def effective_rank(matrix: torch.Tensor) -> float:
    return float((matrix.trace() / matrix.norm()) ** 2)


# --- tables ---------------------------------------------------------------------------------------------------------


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
    ends = sorted({min(groups), max(groups)})
    names = [row.approximation for row in groups[ends[-1]]]
    head = ["approximation", *(f"step {step}" for _, step in ends)]
    return table(head, ([name, *(number(cosine(groups[key], name)) for key in ends)] for name in names))


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


def ranks_table(group: str, truth: str) -> str:
    """What `ranks` recorded, beside the cosine of the optimal product where the run has it."""
    lines = []
    for name, rows in json.loads(RANKS.read_text(encoding="utf-8")).items():
        groups = by_step(loaded(name), "adagrad", own_labels(loaded(name), "adagrad"))
        for row in rows:
            best = next((cosine(found, "optimal") for (_, step), found in groups.items() if step == row["step"]), None)
            both = row["left"] * row["right"]
            spread = (f"{row['left']:.0f} × {row['right']:.0f} = {both:,.0f}", f"{row['matrix']:.0f}")
            lines.append([f"`{name}`", f"{row['step']:,}", number(row["single gradient"]), *spread, number(best)])
    return table(
        [
            "run",
            "gradients",
            "s₁²/‖G‖² of one, mean",
            "effective ranks of L and R",
            "that of the matrix",
            "optimal product",
        ],
        lines,
    )


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


def judged() -> list[list[dict[str, Any]]]:
    """What `language_model.py measure --judge` compared: the rows of one layer, step and damping at a time."""
    found = []
    for path in sorted((RECORDS.parent / "language_model").glob("*.json")):
        for part in json.loads(path.read_text(encoding="utf-8")).get("steps", ()):
            for place in dict.fromkeys((row["layer"], row["damping"]) for row in part["rows"]):
                found += [[row for row in part["rows"] if (row["layer"], row["damping"]) == place]]
    return found


def judged_table(group: str, truth: str) -> str:
    """Cosine and decrease of each approximation: medians over layers, steps and runs."""
    groups = judged()
    dampings = sorted({rows[0]["damping"] for rows in groups})
    names = {**TITLES, "live": "in use", "diagonal": "diagonal"}
    lines = []
    for name in ("optimal", "shampoo2", "shampoo", "live", "diagonal"):
        mine = [row for rows in groups for row in rows if row["approximation"] == name]
        decreases = [[row["decrease"] for row in mine if row["damping"] == damping] for damping in dampings]
        lines.append(
            [
                names[name],
                number(statistics.median(row["matrix cosine"] for row in mine)),
                *(number(statistics.median(values)) for values in decreases),
            ]
        )
    plain = [[rows[0]["plain_decrease"] for rows in groups if rows[0]["damping"] == damping] for damping in dampings]
    lines.append(["the gradient itself", "–", *(number(statistics.median(values)) for values in plain)])
    return table(
        ["approximation", "cosine with the matrix", *(f"decrease, damping {damping:g}" for damping in dampings)], lines
    )


def steps_table(group: str, truth: str) -> str:
    """Whether a better cosine goes with a better step, by damping: ranks of what was compared at one layer and step."""
    found: dict[float, list[tuple[float, bool, bool]]] = {}
    for rows in judged():
        scored = [(row["matrix cosine"], row["decrease"]) for row in rows]
        decreases = {row["approximation"]: row["decrease"] for row in rows}
        found.setdefault(rows[0]["damping"], []).append(
            (
                rank_correlation(scored),
                max(scored)[1] == max(step for _, step in scored),
                decreases["shampoo2"] > decreases["optimal"],
            )
        )
    return table(
        [
            "damping",
            "compared",
            "rank correlation, mean",
            "best cosine has the best step",
            "Shampoo² has a better step than the optimum",
        ],
        (
            [
                f"{damping:g}",
                str(len(groups)),
                f"{statistics.fmean(item[0] for item in groups):.2f}",
                *(f"{sum(item[place] for item in groups)} of {len(groups)}" for place in (1, 2)),
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
    "judged": judged_table,
    "ranks": ranks_table,
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
    counting = asked.add_parser("ranks")
    counting.add_argument("runs", nargs="+", type=Path)
    counting.add_argument("--at", nargs="+", type=int, required=True, help="numbers of gradients")
    asked.add_parser("tables")
    asked.add_parser("figures")
    args = parser.parse_args()
    if args.command == "commands":
        print(commands(), end="")
    elif args.command == "run":
        run(args.names, args.data_dir, args.out)
    elif args.command == "collect":
        collect(args.runs)
    elif args.command == "ranks":
        ranks(args.runs, args.at)
    elif args.command == "figures":
        draw()
    else:
        for document in DOCUMENTS:
            document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
