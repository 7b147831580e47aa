"""Facts: everything registered keeps the promises of the public conformance checks."""

from __future__ import annotations

import pytest

from kronscope import approx
from kronscope.approx import Approximation
from kronscope.testing import check_approximation

# a truncated sum of Kronecker products can have negative eigenvalues
INDEFINITE = {"kronecker-sum"}


@pytest.mark.parametrize("approximation", approx.all_approximations(), ids=lambda a: a.name)
def test_registered_approximations_conform(approximation: Approximation) -> None:
    check_approximation(approximation, psd=approximation.name not in INDEFINITE)


@pytest.mark.parametrize("exponent", [0.25, 1.0])
def test_other_exponents_of_shampoo_have_their_own_degree(exponent: float) -> None:
    check_approximation(approx.get("shampoo", exponent=exponent), degree=4 * exponent)
