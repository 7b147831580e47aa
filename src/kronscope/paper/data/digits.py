"""The embedded data: scikit-learn's 8×8 digits, which need no files."""

from __future__ import annotations

import numpy as np
import torch

from kronscope.errors import MissingExtraError
from kronscope.paper.data.dataset import Dataset, Normalization, TensorImages

__all__ = ["load_digits", "load_digits2"]

# Over all 1797 images, of pixels between 0 and 1.
_NORMALIZATION = Normalization(mean=(0.3053,), std=(0.3760,), scale=16.0)


def load_digits() -> Dataset:
    """All 1797 digits as 1×8×8 images, ten classes.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    images, labels = _arrays()
    return Dataset("digits", "scikit-learn digits", TensorImages(images), labels, 10, _NORMALIZATION)


def load_digits2() -> Dataset:
    """The digits 0 and 1 as vectors of 64 with one float target each, the small sister of ``mnist2``.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    images, labels = _arrays()
    keep = labels <= 1
    return Dataset(
        name="digits2",
        title="scikit-learn digits, 0 and 1",
        images=TensorImages(images[keep]),
        targets=labels[keep].to(torch.float32).unsqueeze(1),
        classes=1,
        normalization=_NORMALIZATION,
        flatten=True,
    )


def _arrays() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits as sklearn_digits
    except ImportError as error:
        raise MissingExtraError(
            "The embedded digits come with scikit-learn; install it with: pip install 'kronscope[paper]'"
        ) from error
    digits = sklearn_digits()
    images = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
    return images, torch.from_numpy(digits.target.astype(np.int64))
