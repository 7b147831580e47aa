"""Files that are either the old ones or the new ones, on the disk and not only on the way there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kronscope as ks
from kronscope.support.files import remove_leftovers, write_json
from tests.gradients.given import Run, given_grads


def test_what_a_killed_write_leaves_is_removed_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    (tmp_path / ".a.json.0123abcd.tmp").write_text("half")
    (tmp_path / ".lock").touch()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", ".lock"}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files are not known here")
def test_the_description_of_a_history_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power between the two must not leave an empty file under that name."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        sync(handle)

    def replaced(path: Path, target: Path) -> Path:
        done.append(f"{target.name} from {path.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    Run(given_grads(2)).attach(path=tmp_path / "history").close()
    temporary, renamed, folder = done
    assert renamed == f"history.json from {temporary}"
    assert folder == "history"
    assert ks.GradientHistory.open(tmp_path / "history").steps == ()
