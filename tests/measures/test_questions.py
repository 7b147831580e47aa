"""What must not be mixed up: two questions in one table, two fits under one name, a batch size that means nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.curvature import SecondMoment
from kronscope.errors import OptionError, ResultsError


def _problem() -> tuple[nn.Module, nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    return model, nn.CrossEntropyLoss(), [(torch.randn(24, 6, dtype=torch.float64), torch.randint(4, (24,)))]


def test_exact_and_population_answers_do_not_merge() -> None:
    exact = ks.measure(*_problem(), layers=["0.weight"], progress=False)
    population = ks.measure(*_problem(), layers=["0.weight"], population=True, progress=False)
    with pytest.raises(ResultsError, match="population"):
        exact.merge(population)
    later = ks.measure(*_problem(), layers=["0.weight"], step=5, population=True, progress=False)
    assert len(exact.merge(later)) == 8


def test_one_name_stands_for_one_fit() -> None:
    twice = [ks.approx.get("kronecker-sum", rank=2), ks.approx.get("kronecker-sum", rank=3)]
    with pytest.raises(OptionError, match="kronecker-sum"):
        ks.measure(*_problem(), approximations=twice, progress=False)


def test_a_batch_size_means_nothing_where_drawn_labels_stand_for_exact_ones() -> None:
    problem = _problem()
    one, many = (
        ks.measure(*problem, layers=["0.weight"], max_columns=1, batch_size=size, progress=False) for size in (1, 64)
    )
    assert [row.cosine for row in one] == [row.cosine for row in many]


def test_kernels_are_only_kept_within_the_share_of_the_budget() -> None:
    stream = ks.GradientStream.from_factors(torch.randn(50, 1, 3), torch.randn(50, 1, 4))
    assert SecondMoment(stream).kernels() is not None
    tight = ks.GradientStream.from_factors(torch.randn(50, 1, 3), torch.randn(50, 1, 4))
    tight.keep_bytes = 16 * 50 * 50 - 1
    assert SecondMoment(tight).kernels() is None
    assert SecondMoment(tight).norm() > 0


def test_a_layer_without_gradients_stops_no_other_and_its_curves_are_empty() -> None:
    # the first factor of a low-rank adapter, as long as the second one is zero
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    nn.init.zeros_(model.get_parameter("1.weight"))
    data = [(torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,)))]
    details = ["spectrum", "exponents", "batch_sizes"]
    for population in (False, True):
        results = ks.measure(
            model, nn.CrossEntropyLoss(), data, details=details, population=population, leading_eigenvalue=True
        )
        assert all("zero" in row.note for row in results.select(layer="0.weight"))
        assert not any(math.isnan(row.cosine) for row in results.select(layer="2.weight"))
        assert math.isnan(results.select(layer="0.weight").details[0].number("ratio"))
        assert ("curves are of these samples" in str(results)) == population
