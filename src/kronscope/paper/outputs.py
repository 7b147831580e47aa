"""What a run leaves for people: pictures, the interactive report, tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kronscope import figures
from kronscope.measures import Results
from kronscope.paper.plans import Plan
from kronscope.report import write_report
from kronscope.support.files import write_atomically

__all__ = ["columns_of", "prefixed", "write_outputs"]


def columns_of(titled: Mapping[str, Results]) -> dict[str, Results]:
    """One column per layer: the workload's title, and the layer's name where there are several."""
    columns = {}
    for title, results in titled.items():
        for layer in results.layers:
            name = title if len(results.layers) == 1 else f"{title}\n{layer}" if title else layer
            columns[name] = results.select(layer=layer)
    return columns


def prefixed(named: Mapping[str, Results]) -> Results:
    """Results of several workloads as one, with the workload in front of each layer's name."""
    parts = [
        Results(
            [replace(row, layer=f"{name}/{row.layer}") for row in results.rows],
            [replace(detail, layer=f"{name}/{detail.layer}") for detail in results.details],
            results.settings,
            results.partial,
        )
        for name, results in named.items()
    ]
    return parts[0].merge(*parts[1:])


def write_outputs(
    plan: Plan,
    columns: Mapping[str, Results],
    report: Results | Mapping[str, Results],
    folder: str | os.PathLike[str],
    title: str | None = None,
) -> list[Path]:
    """Write each picture as PNG and PDF, the table as CSV, and the report; return their paths."""
    target = Path(folder)
    written = []
    for name, figure in plan.draw(columns).items():
        written += [figures.save(figure, target / f"{name}{suffix}") for suffix in (".png", ".pdf")]
    tables = [report] if isinstance(report, Results) else list(report.values())
    for number, results in enumerate(tables):
        written.append(_save_table(results, target / ("table.csv" if len(tables) == 1 else f"table-{number + 1}.csv")))
    written.append(write_report(report, target / "report.html", title=title))
    return written


def _save_table(results: Results, path: Path) -> Path:
    text = results.to_pandas().to_csv(index=False)
    return write_atomically(path, lambda file: file.write(text.encode()))
