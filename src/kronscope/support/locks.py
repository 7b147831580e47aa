"""One writer per folder: a lock that the operating system lets go of when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import warnings
from pathlib import Path
from weakref import WeakSet

from kronscope.support.callers import callers_level
from kronscope.support.files import refuse_links

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["FileLock", "HeldError", "lock_folder"]


class HeldError(Exception):
    """Somebody has the lock; the text names the holder as far as it is known."""


def lock_folder(folder: Path) -> FileLock:
    """Take the lock of a folder that is there, so that only one object writes to it.

    Raises:
        HeldError: Somebody has it, in this process or another.
        OSError: The folder cannot be written to, or has symbolic links to files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = lock_folder(Path(folder))
    ...     lock.release()
    """
    path = folder / ".lock"
    refuse_links(folder)
    try:
        return FileLock.acquire(path)
    except HeldError:
        gc.collect()  # a holder that nothing refers to any more writes nothing
        return FileLock.acquire(path)


class FileLock:
    """Held from :meth:`acquire` to :meth:`release`, to the object's end, or to that of the process.

    So no lock is ever stale. The file stays behind, unless :meth:`remove` takes it away, and means nothing by itself:
    it names the last holder, for messages.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self._handle: int | None = handle
        self._path = path
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path) -> FileLock:
        """Take the lock at once, or raise; where the file system knows no locks, warn and keep nobody out.

        Raises:
            HeldError: Somebody has it, in this process or another.
            OSError: The file cannot be made.
        """
        while True:
            lock = cls._acquire(path)
            if lock._is_there():
                return lock
            lock.release()  # its holder removed the file between our opening and our locking it

    @classmethod
    def _acquire(cls, path: Path) -> FileLock:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                holder = os.read(handle, 32).decode(errors="replace").strip()
                os.close(handle)
                raise HeldError(holder) from error
            warnings.warn(
                f"the file system of {path.parent} cannot lock files ({error.strerror}): let only one process at a "
                "time write to it.",
                stacklevel=callers_level(),
            )
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

    def __del__(self) -> None:
        self.release()

    def _is_there(self) -> bool:
        if sys.platform == "win32" or self._handle is None:
            return True
        try:
            return os.path.samestat(os.fstat(self._handle), self._path.stat())
        except FileNotFoundError:
            return False


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
