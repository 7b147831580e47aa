"""Finding, decompressing, checking and downloading the files of a data set."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import lzma
import os
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from kronscope.errors import DataError, KronscopeError, MissingDataError
from kronscope.support.files import write_atomically

__all__ = [
    "MOST_BYTES",
    "check_digest",
    "download",
    "find_file",
    "folders",
    "missing",
    "read_file",
    "reading",
    "too_large",
]

# No file of these data sets holds more, however it is compressed.
MOST_BYTES = 1 << 30
_SUFFIXES = ("", ".gz", ".xz")
_CHUNK = 1 << 20
# The strongest preset of xz takes 65 MiB to decompress.
_XZ_MEMORY = 256 << 20


def folders(data_dir: str | os.PathLike[str] | None, names: Sequence[str]) -> list[Path]:
    """The places a data set is looked for: the data folder itself, then the usual folders inside it."""
    if data_dir is None:
        return []
    root = Path(data_dir)
    return [root, *(root / name for name in names)]


def find_file(places: Iterable[Path], name: str) -> Path | None:
    """The first of ``name``, ``name.gz``, ``name.xz`` in the first place that has one."""
    for place in places:
        for suffix in _SUFFIXES:
            path = place / f"{name}{suffix}"
            if path.is_file():
                return path
    return None


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of a file, decompressed by its ending, but no more than are expected.

    A few megabytes can hold gigabytes of zeros, so a file is never decompressed first and looked at afterwards.

    Args:
        path: The file.
        most: How many bytes it may hold.

    Raises:
        DataError: The file cannot be read, is cut short, is not what its ending says, or holds more.
    """
    with reading(path), _decompressed(path) as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise too_large(path.name, most)
        return content


def too_large(name: str, most: int) -> DataError:
    """The error for a file that holds more than the published one."""
    return DataError(
        f"{name} holds more than {most} bytes, and the published file does not. It is another file, or made to fill "
        "the memory; get it again."
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say in words why a file cannot be read: it is not allowed, or it is damaged.

    Raises:
        DataError: Anything failed inside.
    """
    try:
        yield
    except KronscopeError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise DataError(f"Could not read {path}: {error.strerror}; check its permissions and its disk.") from error
        raise DataError(f"Could not read {path.name}: {error}. It is damaged; get it again.") from error
    except EOFError as error:
        raise DataError(f"Could not read {path.name}: {error}. It is cut short; get it again.") from error
    except MemoryError as error:
        raise DataError(f"Could not read {path.name}: it does not fit into memory. Get it again.") from error
    except Exception as error:  # bytes that are something else fail anywhere in the reader
        raise DataError(
            f"Could not read {path.name}: {type(error).__name__}: {error}. It is damaged; get it again."
        ) from error


def _decompressed(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return io.BufferedReader(_Xz(path.open("rb")), 1 << 16)
    return path.open("rb")


class _Xz(io.RawIOBase):
    """The content of an xz file; unlike :class:`lzma.LZMAFile` with a limit to the memory that its header asks for."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data and not self._decompressor.eof:
            more = self._file.read(1 << 16) if self._decompressor.needs_input else b""
            if self._decompressor.needs_input and not more:
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            data = self._decompressor.decompress(more, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def check_digest(name: str, content: bytes, digest: str, *, data_set: str) -> None:
    """Compare the content with a published checksum such as ``"md5:…"`` or ``"sha256:…"``.

    Raises:
        DataError: They differ.
    """
    algorithm, _, expected = digest.partition(":")
    actual = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if actual != expected:
        raise DataError(
            f"{name} is not the published file of {data_set}: its {algorithm} should be {expected} "
            f"and is {actual} ({len(content)} bytes). It is damaged, or another data set in the same format. Get it "
            "again. From Python, kronscope.paper.data.load(..., verify=False) takes it as it is, and calls the data "
            "unverified."
        )


def missing(
    data_set: str, looked_for: str, places: Sequence[Path], *, downloadable: bool, instead: str = ""
) -> MissingDataError:
    """The error for a data set that is not there: what, where, and how to get it."""
    where = ", ".join(str(place) for place in places) or "nowhere, because no data folder was given"
    advice = "Give the folder that holds it as data_dir (--data-dir DIR)"
    if downloadable:
        advice += ", or let kronscope download it there (download=True, --download)"
    return MissingDataError(
        f"{data_set} was not found. Looked for {looked_for} in: {where}. {advice}. "
        + (f"{instead} " if instead else "")
        + "kronscope never puts synthetic data in its place; the digits-* workloads need no files."
    )


def download(urls: Sequence[str], target: Path, digest: str, *, data_set: str, timeout: float = 60.0) -> Path:
    """Download a file from the first of ``urls`` that delivers the published bytes.

    The file appears under its name only when it is whole and its checksum is right.

    Args:
        urls: Where to try, in this order.
        target: Where the file shall be; its folder is created.
        digest: The published checksum, ``"md5:…"`` or ``"sha256:…"``.
        data_set: Its name, for messages.
        timeout: Seconds without an answer after which the next address is tried.

    Raises:
        MissingDataError: No address delivered it.
        ResultsError: The file cannot be written.
    """
    failures = []
    for url in urls:
        try:
            return write_atomically(target, partial(_receive, url, digest, timeout))
        except _NotDeliveredError as error:
            failures.append(str(error))
    raise MissingDataError(
        f"Could not download {data_set}: {'; '.join(failures)}. Download {target.name} by other means, "
        f"put it into {target.parent}, and run again."
    )


class _NotDeliveredError(Exception):
    """An address did not deliver the published bytes."""


def _receive(url: str, digest: str, timeout: float, file: BinaryIO) -> None:
    algorithm, _, expected = digest.partition(":")
    checksum = hashlib.new(algorithm, usedforsecurity=False)
    received = 0
    for block in _blocks(url, timeout):
        received += len(block)
        if received > MOST_BYTES:
            raise _NotDeliveredError(f"{url} sent more than {MOST_BYTES} bytes")
        checksum.update(block)
        file.write(block)
    if checksum.hexdigest() != expected:
        raise _NotDeliveredError(f"{url} sent other bytes (checksum {checksum.hexdigest()})")


def _blocks(url: str, timeout: float) -> Iterator[bytes]:
    # Some of the old university servers refuse urllib's own name.
    request = urllib.request.Request(url, headers={"User-Agent": "kronscope"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            while block := response.read(_CHUNK):
                yield block
    except (OSError, http.client.HTTPException) as error:
        raise _NotDeliveredError(f"{url}: {getattr(error, 'reason', None) or repr(error)}") from error
