"""A heading above the example at the end of a docstring, and no references to what only the sources have."""

from __future__ import annotations

from typing import Any

__all__ = ["setup"]


def _with_heading(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what == "module":
        return
    for place, line in enumerate(lines):
        if line.startswith(">>> "):
            lines[place:place] = [".. rubric:: Example", ""]
            return


def setup(app: Any) -> dict[str, bool]:
    """Look at docstrings after napoleon, which turns sections into fields."""
    app.connect("autodoc-process-docstring", _with_heading, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
