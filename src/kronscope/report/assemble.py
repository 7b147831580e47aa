"""Pages that hold everything they need: style, script and data in one file, under a policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from typing import Any

from kronscope.support.texts import printable

__all__ = ["assemble", "static"]

_MOST_LETTERS = 300


def assemble(
    body: str,
    title: str,
    style: str,
    scripts: Sequence[str],
    data: Mapping[str, Any],
    text: str = "",
    *,
    fetches: bool = False,
) -> str:
    """Return a page.

    Args:
        body: What stands between the head and the script, with ``{{generator}}``, ``{{title}}`` and ``{{text}}`` where
            these belong.
        title: The heading.
        style: The style sheet.
        scripts: Parts of the script, which see each other and nothing else does.
        data: What the script reads.
        text: For readers without scripts.
        fetches: Whether the script may ask the server that the page came from.
    """
    script = "(() => {\n'use strict';\n" + "\n".join(scripts) + "\n})();\n"
    policy = [
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        *(["connect-src 'self'"] if fetches else []),
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    values = {
        "policy": "; ".join(policy),
        "generator": html.escape(_generator()),
        "title": html.escape(printable(title if len(title) <= _MOST_LETTERS else f"{title[:_MOST_LETTERS]}…")),
        "style": style,
        "text": html.escape(text),
        "data": _embed(data),
        "script": script,
    }
    page = static("frame.html").replace("{{body}}", body)
    # One pass, so that text which looks like a placeholder (a layer called "{{script}}") stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], page)


def static(name: str, package: str = "kronscope.report") -> str:
    """The text of a file that comes with a package."""
    return resources.files(package).joinpath("static", name).read_text(encoding="utf-8")


def _embed(payload: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in, whatever a layer is called."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _generator() -> str:
    try:
        return f"kronscope {metadata.version('kronscope')}"
    except metadata.PackageNotFoundError:
        return "kronscope"
