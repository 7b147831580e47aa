"""One place decides what a fit, its error bars, its batches and its curves are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.errors import OptionError
from kronscope.gradients import Recorder, resolve_layers
from kronscope.measures import Results
from kronscope.measures.columns import CallColumns, ColumnRequest, TruthColumns
from kronscope.measures.options import MeasureOptions

EXACT, REAL, MIXED = ColumnRequest("exact"), ColumnRequest("real"), ColumnRequest("mixed", 8, 3, 2)


def call(truth: ColumnRequest, *labels: str | None, **options: Any) -> CallColumns:
    name = "empirical_fisher" if truth == REAL else "gauss_newton"
    fits = [ks.Fit(each, 4, ["shampoo2"]) for each in labels]
    return CallColumns(MeasureOptions(fits, truth=name, seed=3, **options), truth)


@pytest.mark.parametrize(
    ("truth", "labels", "fitted", "resample"),
    [
        (EXACT, None, EXACT, None),
        (EXACT, "exact", EXACT, None),
        (EXACT, "real", REAL, None),
        (EXACT, "sampled", ColumnRequest("sampled", 7, 4), "drawn fit"),
        (REAL, None, REAL, None),
        (REAL, "exact", EXACT, None),
        (REAL, "sampled", ColumnRequest("sampled", 7, 4), "drawn fit"),
        (MIXED, None, MIXED, "columns"),
        (MIXED, "exact", MIXED, "columns"),
        (MIXED, "sampled", ColumnRequest("sampled", 7, 4), "columns"),
        (MIXED, "real", REAL, "columns"),
    ],
)
def test_what_a_fit_is_made_of(
    truth: ColumnRequest, labels: str | None, fitted: ColumnRequest, resample: str | None
) -> None:
    columns = call(truth, labels, draws=7)
    fit = columns.of(columns.options.fits[0])
    shown = "exact" if fitted == MIXED else fitted.labels
    assert (fit.fitted, fit.labels, fit.resample, fit.spare) == (fitted, shown, resample, None)
    # the model's own labels, exact or drawn in their place, make the batch size mean nothing
    assert fit.batches.labels == (labels or ("real" if truth == REAL else "exact"))
    everyone = dataclasses.replace(columns, options=dataclasses.replace(columns.options, population=True))
    assert everyone.of(columns.options.fits[0]).resample == "samples"


def test_everything_is_captured_once_and_the_truth_first() -> None:
    few = call(EXACT, "sampled", "real", None, "sampled", "real", draws=2)
    assert few.all() == [EXACT, REAL, ColumnRequest("sampled", 2, 4), ColumnRequest("sampled", 2, 5)]
    assert call(EXACT, "sampled", draws=5).all() == [EXACT, ColumnRequest("sampled", 5, 4)]
    assert call(MIXED, "sampled", "exact", None, draws=5).all() == [MIXED, ColumnRequest("sampled", 5, 4)]


def recorder(classes: int, confident: float) -> Recorder:
    torch.manual_seed(0)
    model = nn.Linear(3, classes).double()
    with torch.no_grad():
        model.weight.mul_(confident)
    data = [(torch.randn(12, 3, dtype=torch.float64), torch.randint(classes, (12,)))]
    return Recorder(model, nn.CrossEntropyLoss(), data, resolve_layers(model, ["weight"]))


def test_as_many_columns_as_the_accuracy_takes_and_exact_ones_where_these_are_no_more() -> None:
    options = MeasureOptions([ks.Fit()], max_columns=10)
    choice = TruthColumns(options, recorder(40, 0.1), 160)
    first = choice.first()
    assert first.mixed
    assert first.fixed + first.draws == 10
    assert choice.enough(first, 0.009, 0.01) == first
    more = choice.enough(first, 0.013, 0.01)
    assert more.mixed
    assert more.fixed + more.draws == 32
    # four times the error takes sixteen times the columns, and all 39 are fewer
    assert choice.enough(first, 0.04, 0.01) == EXACT
    assert TruthColumns(MeasureOptions([ks.Fit()], max_columns=39), recorder(40, 0.1), 160).first() == EXACT


def test_a_confident_model_is_estimated_from_its_few_large_columns() -> None:
    sure = TruthColumns(MeasureOptions([ks.Fit()], max_columns=10), recorder(40, 30.0), 160).first()
    unsure = TruthColumns(MeasureOptions([ks.Fit()], max_columns=10), recorder(40, 0.01), 160).first()
    assert sure.fixed > unsure.fixed
    assert unsure.fixed == 0


def measured(**options: Any) -> Results:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 12)).double()
    data = [(torch.randn(24, 6, dtype=torch.float64), torch.randint(12, (24,)))]
    return ks.measure(model, nn.CrossEntropyLoss(), data, layers=["0.weight"], progress=False, **options)


def test_curves_and_rows_agree_on_what_a_batch_size_means_where_the_truth_is_drawn() -> None:
    kinds = ("exponents", "batch_sizes")
    one, many = (measured(max_columns=1, batch_size=size, details=kinds, replacement=False) for size in (1, 16))
    # the draws stand for exact labels, so that no curve depends on B, and drawing without replacement is no option
    assert [item.values for item in one.details] == [item.values for item in many.details]
    for name in ("shampoo2", "shampoo"):
        curve = many.details[1].series(name)
        assert max(curve) == min(curve)
    assert {item.options for item in many.details} == {row.options for row in many} == {""}
    # labels that are asked for as draws are others than the truth's
    asked = measured(max_columns=1, batch_size=16, labels="sampled", details=kinds)
    assert asked.details[0].values != one.details[0].values


def test_an_estimate_that_ends_with_all_columns_is_not_called_one() -> None:
    found = measured(max_columns=1, accuracy=1e-6, approximations=["shampoo2"])
    assert found.rows[0].cosine == measured(approximations=["shampoo2"]).rows[0].cosine
    assert "notes" not in found.settings
    assert found.question.startswith("Exact")


def test_results_say_what_was_asked() -> None:
    settings = measured(labels="real", max_samples=20, accuracy=0.5, replacement=False, backend="hooks").settings
    expected = {
        "truth": "gauss_newton",
        "labels": "real",
        "batch_size": 1,
        "estimator": "exact",
        "max_samples": 20,
        "accuracy": 0.5,
        "replacement": False,
        "backend": "hooks",
        "samples": 20,
    }
    assert expected.items() <= settings.items()
    # calls at several steps are merged, and are then still one run
    assert "runs" not in measured(step=0).merge(measured(step=1)).settings


def logits(model: nn.Module, inputs: Any) -> torch.Tensor:
    found: torch.Tensor = model(inputs)
    return found


def test_options_are_plain_data() -> None:
    fits = [ks.Fit("real", 2, ["shampoo2"]), ks.Fit(estimator=ks.Probes(7))]
    one, two = (MeasureOptions(fits[:count], "0.weight", forward=logits).to_json() for count in (1, 2))
    assert (one["labels"], one["batch_size"], one["layers"], one["forward"]) == ("real", 2, "0.weight", "logits")
    assert [fit["probes"] for fit in two["fits"]] == [None, 7]
    with pytest.raises(OptionError, match="truth must be one of"):
        MeasureOptions(fits, truth="hessian")
