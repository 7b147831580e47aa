"""Work in forked children that a test kills: importing torch once instead of before every kill."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def serve(work: Callable[[Path], None], prepare: Callable[[], object]) -> None:
    """Read folders from standard input; for each fork a child that works there, print its number, then its exit code.

    Args:
        work: Goes on in a folder from wherever it stands.
        prepare: Loads what the work needs, once, before the first child is forked.
    """
    torch.set_num_threads(1)
    prepare()
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(Path(line.strip()))
                code = 0
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Killer:
    """Starts the children of a module that calls :func:`serve`, and kills them."""

    def __init__(self, module: str) -> None:
        # One thread: forking is safe only in a process that has no others.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._line() == "ready"

    def run(self, folder: Path, *, kill_after: float | None = None) -> int:
        """Let a child work in a folder, and return its exit code."""
        assert self.process.stdin is not None
        print(folder, file=self.process.stdin, flush=True)
        child = int(self._line())
        if kill_after is not None:
            time.sleep(kill_after)
            # Its parent has not waited for it yet or has just done so; either way the number is not in use again.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(self._line())

    def run_both(self, undisturbed: Path, killed: Path, wanted: int) -> None:
        """Work in one folder without disturbance, and in the other through about ``wanted`` kills at random moments."""
        began = time.monotonic()
        assert self.run(undisturbed) == 0
        duration = time.monotonic() - began
        moments, kills = random.Random(wanted), 0
        while kills < wanted and not (killed / "done.json").exists():
            # some early enough to hit the making of the folder; each kill costs little of what was done
            kills += self.run(killed, kill_after=moments.uniform(0, duration / 6)) == -signal.SIGKILL
        # on a machine that was busy only at first the work may end before the last kills
        assert kills > wanted / 2
        assert self.run(killed) == 0

    def close(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()
