"""How a command ends when something is wrong that a person can mend: with one line, and never with a traceback."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kronscope.errors import KronscopeError
from kronscope.support.launch import is_rank_0
from kronscope.support.texts import printable

__all__ = ["one_line_endings"]

_REFUSED, _INTERRUPTED = 2, 130
_GOING_ON = {
    "paper": "the same command with --resume goes on",
    "demo": "the same command goes on, with the demo's folder as --out",
    "measure": "the same command goes on, with the same folder as --out",
    "advise": "the same command goes on, with the same folder as --out",
}
_ADVICE = {
    errno.EACCES: "change its permissions, or choose another folder (--out)",
    errno.EPERM: "change its permissions, or choose another folder (--out)",
    errno.EROFS: "choose a folder that can be written to (--out)",
    errno.ENAMETOOLONG: "choose a shorter name (--out)",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "check the path",
    errno.EMFILE: "allow more open files (ulimit -n)",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def one_line_endings(command: str) -> Iterator[None]:
    """End what fails inside with one line on standard error and an exit code: 2, or 130 after Ctrl-C.

    What no user can mend, such as a mistake in kronscope or in the user's own module, keeps its traceback.

    Args:
        command: The command's name, which decides how it can be gone on with.

    Raises:
        SystemExit: The command ended.
    """
    _make_streams_lenient()
    format_before = warnings.formatwarning
    warnings.formatwarning = _warning_line
    going_on = _GOING_ON.get(command, "")
    try:
        try:
            yield
        except SystemExit as end:  # how typer ends a command, also one that went well, and one after Ctrl-C
            if end.code == _INTERRUPTED:
                raise KeyboardInterrupt from None
            _flush()
            raise
    except KronscopeError as error:
        _end(_REFUSED, str(error))
    except MemoryError as error:
        _end(_REFUSED, f"there is not enough memory ({str(error) or 'none is left'}); use less (--memory-budget).")
    except OSError as error:
        _end(_REFUSED, _in_words(error, going_on))
    except KeyboardInterrupt:
        resumable = f"; {going_on}" if command in ("paper", "demo") else ""
        _end(_INTERRUPTED, f"interrupted{resumable}.")
    finally:
        warnings.formatwarning = format_before


def _in_words(error: OSError, going_on: str) -> str:
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) and error.filename is None:  # os.getcwd
        return "the folder that this was started in is gone; change to one that is there (cd) and try again."
    if error.filename is None:  # files that are written name themselves
        return f"standard output cannot be written ({reason}); what was kept in the run's folder is whole."
    where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
    if len(where) > 160:
        where = f"{where[:80]}…{where[-40:]}"
    if error.errno in _FULL:
        return f"{where}: {reason}. Make room; what was kept is whole{'; ' if going_on else ''}{going_on}."
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{where}: {reason}{'; ' if advice else ''}{advice}."


def _end(code: int, text: str) -> None:
    name = "kronscope" if is_rank_0() else f"kronscope (process {os.environ['RANK']})"
    with suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.write(f"{name}: {printable(text)}\n")
            sys.stderr.flush()
    with suppress(OSError):
        _flush()
    raise SystemExit(code) from None


def _flush() -> None:
    """Write out what was printed; where that fails, it must not fail again, with a traceback, at the process's end."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        raise


def _make_streams_lenient() -> None:
    """Let no character that a terminal does not know, as under LANG=C, end a command."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # a stream whose descriptor was closed or replaced cannot, and will say so when it is written to
            with suppress(OSError, ValueError):
                reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"kronscope: warning: {printable(str(message))}\n"
