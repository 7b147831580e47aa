"""CIFAR-10 (python, binary, tar archives of either) and CIFAR-5M (npz parts)."""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import re
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kronscope.errors import DataError
from kronscope.paper.data.arrays import read_arrays
from kronscope.paper.data.dataset import Dataset, Normalization, TensorImages
from kronscope.paper.data.files import (
    MOST_BYTES,
    check_digest,
    download,
    find_file,
    folders,
    missing,
    read_file,
    reading,
    too_large,
)

__all__ = ["load_cifar5m", "load_cifar10"]

_FOLDERS = tuple(
    f"{outer}{inner}"
    for outer in ("", "cifar10/", "cifar-10/", "CIFAR10/", "cifar/")
    for inner in ("", "cifar-10-batches-bin", "cifar-10-batches-py")
    if f"{outer}{inner}"
)
_BINARY = {
    "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
}
_PYTHON = {
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
}
_HELD_OUT = {
    "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}
_ARCHIVE = "cifar-10-binary.tar.gz"
_ARCHIVE_DIGEST = "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
_NORMALIZATION = Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))

_PART = re.compile(r"(?:cifar5m_)?part(\d+)\.npz")
_PARTS_FOLDERS = ("cifar5m", "cifar-5m", "CIFAR-5M", "CIFAR5M")
_TEST_PART = 5
# A part has about a million images.
_MOST_OF_PART = 8 << 30
_ROW = 1 + 3072

Bytes = NDArray[np.uint8]


def load_cifar10(
    data_dir: str | os.PathLike[str] | None,
    *,
    fetch: bool = False,
    verify: bool = True,
    mirrors: tuple[str, ...] = _MIRRORS,
) -> Dataset:
    """CIFAR-10's 50,000 training images, and its test images if they are beside them.

    Looked for in this order: ``data_batch_N.bin`` (plain, ``.gz`` or ``.xz``), ``data_batch_N`` (python), and
    the two as published, ``cifar-10-binary.tar.gz`` and ``cifar-10-python.tar.gz``.

    Args:
        data_dir: Folder with the files, or with the usual folders that hold them.
        fetch: Download the binary archive into ``data_dir/cifar10`` when nothing is there.
        verify: Compare with the published files.
        mirrors: Addresses to download from.

    Raises:
        MissingDataError: The files are not there, or not all five of them.
        DataError: A file is damaged.
    """
    places = folders(data_dir, _FOLDERS)
    # of one file; the python form is a little larger than the binary one
    most = 10_000 * _ROW * 17 // 16 if verify else MOST_BYTES
    files = _cifar10_files(places, most)
    if files is None and fetch and data_dir is not None:
        archive = download(
            [f"{mirror}{_ARCHIVE}" for mirror in mirrors],
            Path(data_dir) / "cifar10" / _ARCHIVE,
            _ARCHIVE_DIGEST,
            data_set="CIFAR-10",
        )
        files = _tar_members(archive, _BINARY, most)
    if files is None:
        looked_for = "data_batch_1 to 5 as .bin (plain, .gz, .xz), as python files, or as their .tar.gz archive"
        raise missing("CIFAR-10", looked_for, places, downloadable=True)
    title = "CIFAR-10" + ("" if verify else " (unverified)")
    training: list[tuple[Bytes, NDArray[np.int64]]] = []
    held_out = None
    for name, read in files.items():
        content = read()
        if verify:
            check_digest(name, content, (_BINARY | _PYTHON | _HELD_OUT)[name], data_set="CIFAR-10")
        part = _parse_binary(content, name) if name.endswith(".bin") else _parse_pickle(content, name)
        if name in _HELD_OUT:
            held_out = _dataset("cifar-10", f"{title}, test images", *part)
        else:
            training.append(part)
    images, labels = (np.concatenate(parts) for parts in zip(*training, strict=True))
    return replace(_dataset("cifar-10", title, images, labels), held_out=held_out)


def load_cifar5m(data_dir: str | os.PathLike[str] | None, *, limit: int | None = None) -> Dataset:
    """CIFAR-5M from its parts ``cifar5m_part0.npz`` …, in order, the test part 5 left out.

    Args:
        data_dir: Folder with the parts.
        limit: Read only so many images; a part is 3 GB, and only what is used needs to be in memory.

    Raises:
        MissingDataError: There is no part.
        DataError: A part is damaged.
    """
    places = folders(data_dir, _PARTS_FOLDERS)
    parts: dict[int, Path] = {}
    for place in places:
        found = [(match, path) for path in place.glob("*.npz") if (match := _PART.fullmatch(path.name))]
        parts = {int(match[1]): path for match, path in sorted(found, key=lambda item: int(item[0][1]))}
        parts.pop(_TEST_PART, None)
        if parts:
            break
    if not parts:
        raise missing("CIFAR-5M", "cifar5m_part0.npz to cifar5m_part4.npz", places, downloadable=False)
    images, labels, used = [], [], []
    left = math.inf if limit is None else limit
    for number, path in parts.items():
        if left <= 0:
            break
        pixels, classes = read_arrays(path, {"X": (None, 32, 32, 3), "Y": (None,)}, limit=left, most=_MOST_OF_PART)
        images.append(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
        labels.append(classes.astype(np.int64))
        used.append(str(number))
        left -= len(pixels)
    title = f"CIFAR-5M (part {', '.join(used)})"
    return _dataset("cifar-5m", title, np.concatenate(images), np.concatenate(labels))


def _dataset(name: str, title: str, images: Bytes, labels: NDArray[np.int64]) -> Dataset:
    if labels.min(initial=0) < 0 or labels.max(initial=0) > 9:
        raise DataError(f"{title} has labels from {labels.min()} to {labels.max()}; they should be 0 to 9.")
    return Dataset(
        name=name,
        title=title,
        images=TensorImages(torch.from_numpy(images)),
        targets=torch.from_numpy(labels),
        classes=10,
        normalization=_NORMALIZATION,
    )


def _cifar10_files(places: list[Path], most: int) -> dict[str, Callable[[], bytes]] | None:
    for place in places:
        for names in (_BINARY, _PYTHON):
            found = {name: find_file([place], name) for name in names}
            present = {name: path for name, path in found.items() if path is not None}
            if len(present) == len(names):
                test = "test_batch.bin" if names is _BINARY else "test_batch"
                if beside := find_file([place], test):
                    present[test] = beside
                return {name: partial(read_file, path, most) for name, path in present.items()}
            if present:
                absent = ", ".join(name for name in names if name not in present)
                raise missing("All of CIFAR-10", f"{absent} beside {', '.join(present)}", [place], downloadable=False)
        for archive, names in ((_ARCHIVE, _BINARY), ("cifar-10-python.tar.gz", _PYTHON)):
            if (place / archive).is_file():
                return _tar_members(place / archive, names, most)
    return None


def _tar_members(archive: Path, names: dict[str, str], most: int) -> dict[str, Callable[[], bytes]]:
    # One pass over the archive: gzip cannot seek, so reading member by member would decompress it five times. Nothing
    # is written to the disk, whatever paths the members have.
    content: dict[str, bytes] = {}
    with reading(archive), gzip.open(archive) as unpacked:
        # a stream, read in pieces: also what tarfile itself reads, such as long names, is counted
        counted: Any = _Counted(unpacked, archive.name)
        with tarfile.open(fileobj=counted, mode="r|") as tar:
            for member in tar:
                name = Path(member.name).name
                if not member.isfile() or name not in names | _HELD_OUT:
                    continue
                if member.size > most:
                    raise too_large(f"{name} in {archive.name}", most)
                file = tar.extractfile(member)
                content[name] = b"" if file is None else file.read()
    absent = [name for name in names if name not in content]
    if absent:
        raise DataError(f"{archive.name} has no {', '.join(absent)}; get it again.")
    # in the order of the names, whatever the archive's is
    return {name: partial(bytes, content[name]) for name in (*names, *_HELD_OUT) if name in content}


class _Counted:
    """A file that refuses to be read beyond what an archive of CIFAR-10 can hold."""

    def __init__(self, file: gzip.GzipFile, name: str) -> None:
        self._file, self._name, self._left = file, name, MOST_BYTES

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise too_large(self._name, MOST_BYTES)
        return data


def _parse_binary(content: bytes, name: str) -> tuple[Bytes, NDArray[np.int64]]:
    if not content or len(content) % _ROW:
        raise DataError(
            f"{name} should be rows of {_ROW} bytes (label and 32×32×3 image), but has {len(content)} bytes."
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, _ROW)
    return rows[:, 1:].reshape(-1, 3, 32, 32).copy(), rows[:, 0].astype(np.int64)


def _parse_pickle(content: bytes, name: str) -> tuple[Bytes, NDArray[np.int64]]:
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        pixels = np.asarray(batch[b"data"])
        labels = np.asarray(batch[b"labels"], dtype=np.int64)
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{name} is not a CIFAR-10 python batch ({type(error).__name__}: {error}).") from error
    if pixels.ndim != 2 or pixels.shape[1] != 3072 or pixels.dtype != np.uint8 or labels.shape != (len(pixels),):
        raise DataError(f"{name} needs data (N, 3072) bytes and N labels, got {pixels.shape} and {labels.shape}.")
    return pixels.reshape(-1, 3, 32, 32).copy(), labels


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays and plain containers; any other class or function in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        reconstruct: Any = np.empty(0).__reduce__()[0]
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _latin1,
        }
        if (module, name) not in allowed:
            raise DataError(
                f"The file wants to run {module}.{name}; CIFAR-10's python files never do. Do not trust it."
            )
        return allowed[module, name]


def _latin1(text: str, encoding: str) -> bytes:
    # How python 3 writes bytes in the old pickle protocols.
    if encoding != "latin1":
        raise DataError(f"The file asks for the encoding {encoding!r}; CIFAR-10's python files use latin1.")
    return text.encode("latin1")
