"""One HTML file with the data, the style and the script inside it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kronscope.errors import OptionError
from kronscope.figures.figure2 import BARS, CURVES
from kronscope.figures.style import TRUTHS, Style, condition_label, styles
from kronscope.measures import schema
from kronscope.measures.results import Results
from kronscope.measures.rows import Detail, Row, curve_names
from kronscope.measures.table import setting_lines
from kronscope.measures.whole import WHOLE_MODEL, WholeModel
from kronscope.report.assemble import assemble, static
from kronscope.support.files import write_atomically
from kronscope.support.names import short_labels

__all__ = ["render", "write_report"]

_SCRIPTS = ("nodes.js", "data.js", "marks.js", "charts.js", "table.js", "views.js", "details.js", "whole.js", "app.js")
_ELSEWHERE = ("cut", "notes", "title")
_FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def write_report(
    results: Results | Mapping[str, Results], path: str | os.PathLike[str], title: str | None = None
) -> Path:
    """Write an interactive report: charts, a table of all numbers, the settings, and how to read them.

    The file contains everything it needs. It loads nothing from the network, and its content security policy enforces
    that. It appears whole or not at all.

    Args:
        results: What was measured; or several results by name, for example one for each workload.
        path: The HTML file to write.
        title: The page's heading; None takes it from the settings.

    Returns:
        The path.

    Raises:
        OptionError: ``results`` is an empty dictionary.
        ResultsError: the file cannot be written there.

    >>> import tempfile
    >>> row = Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.9)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_report(Results([row]), f"{folder}/report.html", title="My run")
    ...     print("My run" in path.read_text(encoding="utf-8"))
    True
    """
    page = render(results, title)
    return write_atomically(path, lambda file: file.write(page.encode("utf-8", "replace")))


def render(results: Results | Mapping[str, Results], title: str | None = None) -> str:
    """The text of the report; see :func:`write_report`."""
    runs = {"": results} if isinstance(results, Results) else dict(results)
    if not runs:
        raise OptionError("A report needs results, but got an empty dictionary; give one or more results by name.")
    heading = title or _title(runs)
    looks = styles(_approximations(runs.values()))
    payload, colors = _payload(runs, heading, looks)
    return assemble(
        static("template.html"),
        heading,
        static("report.css") + colors,
        [static(name) for name in _SCRIPTS],
        payload,
        "\n\n".join(f"{name}\n{part}".lstrip("\n") for name, part in runs.items()),
    )


def _payload(runs: Mapping[str, Results], title: str, looks: Mapping[str, Style]) -> tuple[dict[str, Any], str]:
    """What the page's script needs, and the style sheet of the colours it refers to."""
    palette = {"approximation": looks, "curve": CURVES, "bar": BARS}
    tables: dict[str, dict[str, Any]] = {}
    light, dark = [], []
    for kind, table in palette.items():
        tables[kind] = {}
        for number, (name, look) in enumerate(table.items()):
            variable = f"--{kind}-{number}"
            light.append(f"{variable}:{look.color}")
            dark.append(f"{variable}:{look.dark}")
            tables[kind][name] = {
                "name": look.name,
                "color": f"var({variable})",
                "marker": look.marker,
                "dashes": look.dashes,
                "width": look.width,
                "line": kind != "bar",
            }
    conditions: set[tuple[Any, ...]] = {row.condition for results in runs.values() for row in results.rows}
    # curves with options are told apart here, rows by the name of their approximation
    conditions |= {
        (*detail.condition, *filter(None, [detail.options])) for results in runs.values() for detail in results.details
    }
    payload = {
        "title": title,
        "fields": _FIELDS,
        "runs": [_run(name, results) for name, results in runs.items()],
        "styles": tables["approximation"],
        "curves": tables["curve"],
        "bars": tables["bar"],
        "truths": TRUTHS,
        "conditions": {"|".join(map(str, item)): condition_label(*item) for item in sorted(conditions)},
    }
    return payload, f':root{{{";".join(light)}}}\n:root[data-theme="dark"]{{{";".join(dark)}}}\n'


def _run(name: str, results: Results) -> dict[str, Any]:
    return {
        "name": name,
        "question": results.question,
        "partial": results.partial,
        "cut": setting_lines(results.settings, "cut"),
        "notes": setting_lines(results.settings, "notes"),
        "settings": {key: value for key, value in results.settings.items() if key not in _ELSEWHERE},
        "count": len(results.rows),
        "columns": _columns(results),
        "short": short_labels(results.layers),
        "details": [schema.to_plain(detail) for detail in results.details if detail.kind != WHOLE_MODEL],
        "whole": [_whole_model(detail, results) for detail in results.details if detail.kind == WHOLE_MODEL],
    }


def _whole_model(detail: Detail, results: Results) -> dict[str, Any]:
    """What the layers are to all of them, ready to be shown."""
    model = WholeModel.of(detail, results.rows)
    texts = [f"step {detail.step:,}", condition_label(*detail.condition), f"‖H‖ = {model.norm:.4g}"]
    shares = [*sorted(model.shares.items(), key=lambda item: -item[1]), ("between layers", model.cross_share)]
    return {
        "facts": " · ".join(texts),
        "shares": [[name, "–" if math.isnan(share) else f"{100 * share:.2f} %"] for name, share in shares],
        "cosines": [
            [name, *("–" if math.isnan(value) else f"{value:.4f}" for value in both)]
            for name, both in model.cosines.items()
        ],
    }


def _columns(results: Results) -> dict[str, Any]:
    """The rows by columns, each in its shortest form: names and settings of thousands of rows are mostly the same."""
    rows = [{**schema.to_plain(row), "approximation": row.variant} for row in results.rows]
    return {field: _column([row[field] for row in rows]) for field in _FIELDS}


def _column(values: Sequence[Any]) -> Any:
    """One value, the values there are and which of them each row has, or all values."""
    places: dict[tuple[type, Any], int] = {}
    # 1, 1.0 and True are equal, but not the same in JSON
    at = [places.setdefault((type(value), value), len(places)) for value in values]
    if len(places) == 1:
        return {"value": values[0]}
    if 4 * len(places) > len(values):
        return list(values)
    return {"values": [value for _, value in places], "at": at}


def _approximations(parts: Iterable[Results]) -> Iterable[str]:
    for results in parts:
        yield from results.variants
        for detail in results.details:
            if detail.kind == "batch_sizes":
                yield from curve_names(detail)


def _title(runs: Mapping[str, Results]) -> str:
    for results in runs.values():
        for key in ("title", "workload", "model"):
            value = results.settings.get(key)
            if isinstance(value, str) and value:
                return value if key == "title" else f"Kronecker approximations: {value}"
    return "Kronecker approximations"
