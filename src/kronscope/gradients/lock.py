"""One writer per folder of records."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

from kronscope.errors import DataError
from kronscope.support.callers import callers_level
from kronscope.support.locks import FileLock, HeldError

__all__ = ["lock_for_writing"]


def lock_for_writing(folder: Path) -> FileLock | None:
    """Take the folder's lock; None, with a warning, where the file system knows none.

    Raises:
        DataError: another history is writing, or the folder cannot be written to.
    """
    path = folder / ".lock"
    try:
        try:
            return FileLock.acquire(path)
        except HeldError:
            gc.collect()  # a history that nothing refers to any more has no hook, and writes nothing
            return FileLock.acquire(path)
    except HeldError as error:
        holder = "this process" if str(error) == f"process {os.getpid()}" else str(error) or "another process"
        raise DataError(
            f"another gradient history is being recorded to {folder}, by {holder}; close() that one first, or pick "
            "another path."
        ) from None
    except OSError as error:
        if not (path.exists() and os.access(path, os.W_OK)):
            raise DataError(f"could not write to {folder}: {error.strerror}; pick another path.") from error
        warnings.warn(
            f"the file system of {folder} cannot lock files ({error.strerror}): do not record two gradient histories "
            "to it at once.",
            stacklevel=callers_level(),
        )
        return None
