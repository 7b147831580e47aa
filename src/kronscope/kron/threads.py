"""Independent pieces of linear algebra on the CPU, one per thread with one BLAS thread each.

A batched decomposition on the CPU is a loop over its matrices, and a single one gains little from a second thread.
Products gain more, but three equal ones on two threads still take as long as four would. Which thread takes which
piece decides nothing about the numbers: each piece is computed by one thread alone.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

import torch

__all__ = ["divided", "in_threads"]

T = TypeVar("T")

# Pieces are dealt out one per thread while the last thread ends at most this much after the mean.
_IMBALANCE = 1.1

_lock = threading.Lock()
# by process: a forked child has the object, but not the threads
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def in_threads(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run functions side by side on at most ``torch.get_num_threads()`` threads, and return their results in order.

    The first error is raised after all have ended, an interrupt after those have ended that had begun. Functions must
    not change what another one reads or changes, and must not depend on whether gradients are enabled: they are not.

    >>> in_threads([lambda: 1, lambda: 2])
    [1, 2]
    """
    workers = torch.get_num_threads()
    if workers < 2:
        return [_quietly(job) for job in jobs]
    # a single one goes there too: numbers must not depend on how many others there happen to be
    futures: list[Future[T]] = []
    try:
        futures.extend(_pool(workers).submit(_quietly, job) for job in jobs)
        # a signal that another thread received is seen only between waits
        while wait(futures, timeout=0.2).not_done:
            pass
    except BaseException:
        # Ctrl-C: nothing may go on changing tensors behind the caller's back
        for future in futures:
            future.cancel()
        wait(futures)
        raise
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


@lru_cache(maxsize=64)
def divided(costs: tuple[float, ...], workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide pieces into those that take all threads, one after another, and those that take one thread each.

    Pieces go to single threads, the longest first, where that keeps all threads busy; the longest are taken out until
    it does.

    >>> divided((1.0, 1.0, 4.0, 1.0, 1.0), 2)
    ((), (2, 0, 1, 3, 4))
    >>> divided((1.0, 9.0, 1.0), 2)
    ((1,), (0, 2))
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    if workers < 2:
        return tuple(order), ()
    cut = next(cut for cut in range(len(order) + 1) if _is_even([costs[index] for index in order[cut:]], workers))
    return tuple(order[:cut]), tuple(order[cut:])


def _is_even(costs: Sequence[float], workers: int) -> bool:
    """Whether pieces in this order, each taken by the next free thread, keep all threads busy to the end."""
    loads = [0.0] * workers
    for cost in costs:
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads) <= _IMBALANCE * sum(loads) / workers


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
