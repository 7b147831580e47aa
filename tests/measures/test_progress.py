"""Progress where there is no terminal."""

from __future__ import annotations

import pytest

from kronscope.measures import progress
from kronscope.measures.progress import Bar


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_without_a_terminal_a_line_now_and_then_says_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    with Bar(True) as bar:
        bar.begin("gradients of 2 layers", 8)
        for done in range(1, 5):
            clock.now += 4
            bar.at(done, 8)
        first = capsys.readouterr().err
        bar.step()
        assert capsys.readouterr().err == ""  # not again at once
        clock.now += 30
        bar.say("measuring fc.weight")
    assert first == "kronscope: gradients of 2 layers: 3 of 8 after 12 s, about 20 s left\n"
    assert capsys.readouterr().err.startswith("kronscope: measuring fc.weight: 5 of 8")


def test_a_quick_or_silent_measurement_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    with Bar(True) as bar:
        bar.begin("checking the data", 1)
        bar.step()
    with Bar(False) as bar:
        clock.now += 1000
        bar.begin("checking the data", 1)
    assert capsys.readouterr().err == ""
