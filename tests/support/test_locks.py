"""The lock of a folder: one holder, none after a kill, and what happens where there are no locks."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from kronscope.support import locks
from kronscope.support.locks import HeldError, lock_folder


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
    with pytest.raises(HeldError, match="process"):
        lock_folder(tmp_path)
    held.remove()
    assert not list(tmp_path.iterdir())


def test_where_there_are_no_locks_a_warning_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(handle: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "_lock", refusing)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"cannot lock files \(No locks available\): let only one process"):
            lock_folder(tmp_path).release()


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        lock_folder(tmp_path / "absent")
