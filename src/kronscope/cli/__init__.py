"""The command line: ``kronscope demo``, ``kronscope paper figure1``, ``kronscope measure``, and so on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kronscope
from kronscope.cli import advise, demo, measure, paper, report, watch
from kronscope.cli.ending import one_line_endings
from kronscope.support.launch import process_group

__all__ = ["app", "main"]

app = typer.Typer(
    help="See Shampoo's preconditioner: how well Kronecker products approximate curvature.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# from the first look to the paper; the help shows them in this order, groups last
for _name, _module in (("demo", demo), ("measure", measure), ("advise", advise), ("watch", watch), ("report", report)):
    app.command(_name)(_module.command)
app.add_typer(paper.app, name="paper")


def main() -> None:
    """Run the command line; what a person can mend ends it with one line and exit code 2.

    Started by torchrun, all processes work on one run, and rank 0 writes.
    """
    with one_line_endings("".join(sys.argv[1:2])), process_group():
        app()


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
