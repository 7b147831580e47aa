"""An operator on a block is the dense matrix's rows and columns of the block's entries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kronscope.errors import OptionError, ShapeError
from kronscope.kron import Diagonal, EigenbasisDiagonal, Identity, KroneckerProduct, KroneckerSum, Operator
from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.kron.restriction import CompressedDiagonal, restricted
from kronscope.testing import check_operator

M, N = 5, 4


def _psd(size: int) -> Tensor:
    root = torch.randn(size, size + 2, dtype=torch.float64)
    return root @ root.T


def _basis(size: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    return basis


def _operators() -> dict[str, Operator]:
    table = torch.rand(M, N, dtype=torch.float64) + 0.1
    places = torch.arange(M * N).view(M, N)
    return {
        "identity": Identity((M, N), 0.5),
        "product": KroneckerProduct(_psd(M), _psd(N), 0.3),
        "sum": KroneckerSum([(1.0, _psd(M), _psd(N)), (0.5, _psd(M), _psd(N))]),
        "diagonal": Diagonal(table),
        "eigenbasis": EigenbasisDiagonal(_basis(M), _basis(N), table),
        "one basis": EigenbasisDiagonal(None, _basis(N), table),
        "blocks": BlockDiagonal(
            (M, N),
            [
                (places[:3], KroneckerProduct(_psd(3), _psd(N))),
                (places[3:, :2], EigenbasisDiagonal(_basis(2), _basis(2), table[:2, :2])),
            ],
        ),
        "dense": KroneckerSum([(1.0, _psd(M), _psd(N)), (0.5, _psd(M), _psd(N))]).power(0.5),
    }


@pytest.mark.parametrize("rows", [(0, M), (1, 4), (4, 5)])
@pytest.mark.parametrize("cols", [(0, N), (1, 3)])
@pytest.mark.parametrize("kind", list(_operators()))
def test_a_restriction_is_a_part_of_the_dense_matrix(kind: str, rows: tuple[int, int], cols: tuple[int, int]) -> None:
    operator = _operators()[kind]
    index = torch.arange(M * N).view(M, N)[slice(*rows), slice(*cols)].flatten()
    part = restricted(operator, rows, cols)
    assert part.shape == (rows[1] - rows[0], cols[1] - cols[0])
    torch.testing.assert_close(part.to_dense(), operator.to_dense()[index[:, None], index], rtol=1e-9, atol=1e-12)
    check_operator(part, tolerance=1e-8)


def test_what_has_no_part_is_refused() -> None:
    whole = BlockDiagonal((2, 3), [(torch.tensor([[0, 1], [2, 3]]), Identity((2, 2)))])
    with pytest.raises(OptionError, match="no ranges of rows and columns"):
        restricted(whole, (0, 1), (0, 3))
    with pytest.raises(ShapeError, match="bases have 2 and 3 columns"):
        CompressedDiagonal(torch.eye(2), torch.eye(3), torch.ones(3, 2))
    with pytest.raises(OptionError, match="up to 4096"):
        CompressedDiagonal(torch.eye(100), torch.eye(100), torch.ones(100, 100)).power(-0.5)
