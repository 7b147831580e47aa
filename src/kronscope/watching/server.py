"""The live page of a run: a server on this machine alone, which reads the run's folder and nothing else."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kronscope.errors import RunError
from kronscope.report.assemble import assemble, static
from kronscope.runs import Run
from kronscope.support.names import short_labels
from kronscope.watching.records import FILE, WatchRecords

__all__ = ["LiveServer", "lines_from"]

ADDRESS = "127.0.0.1"
# Of a long run so much is sent at a time; the page asks again at once.
_PIECE = 4 << 20


class LiveServer(ThreadingHTTPServer):
    """Serves the page of one run and its records, on 127.0.0.1.

    Args:
        folder: The run's folder; it is only read, and may be a copy.
        port: The port; 0 takes a free one.

    Attributes:
        url: The page's address.

    Raises:
        RunError: the folder holds no watched run, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        records = WatchRecords.load(folder)
        short = {name: labels for name, *labels in short_labels(list(records.layers))}
        layers = [
            {"name": name, "rows": m, "cols": n, "short": short.get(name, [])}
            for name, (m, n) in records.layers.items()
        ]
        shared = [static(name) for name in ("nodes.js", "marks.js", "charts.js")]
        own = [static(name, __package__) for name in ("live_charts.js", "live.js")]
        self.page = assemble(
            static("live.html", __package__),
            folder.resolve().name,
            static("report.css") + static("live.css", __package__),
            [*shared, *own],
            {"layers": layers, "optimizer": str(Run.open(folder).config.get("optimizer", ""))},
            fetches=True,
        ).encode("utf-8", "replace")
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise RunError(f"Port {port} cannot be used: {error.strerror}; leave --port out for a free one.") from error
        self.url = f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a browser that went away in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def lines_from(path: Path, start: int) -> dict[str, Any]:
    """Return the whole lines of a file from a place on, and where to go on.

    Args:
        path: The file, which another process may be writing to.
        start: Bytes that were seen.

    Returns:
        ``lines``; ``offset``, where the next ones will begin; ``more`` if there are; ``restarted`` if the file is
        shorter than what was seen, so that these are all of its lines; ``age``, seconds since it was written to.
    """
    try:
        # a folder may come from a stranger, and a link in it lead anywhere
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return {"lines": [], "offset": 0, "more": False, "restarted": start > 0, "age": None}
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        restarted = status.st_size < start
        start = 0 if restarted else start
        file.seek(start)
        content = file.read(_PIECE)
        while content and b"\n" not in content and len(content) % _PIECE == 0 and (rest := file.read(_PIECE)):
            content += rest
    content = content[: content.rfind(b"\n") + 1]
    return {
        "lines": [line for line in map(_line, content.split(b"\n")) if line is not None],
        "offset": start + len(content),
        "more": bool(content) and start + len(content) < status.st_size,
        "restarted": restarted,
        "age": max(0.0, time.time() - status.st_mtime),
    }


def _line(content: bytes) -> Any:
    """A record; None for what is none."""
    try:
        # the browser's JSON has no NaN
        found = json.loads(content, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class _Handler(BaseHTTPRequestHandler):
    """Answers two addresses, to this machine's browser only."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    # seconds for a request that was begun
    timeout = 60

    def do_GET(self) -> None:
        """Send the page, or lines of records."""
        try:
            asked = urllib.parse.urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        # another site's name that leads here must not read the run (DNS rebinding)
        if self.headers.get("Host") not in {f"{host}:{self.server.server_port}" for host in (ADDRESS, "localhost")}:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif asked.path == "/":
            self._send("text/html; charset=utf-8", self.server.page)
        elif asked.path == "/records":
            start = urllib.parse.parse_qs(asked.query).get("from", ["0"])[0]
            seen = int(start) if start.isascii() and start.isdigit() and len(start) < 19 else 0
            found = lines_from(self.server.folder / FILE, seen)
            self._send("application/json", json.dumps(found, separators=(",", ":")).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the page asks every second."""
