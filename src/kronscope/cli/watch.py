"""``kronscope watch``: the live page of a run that goes on."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from kronscope.cli.terminal import open_console, say
from kronscope.support.launch import is_rank_0
from kronscope.watching.server import LiveServer

__all__ = ["command"]


def command(
    run: Annotated[Path, typer.Argument(help="The folder that ks.watch(..., path=...) writes, or a copy of it.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page that grows while a run goes on.

    It is served on this machine alone, until Ctrl-C.
    """
    if not is_rank_0():
        return
    with LiveServer(run, port) as server:
        say(open_console(), f"{server.url}  (Ctrl-C ends it)")
        if open_page:
            webbrowser.open(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
