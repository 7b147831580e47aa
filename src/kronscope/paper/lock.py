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

    The file ``.lock`` stays behind and means nothing by itself; it names the last holder, for the message.
    """

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    @classmethod
    def acquire(cls, folder: Path) -> FolderLock:
        """Take the folder's lock at once, or raise.

        Raises:
            RunError: Another process has it, or the file system knows no locks.
        """
        path = folder / ".lock"
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
        return cls(handle)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        # A byte far behind the text, so that the holder's number can still be read.
        os.lseek(handle, 1 << 20, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
