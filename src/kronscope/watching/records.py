"""What watching has recorded: in memory, and as lines of a file that a killed run leaves whole.

A line is a record, or an event. ``{"event": "start", "step": 40}`` says that training goes on after step 40: records
of later steps, which an earlier attempt wrote, are out of date from there on. They stay in the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronscope.errors import RunError
from kronscope.measures import Results
from kronscope.measures.rows import Row
from kronscope.runs import Run
from kronscope.runs.contents import read_records

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FILE", "WatchRecords"]

FILE = "watch.jsonl"


class WatchRecords:
    """Records of a watched run, one for each recorded step.

    Args:
        layers: The (m, n) of each watched layer by its name, in the order of the records' lists.
        lines: Records and events as they were written.

    Attributes:
        layers: As given.
        records: The records that count, by ascending step. Each has ``step``, ``layers`` (a list for each number, in
            the order of the layers, None where it does not exist), ``run`` (numbers of the whole run), ``warnings`` and
            ``cosines`` (rows, where cosines were measured).

    >>> records = WatchRecords({"fc.weight": (2, 3)})
    >>> records.add({"step": 10, "layers": {"update_ratio": [0.001]}, "run": {}, "warnings": [], "cosines": []})
    >>> records.last_step
    10
    """

    def __init__(self, layers: Mapping[str, Sequence[int]], lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.layers = {name: (int(shape[0]), int(shape[1])) for name, shape in layers.items()}
        self.records: list[dict[str, Any]] = []
        for line in lines:
            self.add(line)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WatchRecords:
        """Read a run's folder, also while the run goes on, or a copy of it.

        Raises:
            RunError: the folder holds no watched run, or a damaged one.
        """
        folder = Path(path)
        config = Run.open(folder).config
        if config.get("command") != "watch":
            raise RunError(
                f"{folder} holds a run that was not watched; give the folder that ks.watch(..., path=...) wrote."
            )
        if (folder / FILE).is_symlink():
            raise RunError(f"{folder / FILE} is a symbolic link, which is not followed; put a copy in its place.")
        try:
            return cls(config["layers"], read_records(folder / FILE))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise RunError(
                f"{folder} is damaged: {type(error).__name__}: {error} in config.json or {FILE}. Put back copies of "
                "them."
            ) from error

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 where there is none."""
        return int(self.records[-1]["step"]) if self.records else 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one more line."""
        if line.get("event") == "start":
            self.records = [record for record in self.records if record["step"] <= line["step"]]
        elif "event" not in line:
            if missing := {"step", "layers", "run", "warnings", "cosines"} - set(line):
                raise KeyError(f"a record without {', '.join(sorted(missing))}")
            self.records.append(dict(line))

    @property
    def results(self) -> Results:
        """The measured cosines."""
        rows = [_row(row) for record in self.records for row in record["cosines"]]
        return Results(rows, settings={"title": "Cosines of a watched run"} if rows else {})

    def to_pandas(self) -> pd.DataFrame:
        """A line for each layer and recorded step: its numbers, and measured cosines as ``cosine_live``, ..."""
        import pandas as pd

        lines = []
        for record in self.records:
            cosines: dict[str, dict[str, float]] = {}
            for row in record["cosines"]:
                cosines.setdefault(row["layer"], {})[f"cosine_{row['approximation']}"] = _number(row["cosine"])
            for place, (name, (rows, cols)) in enumerate(self.layers.items()):
                numbers = {number: _number(values[place]) for number, values in record["layers"].items()}
                line = {"step": record["step"], "layer": name, "rows": rows, "cols": cols}
                lines.append({**line, **numbers, **cosines.get(name, {})})
        return pd.DataFrame(lines, columns=None if lines else ["step", "layer", "rows", "cols"])


def _row(plain: Mapping[str, Any]) -> Row:
    entries: dict[str, Any] = {name: math.nan if value is None else value for name, value in plain.items()}
    return Row(**entries)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
