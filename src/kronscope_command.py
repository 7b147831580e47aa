"""What the command ``kronscope`` starts first, before torch is imported.

Importing torch takes seconds, and Ctrl-C then would end in a traceback through its modules. Any module of the package
itself would import torch first, so this one stands beside it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """Run the command line, and end with one line if Ctrl-C comes while it is still being imported."""
    before = signal.signal(signal.SIGINT, _end)
    from kronscope.cli import main as command

    signal.signal(signal.SIGINT, before)
    command()


def _end(number: int, frame: FrameType | None) -> None:
    # nothing has begun that could be lost; an exception would come out of torch's modules as any other one
    sys.stderr.write("kronscope: interrupted.\n")
    sys.stderr.flush()
    os._exit(130)
