"""Figures show the results' own numbers, with the right names, and change nothing outside."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kronscope import figures
from kronscope.errors import MissingExtraError, OptionError, ResultsError
from kronscope.figures.canvas import ERROR_NOTE, cosine_limits
from kronscope.measures.results import Results
from tests.figures import synthetic

matplotlib = pytest.importorskip("matplotlib")

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def lines(axes: Axes) -> dict[str, list[float]]:
    """The curves of a panel by their names in the legend."""
    handles, labels = axes.get_legend_handles_labels()
    curves: list[Any] = [handle[0] if isinstance(handle, tuple) else handle for handle in handles]
    return {label: list(curve.get_ydata()) for label, curve in zip(labels, curves, strict=True)}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def shown(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_visible()]


def columns() -> dict[str, Results]:
    return {"MNIST-2": synthetic.training_run((0, 5, 10), level=0.99), "CIFAR": synthetic.training_run()}


def cosines_of(results: Results, approximation: str, condition: tuple[str, str, int]) -> list[float]:
    return [row.cosine for row in results if row.condition == condition and row.approximation == approximation]


# ---------------------------------------------------------------- the default figure


def test_one_panel_for_each_layer_and_truth_over_training() -> None:
    results = synthetic.transformer_run()
    figure = figures.cosines(results)
    panels = shown(figure)
    assert len(panels) == 6
    assert panels[1].get_title() == "Adagrad\nblocks.3.mlp.fc1.weight"
    drawn = lines(panels[0])
    expected = results.select(layer="blocks.3.mlp.fc1.weight", truth="gauss_newton")
    assert drawn["Shampoo²"] == cosines_of(expected, "shampoo2", synthetic.GAUSS_NEWTON)
    assert set(drawn) == {"Optimal Kronecker", "Shampoo²", "Shampoo", "K-FAC (reduce)"}
    # A curve of NaN only is not drawn, and not promised by its panel's legend.
    assert "K-FAC (reduce)" not in lines(panels[1])
    assert legend(figure) == ["Optimal Kronecker", "Shampoo²", "Shampoo", "K-FAC (reduce)"]


def test_error_bars_are_drawn_and_explained() -> None:
    with_bars = figures.cosines(synthetic.training_run())
    assert len(shown(with_bars)[0].collections) == 4
    assert legend(with_bars)[-1] == ERROR_NOTE
    without = figures.cosines(synthetic.transformer_run())
    assert not shown(without)[0].collections
    assert ERROR_NOTE not in legend(without)


def test_one_step_is_a_line_of_dots_for_each_layer() -> None:
    results = synthetic.one_step(5, synthetic.ALL)
    figure = figures.cosines(results)
    (panel,) = shown(figure)
    assert [text.get_text() for text in panel.get_yticklabels()] == list(results.layers)
    handles, labels = panel.get_legend_handles_labels()
    dots = dict(zip(labels, handles, strict=True))["SOAP"][0]
    assert list(dots.get_xdata()) == [row.cosine for row in results if row.approximation == "soap"]
    assert [round(place) for place in dots.get_ydata()] == [0, 1, 2, 3, 4]
    # The first layer is on top, as in the table.
    assert panel.get_ylim()[0] > panel.get_ylim()[1]


def test_one_layer_at_one_step_shows_the_approximations() -> None:
    figure = figures.cosines(synthetic.one_step(1, ("optimal", "shampoo", "mine"), error=0.1))
    (panel,) = shown(figure)
    assert [text.get_text() for text in panel.get_yticklabels()] == ["Optimal Kronecker", "Shampoo", "mine"]
    assert not figure.legends


def test_long_names_keep_their_ends() -> None:
    name = "encoder." + "very." * 20 + "deep.weight"
    (panel,) = shown(figures.cosines(Results(synthetic.make_rows(name) + synthetic.make_rows("b"))))
    text = panel.get_yticklabels()[0].get_text()
    assert len(text) < 45
    assert text.startswith("encoder")
    assert text.endswith("deep.weight")


def test_layers_that_differ_in_the_middle_of_their_names_have_different_labels() -> None:
    parts = ("self_attention_output_projection_dense", "intermediate_feed_forward_expansion")
    names = [f"encoder.transformer_layers.{i}.{part}.weight" for i in range(17) for part in parts]
    rows = [row for name in [*names, "classifier.weight"] for row in synthetic.make_rows(name)]
    (panel,) = shown(figures.cosines(Results(rows)))
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert labels[:2] == ["…0.self_attention_output_projection_dense", "…0.intermediate_feed_forward_expansion"]
    assert len(set(labels)) == 35
    assert max(map(len, labels)) <= 42
    several = [dataclasses.replace(row, step=step) for row in rows for step in (0, 1)]
    titles = [axes.get_title() for axes in shown(figures.cosines(Results(several)))]
    assert titles == labels


def test_nothing_measured_is_a_picture_that_says_so() -> None:
    (panel,) = shown(figures.cosines(Results([])))
    assert panel.texts[0].get_text() == "nothing was measured"


@pytest.mark.parametrize("many", [1, 2, 3, 4, 5, 7])
def test_panels_of_any_number_are_laid_out(many: int) -> None:
    results = Results([row for number in range(many) for row in synthetic.make_rows(f"l{number}", steps=(0, 1))])
    figure = figures.cosines(results)
    assert len(shown(figure)) == many
    figure.draw_without_rendering()


def test_axes_zoom_only_when_everything_is_near_one() -> None:
    assert cosine_limits([0.2, 1.0]) == (0.0, 1.03)
    low, high = cosine_limits([0.999, 1.0])
    assert 0.998 < low < 0.999
    assert 1.0 < high < 1.001
    assert cosine_limits([1.0, 1.0])[0] < 1.0
    assert cosine_limits([-0.1, 1.2]) == (-0.13, 1.23)
    assert cosine_limits([math.nan]) == (0.0, 1.03)


# ---------------------------------------------------------------- the paper's figures


def test_figure_1_has_two_rows_and_three_lines() -> None:
    given = columns()
    figure = figures.figure1(given)
    panels = shown(figure)
    assert len(panels) == 4
    assert [axes.get_title() for axes in panels] == ["MNIST-2", "CIFAR", "", ""]
    assert panels[0].get_ylabel() == "Gauss–Newton\ncosine similarity"
    assert panels[2].get_ylabel() == "Adagrad\ncosine similarity"
    assert lines(panels[1])["Shampoo"] == cosines_of(given["CIFAR"], "shampoo", synthetic.GAUSS_NEWTON)
    assert lines(panels[3])["Optimal Kronecker"] == cosines_of(given["CIFAR"], "optimal", synthetic.ADAGRAD)
    assert legend(figure) == ["Optimal Kronecker", "Shampoo²", "Shampoo", ERROR_NOTE]
    assert panels[0].get_ylim() == panels[3].get_ylim()
    # Adagrad's row has no step 0, and is drawn below the same steps nevertheless
    assert panels[0].get_xlim() == panels[2].get_xlim()


def test_figure_1_takes_exact_labels_before_others() -> None:
    results = synthetic.training_run()
    sampled = Results(
        [dataclasses.replace(row, labels="sampled", cosine=0.5) for row in results if row.labels == "exact"]
    )
    both = shown(figures.figure1({"a": sampled.merge(results)}))[0]
    assert lines(both)["Shampoo²"] == cosines_of(results, "shampoo2", synthetic.GAUSS_NEWTON)
    assert set(lines(shown(figures.figure1({"a": sampled}))[0])["Shampoo²"]) == {0.5}


def test_what_was_not_measured_is_said_in_its_panel() -> None:
    only = synthetic.training_run().select(truth="gauss_newton")
    assert len(shown(figures.figure1({"a": only}))) == 1
    panels = shown(figures.figure1({"a": only, "b": synthetic.training_run()}))
    assert [text.get_text() for text in panels[2].texts] == ["not measured"]


def test_figure_2_shows_the_ratio_above_its_curves_and_the_spectrum_beside() -> None:
    results = synthetic.training_run()
    figure = figures.figure2({"CIFAR": results}, leading=6)
    curves, bars, *rest = shown(figure)
    assert len(rest) == 2
    spectra = [item for item in results.details if item.kind == "spectrum" and item.truth == "gauss_newton"]
    drawn = lines(curves)
    expected = [[item.number(name) for item in spectra] for name in ("ratio", "left", "right")]
    assert list(drawn.values()) == expected
    last = spectra[-1].series("sigma")
    heights = [patch.get_height() for patch in bars.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([value / last[0] for value in last[:6]])
    alpha = spectra[-1].series("alpha_right")
    handles, labels = bars.get_legend_handles_labels()
    points = dict(zip(labels, handles, strict=True))["|αᵢ| / α₁, αᵢ = tr Vᵢ (for L)"]
    assert list(points.get_ydata()) == pytest.approx([abs(value) / alpha[0] for value in alpha[:6]])
    assert bars.get_title() == "spectrum at step 1,000"
    assert {"σᵢ / σ₁", "σ₁ / ‖σ‖ (optimal)"} < set(legend(figure))


def test_figure_2_says_that_a_spectrum_is_a_single_value() -> None:
    results = synthetic.training_run().select(truth="gauss_newton")
    short = ("sigma", "alpha_left", "alpha_right")
    details = [
        dataclasses.replace(item, values={**item.values, **{name: item.series(name)[:1] for name in short}})
        for item in results.details
        if item.kind == "spectrum"
    ]
    _, bars = shown(figures.figure2({"CIFAR": Results(list(results), details)}))
    assert not bars.patches
    assert [text.get_text() for text in bars.texts] == ["the first singular\nvalue only"]


def test_figure_3_has_a_row_for_each_batch_size_on_real_labels() -> None:
    given = columns()
    panels = shown(figures.figure3(given))
    assert [axes.get_ylabel().split("\n")[0] for axes in panels[::2]] == ["Batch size 1", "Batch size 256"]
    expected = cosines_of(given["CIFAR"], "shampoo2", ("gauss_newton", "real", 256))
    assert lines(panels[3])["Shampoo²"] == expected


def test_figure_4_adds_kfac_to_the_gauss_newton_row() -> None:
    panels = shown(figures.figure4(columns()))
    assert len(panels) == 2
    assert "K-FAC (reduce)" in lines(panels[0])


def test_figure_5_has_a_column_for_each_layer() -> None:
    results = synthetic.transformer_run()
    titles = {"FFN 1": results.layers[0], "Q-K": results.layers[2]}
    panels = shown(figures.figure5(results, titles))
    assert [axes.get_title() for axes in panels] == ["FFN 1", "Q-K", "", ""]
    expected = cosines_of(results.select(layer=results.layers[2]), "shampoo", synthetic.ADAGRAD)
    assert lines(panels[3])["Shampoo"] == expected
    assert len(shown(figures.figure5(results))) == 6


@pytest.mark.parametrize("draw", [figures.figure1, figures.figure2, figures.figure3, figures.figure4])
def test_a_column_is_one_layer(draw: Any) -> None:
    with pytest.raises(OptionError, match=r"Column 'ViT' must hold one layer, but has 3.*results.select\(layer="):
        draw({"ViT": synthetic.transformer_run()})
    with pytest.raises(OptionError, match="one column or more"):
        draw({})


def test_missing_curves_say_how_to_measure_them() -> None:
    results = synthetic.one_step(1)
    with pytest.raises(OptionError, match=r"details=\('spectrum',\)"):
        figures.figure2({"a": results})
    with pytest.raises(OptionError, match="labels='real'"):
        figures.figure3({"a": results})
    with pytest.raises(OptionError, match=r"details=\('exponents',\)"):
        figures.exponents(results)
    with pytest.raises(OptionError, match=r"details=\('batch_sizes',\)"):
        figures.batch_sizes(results)


# ---------------------------------------------------------------- sweeps


def test_exponents_are_one_line_for_each_step_with_the_best_marked() -> None:
    results = synthetic.training_run((0, 10, 20))
    figure = figures.exponents(results)
    panel = shown(figure)[0]
    sweeps = [item for item in results.details if item.kind == "exponents" and item.truth == "gauss_newton"]
    curves = lines(panel)
    assert list(curves) == ["step 0", "step 10", "step 20"]
    assert curves["step 10"] == sweeps[1].series("cosine")
    rings = [line for line in panel.get_lines() if line.get_marker() == "o"]
    best = [sweep.series("exponent")[sweep.series("cosine").index(max(sweep.series("cosine")))] for sweep in sweeps]
    assert [ring.get_xdata()[0] for ring in rings] == best  # type: ignore[index]
    assert {text.get_text().strip() for text in panel.texts} == {"Shampoo", "Shampoo²"}
    colors = [line.get_color() for line in panel.get_lines() if str(line.get_label()).startswith("step")]
    assert len(set(colors)) == 3


def test_batch_sizes_are_on_a_logarithmic_axis_at_the_step_asked_for() -> None:
    results = synthetic.training_run((0, 10))
    panel = shown(figures.batch_sizes(results))[0]
    assert panel.get_xscale() == "log"
    assert panel.get_title().endswith("step 10")
    sweep = next(item for item in results.details if item.kind == "batch_sizes" and item.step == 0)
    panels = shown(figures.batch_sizes(results, step=0))
    assert len(panels) == 2
    assert lines(panels[0])["Shampoo"] == sweep.series("shampoo")
    with pytest.raises(OptionError, match=r"at step 3, but they are at steps \[0, 10\]"):
        figures.batch_sizes(results, step=3)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_figures_are_saved_by_their_ending_and_alike_each_time(tmp_path: Path, name: str, magic: bytes) -> None:
    results = synthetic.one_step(2)
    path = results.plot(tmp_path / "new" / name)
    first = path.read_bytes()
    assert first.startswith(magic)
    assert list(path.parent.iterdir()) == [path]
    if not name.endswith("svg"):  # identifiers inside an SVG are random
        assert results.plot(path).read_bytes() == first


def test_png_has_200_dots_to_the_inch(tmp_path: Path) -> None:
    figure = figures.figure1(columns())
    header = figures.save(figure, tmp_path / "a.png").read_bytes()
    assert int.from_bytes(header[16:20], "big") == int(figure.get_size_inches()[0] * 200)


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"must end in .png, .pdf or .svg, but it is '.*figure.bmp'"):
        synthetic.one_step(1).plot(tmp_path / "figure.bmp")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(ResultsError, match="is a folder"):
        synthetic.one_step(1).plot(tmp_path / "b.png")


def test_drawing_changes_no_global_setting(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    synthetic.training_run().plot(tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # which import reads as: there is none
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'kronscope[figures]'")):
        figures.cosines(Results([]))
