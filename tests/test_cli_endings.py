"""How commands end: one line for what a person can mend, whatever the terminal, the path and the disk."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import kronscope as ks
from kronscope.cli.ending import one_line_endings
from kronscope.measures import Row
from kronscope.support.texts import printable
from tests.commands import MODULE, Command, assert_refused, kronscope
from tests.forked import run_program

__all__ = ["kronscope"]

_MEASURE = ("measure", "mine:build", "--data", "mine:data", "--approximation", "identity")


def _row(layer: str) -> Row:
    return Row(layer, 3, 4, 0, "gauss_newton", "exact", 1, "shampoo2", 0.9)


@pytest.mark.parametrize("name", ["a[/b]c", "[red]x", "a b", "größe·模型", "-dash", "new\nline"])
def test_odd_names_of_folders(kronscope: Command, tmp_path: Path, name: str) -> None:
    ended = kronscope(*_MEASURE, f"--out={name}")
    assert ended.code == 0, ended.err
    assert f"{name}/results.json" in ended.out
    assert (tmp_path / name / "done.json").exists()


def test_names_that_are_no_text(kronscope: Command, tmp_path: Path) -> None:
    name = os.fsdecode(b"no-text-\xff")
    ended = kronscope(*_MEASURE, f"--out={name}")
    assert ended.code == 0, ended.err
    assert (tmp_path / name / "done.json").exists()


def test_a_name_that_is_too_long(kronscope: Command) -> None:
    ended = kronscope(*_MEASURE, "--out", "x" * 300)
    assert_refused(ended, "too long", "--out")
    assert len(ended.err) < 300


def test_data_that_the_model_does_not_take(kronscope: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        MODULE
        + """
class Picky(nn.Linear):
    def forward(self, inputs):
        return self.refuse(inputs)

    def refuse(self, inputs):
        raise IndexError("too picky")

def picky():
    return Picky(4, 2)

def wide():
    return [(torch.randn(6, 5), torch.randint(0, 2, (6,)))]
"""
    )
    for command in ("measure", "advise"):
        assert_refused(kronscope(command, "mine:build", "--data", "mine:wide"), "the model fails", "shapes")
        ended = kronscope(command, "mine:picky", "--data", "mine:data")
        assert_refused(ended, "IndexError: too picky", "mine.py", "line 32")
    assert not (tmp_path / "runs").exists()


def test_what_nobody_but_us_can_mend_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), one_line_endings("measure"):
        raise ZeroDivisionError


@pytest.mark.parametrize("command", ["measure", "paper"])
def test_a_full_disk_is_named_with_how_to_go_on(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, one_line_endings(command):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/metrics.jsonl")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("kronscope: runs/x/metrics.jsonl: No space left on device. Make room")
    assert ("--resume" if command == "paper" else "--out") in said


def test_out_of_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, one_line_endings("measure"):
        raise MemoryError
    assert ended.value.code == 2
    assert "--memory-budget" in capsys.readouterr().err


def test_warnings_are_lines_without_places_of_the_source() -> None:
    before = warnings.formatwarning
    with one_line_endings("measure"):
        assert warnings.formatwarning("odd \x1b[1m", UserWarning, "x.py", 3) == "kronscope: warning: odd \\x1b[1m\n"
    assert warnings.formatwarning is before


# ---------------------------------------------------------------------- terminals


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (ended,) = run_program(tmp_path, "kronscope", *_MEASURE, "--out", "out", out="/dev/full")
    assert ended.code == 2
    assert ended.err.startswith("kronscope: standard output cannot be written (No space left on device)")
    assert ended.err.count("\n") == 1
    assert (tmp_path / "out" / "done.json").exists()


def test_no_home_a_small_terminal_and_ascii(
    kronscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LANG": "C", "LC_ALL": "C", "TERM": "dumb", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOME", raising=False)
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    ended = kronscope(*_MEASURE, "--out", "größe")
    assert ended.code == 0, ended.err
    assert b"gr??e/results.json" in printed.getvalue()
    assert (tmp_path / "größe" / "done.json").exists()


def test_standard_output_that_is_closed(kronscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert kronscope(*_MEASURE, "--out", "out").code == 0
    assert (tmp_path / "out" / "done.json").exists()


def test_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(60)\n")
    command = [sys.executable, "-c", "import kronscope_command; kronscope_command.main()"]
    source = str(Path(ks.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "importing").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert said == "kronscope: interrupted.\n"
    assert process.returncode == 130


# ---------------------------------------------------------------------- names of layers


def test_escape_sequences_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "fc\x1b]0;title\x07\x1b[2J\u202etxt"
    results = ks.Results([_row(hostile), _row("other")], settings={"notes": [hostile]})
    print(results)
    printed = capsys.readouterr().out
    assert printed.count("fc\\x1b]0;title\\x07\\x1b[2J\\u202etxt") == 2
    assert not set(printed) & {"\x1b", "\x07", "\u202e"}
    assert printable("tab\tand\nline") == "tab\tand\nline"


# ---------------------------------------------------------------------- links


def test_a_link_in_a_folder_is_not_written_through(kronscope: Command, tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    for name in (".lock", "config.json", "report.html", "figure.png", "results.json"):
        folder = tmp_path / f"with-{name}"
        folder.mkdir()
        (folder / name).symlink_to(precious)
        assert_refused(kronscope(*_MEASURE, "--out", folder), name)
        assert precious.read_text() == "mine"
    ks.Results([_row("fc")]).save(tmp_path / "loose" / "results.json")
    (tmp_path / "loose" / "report.html").symlink_to(precious)
    assert_refused(kronscope("report", "loose"), "symbolic link", "--out FILE")
    assert precious.read_text() == "mine"


def test_links_that_we_would_not_write_are_no_hindrance(kronscope: Command, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "python").symlink_to(sys.executable)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / "out" / "checkpoints").unlink()
    assert kronscope(*_MEASURE, "--out", "link").code == 0


# ---------------------------------------------------------------------- what is not installed


def test_a_missing_matplotlib_is_found_out_before_the_work(
    kronscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("kronscope.cli.measure.run", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr("kronscope.cli.advise.advise", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr("kronscope.paper.Experiment.run", lambda *_, **__: pytest.fail("trained"))
    for command in (
        _MEASURE,
        ("advise", "mine:build", "--data", "mine:data"),
        ("paper", "figure1", "--workload", "digits-linear"),
        ("demo",),
    ):
        assert_refused(kronscope(*command, "--out", "out"), "pip install 'kronscope[figures]'")
    assert not (tmp_path / "out").exists()
