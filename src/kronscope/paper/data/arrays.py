"""Arrays in npz files: the rows that are wanted, in the shapes that are expected, and nothing that could run code."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kronscope.errors import DataError
from kronscope.paper.data.files import reading

__all__ = ["read_arrays"]


def read_arrays(
    path: Path, shapes: Mapping[str, tuple[int | None, ...]], *, limit: float = math.inf, most: int
) -> list[NDArray[Any]]:
    """The leading rows of images and their labels, the first and the second array that are asked for.

    Sizes are taken from the arrays' headers before anything is decompressed, and headers that ask for objects are
    refused. Unlike ``np.load`` this reads only the rows that are wanted.

    Args:
        path: The npz file.
        shapes: The names of the two arrays and their shapes; None stands for any size. The first holds bytes, the
            second whole numbers, and both have equally many rows.
        limit: Read at most so many rows.
        most: How many bytes an array may take.

    Raises:
        DataError: The file is damaged, lacks an array, or holds other arrays.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        found = {name: _leading_rows(archive, path, name, limit, most) for name in shapes}
    wanted = zip(shapes.items(), (np.uint8, np.integer), found.values(), strict=True)
    fits = all(
        _fits(shape, expected) and np.issubdtype(array.dtype, kind) for (_, expected), kind, (array, shape) in wanted
    )
    (pixels, whole), (classes, others) = found.values()
    if not fits or whole[0] != others[0]:
        needed = " and ".join(f"{name} {_text(shape)}" for name, shape in shapes.items())
        raise DataError(
            f"{path.name} needs {needed}, bytes and as many whole numbers; got {whole} {pixels.dtype} and {others} "
            f"{classes.dtype}. It is another data set, or damaged; get it again."
        )
    return [pixels, classes]


def _leading_rows(
    archive: zipfile.ZipFile, path: Path, key: str, limit: float, most: int
) -> tuple[NDArray[Any], tuple[int, ...]]:
    """The rows, and the shape of all of them."""
    if f"{key}.npy" not in archive.namelist():
        raise DataError(f"Could not read {key} of {path.name}: there is none. Get it again.")
    with archive.open(f"{key}.npy") as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        if fortran or dtype.hasobject or not shape or dtype.itemsize == 0:
            raise DataError(f"{path.name} holds {key} in a form this data set does not use ({shape}, {dtype}).")
        rows = int(min(shape[0], limit))
        size = rows * math.prod(shape[1:]) * dtype.itemsize
        if size > most:
            raise DataError(f"{path.name} holds {key} {shape}, {size} bytes; there should be at most {most}.")
        content = file.read(size)
    if len(content) != size:
        raise DataError(f"{path.name} is cut short: {key} should have {size} bytes and has {len(content)}.")
    return np.frombuffer(content, dtype=dtype).reshape(rows, *shape[1:]), shape


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(b is None or a == b for a, b in zip(shape, expected, strict=True))


def _text(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('N' if size is None else str(size) for size in shape)})".replace("(N)", "(N,)")
