"""One writer per folder of records: a lock that the operating system lets go of when its holder dies, however."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import warnings
from pathlib import Path
from weakref import WeakSet

from kronscope.errors import DataError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["FileLock", "HeldError", "lock_for_writing"]


class HeldError(Exception):
    """Somebody has the lock; the text names the holder as far as it is known."""


class FileLock:
    """Held from :meth:`acquire` to :meth:`release`, to the object's end, or to that of the process.

    The file stays behind and means nothing by itself; it names the last holder, for messages.
    """

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path) -> FileLock:
        """Take the lock at once, or raise.

        Raises:
            HeldError: Somebody has it, in this process or another.
            OSError: The file cannot be made, or its file system knows no locks.
        """
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle)
        except OSError as error:
            holder = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise HeldError(holder) from error
            raise
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()}\n".encode())
        return cls(handle)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.release()


_held: WeakSet[FileLock] = WeakSet()


def _after_fork() -> None:
    # a forked process, such as one that loads data, would keep the lock when its parent has let go
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        # a byte far behind the text, so that the holder's number can still be read
        os.lseek(handle, 1 << 20, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
            stacklevel=2,
        )
        return None
