"""Products along a mode give the same whatever the order of the modes in memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from kronscope.kron.triangles import Triangle, is_packed
from kronscope.optim.block_math import add_gram, batched_times, in_memory_order, short_inside
from kronscope.optim.grafts import with_lengths_of

SHAPES = [(5, 4), (40, 36, 3), (33, 3, 34), (3, 40, 33), (2, 3, 40), (34, 2, 3, 33), (260, 40, 3), (35, 1, 36)]


def laid_out(tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same tensors in every order of their modes in memory, and as every other entry of a larger one."""
    orders = itertools.permutations(range(1, tensors.ndim))
    found = [tensors.permute(0, *o).contiguous().permute(0, *(1 + o.index(a) for a in sorted(o))) for o in orders]
    return [*found, torch.stack([tensors, tensors], -1).flatten(-2)[..., ::2]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_grams_do_not_depend_on_the_order_in_memory(shape):
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    for mode, size in enumerate(shape):
        matrices = torch.randn(2, size, size, generator=generator, dtype=torch.float64)
        rows = tensors.movedim(mode + 1, 1).flatten(2)
        product = torch.stack([m @ r for m, r in zip(matrices, rows, strict=True)])
        wanted = product.view(tensors.movedim(mode + 1, 1).shape).movedim(1, mode + 1)
        gram = torch.stack([2 * m + 0.5 * r @ r.T for m, r in zip(matrices + matrices.mT, rows, strict=True)])
        for data in laid_out(tensors):
            torch.testing.assert_close(batched_times(matrices, data, mode), wanted, rtol=1e-11, atol=1e-11)
            for given in (data, short_inside(data)):
                factor = matrices + matrices.mT
                if is_packed(size):
                    factor = Triangle(size).pack(factor)
                add_gram(factor, given, mode, 2.0, 0.5)
                found = Triangle(size).unpack(factor) if is_packed(size) else factor
                torch.testing.assert_close(found, gram, rtol=1e-11, atol=1e-11)


def test_short_modes_lie_inside_in_memory_and_nothing_else_changes():
    tensors = torch.randn(2, 40, 36, 3)
    moved = short_inside(tensors)
    assert torch.equal(moved, tensors)
    assert moved.stride()[1:] == (3 * 36, 1, 36)
    assert short_inside(torch.randn(2, 3, 40, 36)).stride()[1:] == (36, 3 * 36, 1)
    # as gradients in torch.channels_last lie already
    last = torch.randn(40, 36, 3, 3).to(memory_format=torch.channels_last).view(1, 40, 36, 3, 3)
    assert short_inside(last) is last
    few = torch.randn(2, 4, 5, 3)
    assert short_inside(few) is few
    assert short_inside(moved) is moved
    matrix = torch.randn(2, 5, 4)
    assert short_inside(matrix) is matrix


def test_views_in_memory_order_are_contiguous_or_none():
    tensors = torch.arange(2 * 40 * 33 * 3, dtype=torch.float32).view(2, 40, 33, 3)
    moved = short_inside(tensors)
    views = in_memory_order(moved, short_inside(tensors + 1))
    assert views is not None
    assert all(view.is_contiguous() for view in views)
    assert torch.equal(views[1], views[0] + 1)
    assert views[0].data_ptr() == moved.data_ptr()
    assert in_memory_order(moved, tensors) is None


def test_a_graft_is_formed_once_also_where_a_direction_has_no_length():
    formed = []

    def graft() -> torch.Tensor:
        formed.append(1)
        return torch.full((2, 3, 2), 2.0)

    direction = torch.ones(2, 3, 2)
    direction[1] = 0
    found = with_lengths_of(graft, direction)
    torch.testing.assert_close(found, torch.full((2, 3, 2), 2.0))
    assert formed == [1]
    direction = torch.ones(1, 3, 2)
    with_lengths_of(graft, direction, torch.full((1, 1, 1), 6.0**0.5))
    torch.testing.assert_close(direction, torch.ones(1, 3, 2))
    assert formed == [1]
