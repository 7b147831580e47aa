"""Links from pages to files that are in the repository but not on the site.

On the site an example is a page of the gallery, and a record of a benchmark is copied as a file to download.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["setup"]

ROOT = Path(__file__).parent.parent.parent
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<path>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
# Where these files are on the site.
_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}


def _on_the_site(app: Any, name: str, content: list[str]) -> None:
    folder = Path(app.srcdir, name).parent
    up = "../" * (len(Path(name).parts) - 1)

    def replaced(match: re.Match[str]) -> str:
        file = (folder / match["path"]).resolve()
        if not file.is_relative_to(ROOT) or file.is_relative_to(app.srcdir):
            return match[0]
        if not file.exists():
            raise ValueError(f"docs/{name} links to {match['path']}, which does not exist")
        path = file.relative_to(ROOT)
        if path.parts[0] == "examples" and path.suffix == ".py":
            return f"[{match['text']}]({up}gallery/{path.stem}.rst)"
        if str(path) in _PAGES:
            return f"[{match['text']}]({up}{_PAGES[str(path)]}{match['anchor'] or ''})"
        if file.is_file():
            return f"{{download}}`{match['text'].strip('`')} <{match['path']}>`"
        return match["text"]

    content[0] = _LINK.sub(replaced, content[0])


def setup(app: Any) -> dict[str, bool]:
    """Change the text of pages before they are parsed."""
    app.connect("source-read", _on_the_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
