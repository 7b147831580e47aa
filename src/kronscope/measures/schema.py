"""Results as JSON text: one line per row, a version, and errors that say what is wrong with a file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kronscope.errors import ResultsError
from kronscope.measures.results import Results
from kronscope.measures.rows import Detail, Row

__all__ = ["FORMAT", "SCHEMA_VERSION", "dumps", "from_data", "loads", "read_text", "to_data", "to_plain"]

FORMAT = "kronscope-results"
_FIRST_VERSION = 1


def _since(entry: dataclasses.Field[Any]) -> int:
    return int(entry.metadata.get("since", _FIRST_VERSION))


SCHEMA_VERSION = max(_since(entry) for kind in (Row, Detail) for entry in dataclasses.fields(kind))

_Record = TypeVar("_Record", Row, Detail)


def to_plain(record: Row | Detail) -> dict[str, Any]:
    """A row or a detail as plain data, NaN as None."""
    return {entry.name: _nulls(getattr(record, entry.name)) for entry in dataclasses.fields(record)}


def to_data(results: Results) -> dict[str, Any]:
    """Results as plain data."""
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "partial": results.partial,
        "settings": results.settings,
        "rows": [to_plain(row) for row in results.rows],
        "details": [to_plain(detail) for detail in results.details],
    }


def dumps(results: Results) -> str:
    """JSON text with one row per line, so that two files can be compared line by line."""
    parts = []
    for name, value in to_data(results).items():
        if name in ("rows", "details"):
            lines = ",\n".join(json.dumps(record, allow_nan=False) for record in value)
            parts.append(f'"{name}": [\n{lines}\n]' if lines else f'"{name}": []')
        else:
            parts.append(f'"{name}": {json.dumps(value, indent=1, allow_nan=False)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a results file.

    Raises:
        ResultsError: There is no such file, it is a folder, or it is not text.
    """
    name = os.fspath(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        message = (
            f"There is no results file {name!r}; check the path, or make one: kronscope measure --out writes a folder "
            "with one, Results.save a file."
        )
        raise ResultsError(message) from None
    except IsADirectoryError:
        inside = Path(path) / "results.json"
        hint = f"load {str(inside)!r} instead" if inside.is_file() else "give the name of the file in it"
        raise ResultsError(f"A results file is expected, but {name!r} is a folder; {hint}.") from None
    except UnicodeDecodeError:
        raise ResultsError(f"A JSON results file is expected, but {name!r} is not text; {_REMEDY}.") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResultsError(f"{name!r} cannot be read ({reason}); check the path and its permissions.") from error


def loads(text: str, name: str = "the text") -> Results:
    """Results from JSON text; ``name`` is the file's name for messages. Entries newer than the file get their default.

    Raises:
        ResultsError: The text is not JSON, is cut short, is of another format or a newer version, or is damaged.
    """
    return from_data(_parse(text, name), name)


def from_data(data: Any, name: str) -> Results:
    """Results from plain data, as :func:`to_data` makes it; ``name`` is the file's name for messages.

    Raises:
        ResultsError: The data is of another format or a newer version, or is damaged.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ResultsError(
            f'A results file is expected ("format": "{FORMAT}"), but {name!r} holds other JSON; {_REMEDY}.'
        )
    version = data.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise ResultsError(f"{name!r} has no valid schema_version (found {version!r}); {_REMEDY}.")
    if version > SCHEMA_VERSION:
        raise ResultsError(
            f"{name!r} was written by a newer kronscope: its schema_version is {version}, this one reads up "
            f"to {SCHEMA_VERSION}; upgrade with: pip install --upgrade kronscope"
        )
    for entry, kind in (("rows", list), ("details", list), ("settings", dict), ("partial", bool)):
        if not isinstance(data.get(entry), kind):
            raise ResultsError(f"{name!r} is damaged: {entry!r} is missing or no {kind.__name__}; {_REMEDY}.")
    rows = [_record(Row, item, version, f"row {i} of {name!r}") for i, item in enumerate(data["rows"], 1)]
    details = [_record(Detail, item, version, f"detail {i} of {name!r}") for i, item in enumerate(data["details"], 1)]
    return Results(rows, details, data["settings"], data["partial"])


_REMEDY = "give a file written by Results.save, or measure again"


def _parse(text: str, name: str) -> Any:
    if not text.strip():
        raise ResultsError(f"A results file is expected, but {name!r} is empty; {_REMEDY}.")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        whole = text.strip()
        if whole.startswith("{") and (error.pos >= len(text.rstrip()) or not whole.endswith("}")):
            message = f"{name!r} is cut short: it ends in the middle of line {error.lineno}; {_REMEDY}."
            raise ResultsError(message) from None
        place = f"line {error.lineno}, column {error.colno}"
        raise ResultsError(f"{name!r} is not JSON ({error.msg} at {place}); {_REMEDY}.") from None


def _record(kind: type[_Record], item: Any, version: int, place: str) -> _Record:
    names = {entry.name for entry in dataclasses.fields(kind) if _since(entry) <= version}
    if not isinstance(item, Mapping) or set(item) != names:
        found = set(item) if isinstance(item, Mapping) else set()
        wrong = ", ".join(sorted(names ^ found))
        raise ResultsError(f"{place} is damaged: missing or unknown entries {wrong}; {_REMEDY}.")
    for text in _TEXTS & names:
        if not isinstance(item[text], str):
            raise ResultsError(f"{place} is damaged: {text} must be text, but is {item[text]!r}; {_REMEDY}.")
    try:
        return kind(**{entry: _nans(value) for entry, value in item.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"{place} is damaged: {error}; {_REMEDY}.") from error


_TEXTS = {"layer", "truth", "labels", "approximation", "note", "options", "kind"}


def _nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nulls(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_nulls(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _nans(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nans(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_nans(item) for item in value]
    return math.nan if value is None else value
