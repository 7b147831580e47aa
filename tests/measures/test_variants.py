"""Fits that differ in their options only are different results: they are kept, shown and saved apart."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope import approx, figures
from kronscope.approx import options_of
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Operator
from kronscope.measures import Detail, Results, schema
from kronscope.measures.rows import MATRIX_COLUMNS
from kronscope.report import write_report
from tests.figures import synthetic

LOSS = nn.CrossEntropyLoss()


def measured(**options: Any) -> Results:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = [(torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,)))]
    return ks.measure(model, LOSS, data, layers="0.weight", progress=False, **options)


def shampoo(exponent: float) -> Results:
    return measured(approximations=[approx.get("shampoo", exponent=exponent)])


def test_exponents_are_kept_apart_by_merge() -> None:
    merged = shampoo(0.5).merge(shampoo(0.75), shampoo(1.0))
    assert [row.options for row in merged] == ["", "exponent=0.75", "exponent=1.0"]
    assert merged.approximations == ("shampoo",)
    assert merged.variants == ("shampoo", "shampoo (exponent=0.75)", "shampoo (exponent=1.0)")
    assert len({row.cosine for row in merged}) == 3
    # and the same one measured again still replaces itself
    assert len(merged.merge(shampoo(0.75))) == 3


def test_curves_and_settings_name_them_too() -> None:
    results = measured(approximations=[approx.get("shampoo", exponent=0.75)], details=("batch_sizes",))
    assert set(results.details[0].values) == {"batch_size", "shampoo (exponent=0.75)"}
    assert results.settings["approximations"] == ["shampoo (exponent=0.75)"]


def test_batches_without_replacement_are_kept_apart_where_they_differ() -> None:
    names = ("optimal", "shampoo2", "kfac-reduce")

    def both(**options: Any) -> Results:
        details = ("spectrum", "exponents", "batch_sizes")
        one, other = (
            measured(approximations=names, replacement=way, details=details, **options) for way in (True, False)
        )
        return one.merge(other)

    drawn = both(labels="real", batch_size=4)
    # the optimum and K-FAC do not depend on batches, so they are the same thing measured twice
    assert drawn.variants == (*names, "shampoo2 (replacement=False)")
    first, second = (row.cosine for row in drawn.select(approximation="shampoo2"))
    assert first != second
    assert [(item.kind, item.options) for item in drawn.details] == [
        ("spectrum", ""),
        ("exponents", ""),
        ("batch_sizes", ""),
        ("exponents", "replacement=False"),
        ("batch_sizes", "replacement=False"),
    ]
    # nor does anything where B is 1 or labels are exact
    assert both(labels="real").variants == names
    exact = both(batch_size=4)
    assert exact.variants == names
    assert len(exact.details) == 3


def test_select_takes_options_too() -> None:
    merged = shampoo(0.5).merge(shampoo(0.75))
    assert merged.select(approximation="shampoo") == merged
    assert merged.select(options="exponent=*").variants == ("shampoo (exponent=0.75)",)
    assert merged.select(options="").variants == ("shampoo",)


def test_a_data_frame_has_options_where_there_are_any() -> None:
    plain = shampoo(0.5)
    assert "options" not in plain.to_pandas().columns
    frame = plain.merge(shampoo(0.75)).to_pandas()
    assert list(frame.columns.drop("options")) == list(plain.to_pandas().columns)
    assert list(frame["options"]) == ["", "exponent=0.75"]


def test_options_are_saved_and_loaded(tmp_path: Path) -> None:
    merged = shampoo(0.5).merge(shampoo(0.75))
    assert Results.load(merged.save(tmp_path / "run.json")) == merged


def test_files_from_before_options_are_read() -> None:
    results = Results(synthetic.make_rows(), synthetic.make_details(), {"seed": 0})
    data = json.loads(schema.dumps(results))
    data["schema_version"] = 1
    for record in [*data["rows"], *data["details"]]:
        assert record.pop("options") == ""
    # what came later still
    for record in data["rows"]:
        assert [record.pop(name) for name in MATRIX_COLUMNS] == [None] * len(MATRIX_COLUMNS)
    assert schema.loads(json.dumps(data)) == results


def test_the_table_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    merged = shampoo(0.5).merge(shampoo(0.75))
    for text in (str(merged), merged._repr_html_()):
        assert "shampoo (exponent=0.75)" in text
        for row in merged:
            assert f"{row.cosine:.4f}" in text


@pytest.mark.parametrize("steps", [(0,), (0, 10)])
def test_figures_draw_each(steps: tuple[int, ...]) -> None:
    one = Results(synthetic.make_rows(steps=steps, names=("shampoo",)))
    other = Results([dataclasses.replace(row, cosine=0.5, options="exponent=0.75") for row in one])
    drawn = [figures.cosines(one.merge(other)), figures.figure1({"a": one.merge(other)})]
    for figure in drawn[: len(steps)]:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        assert sorted(labels) == ["Shampoo", "Shampoo (exponent=0.75)"]
        assert len({handle.lines[0].get_color() for handle in handles}) == 2  # type: ignore[attr-defined]


def test_figures_of_curves_draw_each() -> None:
    usual = [item for item in synthetic.make_details() if item.kind != "spectrum"]
    both = Results([], usual + [dataclasses.replace(item, options="replacement=False") for item in usual])
    for figure in (figures.exponents(both), figures.batch_sizes(both)):
        titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
        assert len(titles) == 2
        assert "replacement=False" in titles[1]
        assert "replacement=False" not in titles[0]


def test_the_report_has_each(tmp_path: Path) -> None:
    rows = synthetic.make_rows(names=("shampoo",))
    rows += [dataclasses.replace(row, cosine=0.5, options="exponent=0.75") for row in rows]
    curves: list[Detail] = synthetic.make_details()
    curves += [dataclasses.replace(item, options="replacement=False") for item in curves]
    page = write_report(Results(rows, curves), tmp_path / "report.html").read_text()
    data = json.loads(page.split('id="data"')[1].split(">", 1)[1].split("</script>")[0])
    assert data["runs"][0]["columns"]["approximation"] == ["shampoo", "shampoo (exponent=0.75)"]
    assert data["styles"]["shampoo (exponent=0.75)"]["name"] == "Shampoo (exponent=0.75)"
    assert data["conditions"] == {
        "gauss_newton|exact|1": "Gauss–Newton · exact labels",
        "gauss_newton|exact|1|replacement=False": "Gauss–Newton · exact labels · replacement=False",
    }


@dataclass(frozen=True)
class Odd:
    """An approximation of one's own, with options of every kind."""

    name: ClassVar[str] = "odd"
    title: ClassVar[str] = "Odd"

    needed: int
    values: list[int] = field(default_factory=list)
    helper: object = None

    def fit(self, stream: GradientStream) -> Operator:
        """Fit it."""
        return approx.get("identity").fit(stream)


def own(*options: Any) -> approx.Approximation:
    return approx.get(Odd(*options))  # type: ignore[arg-type]


def test_options_are_those_that_differ_from_the_defaults() -> None:
    assert all(options_of(item) == "" for item in approx.all_approximations())
    assert options_of(approx.get("kronecker-sum", rank=3, tolerance=1e-8)) == "rank=3"
    assert options_of(own(2)) == "needed=2"
    # without the address of an object, which is another one in every process
    assert options_of(own(2, [1], object())) == "needed=2, values=[1], helper=object"
