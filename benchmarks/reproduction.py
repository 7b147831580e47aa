"""The numbers and pictures of docs/reproduction.md, from finished runs of `kronscope paper`.

    python benchmarks/reproduction.py collect RUN [RUN ...]   # copy results and pictures of run folders
    python benchmarks/reproduction.py tables                  # write the tables of the document from the records

A table stands between `<!-- table KIND RUN [TRUTH] -->` and `<!-- end -->` in the document; a test checks that
every one of them is what the records give.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from kronscope import Results, figures
from kronscope.measures.rows import Detail, Row
from kronscope.paper import plans, results_so_far
from kronscope.paper.outputs import columns_of

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records" / "reproduction"
DOCUMENT = ROOT / "docs" / "reproduction.md"
PICTURES = ROOT / "docs" / "images" / "reproduction"
MARK = re.compile(r"(<!-- table (?P<what>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
SHAMPOOS = ("optimal", "shampoo2", "shampoo")
TITLES = {"optimal": "optimal", "shampoo2": "Shampoo²", "shampoo": "Shampoo", "kfac-reduce": "K-FAC"}


def collect(folders: Iterable[Path]) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        results = results_so_far(folder)
        name = folder.resolve().name
        results.save(RECORDS / f"{name}.json")
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
    return Results.load(RECORDS / f"{name}.json")


def number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*out, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def cosine(rows: Iterable[Row], approximation: str) -> float | None:
    return next((row.cosine for row in rows if row.approximation == approximation), None)


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
            [*([layer] if several else []), str(step), *(number(cosine(rows, name)) for name in names)]
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

    def estimate(rows: list[Row], name: str) -> str:
        row = next(row for row in rows if row.approximation == name)
        return f"{row.cosine:.3f} ± {row.stderr:.3f}"

    head = ["step", *(f"{TITLES[name]}{kind}" for name in SHAMPOOS for kind in (", exact", ", five probes"))]
    lines = (
        [
            str(key[1]),
            *(text for name in SHAMPOOS for text in (number(cosine(rows, name)), estimate(theirs[key], name))),
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


def family_table(workload: str, truth: str) -> str:
    results = loaded(workload)
    groups = by_step(results, truth, own_labels(results, truth))
    steps = sorted(groups)
    names = [row.approximation for row in groups[steps[-1]]]
    head = ["approximation", *(f"step {step}" for _, step in (steps[0], steps[-1]))]
    return table(
        head, ([name, *(number(cosine(groups[key], name)) for key in (steps[0], steps[-1]))] for name in names)
    )


KINDS: dict[str, Callable[[str, str], str]] = {
    "main": main_table,
    "spectrum": spectrum_table,
    "alpha": alpha_table,
    "labels": labels_table,
    "probes": probes_table,
    "exponents": exponent_table,
    "family": family_table,
}


def filled(text: str) -> str:
    """The document with every table as the records give it."""

    def fill(match: re.Match[str]) -> str:
        kind, workload, *truth = match["what"].split()
        return match[1] + KINDS[kind](workload, *(truth or ["gauss_newton"])) + match[3]

    return MARK.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("runs", nargs="+", type=Path)
    commands.add_parser("tables")
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.runs)
    else:
        DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
