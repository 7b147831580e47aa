"""Equality of results up to the order of summation."""

from __future__ import annotations

import pytest

from kronscope.measures import Detail, Results

# What summing in another order does to float64 numbers, also after some dozens of iterations.
TOLERANCE = 1e-9


def assert_same_numbers(ours: Results, theirs: Results, tolerance: float = TOLERANCE) -> None:
    assert len(ours.rows) == len(theirs.rows) > 0
    for one, two in zip(ours.rows, theirs.rows, strict=True):
        assert (one.key, one.samples, one.note) == (two.key, two.samples, two.note)
        for name in ("cosine", "stderr"):
            assert getattr(one, name) == pytest.approx(getattr(two, name), abs=tolerance, nan_ok=True), one
    assert len(ours.details) == len(theirs.details)
    for curve, other in zip(ours.details, theirs.details, strict=True):
        assert_same_curve(curve, other)


def assert_same_curve(curve: Detail, other: Detail) -> None:
    assert curve.key == other.key
    assert set(curve.values) == set(other.values)
    # the optimum is found from another space, with other rounds and rounding left over
    for name in set(curve.values) - {"rounds", "residual"}:
        assert curve.values[name] == pytest.approx(other.values[name], abs=TOLERANCE), (curve.kind, name)
