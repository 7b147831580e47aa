"""The folder of a measurement: without results it is as it was before, with results it is never written to again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kronscope as ks
from kronscope.errors import RunError
from kronscope.paper import Run
from kronscope.paper.lock import lock_folder
from kronscope.paper.measurement import MeasurementFolder
from kronscope.support import locks

_RESULTS = ks.Results([ks.measures.Row("fc.weight", 3, 4, 0, "gauss_newton", "exact", 1, "shampoo2", 0.9)])
_KILLED = """
import os, signal, sys
from kronscope.paper.measurement import MeasurementFolder
folder = MeasurementFolder(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_failure_leaves_only_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "a" / "b"):
        with pytest.raises(ZeroDivisionError), MeasurementFolder(path):
            raise ZeroDivisionError
        assert _names(tmp_path) == {"notes.txt"}


def test_a_folder_with_results_is_never_written_to_again(tmp_path: Path) -> None:
    with MeasurementFolder(tmp_path / "out") as folder:
        files = folder.write(_RESULTS, {"model": "a:b"})
    assert {path.name for path in files} == {"results.json", "figure.png", "figure.pdf", "report.html"}
    run = Run.open(tmp_path / "out")
    assert run.done
    assert run.config == {"model": "a:b"}
    for name in ("config.json", "results.json"):  # the second: as after a kill between the two files
        with pytest.raises(RunError, match=r"choose another folder \(--out\)") as raised:
            MeasurementFolder(tmp_path / "out")
        assert "resume" not in str(raised.value)
        (tmp_path / "out" / name).rename(tmp_path / name)


def test_results_are_kept_when_the_picture_fails(tmp_path: Path) -> None:
    (tmp_path / "figure.png").mkdir()
    with pytest.raises(ks.errors.ResultsError, match=r"figure\.png"), MeasurementFolder(tmp_path) as folder:
        folder.write(_RESULTS, {})
    assert ks.Results.load(tmp_path / "results.json").rows == _RESULTS.rows


def test_a_killed_measurement_can_be_given_again(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    (tmp_path / "out" / ".results.json.0123.tmp").write_text("half")
    with MeasurementFolder(tmp_path / "out") as folder:
        folder.write(_RESULTS, {})
    assert not list((tmp_path / "out").glob(".*.tmp"))


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with MeasurementFolder(tmp_path / "out"):
        with pytest.raises(RunError, match="another process"):
            MeasurementFolder(tmp_path / "out")
        with pytest.raises(RunError, match="another process"):
            Run.start(tmp_path / "out", {})


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be removed there")
def test_a_lock_on_a_removed_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first = locks._lock, [True]

    def removed_meanwhile(handle: int) -> None:
        if first:
            first.clear()
            (tmp_path / ".lock").unlink()
        real(handle)

    monkeypatch.setattr(locks, "_lock", removed_meanwhile)
    held = lock_folder(tmp_path)
    with pytest.raises(RunError, match="another process"):
        lock_folder(tmp_path)
    held.remove()
    assert not _names(tmp_path)
