"""Commands run in this process, for tests: what they print, and how they end."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kronscope import cli
from kronscope.measures import progress

MODULE = """
import torch
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
inputs, targets = torch.randn(10, 4), torch.randint(0, 2, (10,))
batches = [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])]
number = 3

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

def data():
    return batches

def empty():
    return []

def pressed():
    class Pressed:
        def __iter__(self):
            raise KeyboardInterrupt
    return Pressed()
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def kronscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command, run in this process in a folder of its own that holds a module ``mine``."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    # one line of progress would follow on a machine that takes ten seconds
    monkeypatch.setattr(progress, "_FIRST_LINE", math.inf)

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["kronscope", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return Ended(code or 0, printed.out, printed.err)

    yield run
    sys.modules.pop("mine", None)


def assert_refused(ended: Ended, *words: str) -> None:
    assert ended.code == 2
    assert "Traceback" not in ended.err
    line = ended.err.strip()
    assert line.startswith("kronscope: ")
    assert "\n" not in line
    for word in words:
        assert word in line
