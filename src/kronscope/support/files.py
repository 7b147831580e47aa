"""Writing a file so that a crash at any moment leaves either the old one or the new one, never half of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kronscope.errors import ResultsError

__all__ = ["naming", "refuse_links", "remove_leftovers", "write_atomically", "write_json"]

# What is written into folders of runs and histories: endings, and names without one.
_WRITTEN = (".json", ".jsonl", ".html", ".png", ".pdf", ".csv", ".pt", ".bin", ".lock", "seen")


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place in one step.

    The folder is created if it is not there: losing an hour's measurement to a missing folder helps nobody.
    A symbolic link is followed, and an existing file's permissions are kept.

    Args:
        path: Where the file shall be.
        write: Called once with the open binary file.

    Returns:
        The path, as a :class:`~pathlib.Path`.

    Raises:
        ResultsError: ``path`` is a folder or a device, or the file cannot be written there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(folder + "/new/a.txt", lambda file: file.write(b"whole")).read_bytes()
    b'whole'
    """
    asked = Path(path)
    target = Path(os.path.realpath(asked))
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "not a regular file"
        raise ResultsError(f"A file to write is needed, but {str(asked)!r} is {kind}; give the name of a file.")
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # os.open rather than tempfile: its 0o666 is cut by the umask, as for any other file the user makes.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResultsError(
            f"Could not write {str(asked)!r}: {reason}. Choose a folder you may write to that has free space."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return asked


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> Path:
    """Write plain data so that people can read it too.

    Raises:
        ResultsError: As for :func:`write_atomically`.
    """
    text = json.dumps(dict(content), indent=2, allow_nan=False, ensure_ascii=False)
    # names of files may hold bytes that are no text; json.loads reads them back
    return write_atomically(path, lambda file: file.write(text.encode("utf-8", "surrogatepass") + b"\n"))


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill in the middle of :func:`write_atomically` left in a folder; only for who holds its lock."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def refuse_links(folder: Path) -> None:
    """Refuse a folder with a symbolic link where we would write: its maker may not own what would be overwritten.

    Links to folders are allowed; people keep checkpoints on other disks. So are files of kinds we do not write.

    Raises:
        OSError: There is one; the error names it.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() and (path.suffix in _WRITTEN or path.name in _WRITTEN) and not path.is_dir():
            reason = "a symbolic link, which is not written through; remove it, or put a copy in its place"
            raise OSError(errno.ELOOP, reason, str(path))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name into errors of the operating system, which does not know it while a file is written."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _sync_folder(folder: Path) -> None:
    # The rename is on disk only once the folder is; some file systems (and Windows) do not offer this.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
