"""ImageNet as an image folder, and two small samples of it: Tiny ImageNet (tar or folder), and an npz."""

from __future__ import annotations

import io
import math
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kronscope.errors import DataError, MissingExtraError
from kronscope.paper.data.arrays import read_arrays
from kronscope.paper.data.dataset import Dataset, Images, Normalization, TensorImages
from kronscope.paper.data.files import folders, missing, read_file, reading, too_large

__all__ = ["ImageFiles", "decode", "load_imagenet", "load_imagenet_sample", "load_tiny_imagenet"]

_NORMALIZATION = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
_FOLDERS = ("imagenet", "ImageNet", "ILSVRC2012", "imagenet/ILSVRC2012", "ILSVRC/Data/CLS-LOC")
_TINY_FOLDERS = ("tiny-imagenet-200", "imagenet", "imagenet/tiny-imagenet-200", "tiny-imagenet")
# The largest photographs; Pillow itself would decode 179 million before it refuses.
_MOST_PIXELS = 80_000_000
_MOST_OF_IMAGE = 64 << 20
_MOST_OF_SAMPLE = 2 << 30
_EXTENSIONS = (".jpeg", ".jpg", ".png")
_TRAIN_MEMBER = re.compile(r"(?:.*/)?train/(n\d{8})/(?:images/)?[^/]+\.(?:jpe?g|png)", re.IGNORECASE)
_WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class ImageFiles:
    """Images decoded from their files when asked for: ImageNet does not fit into memory."""

    paths: tuple[Path, ...]
    size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Tensor) -> Tensor:
        """Decode the images at ``indices``."""
        chosen = [self.paths[int(index)] for index in indices]
        # Pillow lets go of the interpreter while it decodes.
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            images = list(
                pool.map(lambda path: decode(read_file(path, _MOST_OF_IMAGE), self.size, name=path.name), chosen)
            )
        return torch.from_numpy(np.stack(images))


def decode(content: bytes, size: int, *, name: str = "image") -> NDArray[np.uint8]:
    """An image file as ``(3, size, size)`` bytes: shorter side to 8/7 of ``size``, centre crop.

    An image whose shorter side is ``size`` already is only cropped. Grey images become colour.

    Raises:
        DataError: The file is not an image Pillow can read.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            "Reading images needs Pillow; install it with: pip install 'kronscope[paper]'"
        ) from error
    try:
        # Only these two: for others Pillow starts programs that are installed, as Ghostscript for EPS.
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as file:
            if math.prod(file.size) > _MOST_PIXELS:
                raise DataError(f"{name} is an image of {file.width} × {file.height} pixels; ImageNet's are smaller.")
            image = file.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # damaged images fail anywhere in the decoder
        raise DataError(f"{name} is not a readable image: {type(error).__name__}: {error}. Get it again.") from error
    shorter = min(image.size)
    if shorter != size:
        factor = round(size * 8 / 7) / shorter
        width, height = (max(size, round(side * factor)) for side in image.size)
        if width * height > _MOST_PIXELS:
            raise DataError(
                f"{name} is an image of {image.width} × {image.height} pixels, much too long. Get it again."
            )
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.uint8)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def load_imagenet(data_dir: str | os.PathLike[str] | None, *, image_size: int = 224) -> Dataset:
    """ILSVRC-2012's training images from ``train/<wnid>/*.JPEG``, decoded on demand.

    Args:
        data_dir: Folder with ``train``, or with an ``imagenet`` folder that has it.
        image_size: Pixels a side after resizing and cropping.

    Raises:
        MissingDataError: No such folder.
    """
    places = folders(data_dir, _FOLDERS)
    found = next((files for place in places if (files := _class_folders(place / "train", ""))), None)
    if found is None:
        raise missing("ImageNet", "train/<wnid>/*.JPEG (an image folder)", places, downloadable=False)
    return _from_files("imagenet", "ImageNet", found, lambda paths: ImageFiles(paths, image_size))


def load_tiny_imagenet(data_dir: str | os.PathLike[str] | None, *, image_size: int = 64) -> Dataset:
    """Tiny ImageNet (ImageNet classes at 64×64), or a part of it: a folder, or a ``tiny-imagenet*.tar``.

    Args:
        data_dir: Folder with the tar, or with ``train/<wnid>/images/*.JPEG``.
        image_size: Pixels a side; 64 keeps the images as they are.

    Raises:
        MissingDataError: There is neither.
        DataError: The tar or an image is damaged.
    """
    places = folders(data_dir, _TINY_FOLDERS)
    for place in places:
        files = _class_folders(place / "train", "images")
        if files:
            return _from_files("tiny-imagenet", "Tiny ImageNet", files, lambda paths: _decoded(paths, image_size))
        for archive in sorted(place.glob("tiny-imagenet*.tar")):
            return _from_tar(archive, image_size)
    looked_for = "tiny-imagenet*.tar or tiny-imagenet-200/train/<wnid>/images/*.JPEG"
    raise missing("Tiny ImageNet", looked_for, places, downloadable=False)


def load_imagenet_sample(data_dir: str | os.PathLike[str] | None) -> Dataset:
    """A small sample of ImageNet in one file, ``imagenet1k_sample*.npz``: x (N, h, w, 3) bytes, y (N,) 0…999.

    Raises:
        MissingDataError: No such file.
        DataError: It is damaged.
    """
    places = folders(data_dir, _FOLDERS)
    path = next((file for place in places for file in sorted(place.glob("imagenet1k_sample*.npz"))), None)
    if path is None:
        raise missing("The ImageNet sample", "imagenet1k_sample*.npz", places, downloadable=False)
    pixels, labels = read_arrays(path, {"x": (None, None, None, 3), "y": (None,)}, most=_MOST_OF_SAMPLE)
    if len(labels) and (labels.min() < 0 or labels.max() > 999):
        raise DataError(f"{path.name} has labels from {labels.min()} to {labels.max()}; they should be 0 to 999.")
    return Dataset(
        name="imagenet-sample",
        title=f"ImageNet sample ({len(pixels)} images, 1000 classes)",
        images=TensorImages(torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))),
        targets=torch.from_numpy(labels.astype(np.int64)),
        classes=1000,
        normalization=_NORMALIZATION,
    )


def _class_folders(train: Path, inner: str) -> list[tuple[str, Path]]:
    # Tiny ImageNet keeps its files one folder deeper (``inner``), which tells the two apart.
    if not train.is_dir():
        return []
    classes = sorted(entry.name for entry in os.scandir(train) if _WNID.fullmatch(entry.name) and entry.is_dir())
    return [(wnid, path) for wnid in classes for path in _images_in(train / wnid / inner)]


def _images_in(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.lower().endswith(_EXTENSIONS):
                yield Path(entry.path)


def _from_files(
    name: str, title: str, files: list[tuple[str, Path]], images: Callable[[tuple[Path, ...]], Images]
) -> Dataset:
    targets, classes = _numbered([wnid for wnid, _ in files])
    title = f"{title} ({len(files)} images, {classes} classes)"
    return Dataset(name, title, images(tuple(path for _, path in files)), targets, classes, _NORMALIZATION)


def _from_tar(archive: Path, image_size: int) -> Dataset:
    found = []
    # Not compressed, so that no member is larger than the file; a sparse one says so and is refused by its size.
    with reading(archive), tarfile.open(archive, "r:") as tar:
        for member in tar:
            match = _TRAIN_MEMBER.fullmatch(member.name)
            if not match or not member.isfile():
                continue
            if member.size > _MOST_OF_IMAGE:
                raise too_large(f"{member.name} in {archive.name}", _MOST_OF_IMAGE)
            file = tar.extractfile(member)
            content = b"" if file is None else file.read()
            found.append((match[1], member.name, decode(content, image_size, name=member.name)))
    if not found:
        raise DataError(f"{archive.name} has no train/<wnid>/images/*.JPEG; is it Tiny ImageNet?")
    # The order inside a tar is its maker's; results should not depend on it.
    found.sort(key=lambda item: (item[0], item[1]))
    targets, classes = _numbered([wnid for wnid, _, _ in found])
    images = TensorImages(torch.from_numpy(np.stack([pixels for _, _, pixels in found])))
    title = f"Tiny ImageNet ({len(found)} images, {classes} classes)"
    return Dataset("tiny-imagenet", title, images, targets, classes, _NORMALIZATION)


def _decoded(paths: tuple[Path, ...], size: int) -> TensorImages:
    return TensorImages(ImageFiles(paths, size).read(torch.arange(len(paths))))


def _numbered(wnids: list[str]) -> tuple[Tensor, int]:
    numbers = {wnid: number for number, wnid in enumerate(sorted(set(wnids)))}
    return torch.tensor([numbers[wnid] for wnid in wnids]), len(numbers)
