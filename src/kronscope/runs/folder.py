"""A run's folder before anything is in it: whether it is free, who writes to it, and what is put back."""

from __future__ import annotations

import contextlib
import errno
import os
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kronscope.errors import RunError
from kronscope.support.locks import FileLock, HeldError, lock_folder

__all__ = ["KEPT", "Before", "check_free", "differences", "is_unfinished", "plain", "read_json", "take_lock"]

# What a run leaves once there is something to keep.
KEPT = ("checkpoints", "stored", "metrics.jsonl", "watch.jsonl", "results.json", "done.json")


class Before:
    """What was there before a run was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locked = (folder / ".lock").exists()
        self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]

    def restore(self, lock: FileLock) -> None:
        """Remove what is there now and was not; the lock goes last, since from then on another may write."""
        for name in ("config.json", "environment.json"):
            (self._folder / name).unlink(missing_ok=True)
        if not self._locked:
            lock.remove()
        for path in self._new_folders:
            with contextlib.suppress(OSError):  # it has content
                path.rmdir()


def take_lock(folder: Path) -> FileLock:
    """Lock a folder for writing.

    Raises:
        RunError: Another process writes to it, or it cannot be written to.
    """
    try:
        return lock_folder(folder)
    except HeldError as error:
        if str(error) == f"process {os.getpid()}":
            raise RunError(
                f"{folder} is being written by this process: end what writes to it (detach(), close()), or choose "
                "another folder."
            ) from error
        holder = f" ({error})" if str(error) else ""
        raise RunError(
            f"{folder} is being written by another process{holder}; wait until it ends, or choose another folder "
            "(--out)."
        ) from error
    except OSError as error:
        where = error.filename if error.errno == errno.ELOOP else f"Could not write to {folder}"
        raise RunError(f"{where}: {error.strerror}; choose another folder (--out on the command line).") from error


def check_free(folder: Path) -> None:
    """Look whether a new run can be made in a folder.

    Raises:
        RunError: It holds a run, or what is left of one.
    """
    if (folder / "config.json").exists():
        raise RunError(f"{folder} already holds a run; choose another folder (--out on the command line), or remove this one first.")
    remains = [name for name in KEPT if (folder / name).exists()]
    if remains:
        raise RunError(
            f"{folder} has {', '.join(remains)} of another run but no config.json; "
            f"remove them, or choose another folder (--out on the command line)."
        )


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as it will be read back.

    >>> plain({"steps": (1, 2)})
    {'steps': [1, 2]}
    """
    read: dict[str, Any] = json.loads(json.dumps(dict(config), allow_nan=False))
    return read


def read_json(path: Path) -> dict[str, Any] | None:
    """What a file holds; None if there is none, or nothing in it.

    Raises:
        RunError: It cannot be read, or is damaged.
    """
    try:
        content: Any = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; change that, or choose another folder.") from error
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is no JSON: {error}"
        raise RunError(f"{path} is damaged ({reason}); put back a copy of it, or choose another folder.") from error
    if content is not None and not isinstance(content, dict):
        raise RunError(f"{path} is damaged (it holds no table of names); put back a copy of it, or choose another folder.")
    return content


def differences(before: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> list[str]:
    """How a configuration differs from the one asked for, in words.

    >>> differences({"steps": 2, "data": {"name": "x"}}, {"steps": 3, "data": {"name": "x"}})
    ['steps is 2 there, 3 was asked']
    """
    found = []
    for key in sorted({*before, *asked}):
        old, new = before.get(key), asked.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} is {old!r} there, {new!r} was asked")
    return found


def is_unfinished(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder holds a run of this configuration that was stopped, and nobody has it."""
    try:
        found = read_json(folder / "config.json")
        if found is None or (folder / "done.json").exists() or differences(found, plain(config)):
            return False
        take_lock(folder).release()
    except RunError:
        return False
    return True
