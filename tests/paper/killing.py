"""Work in processes that a test kills."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import forked, forking


class Killer:
    """Lets functions of a module work in folders, each time in a process of its own, and kills it.

    Args:
        work: Goes on in a folder from wherever it stands.
    """

    def __init__(self, work: Callable[[Path], None]) -> None:
        self.work = work
        forking()

    def run(self, folder: Path, *, kill_after: float | None = None) -> int:
        """Let a process work in a folder, and return its exit code."""
        with forked(_work, self.work, folder) as (process, pipe):
            # it has begun: what it imports is imported
            pipe.recv()
            if kill_after is not None:
                time.sleep(kill_after)
                process.kill()
            process.join()
            code: int = process.exitcode
        return code

    def run_both(self, undisturbed: Path, killed: Path, wanted: int) -> None:
        """Work in one folder without disturbance, and in the other through about ``wanted`` kills at random moments."""
        began = time.monotonic()
        assert self.run(undisturbed) == 0
        duration = time.monotonic() - began
        moments, kills = random.Random(wanted), 0
        for _ in range(4):
            while kills < wanted and not (killed / "done.json").exists():
                # some early enough to hit the making of the folder; each kill costs little of what was done
                kills += self.run(killed, kill_after=moments.uniform(0, duration / 6)) == -signal.SIGKILL
            # on a machine that was busy only at first the work may end before the last kills
            if kills > wanted / 2:
                break
            shutil.rmtree(killed)
            duration, kills = duration / 2, 0
        assert kills > wanted / 2
        assert self.run(killed) == 0


def _work(pipe: Any, work: Callable[[Path], None], folder: Path) -> None:
    pipe.send("begun")
    work(folder)
