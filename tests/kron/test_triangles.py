"""Packed triangles: the same matrices, whatever their size and the height of the panels."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kronscope.kron.powers import Spectrum
from kronscope.kron.triangles import Triangle, is_packed, pack, stored_traces, symmetric_outer, unpack

sizes = st.integers(1, 20)


def rows(count: int, size: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, columns, generator=generator, dtype=torch.float64)


@given(count=st.integers(0, 3), size=sizes, panel=st.integers(1, 9))
def test_packing_and_unpacking_is_exact(count, size, panel):
    triangle = Triangle(size, panel)
    matrices = rows(count, size, size)
    matrices = matrices + matrices.mT
    packed = triangle.pack(matrices)
    assert packed.shape == (count, size * (size + 1) // 2)
    assert torch.equal(triangle.unpack(packed), matrices)
    assert torch.allclose(triangle.traces(packed), matrices.diagonal(dim1=1, dim2=2).sum(1))


@given(size=sizes, columns=st.integers(1, 6), panel=st.integers(1, 9), decay=st.sampled_from([0.0, 0.9, 1.0]))
def test_a_triangle_s_gram_matrix_is_the_full_one(size, columns, panel, decay):
    triangle = Triangle(size, panel)
    before, new = rows(2, size, size), rows(2, size, columns, seed=1)
    before = before @ before.mT
    for gradient in (new, rows(2, columns, size, seed=1).mT):
        packed = triangle.pack(before)
        triangle.add_gram(packed, gradient, decay, 0.3)
        wanted = decay * before + 0.3 * gradient @ gradient.mT
        assert torch.allclose(triangle.unpack(packed), wanted, rtol=1e-12, atol=1e-12)


def test_both_forms_read_alike():
    matrices = rows(2, 7, 7)
    matrices = matrices + matrices.mT
    packed = Triangle(7).pack(matrices)
    assert torch.equal(unpack(packed), unpack(matrices))
    assert torch.equal(pack(matrices, packed), packed)
    assert pack(matrices, matrices) is matrices
    assert torch.allclose(stored_traces(packed), stored_traces(matrices))


def test_a_large_symmetric_outer_product_is_formed_from_its_lower_half():
    left = rows(2, 300, 40)
    assert is_packed(300)
    product = symmetric_outer(left, left)
    assert torch.equal(product, product.mT)
    assert torch.allclose(product, left @ left.mT, rtol=1e-12, atol=1e-12)
    values = torch.arange(300, dtype=torch.float64) - 100
    vectors = torch.linalg.qr(rows(1, 300, 300)[0]).Q
    assert torch.allclose(Spectrum(values, vectors).matrix(), (vectors * values) @ vectors.T, atol=1e-9)
