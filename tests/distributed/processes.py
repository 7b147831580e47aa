"""Run cases in several processes at once, and the same cases in this one to compare with.

A case is a function of a :class:`Place`. Starting processes takes seconds, so all cases of a file share one start.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import forking

# generous: a busy machine is no reason to fail
SECONDS = 270.0
# where the data is cut, as a part of it: shares are never equal
_CUTS = {1: (0.0, 1.0), 2: (0.0, 0.6, 1.0), 3: (0.0, 0.25, 0.65, 1.0)}


@dataclass(frozen=True)
class Place:
    """One process among several (or the only one), and a folder they share."""

    rank: int
    size: int
    folder: Path

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """This process's part of the samples."""
        cuts = [round(cut * len(tensor)) for cut in _CUTS[self.size]]
        return tensor[cuts[self.rank] : cuts[self.rank + 1]]


Case = Callable[[Place], Any]


@dataclass(frozen=True)
class Failed:
    """What a case raised."""

    kind: str
    text: str


def _run(rank: int, size: int, folder: Path, cases: Mapping[str, Case]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    outcomes: dict[str, Any] = {}
    for name, case in cases.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        try:
            outcomes[name] = case(Place(rank, size, own))
        except Exception as error:  # noqa: BLE001  # the test looks at it
            outcomes[name] = Failed(type(error).__name__, str(error))
        # whatever a case did, the group is still of use
        dist.barrier()
    (folder / f"outcomes-{rank}").write_bytes(pickle.dumps(outcomes))
    dist.destroy_process_group()


def run_everywhere(size: int, cases: Mapping[str, Case]) -> list[dict[str, Any]]:
    """Run the cases on ``size`` processes; return each one's outcomes by name."""
    context = forking()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [context.Process(target=_run, args=(rank, size, folder, cases)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        assert not stuck, f"processes {stuck} of {size} did not end"
        assert [process.exitcode for process in processes] == [0] * size
        return [pickle.loads((folder / f"outcomes-{rank}").read_bytes()) for rank in range(size)]


@cache
def run_alone(case: Case) -> Any:
    """Run a case in this process, on all of the data; once, whatever number of processes is compared with it."""
    with tempfile.TemporaryDirectory() as folder:
        return case(Place(0, 1, Path(folder)))
