"""The folder of a measurement: without results it is as it was before, with results it is never written to again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest

import kronscope as ks
from kronscope import figures
from kronscope.errors import RunError
from kronscope.runs import Run
from kronscope.runs.measurement import run_measurement
from tests.forked import forked

_RESULTS = ks.Results([ks.measures.Row("fc.weight", 3, 4, 0, "gauss_newton", "exact", 1, "shampoo2", 0.9)])
_FILES = {"results.json", "figure.png", "figure.pdf", "report.html"}


def _killed(pipe: object, folder: Path, while_: str) -> None:
    def kill(*_: object) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not killed")

    with mock.patch.object(figures, "cosines", kill):
        run_measurement(folder, {"model": "a:b"}, kill if while_ == "measuring" else lambda: _RESULTS)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _measuring(done: list[str]) -> Callable[[], ks.Results]:
    def measure() -> ks.Results:
        done.append("measured")
        return _RESULTS

    return measure


def _never() -> NoReturn:
    raise AssertionError("measured again")


def test_a_failure_leaves_only_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    during = []

    def fail() -> NoReturn:
        during.append((path / "config.json").exists())
        raise ZeroDivisionError

    for path in (tmp_path, tmp_path / "a" / "b"):
        with pytest.raises(ZeroDivisionError):
            run_measurement(path, {}, fail)
        assert _names(tmp_path) == {"notes.txt"}
    assert during == [True, True]


def test_an_interrupt_before_the_first_row_leaves_only_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_measurement(tmp_path / "out", {}, lambda: ks.Results([], partial=True))
    assert not _names(tmp_path)


def test_a_folder_with_results_is_never_written_to_again(tmp_path: Path) -> None:
    results, files = run_measurement(tmp_path / "out", {"model": "a:b"}, lambda: _RESULTS)
    assert results == _RESULTS
    assert {path.name for path in files} == _FILES
    assert _names(tmp_path / "out") == {*_FILES, "config.json", "environment.json", "done.json", ".lock"}
    run = Run.open(tmp_path / "out")
    assert run.done
    assert run.config == {"model": "a:b"}
    for name in ("config.json", "results.json"):  # the second: as after somebody removed the first
        with pytest.raises(RunError, match=r"choose another folder \(--out on the") as raised:
            run_measurement(tmp_path / "out", {"model": "a:b"}, _never)
        assert "resume" not in str(raised.value)
        (tmp_path / "out" / name).rename(tmp_path / name)


def test_results_are_kept_when_the_picture_fails(tmp_path: Path) -> None:
    (tmp_path / "figure.png").mkdir()
    with pytest.raises(ks.errors.ResultsError, match=r"figure\.png"):
        run_measurement(tmp_path, {}, lambda: _RESULTS)
    assert ks.Results.load(tmp_path / "results.json").rows == _RESULTS.rows
    (tmp_path / "figure.png").rmdir()
    results, _ = run_measurement(tmp_path, {}, _never)
    assert results.rows == _RESULTS.rows
    assert Run.open(tmp_path).done


@pytest.mark.parametrize("while_", ["measuring", "drawing"])
def test_a_killed_measurement_can_be_given_again(tmp_path: Path, while_: str) -> None:
    with forked(_killed, tmp_path / "out", while_) as (killed, _):
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
    (tmp_path / "out" / ".results.json.0123.tmp").write_text("half")
    with pytest.raises(RunError, match=r"model is 'a:b' there, 'c:d' was asked.*choose another folder"):
        run_measurement(tmp_path / "out", {"model": "c:d"}, _never)
    done: list[str] = []
    run_measurement(tmp_path / "out", {"model": "a:b"}, _measuring(done))
    assert done == (["measured"] if while_ == "measuring" else [])
    assert Run.open(tmp_path / "out").done
    assert _names(tmp_path / "out") >= _FILES
    assert not list((tmp_path / "out").glob(".*.tmp"))


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    def measure() -> ks.Results:
        for start in (lambda: run_measurement(tmp_path, {}, _never), lambda: Run.start(tmp_path, {}, resume=True)):
            with pytest.raises(RunError, match="is being written by this process"):
                start()
        return _RESULTS

    run_measurement(tmp_path, {}, measure)
