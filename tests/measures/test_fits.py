"""Several fits against one truth: the numbers of single calls, from one capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import OptionError
from kronscope.gradients import Recorder

FITS = (
    ks.Fit(),
    ks.Fit("real", 1, ("optimal", "shampoo2"), ("batch_sizes",)),
    ks.Fit("real", 7, ("shampoo2", "shampoo"), "exponents"),
    ks.Fit("sampled", 1, ("shampoo2",)),
    ks.Fit(approximations=("shampoo",), estimator=ks.Probes(4, seed=3)),
)


def _problem() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randint(0, 3, (12,))
    return model, list(zip(x.split(5), y.split(5), strict=True))


def _facts(results: ks.Results) -> list[Any]:
    rows = [(row.layer, row.labels, row.batch_size, row.approximation, row.samples, row.note) for row in results]
    return [*rows, *((detail.kind, detail.labels, detail.batch_size) for detail in results.details)]


def _numbers(results: ks.Results) -> list[float]:
    values = [number for row in results for number in (row.cosine, row.stderr)]
    for detail in results.details:
        for value in detail.values.values():
            values += value if isinstance(value, list) else []
    return values


@pytest.mark.parametrize("truth", ["gauss_newton", "empirical_fisher"])
def test_each_fit_gives_what_a_call_of_its_own_gives(truth: str) -> None:
    model, data = _problem()
    together = ks.measure_fits(model, nn.CrossEntropyLoss(), data, FITS, truth=truth, progress=False)
    assert len(together) == len(FITS)
    for fit, got in zip(FITS, together, strict=True):
        alone = ks.measure(
            model,
            nn.CrossEntropyLoss(),
            data,
            None,
            truth,
            fit.labels,
            fit.batch_size,
            fit.approximations,
            estimator=fit.estimator,
            details=fit.details,
            progress=False,
        )
        assert _facts(got) == _facts(alone)
        assert _numbers(got) == pytest.approx(_numbers(alone), abs=1e-12, nan_ok=True)
        assert got.settings == alone.settings


def test_the_truth_is_captured_once_and_so_are_equal_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    streams = Recorder.streams

    def counted(self: Recorder, labels: str, **options: Any) -> Any:
        captured.append(labels)
        return streams(self, labels, **options)

    monkeypatch.setattr(Recorder, "streams", counted)
    model, data = _problem()
    ks.measure_fits(model, nn.CrossEntropyLoss(), data, FITS, progress=False)
    # the second draw of labels is for the error bars
    assert sorted(captured) == ["exact", "real", "sampled", "sampled"]


def test_results_of_several_fits_merge() -> None:
    model, data = _problem()
    one, many = ks.measure_fits(
        model, nn.CrossEntropyLoss(), data, [ks.Fit("real", size, ["shampoo2"]) for size in (1, 4)], progress=False
    )
    assert {row.batch_size for row in one.merge(many)} == {1, 4}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ks.Fit("reel"), "labels must be one of"),
        (lambda: ks.Fit(batch_size=0), "batch_size must be a whole number"),
        (lambda: ks.Fit(details=("spectre",)), "details may be"),
        (lambda: ks.Fit(estimator="probe"), "estimator must be"),
        (lambda: ks.measure_fits(*_problem()[:1], nn.CrossEntropyLoss(), _problem()[1], []), "at least one Fit"),
    ],
)
def test_fits_that_make_no_sense_are_refused(make: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        make()


def test_probes_beside_a_population_answer_for_the_samples() -> None:
    model, data = _problem()
    exact, probed = ks.measure_fits(
        model,
        nn.CrossEntropyLoss(),
        data,
        [ks.Fit(approximations=["shampoo2"]), ks.Fit(approximations=["shampoo2"], estimator="probes")],
        population=True,
        progress=False,
    )
    plain = ks.measure(
        model, nn.CrossEntropyLoss(), data, approximations=["shampoo2"], estimator="probes", progress=False
    )
    assert [row.cosine for row in probed] == pytest.approx([row.cosine for row in plain])
    assert all(row.stderr > 0 for row in exact)
