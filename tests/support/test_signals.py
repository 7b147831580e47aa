"""Handlers of signals wait for the end of a block."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from kronscope.support.signals import signals_held


def test_signals_are_left_alone_outside_the_main_thread_and_handlers_come_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with signals_held():
            signal.raise_signal(signal.SIGUSR1)
            assert seen == []
        assert seen == [signal.SIGUSR1]
        inside: list[Any] = []
        thread = threading.Thread(target=lambda: _in_thread(inside))
        thread.start()
        thread.join()
        assert inside[0] is signal.getsignal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_all_handlers_run_also_if_one_raises() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))

    def both() -> None:
        with signals_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            seen.append(0)

    try:
        with pytest.raises(KeyboardInterrupt):
            both()
        assert seen == [0, signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def _in_thread(inside: list[Any]) -> None:
    with signals_held():
        inside.append(signal.getsignal(signal.SIGUSR1))
