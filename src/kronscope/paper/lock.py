"""A lock on a folder that the operating system lets go of when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

from kronscope.errors import RunError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["FolderLock"]


class FolderLock:
    """Held from :meth:`acquire` to :meth:`release`, or to the end of the process; so no lock is ever stale.

    The file ``.lock`` stays behind, unless :meth:`remove` takes it away, and means nothing by itself; it names the last
    holder, for the message.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self._handle: int | None = handle
        self._path = path

    @classmethod
    def acquire(cls, folder: Path) -> FolderLock:
        """Take the folder's lock at once, or raise.

        Raises:
            RunError: Another process has it, or the file system knows no locks.
        """
        path = folder / ".lock"
        lock = cls._acquire(folder, path)
        while not lock._holds(path):  # its holder removed the file between our opening and our locking it
            lock.release()
            lock = cls._acquire(folder, path)
        return lock

    @classmethod
    def _acquire(cls, folder: Path, path: Path) -> FolderLock:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(f"Could not write to {folder}: {error.strerror}; choose another folder (--out).") from error
        try:
            _lock(handle)
        except OSError as error:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() if hasattr(os, "pread") else ""
            os.close(handle)
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise RunError(
                    f"{folder} is being written by another process{f' ({holder})' if holder else ''}; "
                    f"wait until it ends, or choose another folder (--out)."
                ) from error
            raise RunError(
                f"The file system of {folder} cannot lock files ({error.strerror}); choose a folder on a local disk."
            ) from error
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()}\n".encode())
        return cls(handle, path)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def remove(self) -> None:
        """Let go and leave no file behind."""
        if sys.platform == "win32":  # where an open file cannot be removed
            self.release()
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.release()

    def _holds(self, path: Path) -> bool:
        if sys.platform == "win32" or self._handle is None:
            return True
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except FileNotFoundError:
            return False


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        # A byte far behind the text, so that the holder's number can still be read.
        os.lseek(handle, 1 << 20, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
