"""A run's folder: what survives a kill, who may write, and what an older run's folder refuses."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from kronscope.errors import RunError
from kronscope.runs import Run
from kronscope.runs.contents import Records, environment, read_records
from kronscope.support.locks import HeldError, lock_folder
from tests.forked import forked

_CONFIG = {"workload": "x", "steps": 3, "data": {"name": "y"}, "points": (1, 2)}


def _steps(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics()]


def test_a_new_run_has_config_and_environment_without_names_or_paths(tmp_path):
    with Run.create(tmp_path / "a" / "run", _CONFIG) as run:
        assert json.loads((run.folder / "config.json").read_text())["points"] == [1, 2]
        written = (run.folder / "environment.json").read_text()
        assert run.environment["torch"] == str(torch.__version__)
        assert run.environment["threads"] == torch.get_num_threads()
    assert str(tmp_path) not in written
    assert os.path.expanduser("~") not in written  # noqa: PTH111
    assert not run.done


def test_resuming_drops_what_was_logged_after_the_checkpoint(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        run.log(1, loss=0.1)
        run.checkpoint(1, {"w": torch.arange(3.0)})
        run.log(2, loss=float("nan"))
        assert _steps(run) == [1, 2]
        assert run.metrics()[1]["loss"] is None
    with Run.open(tmp_path, resume=True) as run:
        assert _steps(run) == [1]
        checkpoint = run.latest()
        assert checkpoint is not None
        assert checkpoint.step == 1
        assert torch.equal(checkpoint.state["w"], torch.arange(3.0))
        run.log(2, loss=0.2)
        assert run.metrics() == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}]


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        run.log(1, loss=0.1)
    with Run.open(tmp_path, resume=True) as run:
        assert run.latest() is None
        assert run.metrics() == []


def test_a_line_cut_short_is_not_read(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        run.log(1, loss=0.1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert _steps(Run.open(tmp_path)) == [1]


def test_the_last_two_checkpoints_are_kept(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        for step in (1, 2, 10, 300):
            run.checkpoint(step, {"step": step})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert [name.split("-")[1] for name in names] == ["00000010", "00000300"]


@pytest.mark.parametrize("damage", ["cut", "empty", "overwritten", "one bit", "text"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, damage):
    with Run.create(tmp_path, _CONFIG) as run:
        for step in (1, 2):
            run.log(step, loss=0.0)
            run.checkpoint(step, {"w": torch.full((100,), float(step))})
    (path,) = (tmp_path / "checkpoints").glob("step-00000002-*.pt")
    content = path.read_bytes()
    weights = torch.full((100,), 2.0).numpy().tobytes()
    assert weights in content
    path.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "empty": b"",
            "overwritten": content[:200] + b"\xff" * 200 + content[400:],
            "one bit": content.replace(weights, weights[:-1] + bytes([weights[-1] ^ 1])),
            "text": b"hello",
        }[damage]
    )
    with pytest.warns(UserWarning, match=r"step-00000002-\w+\.pt is damaged"):
        run = Run.open(tmp_path, resume=True)
    with run:
        checkpoint = run.latest()
        assert checkpoint is not None
        assert checkpoint.step == 1
        assert _steps(run) == [1]


def test_a_checkpoint_is_read_in_the_form_it_was_always_written(tmp_path):
    """A run that was begun by an earlier version goes on: names, order and meaning of a file's entries stay."""
    with Run.create(tmp_path, _CONFIG) as run:
        run.log(1, loss=0.5)
        run.log(2, loss=0.25)
    first = (tmp_path / "metrics.jsonl").read_bytes().index(b"\n") + 1
    content = io.BytesIO()
    torch.save({"step": 1, "metrics_bytes": first, "state": {"w": torch.ones(2)}}, content)
    checksum = hashlib.sha256(content.getvalue()).hexdigest()[:16]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / f"step-00000001-{checksum}.pt").write_bytes(content.getvalue())
    with Run.open(tmp_path, resume=True) as run:
        checkpoint = run.latest()
        assert checkpoint is not None
        assert checkpoint.step == 1
        assert torch.equal(checkpoint.state["w"], torch.ones(2))
        assert _steps(run) == [1]


def test_leftovers_of_a_killed_write_are_removed(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        run.checkpoint(1, {})
        run.store("a", {"x": 1})
    leftovers = [
        tmp_path / ".config.json.0123.tmp",
        tmp_path / "checkpoints" / ".step-00000002.pt.4567.tmp",
        tmp_path / "stored" / ".b.json.89ab.tmp",
    ]
    for path in leftovers:
        path.write_bytes(b"half")
    with Run.open(tmp_path, resume=True) as run:
        assert not any(path.exists() for path in leftovers)
        assert run.stored("a") == {"x": 1}
        assert run.stored("b") is None


def test_a_kill_before_config_was_written_leaves_a_folder_that_can_be_used(tmp_path):
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / ".config.json.0123.tmp").write_text("{")
    with Run.start(tmp_path, _CONFIG, resume=True) as run:
        assert run.latest() is None
    assert not (tmp_path / ".config.json.0123.tmp").exists()


def test_an_existing_run_needs_resume(tmp_path):
    with Run.start(tmp_path, _CONFIG) as run:
        pass
    with pytest.raises(RunError, match=r"already holds a run; go on with it.*--resume.*--out"):
        Run.start(tmp_path, _CONFIG)
    with pytest.raises(RunError, match="already holds a run"):
        Run.create(tmp_path, _CONFIG)
    with Run.start(tmp_path, _CONFIG, resume=True) as run:
        run.finish()
    assert Run.open(tmp_path).done
    with pytest.raises(RunError, match="finished run"):
        Run.start(tmp_path, _CONFIG)


def test_another_configuration_is_refused_and_the_differences_named(tmp_path):
    with Run.start(tmp_path, _CONFIG) as run:
        run.log(1, loss=0.5)
    other = {**_CONFIG, "steps": 4, "data": {"name": "z"}}
    with pytest.raises(RunError, match=r"data\.name is 'y' there, 'z' was asked; steps is 3 there, 4 was asked"):
        Run.start(tmp_path, other, resume=True)
    # Refusing changes nothing and keeps no lock; resuming then drops the line after the last checkpoint.
    assert _steps(Run.open(tmp_path)) == [1]
    Run.start(tmp_path, _CONFIG, resume=True).close()


def test_remains_of_another_run_are_never_mixed_in(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        run.checkpoint(1, {})
    (tmp_path / "config.json").unlink()
    with pytest.raises(RunError, match=r"has checkpoints, metrics\.jsonl of another run"):
        Run.start(tmp_path, _CONFIG, resume=True)


def test_a_folder_without_a_run_and_a_damaged_one_are_explained(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        Run.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Could not make the folder"):
        Run.create(tmp_path / "file" / "run", _CONFIG)


def test_metrics_shorter_than_the_checkpoint_lead_back_to_the_one_before(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        for step in (1, 2):
            run.log(step, loss=0.1)
            run.checkpoint(step, {})
    os.truncate(tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").stat().st_size - 1)
    with (
        pytest.warns(UserWarning, match="metrics.jsonl has 49 of the 50 bytes.*the checkpoint before it"),
        Run.open(tmp_path, resume=True) as run,
    ):
        latest = run.latest()
        assert latest is not None
        assert latest.step == 1
        assert [line["step"] for line in run.metrics()] == [1]


def test_a_line_that_is_no_record_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st\xff\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged: line 2"):
        read_records(tmp_path / "metrics.jsonl")


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    records = Records(tmp_path / "metrics.jsonl")
    records.append({"step": 1})

    write = os.write

    def full(file, data):
        write(file, bytes(data)[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        records.append({"step": 2})
    monkeypatch.undo()
    records.append({"step": 2})
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_run_opened_for_reading_writes_nothing(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        run.log(1, loss=0.5)
    reader = Run.open(tmp_path)
    writes: tuple[Callable[[], None], ...] = (
        lambda: reader.log(2, loss=0.5),
        lambda: reader.checkpoint(2, {}),
        lambda: reader.store("a", {}),
        reader.finish,
    )
    for write in writes:
        with pytest.raises(RunError, match="for reading only"):
            write()
    assert reader.metrics() == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize("name", ["../a", "", "a/b", ".hidden"])
def test_stored_names_stay_inside_the_folder(tmp_path, name):
    with Run.create(tmp_path, _CONFIG) as run, pytest.raises(RunError, match="needs a name"):
        run.store(name, {})


def test_a_change_of_environment_is_said(tmp_path, monkeypatch):
    Run.create(tmp_path, _CONFIG).close()
    changed = {**environment(), "threads": 99}
    monkeypatch.setattr("kronscope.runs.run.environment", lambda: changed)
    with pytest.warns(UserWarning, match=r"another environment \(threads: \d+ -> 99\)"):
        Run.open(tmp_path, resume=True).close()


def test_two_writers_in_one_process_are_refused(tmp_path):
    with Run.create(tmp_path, _CONFIG):
        with pytest.raises(RunError, match="is being written by this process: end what writes"):
            Run.open(tmp_path, resume=True)
        # Reading is always allowed.
        assert Run.open(tmp_path).config["steps"] == 3
    Run.open(tmp_path, resume=True).close()


def _hold(pipe, folder):
    lock = lock_folder(folder)
    pipe.send("held")
    pipe.recv()
    lock.release()


def test_a_killed_writer_leaves_no_stale_lock(tmp_path):
    before = multiprocessing.active_children()  # other tests may keep processes of their own
    with forked(_hold, tmp_path) as (other, pipe):
        assert pipe.recv() == "held"
        with pytest.raises(HeldError, match=f"process {other.pid}"):
            lock_folder(tmp_path)
        with pytest.raises(RunError, match=rf"written by another process \(process {other.pid}\)"):
            Run.create(tmp_path, _CONFIG)
        other.kill()
        other.join()
        assert other.exitcode == -signal.SIGKILL
    lock = lock_folder(tmp_path)
    lock.release()
    lock.release()
    assert multiprocessing.active_children() == before


def test_a_run_that_fails_before_anything_is_kept_leaves_no_trace(tmp_path):
    with pytest.raises(ZeroDivisionError), Run.create(tmp_path / "a" / "run", _CONFIG):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), Run.create(tmp_path / "a" / "run", _CONFIG) as run:
        run.log(1, loss=0.5)
        raise ZeroDivisionError
    # and one that has kept something is there to go on with, whatever ends it then
    with pytest.raises(ZeroDivisionError), Run.open(tmp_path / "a" / "run", resume=True):
        raise ZeroDivisionError
    assert Run.open(tmp_path / "a" / "run").config["steps"] == 3


def test_a_run_is_finished_only_with_all_it_needs(tmp_path):
    with Run.create(tmp_path, _CONFIG) as run:
        run.store("a", {})
        with pytest.raises(RunError, match=r"without stored/b\.json, results\.json.*--resume"):
            run.finish(needs=["stored/a.json", "stored/b.json", "results.json"])
        assert not run.done
        run.finish(needs=["stored/a.json"])
        assert run.done


def test_a_finished_run_is_not_reopened_where_that_is_not_wanted(tmp_path):
    with Run.start(tmp_path, _CONFIG) as run:
        run.finish()
    Run.start(tmp_path, _CONFIG, resume=True).close()
    with pytest.raises(RunError, match=r"already holds a run that is finished; choose another folder \(--out on the"):
        Run.start(tmp_path, _CONFIG, resume=True, reopen=False)


def _log(pipe, folder):
    run = Run.create(folder, {})
    run.log(1, loss=0.5)
    pipe.send("logged")
    pipe.recv()
    run.log(2, loss=0.25)
    os.kill(os.getpid(), signal.SIGKILL)


def test_lines_can_be_read_while_they_are_written_and_survive_a_kill(tmp_path):
    """From another process, before the writer closes or flushes anything."""
    with forked(_log, tmp_path) as (writer, pipe):
        assert pipe.recv() == "logged"
        assert _steps(Run.open(tmp_path)) == [1]
        pipe.send("go on")
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
    assert _steps(Run.open(tmp_path)) == [1, 2]


def test_an_environment_that_changed_before_anything_was_kept_is_the_runs_own(tmp_path, monkeypatch):
    Run.create(tmp_path, _CONFIG).close()
    changed = {**environment(), "threads": 99}
    monkeypatch.setattr("kronscope.runs.run.environment", lambda: changed)
    with pytest.warns(UserWarning, match="another environment"):
        Run.open(tmp_path, resume=True).close()
    assert Run.open(tmp_path).environment["threads"] == 99
