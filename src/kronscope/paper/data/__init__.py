"""The data sets of the paper's workloads, by name.

Images come from files the user has, or from the published addresses when asked to download; MNIST and
CIFAR-10 are checked against their published checksums. Nothing is ever replaced by synthetic data. Images are
standardised with the usual constants and never augmented.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kronscope.errors import MissingDataError, OptionError
from kronscope.paper.data.cifar import load_cifar5m, load_cifar10
from kronscope.paper.data.dataset import Dataset, SampleBatches, batch_indices, derive_seed
from kronscope.paper.data.digits import load_digits, load_digits2
from kronscope.paper.data.imagenet import load_imagenet, load_imagenet_sample, load_tiny_imagenet
from kronscope.paper.data.mnist import load_mnist2

__all__ = ["Dataset", "SampleBatches", "batch_indices", "derive_seed", "load", "load_first", "names"]


@dataclass(frozen=True)
class _Wanted:
    """What a loader is asked for; see :func:`load`."""

    data_dir: str | os.PathLike[str] | None
    image_size: int | None
    limit: int | None
    download: bool
    verify: bool


_LOADERS: dict[str, Callable[[_Wanted], Dataset]] = {
    "mnist2": lambda asked: load_mnist2(asked.data_dir, fetch=asked.download, verify=asked.verify),
    "cifar-10": lambda asked: load_cifar10(asked.data_dir, fetch=asked.download, verify=asked.verify),
    "cifar-5m": lambda asked: load_cifar5m(asked.data_dir, limit=asked.limit),
    "imagenet": lambda asked: load_imagenet(asked.data_dir, image_size=asked.image_size or 224),
    "tiny-imagenet": lambda asked: load_tiny_imagenet(asked.data_dir, image_size=min(asked.image_size or 64, 64)),
    "imagenet-sample": lambda asked: load_imagenet_sample(asked.data_dir),
    "digits": lambda asked: load_digits(),
    "digits2": lambda asked: load_digits2(),
}
_DOWNLOADABLE = ("mnist2", "cifar-10")


def names() -> tuple[str, ...]:
    """The names :func:`load` knows.

    >>> "cifar-10" in names()
    True
    """
    return tuple(_LOADERS)


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    image_size: int | None = None,
    limit: int | None = None,
    download: bool = False,
    verify: bool = True,
) -> Dataset:
    """Load a data set's training images.

    Args:
        name: One of :func:`names`.
        data_dir: Folder to look in; the usual folders inside it (``mnist``, ``cifar10``, …) are tried too.
        image_size: Pixels a side, for data decoded from image files.
        limit: Read no more images than this, where reading fewer saves memory (CIFAR-5M).
        download: Download MNIST or CIFAR-10 into ``data_dir`` when they are not there.
        verify: Compare MNIST and CIFAR-10 with their published checksums.

    Raises:
        MissingDataError: It is not there; the text says what was looked for, where, and how to get it.
        DataError: A file is damaged.
        OptionError: There is no data set of that name, or a download without a folder.

    >>> len(load("digits"))
    1797
    """
    if name not in _LOADERS:
        raise OptionError(f"There is no data set {name!r}; choose one of {', '.join(names())}.")
    if download and data_dir is None and name in _DOWNLOADABLE:
        raise OptionError("A download needs a folder to go to: give data_dir (--data-dir DIR).")
    return _LOADERS[name](_Wanted(data_dir, image_size, limit, download, verify))


def load_first(
    choices: Sequence[str],
    data_dir: str | os.PathLike[str] | None = None,
    *,
    image_size: int | None = None,
    limit: int | None = None,
    download: bool = False,
    verify: bool = True,
) -> Dataset:
    """Load the first of several data sets that is there; a damaged one raises instead of being passed over.

    What is on disk goes first: a download is tried only when none of them is there. The arguments are those
    of :func:`load`.

    Raises:
        MissingDataError: None of them is there.
        DataError: A file is damaged.
    """
    reasons = []
    for fetch in (False, True) if download else (False,):
        for name in choices:
            try:
                return load(name, data_dir, image_size=image_size, limit=limit, download=fetch, verify=verify)
            except MissingDataError as error:
                reasons.append(str(error))
    raise MissingDataError("\n".join(dict.fromkeys(reasons)))
