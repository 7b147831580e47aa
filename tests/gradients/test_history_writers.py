"""One history writes to a folder at a time; any number read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import kronscope as ks
from kronscope.errors import DataError, LayerError, OptionError
from kronscope.support import locks
from tests.gradients.given import Run, given_grads, stored


def test_a_second_writer_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    run = Run(given_grads(6))
    first = run.attach(path=tmp_path, resume=True)
    run.train(0, 2)
    with pytest.raises(DataError, match=r"is being recorded to .*, by this process; close\(\) that one first"):
        run.attach(path=tmp_path, resume=True)
    run.train(2, 4)
    assert ks.GradientHistory.open(tmp_path).steps == first.steps == (1, 2, 3, 4)
    first.close()
    second = run.attach(path=tmp_path, resume=True)
    run.train(4, 6)
    assert torch.equal(stored(second), given_grads(6))
    second.close()


def test_a_history_that_nobody_can_close_any_more_holds_no_lock(tmp_path: Path) -> None:
    def train(start: int) -> tuple[int, ...]:
        run = Run(given_grads(4))
        history = run.attach(path=tmp_path, resume=True)
        run.optimizer.__dict__["cycle"] = run.optimizer  # as schedulers may make: it does not go at once
        run.train(start, start + 2)
        return history.steps

    assert [train(0), train(2)] == [(1, 2), (1, 2, 3, 4)]


def test_what_is_refused_leaves_no_lock(tmp_path: Path) -> None:
    Run(given_grads(1)).attach(path=tmp_path, every=2).close()
    kept: list[BaseException] = []  # with their tracebacks, as a notebook keeps them
    for options, error in (
        ({"every": 3}, OptionError),
        ({"layers": ["weight[0:2]"]}, DataError),
        ({"resume": False}, DataError),
        ({"layers": ["wieght"]}, LayerError),
    ):
        with pytest.raises(error) as raised:
            Run(given_grads(1)).attach(**{"path": tmp_path, "resume": True, **options})
        kept.append(raised.value)
    Run(given_grads(1)).attach(path=tmp_path, resume=True).close()
    assert len(kept) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    history = Run(given_grads(1)).attach(path=tmp_path)
    waiting, ending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ending)
        os.read(waiting, 1)
        os._exit(0)
    try:
        with pytest.raises(DataError, match="by this process"):
            Run(given_grads(1)).attach(path=tmp_path, resume=True)
        history.close()
        Run(given_grads(1)).attach(path=tmp_path, resume=True).close()
    finally:
        os.close(ending)
        os.waitpid(child, 0)
        os.close(waiting)


def test_a_history_that_was_opened_or_closed_cannot_be_changed(tmp_path: Path) -> None:
    run = Run(given_grads(4))
    history = run.attach(path=tmp_path)
    run.train(0, 2)
    state = history.state_dict()
    run.train(2, 4)
    with pytest.raises(DataError, match="attach with resume=True"):
        ks.GradientHistory.open(tmp_path).load_state_dict(state)
    assert ks.GradientHistory.open(tmp_path).steps == (1, 2, 3, 4)
    history.close()
    with pytest.raises(DataError, match="attach with resume=True"):
        history.load_state_dict(state)


def test_steps_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    run = Run(given_grads(6))
    history = run.attach(path=tmp_path)
    run.train()
    history.close()
    np.array([1, 2, 3, 4, 3, 4], dtype=np.int64).tofile(tmp_path / "steps.0.bin")
    with pytest.raises(DataError, match=r"step 3 after step 4: two histories wrote to it at once.*Record it again"):
        ks.GradientHistory.open(tmp_path)
    with pytest.raises(DataError, match="two histories wrote") as raised:
        run.attach(path=tmp_path, resume=True)
    locks.FileLock.acquire(tmp_path / ".lock").release()
    assert raised.value.__traceback__ is not None  # kept, as a notebook does, and with it what was local


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(handle: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "_lock", refusing)
    run = Run(given_grads(2))
    with pytest.warns(UserWarning, match="cannot lock files"):
        history = run.attach(path=tmp_path)
    run.train()
    assert history.steps == (1, 2)
    history.close()
