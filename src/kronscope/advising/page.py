"""Advice as plain data and as one HTML page."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronscope.report.assemble import assemble, static
from kronscope.support.files import write_atomically

if TYPE_CHECKING:
    from kronscope.advising.advise import Advice, Option

__all__ = ["to_data", "write_page"]


def to_data(advice: Advice) -> dict[str, Any]:
    """Return advice as JSON knows it; what could not be measured is None."""
    return {
        "tolerance": advice.tolerance,
        "question": advice.results.question,
        "layers": [
            {
                "layer": entry.layer,
                "shape": list(entry.shape),
                "optimal": _known(entry.optimal),
                "recommended": entry.choice.name,
                "settings": entry.choice.settings,
                "reason": entry.reason,
                "options": [_option(one) for one in entry.options],
            }
            for entry in advice.layers
        ],
    }


def _option(one: Option) -> dict[str, Any]:
    return {
        "name": one.name,
        "title": one.title,
        "cosine": _known(one.cosine),
        "milliseconds": one.milliseconds,
        "bytes": one.bytes,
        "settings": one.settings,
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def write_page(advice: Advice, path: str | os.PathLike[str]) -> Path:
    """Write the page; it loads nothing from the network.

    Raises:
        ResultsError: the file cannot be written there.
    """
    page = assemble(
        static("advice.html", __package__),
        "Advice for a model",
        static("report.css") + static("advice.css", __package__),
        [static("nodes.js"), static("advice.js", __package__)],
        to_data(advice),
        str(advice),
    )
    return write_atomically(path, lambda file: file.write(page.encode("utf-8", "replace")))
