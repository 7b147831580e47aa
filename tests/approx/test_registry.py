"""Facts: approximations are found by name, and a wrong name or option says what exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope import approx
from kronscope.approx import registry
from kronscope.errors import OptionError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Identity


def test_the_promised_names_exist() -> None:
    promised = "optimal shampoo2 shampoo kfac-reduce kfac-expand ekfac soap tnt caspr kl one-sided diagonal identity"
    assert set(promised.split()) <= set(approx.names())


def test_flags_say_which_fits_are_kronecker_products() -> None:
    others = {a.name for a in approx.all_approximations() if not a.kronecker}
    assert others == {"kronecker-sum", "ekfac", "soap", "caspr", "diagonal"}
    assert {a.name for a in approx.all_approximations() if not a.uses_batches} == {
        "kfac-reduce",
        "kfac-expand",
        "ekfac",
    }
    assert {a.name for a in approx.all_approximations() if a.fits_truth} == {
        "optimal",
        "optimal-paper",
        "kronecker-sum",
    }


def test_those_that_say_so_are_diagonal_in_shampoos_eigenbasis() -> None:
    stream = GradientStream.from_factors(
        torch.randn(40, 2, 3, dtype=torch.float64), torch.randn(40, 2, 4, dtype=torch.float64)
    )
    left, right = (factor.spectrum.vectors for factor in ks.SecondMoment(stream).factors())
    basis = torch.kron(left, right)
    diagonal = set()
    for approximation in approx.all_approximations():
        rotated = basis.T @ approximation.fit(stream).to_dense() @ basis
        if float((rotated - rotated.diagonal().diag()).norm() / rotated.norm()) < 1e-10:
            diagonal.add(approximation.name)
    said = {a.name for a in approx.all_approximations() if a.in_shampoo_basis}
    assert said == {"shampoo2", "tnt", "shampoo", "soap", "caspr"}
    # multiples of the identity on one side or both are diagonal in any basis, and need none
    assert diagonal == said | {"one-sided", "identity"}


def test_a_wrong_name_lists_near_ones() -> None:
    with pytest.raises(OptionError, match="did you mean 'shampoo2' or 'shampoo'"):
        approx.get("shampo2")
    with pytest.raises(OptionError, match="there are: optimal, "):
        approx.get("xyzzy")


def test_a_wrong_option_lists_those_there_are() -> None:
    with pytest.raises(OptionError, match="has no option power; it has: exponent"):
        approx.get("shampoo", power=2)
    with pytest.raises(OptionError, match="it has: none"):
        approx.get("identity", power=2)
    with pytest.raises(OptionError, match="rank 1 or more"):
        approx.get("kronecker-sum", rank=0)
    with pytest.raises(OptionError, match="at least one round"):
        approx.get("optimal-paper", rounds=0)


@dataclass(frozen=True)
class Mine:
    name: ClassVar[str] = "mine"
    title: ClassVar[str] = "Mine"

    def fit(self, stream: GradientStream) -> Identity:
        return Identity(stream.shape)


def test_one_s_own_is_registered_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    approx.register(Mine)
    found = approx.get("mine")
    assert isinstance(found, Mine)
    assert (found.kronecker, found.fits_truth, found.uses_batches) == (False, False, True)

    class Other(Mine):
        pass

    with pytest.raises(OptionError, match="exists already"):
        approx.register(Other)


@dataclass(frozen=True)
class Unregistered:
    name: ClassVar[str] = "unregistered"
    title: ClassVar[str] = "Unregistered"

    def fit(self, stream: GradientStream) -> Identity:
        return Identity(stream.shape)


def test_one_s_own_need_not_be_registered_to_be_measured() -> None:
    own: Any = Unregistered()
    assert approx.get(own) is own
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    data = [(torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))]
    results = ks.measure(model, nn.CrossEntropyLoss(), data, approximations=[own, "identity"], progress=False)
    found = [row.cosine for row in results]
    # up to rounding: where a sum's numbers lie in memory decides the order of its terms on some processors
    assert found[0::2] == pytest.approx(found[1::2], rel=1e-13)
    assert "unregistered" not in approx.names()


def test_objects_that_cannot_fit_are_refused() -> None:
    with pytest.raises(OptionError, match=r"needs a name and a fit\(stream\) method"):
        approx.get(3)  # type: ignore[arg-type]
