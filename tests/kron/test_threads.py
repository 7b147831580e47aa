"""Threads: the same bits as one after the other, and no trace left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kronscope.kron import threads as threads_module
from kronscope.kron.threads import divided, in_threads


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def decompositions(sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, 2 * size, generator=generator) for size in sizes]
    jobs = [lambda rows=rows: torch.linalg.eigh(rows @ rows.T).eigenvectors for rows in made]
    return in_threads(jobs)


def test_threads_give_the_bits_of_one_thread(threads):
    side_by_side = decompositions([90, 130, 70, 200, 10])
    single = decompositions([90])
    torch.set_num_threads(1)
    one_by_one = decompositions([90, 130, 70, 200, 10])
    assert all(torch.equal(a, b) for a, b in zip(side_by_side, one_by_one, strict=True))
    assert torch.equal(single[0], one_by_one[0])


def test_the_number_of_threads_is_left_alone(threads):
    seen = in_threads([torch.get_num_threads] * 4)
    assert seen == [1, 1, 1, 1]
    assert torch.get_num_threads() == threads
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [threads]


def test_an_error_arrives_after_all_have_ended(threads):
    ended = []

    def fails() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        in_threads([fails, lambda: ended.append(1), lambda: ended.append(2)])
    assert sorted(ended) == [1, 2]


def test_after_an_interrupt_nothing_goes_on(threads):
    begun, ended = [], []

    def slow() -> None:
        begun.append(1)
        first = len(begun) == 1
        time.sleep(0.3 if first else 0.1)
        if first:  # when all are submitted: an exception inside a callback of the interpreter would be lost
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        ended.append(1)

    # a process started in the background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads([slow] * 40)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(begun) == len(ended) < 40
    time.sleep(0.5)
    assert len(begun) == len(ended)


def test_gradients_are_not_recorded(threads):
    assert in_threads([torch.is_grad_enabled] * 2) == [False, False]
    assert torch.is_grad_enabled()


@given(costs=st.lists(st.floats(0.1, 100.0), max_size=30).map(tuple), workers=st.integers(1, 8))
def test_pieces_are_divided_so_that_no_thread_waits_for_long(costs, workers):
    alone, apart = divided(costs, workers)
    assert sorted(alone + apart) == list(range(len(costs)))
    if workers == 1:
        assert not apart
    # the next free thread takes the next piece
    ends = [0.0] * workers
    for index in apart:
        ends[ends.index(min(ends))] += costs[index]
    assert max(ends) <= 1.1 * sum(ends) / workers + 1e-9
    if alone and apart:
        assert min(costs[index] for index in alone) >= max(costs[index] for index in apart)


def test_a_single_piece_takes_all_threads_and_many_equal_ones_take_one_each():
    assert divided((5.0,), 2) == ((0,), ())
    assert divided((5.0,) * 4, 2) == ((), (0, 1, 2, 3))
    assert divided((5.0,) * 3, 2) == ((0,), (1, 2))
    assert divided((), 2) == ((), ())


def test_a_job_is_waited_for_if_the_interrupt_comes_before_its_future_is_known(monkeypatch):
    begun, ended = threading.Event(), []

    def slow() -> None:
        begun.set()
        time.sleep(0.2)
        ended.append(1)

    class Interrupted:
        def submit(self, run: Any, job: Any) -> None:
            pool.submit(run, job)
            begun.wait()
            raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(threads_module, "_pool", lambda workers: Interrupted())
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        with pytest.raises(KeyboardInterrupt):
            in_threads([slow, slow])
        assert ended == [1]
