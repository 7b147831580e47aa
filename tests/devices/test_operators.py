"""Inner products of all pairs of operators, wherever each is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.kron.operators import Diagonal, EigenbasisDiagonal, Identity, KroneckerProduct, KroneckerSum, Operator
from tests.devices.pretend import Machine

M, N = 3, 4


def psd(size: int, seed: int) -> Tensor:
    rows = torch.randn(size, size + 2, generator=torch.Generator().manual_seed(seed))
    return rows @ rows.T


def basis(size: int, seed: int) -> Tensor:
    found: Tensor = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed))).Q
    return found


Place = Callable[[Tensor], Tensor]


def blocks(place: Place) -> Operator:
    flat = torch.arange(M * N).view(M, N)
    return BlockDiagonal(
        (M, N),
        [(flat[:2], KroneckerProduct(place(psd(2, 1)), place(psd(N, 2)))), (flat[2:], Identity((1, N), 0.5))],
    )


KINDS: dict[str, Callable[[Place], Operator]] = {
    "product": lambda place: KroneckerProduct(place(psd(M, 3)), place(psd(N, 4)), 0.5),
    "sum": lambda place: KroneckerSum(
        [(2.0, place(psd(M, 5)), place(psd(N, 6))), (1.0, place(psd(M, 7)), place(psd(N, 8)))]
    ),
    "power of a sum": lambda place: KroneckerSum([(2.0, place(psd(M, 5)), place(psd(N, 6)))]).power(0.5),
    "eigenbasis": lambda place: EigenbasisDiagonal(place(basis(M, 1)), place(basis(N, 2)), place(psd(N, 9)[:M].abs())),
    "diagonal": lambda place: Diagonal(place(psd(N, 10)[:M].abs())),
    "identity": lambda place: Identity((M, N), 3.0),
    "blocks": blocks,
}


@pytest.mark.parametrize("places", [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("mps", "mps"), ("cuda:0", "cpu")])
def test_all_pairs_agree_with_the_cpu(places):
    here = {name: make(lambda tensor: tensor) for name, make in KINDS.items()}
    with Machine() as machine:
        sets = [{name: make(lambda t, at=at: machine.place(t, at)) for name, make in KINDS.items()} for at in places]  # type: ignore[misc]
        for one, two in itertools.product(KINDS, KINDS):
            wanted = here[one].inner(here[two])
            assert sets[0][one].inner(sets[1][two]) == pytest.approx(wanted, rel=1e-4), (one, two)
        for name, operator in sets[0].items():
            assert operator.norm() == pytest.approx(here[name].norm(), rel=1e-4)
            assert operator.power(-0.5).trace() == pytest.approx(here[name].power(-0.5).trace(), rel=1e-3)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_block_diagonal_operator_is_dense_where_its_blocks_are(device):
    with Machine() as machine:
        operator = blocks(lambda tensor: machine.place(tensor, device))
        dense = operator.to_dense()
        assert str(dense.device) == device
        matrix = machine.place(psd(N, 1)[:M], device)
        assert torch.allclose(
            (dense.float() @ matrix.flatten()).cpu(), operator.apply(matrix).flatten().cpu(), rtol=1e-4
        )


def test_on_mps_a_dense_matrix_is_on_the_host_in_float64():
    with Machine() as machine:
        dense = blocks(lambda tensor: machine.place(tensor, "mps")).to_dense()
    assert dense.dtype == torch.float64
    assert torch.allclose(dense.float(), blocks(lambda tensor: tensor).to_dense().float(), rtol=1e-4)
