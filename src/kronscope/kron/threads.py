"""Independent pieces of linear algebra on the CPU, one per thread with one BLAS thread each.

A batched decomposition on the CPU is a loop over its matrices, and a single one gains little from a second thread.
Which thread takes which piece decides nothing about the numbers: each piece is computed by one thread alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["in_threads"]

T = TypeVar("T")

_lock = threading.Lock()
# by process: a forked child has the object, but not the threads
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def in_threads(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run functions side by side on at most ``torch.get_num_threads()`` threads, and return their results in order.

    The first error is raised after all have ended. Functions must not change what another one reads or
    changes, and must not depend on whether gradients are enabled: they are not.

    >>> in_threads([lambda: 1, lambda: 2])
    [1, 2]
    """
    workers = torch.get_num_threads()
    if workers < 2:
        return [_quietly(job) for job in jobs]
    # a single one goes there too: numbers must not depend on how many others there happen to be
    futures = [_pool(workers).submit(_quietly, job) for job in jobs]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


def _quietly(job: Callable[[], T]) -> T:
    with torch.no_grad():
        return job()


def _pool(workers: int) -> ThreadPoolExecutor:
    key = (os.getpid(), workers)
    with _lock:
        if key not in _pools:
            before = torch.get_num_threads()
            gate = threading.Barrier(workers + 1)
            pool = ThreadPoolExecutor(workers, thread_name_prefix="kronscope")
            for _ in range(workers):
                pool.submit(_one_thread, gate)
            gate.wait()
            # the number is each thread's own, but the default for threads to come is shared: put it back
            torch.set_num_threads(before)
            _pools[key] = pool
        return _pools[key]


def _one_thread(gate: threading.Barrier) -> None:
    # reading comes first: a thread's first reading sets it to the shared default
    torch.get_num_threads()
    torch.set_num_threads(1)
    gate.wait()
