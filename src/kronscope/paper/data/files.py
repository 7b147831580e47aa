"""Finding, decompressing, checking and downloading the files of a data set."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from kronscope.errors import DataError, MissingDataError
from kronscope.support.files import write_atomically

__all__ = ["check_digest", "download", "find_file", "folders", "missing", "read_file"]

_SUFFIXES = ("", ".gz", ".xz")
_CHUNK = 1 << 20


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


def read_file(path: Path) -> bytes:
    """All bytes of a file, decompressed by its ending.

    Raises:
        DataError: The file is cut short or not what its ending says.
    """
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        if path.suffix == ".xz":
            return lzma.decompress(path.read_bytes())
        return path.read_bytes()
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"Could not read {path.name}: {error}. The file is probably cut short; get it again."
        ) from error


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
            f"and is {actual}. It is damaged, or another data set in the same format. Get it again. From "
            f"Python, kronscope.paper.data.load(..., verify=False) takes it as it is, and calls the data unverified."
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
    for block in _blocks(url, timeout):
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
    except OSError as error:
        raise _NotDeliveredError(f"{url}: {getattr(error, 'reason', error)}") from error
