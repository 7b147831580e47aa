"""When the site is built: every link within it leads somewhere, and no page loads anything from the network."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.util import logging

__all__ = ["setup"]

_log = logging.getLogger(__name__)
# Tags that make a browser load something, with the attribute that says what.
_LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class _Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = {"", "top"}, [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        # an address such as rel="canonical" is not loaded
        if values.get(_LOADING.get(tag, "")) and values.get("rel", "stylesheet") in ("stylesheet", "icon", "preload"):
            self.loaded.append(values[_LOADING[tag]])


def problems(folder: Path) -> list[str]:
    """Return what is wrong with a built site."""
    pages = {path: _Page(path) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        for address in page.links + page.loaded:
            url = urlsplit(address)
            if url.scheme or url.netloc:
                if address in page.loaded and url.scheme != "data":
                    found.append(f"{name} loads {address} from the network")
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.exists():
                found.append(f"{name} refers to {address}, which does not exist")
            elif target in pages and unquote(url.fragment) not in pages[target].anchors:
                found.append(f"{name} refers to {address}, but that page has no such place")
    return found


def _check(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for problem in problems(Path(app.outdir)):
            _log.warning(problem, type="whole_site")


def setup(app: Any) -> dict[str, bool]:
    """Check at the very end; warnings are errors under `make docs`."""
    app.connect("build-finished", _check, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
