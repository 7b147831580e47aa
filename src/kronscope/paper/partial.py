"""What a run that has not ended has measured so far."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from kronscope.errors import RunError
from kronscope.measures import Results
from kronscope.measures.schema import loads

__all__ = ["results_so_far"]

_MEASURED = re.compile(r"gauss_newton-(?P<fit>\d+)-(?P<step>\d+)\.json|adagrad\.json")
_KEPT = ("workload", "scale", "steps", "batch", "samples", "optimizer", "lr", "weight_decay", "momentum", "seed")


def results_so_far(folder: str | os.PathLike[str]) -> Results:
    """The results of a run: of all of it if it has ended, else what is there, marked partial.

    Reading disturbs nothing; a run that is going on may be looked at.

    Raises:
        RunError: the folder is no run, or has nothing yet.
    """
    path = Path(folder)
    if (path / "results.json").exists():
        return Results.load(path / "results.json")
    found = sorted(
        (match["step"] is None, int(match["step"] or 0), int(match["fit"] or 0), file)
        for file in (path / "stored").glob("*.json")
        if (match := _MEASURED.fullmatch(file.name))
    )
    if not found:
        raise RunError(
            f"{path} has no results yet: there is no results.json and no measurement. If it is a run's folder, "
            "wait for its first measurement, or go on with it: 'kronscope paper' with --resume."
        )
    parts = [loads(file.read_text(encoding="utf-8"), str(file)) for *_, file in found]
    merged = parts[0].merge(*parts[1:])
    return Results(merged.rows, merged.details, {**_settings(path), "runs": merged.settings.get("runs", [])}, True)


def _settings(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    environment = folder / "environment.json"
    return {
        "title": config.get("title", folder.name),
        **{name: config[name] for name in _KEPT if name in config},
        "data": config.get("data", {}).get("title"),
        "cut": config.get("cuts", []),
        "notes": [*config.get("notes", []), "the run has not ended: what it had measured is shown"],
        "environment": json.loads(environment.read_text(encoding="utf-8")) if environment.exists() else {},
    }
