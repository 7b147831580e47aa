"""Changed records are noticed, they are on the disk before a checkpoint counts on them, and their limit stays."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path

import pytest
import torch

import kronscope as ks
from kronscope.errors import DataError
from kronscope.gradients.history_parts import why_lacking
from tests.gradients.given import SHAPE, Run, given_grads, recorded, stored

HALF = 2 * SHAPE[0] * SHAPE[1] + 8


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_flipped_byte_is_noticed(tmp_path: Path, dtype: torch.dtype) -> None:
    recorded(tmp_path, given_grads(3), dtype=dtype).close()
    values = tmp_path / "history" / "0.0.bin"
    record = values.stat().st_size // 3
    for at in range(0, 3 * record, 7):
        _flip(values, at)
        opened = ks.GradientHistory.open(tmp_path / "history")
        whole = at // record
        opened.read("weight", 0, whole) if whole else None
        with pytest.raises(DataError, match=rf"'weight' at step {whole + 1} is not what was recorded"):
            opened.read("weight", whole, whole + 1)
        _flip(values, at)
    _flip(values, record)
    with pytest.raises(DataError, match="at step 2 is not what was recorded"):
        ks.measure_history(ks.GradientHistory.open(tmp_path / "history"))


def test_a_state_counts_only_on_records_that_are_whole(tmp_path: Path) -> None:
    run = Run(given_grads(9))
    history = run.attach(path=tmp_path)
    states = []
    for stop in (3, 6, 9):
        run.train(stop - 3, stop)
        states.append(history.state_dict())
    history.close()
    assert [why_lacking(tmp_path, state) for state in states] == [None, None, None]
    record = 8 * SHAPE[0] * SHAPE[1]
    _flip(tmp_path / "0.0.bin", 7 * record + 3)
    reasons = [why_lacking(tmp_path, state) for state in states]
    assert reasons[:2] == [None, None]
    assert "step 8 is not what was recorded" in (reasons[2] or "")
    os.truncate(tmp_path / "0.0.bin", 4 * record - 1)
    reasons = [why_lacking(tmp_path, state) for state in states]
    assert reasons[0] is None
    assert "lacks step 4" in (reasons[1] or "")
    assert "lacks step 4" in (reasons[2] or "")
    (tmp_path / "history.json").write_text("{")
    assert all("damaged" in (why_lacking(tmp_path, state) or "") for state in states)


def test_records_are_on_the_disk_before_a_state_counts_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(given_grads(4))
    history = run.attach(path=tmp_path)
    run.train()
    synced = []

    def fsync(file: int) -> None:
        synced.append(os.fstat(file).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    state = history.state_dict()
    assert state["steps"] == [1, 2, 3, 4]
    assert {path.stat().st_ino for path in tmp_path.glob("*.bin")} <= set(synced)
    assert len(list(tmp_path.glob("*.bin"))) == 3
    history.close()


def test_a_history_without_checksums_goes_on(tmp_path: Path) -> None:
    recorded(tmp_path, given_grads(4)).close()
    folder = tmp_path / "history"
    (folder / "checksums.0.bin").unlink()
    described = json.loads((folder / "history.json").read_text())
    del described["checksums"], described["space"]
    (folder / "history.json").write_text(json.dumps(described))
    assert torch.equal(stored(ks.GradientHistory.open(folder)), given_grads(4))
    run = Run(given_grads(6))
    history = run.attach(path=folder, resume=True)
    run.train(4)
    assert torch.equal(stored(history), given_grads(6))
    history.close()


@pytest.mark.parametrize(
    "change",
    [{"rows": 0}, {"rows": 2.5}, {"cols": True}, {"dtype": "nn"}, {"dtype": None}, {"rows": "4"}],
)
def test_a_damaged_description_is_said(tmp_path: Path, change: dict[str, object]) -> None:
    recorded(tmp_path, given_grads(2)).close()
    path = tmp_path / "history" / "history.json"
    described = json.loads(path.read_text())
    described["layers"][0] |= change
    path.write_text(json.dumps(described))
    with pytest.raises(DataError, match="is damaged"):
        ks.GradientHistory.open(tmp_path / "history")


# ---------------------------------------------------------------------- space


def test_the_limit_is_the_same_after_resuming(tmp_path: Path) -> None:
    def train(folder: Path, stops: tuple[int, ...]) -> torch.Tensor:
        run, start = Run(given_grads(14, dtype=torch.float32)), 0
        for stop in stops:
            history = run.attach(path=folder, resume=True, space=6 * HALF if start == 0 else None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.train(start, stop)
            start = stop
            history.close()
        return stored(ks.GradientHistory.open(folder))

    assert torch.equal(train(tmp_path / "a", (2, 5, 14)), train(tmp_path / "b", (14,)))


# ---------------------------------------------------------------------- a full disk


def _full(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the disk take so many more writes, and a part of the next."""
    write, left = os.write, [after]

    def refuse(file: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            write(file, bytes(data)[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", refuse)


@pytest.mark.parametrize("after", range(6))
def test_a_full_disk_leaves_whole_records_and_the_step_can_be_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    run = Run(given_grads(6))
    history = run.attach(path=tmp_path)
    run.train(0, 2)
    with monkeypatch.context() as full:
        _full(full, after)
        with pytest.raises(OSError, match="No space left") as found:
            run.train(2, 4)
    assert str(found.value.filename).startswith(str(tmp_path))
    done = 2 + after // 3
    assert history.total_steps == done
    assert torch.equal(stored(ks.GradientHistory.open(tmp_path)), given_grads(6)[:done])
    run.train(done)
    assert torch.equal(stored(history), given_grads(6))
    history.close()


def test_a_full_disk_while_records_are_rewritten_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(given_grads(8, dtype=torch.float32))
    history = run.attach(path=tmp_path, space=6 * HALF)
    run.train(0, 3)
    for after in range(7):
        with monkeypatch.context() as full:
            _full(full, after)
            with pytest.raises(OSError, match="No space left"):
                run.train(3, 4)
        assert torch.equal(stored(ks.GradientHistory.open(tmp_path)), run.grads[:3])
        assert torch.equal(stored(history), run.grads[:3])
    with pytest.warns(UserWarning, match="float16"):
        run.train(3, 6)
    assert list(history.steps) == [1, 2, 3, 4, 5, 6]
    history.close()
