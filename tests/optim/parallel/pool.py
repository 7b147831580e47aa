"""A few processes that run functions together, each time in a fresh process group of as many of them as asked."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.forked import forking

TIMEOUT = 60.0


def _serve(rank: int, inbox: Any, outbox: Any, paths: list[str]) -> None:
    sys.path[:] = paths
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    while (job := inbox.get()) is not None:
        module, name, size, store, kwargs = job
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
            )
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
                warnings.filterwarnings("ignore", message=".* was given parameters without names")
                result = getattr(importlib.import_module(module), name)(**kwargs)
            # pickled here, where a failure is reported, and by value
            outbox.put((rank, True, pickle.dumps(result)))
        except BaseException:  # noqa: BLE001  # the parent reports it
            outbox.put((rank, False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Pool:
    """Processes that wait for work."""

    def __init__(self, size: int) -> None:
        context = forking()
        self._outbox = context.Queue()
        self._inboxes = [context.Queue() for _ in range(size)]
        self._processes = [
            context.Process(target=_serve, args=(rank, inbox, self._outbox, list(sys.path)), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()

    def run(self, function: Callable[..., Any], size: int, **kwargs: Any) -> list[Any]:
        """Run a function of a module on ``size`` processes and return what each returned."""
        store = Path(self._folder.name) / str(next(self._numbers))
        for inbox in self._inboxes[:size]:
            inbox.put((function.__module__, function.__name__, size, str(store), kwargs))
        found = [self._outbox.get(timeout=4 * TIMEOUT) for _ in range(size)]
        failures = [f"rank {rank}:\n{text}" for rank, good, text in sorted(found) if not good]
        assert not failures, "\n".join(failures)
        return [pickle.loads(result) for _, _, result in sorted(found, key=lambda item: item[0])]

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
