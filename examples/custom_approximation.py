"""
Write an approximation of your own
==================================

A small class is enough to measure an approximation beside the others. The one here is Adafactor's: Adam keeps the
diagonal of H, an m x n table; Adafactor keeps only the table's row sums and column sums and replaces the table by their
product, diag(L) x diag(R) / tr L.

Run it::

    python examples/custom_approximation.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import nn

import kronscope as ks
from kronscope.kron import KroneckerProduct
from kronscope.testing import check_approximation


@ks.approx.register
@dataclass(frozen=True)
class Adafactor:
    """The outer product of the row and column sums of H's diagonal, over its total."""

    name: ClassVar[str] = "adafactor"
    title: ClassVar[str] = "Adafactor"
    kronecker: ClassVar[bool] = True

    def fit(self, stream: ks.GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment."""
        moment = ks.SecondMoment(stream)
        rows, cols = moment.left().diagonal(), moment.right().diagonal()
        total = float(rows.sum())
        return KroneckerProduct(rows.diag(), cols.diag(), 1 / total if total > 0 else 0.0)


# %%
# Check it against dense matrices on a dozen small streams: this raises ``ConformanceError`` if a promise is not kept.

check_approximation(Adafactor())
print("adafactor keeps the promises of an approximation")

# %%
# Its name can now be used wherever an approximation is asked for.

pixels, digits = load_digits(return_X_y=True)
inputs, targets = torch.as_tensor(pixels / 16, dtype=torch.float32), torch.as_tensor(digits)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
names = ("optimal", "shampoo2", "diagonal", "adafactor", "identity")
results = ks.measure(model, nn.CrossEntropyLoss(), [(inputs[:256], targets[:256])], approximations=names)
print(results)
results.plot("runs/custom_approximation/cosines.png")
