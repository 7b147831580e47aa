"""Shared numerics of the measuring and the training half: gradients to factors, powers of factors, operators."""

from __future__ import annotations

from kronscope.kron.grams import (
    factored_gram,
    is_symmetric,
    mode_gram,
    position_products,
    positions_gram,
    symmetric_inner,
)
from kronscope.kron.operators import (
    Diagonal,
    EigenbasisDiagonal,
    Identity,
    KroneckerProduct,
    KroneckerSum,
    Operator,
)
from kronscope.kron.powers import PsdFactor, Spectrum, default_cutoff, psd_power

__all__ = [
    "Diagonal",
    "EigenbasisDiagonal",
    "Identity",
    "KroneckerProduct",
    "KroneckerSum",
    "Operator",
    "PsdFactor",
    "Spectrum",
    "default_cutoff",
    "factored_gram",
    "is_symmetric",
    "position_products",
    "positions_gram",
    "mode_gram",
    "psd_power",
    "symmetric_inner",
]
