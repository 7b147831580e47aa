"""Finding, decompressing, checking and downloading the files of a data set."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import lzma
import os
import secrets
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kronscope.errors import DataError, MissingDataError

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
            f"and is {actual}. It is damaged, or another data set in the same format. Get it again, or "
            f"use it as it is (verify=False, --no-verify): results then call the data unverified."
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


def download(
    urls: Sequence[str],
    target: Path,
    digest: str,
    *,
    data_set: str,
    on_bytes: Callable[[int, int], None] | None = None,
    timeout: float = 60.0,
) -> Path:
    """Download a file from the first of ``urls`` that delivers the published bytes.

    The file appears under its name only when it is whole and its checksum is right.

    Args:
        urls: Where to try, in this order.
        target: Where the file shall be; its folder is created.
        digest: The published checksum, ``"md5:…"`` or ``"sha256:…"``.
        data_set: Its name, for messages.
        on_bytes: Called with the bytes received so far and the total (0 when the server does not say).
        timeout: Seconds without an answer after which the next address is tried.

    Raises:
        MissingDataError: No address delivered it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in urls:
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            actual = _receive(url, part, digest.partition(":")[0], on_bytes, timeout)
            if actual == digest.partition(":")[2]:
                part.replace(target)
                return target
            failures.append(f"{url} sent other bytes (checksum {actual})")
        except (OSError, urllib.error.URLError) as error:
            failures.append(f"{url}: {getattr(error, 'reason', error)}")
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    raise MissingDataError(
        f"Could not download {data_set}: {'; '.join(failures)}. Download {target.name} by other means, "
        f"put it into {target.parent}, and run again."
    )


def _receive(url: str, part: Path, algorithm: str, on_bytes: Callable[[int, int], None] | None, timeout: float) -> str:
    checksum = hashlib.new(algorithm, usedforsecurity=False)
    # Some of the old university servers refuse urllib's own name.
    request = urllib.request.Request(url, headers={"User-Agent": "kronscope"})
    with urllib.request.urlopen(request, timeout=timeout) as response, part.open("wb") as file:
        total = int(response.headers.get("Content-Length") or 0)
        received = 0
        for block in _blocks(response.read):
            checksum.update(block)
            file.write(block)
            received += len(block)
            if on_bytes is not None:
                on_bytes(received, total)
        file.flush()
        os.fsync(file.fileno())
    return checksum.hexdigest()


def _blocks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while block := read(_CHUNK):
        yield block
