"""Progress where there is no terminal."""

from __future__ import annotations

import re

import pytest

from kronscope.measures import progress
from kronscope.measures.progress import Bar, shortened


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


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_long_name_leaves_room_for_bar_count_and_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    lines = set()
    for layer in (3, 17):
        with Bar(True) as bar:
            bar.begin("measuring", 120)
            bar.say("measuring", f"vision_tower.encoder.layers.{layer}.self_attention.query_projection.weight")
            for _ in range(60):
                bar.step()
        # what is drawn last, up to where it is taken away again
        drawn = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]|\r", "\n", capsys.readouterr().err)
        (line,) = {line for line in drawn.splitlines() if "measuring" in line and "60/120" in line}
        assert "━" * 5 in line
        assert re.search(r" 60/120 \d:\d\d:\d\d [-\d]:[-\d]{2}:[-\d]{2}", line), line
        assert len(line.rstrip()) <= columns
        assert f"{layer}." in line
        assert line.split("━")[0].rstrip(" ╺").endswith("weight")
        lines.add(line)
    assert len(lines) == 2


def test_without_a_terminal_names_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    name = ".".join(["model", "layers", *["inner"] * 20, "weight"])
    with Bar(True) as bar:
        bar.begin("measuring", 2)
        clock.now += 40
        bar.say("measuring", name)
    assert name in capsys.readouterr().err


def test_names_are_shortened_only_as_far_as_needed() -> None:
    assert shortened("fc.weight", 9) == "fc.weight"
    assert shortened("model.blocks.1.fc.weight", 20) == "m.blocks.1.fc.weight"
    assert shortened("projection_of_everything", 10) == "…verything"
    assert shortened("fc.weight", 0) == "…"
