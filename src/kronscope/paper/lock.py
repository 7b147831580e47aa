"""One process per folder of a run."""

from __future__ import annotations

from pathlib import Path

from kronscope.errors import RunError
from kronscope.support.locks import FileLock, HeldError

__all__ = ["lock_folder"]


def lock_folder(folder: Path) -> FileLock:
    """Take the folder's lock at once, or raise.

    Raises:
        RunError: Another process has it, or the file system knows no locks.
    """
    path = folder / ".lock"
    try:
        return FileLock.acquire(path)
    except HeldError as error:
        holder = f" ({error})" if str(error) else ""
        raise RunError(
            f"{folder} is being written by another process{holder}; wait until it ends, or choose another folder "
            "(--out)."
        ) from error
    except OSError as error:
        if not path.exists():
            raise RunError(f"Could not write to {folder}: {error.strerror}; choose another folder (--out).") from error
        raise RunError(
            f"The file system of {folder} cannot lock files ({error.strerror}); choose a folder on a local disk."
        ) from error
