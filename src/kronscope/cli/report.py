"""``kronscope report``: one interactive page from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kronscope.cli.terminal import open_console, say_where
from kronscope.errors import OptionError
from kronscope.measures import Results
from kronscope.paper import results_so_far
from kronscope.report import write_report
from kronscope.support.launch import is_rank_0

__all__ = ["command"]


def command(
    run: Annotated[list[Path], typer.Argument(help="Run folders or results.json files.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; default report.html beside the first results.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
) -> None:
    """Write an interactive page of runs.

    It is one HTML file that needs no network. A run that has not ended is shown as far as it has come.
    """
    if not is_rank_0():
        return
    files = [path / "results.json" if path.is_dir() else path for path in run]
    loaded = [results_so_far(path) if path.is_dir() else Results.load(path) for path in run]
    short = [path.parent.name or str(path) for path in files]
    names = short if len(set(short)) == len(short) else [str(path) for path in files]
    if len({path.resolve() for path in files}) < len(files):
        raise OptionError(f"A run is given twice among {', '.join(map(str, run))}; give each one once.")
    several = dict(zip(names, loaded, strict=True))
    target = out or files[0].parent / "report.html"
    if out is None and target.is_symlink():
        raise OptionError(
            f"{target} is a symbolic link to {target.readlink()}, which would be overwritten; remove it, or say where "
            "the page shall be (--out FILE)."
        )
    write_report(loaded[0] if len(loaded) == 1 else several, target, title=title)
    say_where(open_console(), [target])
