"""Independent jobs of linear algebra on the CPU, each computed by one thread alone.

Torch decomposes a stack of matrices one by one, and a single decomposition gains little from a second thread; so two
threads with one matrix each are nearly twice as fast. Numbers do not depend on which thread takes which job.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import lru_cache, partial
from typing import TypeVar

import torch

__all__ = ["divided", "in_threads"]

T = TypeVar("T")

# Jobs go to single threads if the last thread then ends at most this much later than the mean.
_IMBALANCE = 1.1

_lock = threading.Lock()
# by process: a forked child has the object, but not the threads
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def in_threads(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run functions side by side on at most ``torch.get_num_threads()`` threads, and return their results in order.

    No function may change what another one reads or changes. Gradients are disabled in all of them. If one fails, its
    error is raised after the others have finished. On Ctrl-C only those that have begun are finished.

    >>> in_threads([lambda: 1, lambda: 2])
    [1, 2]
    """
    workers = torch.get_num_threads()
    if workers < 2:
        return [_quietly(job) for job in jobs]
    # also a single one: with all threads of BLAS it would round differently, depending on what else is due
    batch = _Batch()
    futures: list[Future[T]] = []
    try:
        # each job in a copy of the caller's context: what is recorded there is recorded here
        futures.extend(_pool(workers).submit(batch.run, partial(copy_context().run, job)) for job in jobs)
        # a signal that another thread received is seen only between waits
        while wait(futures, timeout=0.2).not_done:
            pass
    except BaseException:
        # Ctrl-C: nothing may go on changing tensors behind the caller's back
        batch.stop()
        raise
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


@lru_cache(maxsize=64)
def divided(costs: tuple[float, ...], workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide jobs into those that use all threads, one job after another, and those that get one thread each.

    One thread per job is faster as long as no thread runs out of work: three equal jobs on two threads take as long as
    four. So some of the longest jobs use all threads, as few as possible, such that the rest keep every thread busy.

    Args:
        costs: What each job costs.
        workers: Number of threads.

    Returns:
        The indices of both kinds, the longest job first.

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
    """Whether jobs in this order, each taken by the next free thread, keep all threads busy to the end."""
    loads = [0.0] * workers
    for cost in costs:
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads) <= _IMBALANCE * sum(loads) / workers


class _Batch:
    """The jobs of one call, which can be stopped together, also those that were submitted a moment ago."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._is_stopped = False

    def run(self, job: Callable[[], T]) -> T:
        """Do a job, unless the batch was stopped."""
        with self._changed:
            if self._is_stopped:
                raise CancelledError
            self._running += 1
        try:
            return _quietly(job)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin no more jobs, and wait for those that have begun."""
        with self._changed:
            self._is_stopped = True
            self._changed.wait_for(lambda: self._running == 0)


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
