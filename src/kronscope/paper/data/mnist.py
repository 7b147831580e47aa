"""MNIST from its idx files, reduced to the two digits of the paper."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kronscope.errors import DataError
from kronscope.paper.data.dataset import Dataset, Normalization, TensorImages
from kronscope.paper.data.files import MOST_BYTES, check_digest, download, find_file, folders, missing, read_file

__all__ = ["load_mnist2", "parse_idx"]

_FOLDERS = ("mnist", "MNIST", "MNIST/raw", "mnist/raw")
_IMAGES, _LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_TEST_IMAGES, _TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
# Of the decompressed files, so that it does not matter who compressed them.
_CONTENT = {
    _IMAGES: "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    _LABELS: "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    _TEST_IMAGES: "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    _TEST_LABELS: "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_SIZES = {
    _IMAGES: 16 + 60_000 * 784,
    _LABELS: 8 + 60_000,
    _TEST_IMAGES: 16 + 10_000 * 784,
    _TEST_LABELS: 8 + 10_000,
}
_DOWNLOAD = {
    _IMAGES: "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    _LABELS: "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
}
_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


def load_mnist2(
    data_dir: str | os.PathLike[str] | None,
    *,
    fetch: bool = False,
    verify: bool = True,
    mirrors: tuple[str, ...] = _MIRRORS,
) -> Dataset:
    """Digits 0 and 1 of MNIST's training set, and of its test set if that is there too.

    Vectors of 784, one float target each.

    Args:
        data_dir: Folder with ``train-images-idx3-ubyte`` and ``train-labels-idx1-ubyte``, also ``.gz``.
        fetch: Download what is missing into ``data_dir/mnist``.
        verify: Compare with the published files.
        mirrors: Addresses to download from.

    Raises:
        MissingDataError: The files are not there.
        DataError: A file is damaged.
    """
    places = folders(data_dir, _FOLDERS)
    paths = {}
    for name in (_IMAGES, _LABELS):
        path = find_file(places, name)
        if path is None and fetch and data_dir is not None:
            path = download(
                [f"{mirror}{name}.gz" for mirror in mirrors],
                Path(data_dir) / "mnist" / f"{name}.gz",
                _DOWNLOAD[name],
                data_set="MNIST",
            )
        if path is None:
            raise missing("MNIST", f"{name} (plain, .gz or .xz)", places, downloadable=True)
        paths[name] = path
    title = "MNIST, digits 0 and 1" + ("" if verify else " (unverified)")
    tests = find_file(places, _TEST_IMAGES), find_file(places, _TEST_LABELS)
    held_out = None
    if tests[0] is not None and tests[1] is not None:
        held_out = _dataset(f"{title}, test images", tests[0], tests[1], (_TEST_IMAGES, _TEST_LABELS), verify)
    return replace(_dataset(title, paths[_IMAGES], paths[_LABELS], (_IMAGES, _LABELS), verify), held_out=held_out)


def _dataset(title: str, images_path: Path, labels_path: Path, names: tuple[str, str], verify: bool) -> Dataset:
    arrays = []
    for path, name in zip((images_path, labels_path), names, strict=True):
        content = read_file(path, _SIZES[name] if verify else MOST_BYTES)
        if verify:
            check_digest(path.name, content, _CONTENT[name], data_set="MNIST")
        arrays.append(parse_idx(content, name=name))
    images, labels = arrays
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"MNIST needs images (N, height, width) and labels (N,), got {images.shape} and {labels.shape}."
        )
    keep = labels <= 1
    return Dataset(
        name="mnist2",
        title=title,
        images=TensorImages(torch.from_numpy(images[keep]).unsqueeze(1)),
        targets=torch.from_numpy(labels[keep].astype(np.float32)).unsqueeze(1),
        classes=1,
        # Over all ten digits, the numbers everyone uses.
        normalization=Normalization(mean=(0.1307,), std=(0.3081,)),
        flatten=True,
    )


def parse_idx(content: bytes, *, name: str = "idx file") -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Unsigned bytes in the idx format: two zero bytes, type 8, number of dimensions, big-endian sizes, data.

    Raises:
        DataError: It is not such a file, or its length is not what its sizes say.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    array([7, 8, 9], dtype=uint8)
    """
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{name} is no idx file of bytes: it starts with {content[:4].hex() or 'nothing'}, not 000008.")
    dims = content[3]
    start = 4 + 4 * dims
    if len(content) < start:
        raise DataError(f"{name} ends inside its header, after {len(content)} bytes; get it again.")
    sizes = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    # of python's integers, which do not overflow
    expected = start + math.prod(sizes)
    if len(content) != expected:
        raise DataError(f"{name} should have {expected} bytes for sizes {sizes} and has {len(content)}; get it again.")
    if dims > 3:
        raise DataError(f"{name} has {dims} dimensions; images have three, labels one.")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(sizes).copy()
