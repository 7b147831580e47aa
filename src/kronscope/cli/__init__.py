"""The command line: ``kronscope demo``, ``kronscope paper figure1``, ``kronscope measure``, and so on."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import kronscope
from kronscope.cli import advise, demo, measure, paper, report, watch
from kronscope.errors import KronscopeError
from kronscope.support.launch import is_rank_0, process_group

__all__ = ["app", "main"]

_INTERRUPTED = 130
_GOING_ON = {
    "paper": "; the same command with --resume goes on",
    "demo": "; the same command goes on, with the demo's folder as --out",
}

app = typer.Typer(
    help="See Shampoo's preconditioner: how well Kronecker products approximate curvature.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(paper.app, name="paper")
for _name, _module in (("advise", advise), ("demo", demo), ("measure", measure), ("report", report), ("watch", watch)):
    app.command(_name)(_module.command)


def main() -> None:
    """Run the command line; errors meant for people end it with one line and exit code 2.

    Started by torchrun, all processes work on one run, and rank 0 writes.
    """
    try:
        with process_group():
            app()
    except KronscopeError as error:
        name = "kronscope" if is_rank_0() else f"kronscope (process {os.environ['RANK']})"
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(2) from None
    except SystemExit as end:
        # typer turns Ctrl-C into this
        if end.code == _INTERRUPTED:
            sys.stderr.write(f"kronscope: interrupted{_GOING_ON.get(''.join(sys.argv[1:2]), '')}.\n")
        raise


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(kronscope.__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
