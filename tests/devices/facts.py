"""What is known of operations on accelerators: which wait, which launch nothing, which a device lacks."""

from __future__ import annotations

import functools
import sys
from types import FrameType

import torch
from torch import Tensor

# What makes the host wait: a number, or a shape, that depends on numbers is asked for.
WAITING = {
    "_local_scalar_dense",
    "_linalg_eigh",
    "_linalg_eigvals",
    "_linalg_svd",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "linalg_eig",
    "linalg_inv",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
# Decompositions that MPS has not, or not in every version of torch that has MPS.
NOT_ON_MPS = {
    "_linalg_eigh",
    "_linalg_svd",
    "linalg_cholesky_ex",
    "linalg_eig",
    "linalg_qr",
    "linalg_solve_triangular",
    "linalg_lu_factor_ex",
}
# Operations on metadata, and allocations, launch nothing.
NO_LAUNCH = {
    "_local_scalar_dense",
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# 0-D tensors of the CPU are no numbers for these.
STRICT = {"addmm", "baddbmm", "baddbmm_", "bmm", "cat", "gather", "index_select", "mm", "stack"}
FOREACH_CHUNK = 64


def calling_line() -> str:
    """Return the line of kronscope, and the one that called it, that an operation came from."""
    frame: FrameType | None = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < 2:
        if inside := _inside(frame.f_code.co_filename):
            found.append(f"{inside}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "the test"


@functools.cache
def _inside(path: str) -> str:
    return path.partition("/src/kronscope/")[2]


def is_diagonal(matrices: Tensor) -> bool:
    return bool((matrices.count_nonzero((-2, -1)) <= matrices.shape[-1]).all()) and bool(
        torch.equal(matrices, torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1)))
    )


def read_off(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and vectors of diagonal matrices: counting on large ones need not take minutes."""
    values, order = matrices.diagonal(dim1=-2, dim2=-1).sort(dim=-1)
    return values, torch.nn.functional.one_hot(order, matrices.shape[-1]).mT.to(matrices.dtype)
