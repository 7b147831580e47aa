"""One experiment: what it measures, and that a run killed at any moment ends with the same results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kronscope as ks
from kronscope.errors import RunError
from kronscope.paper import Experiment, Options, Settings, measurements, plans, scaled
from kronscope.paper.data import Dataset
from kronscope.paper.models import logits
from kronscope.paper.training import Event
from kronscope.runs import Run
from tests.paper import killable_experiment
from tests.paper.killing import Killer


def _prepared(**options: Any) -> tuple[Settings, Dataset]:
    settings = scaled("digits-linear", **{"steps": 4, "samples": 30, "measure_at": [0, 1, 4], **options})
    return settings, settings.load_data()


def _run(folder: Path, figure: str = "figure1", options: Options | None = None, **how: Any) -> ks.Results:
    return Experiment(plans.get(figure), *_prepared(), options).run(folder, show_bars=False, **how)


def test_rows_are_those_of_measuring_by_hand(tmp_path: Path) -> None:
    results = _run(tmp_path)
    settings, dataset = _prepared()
    settings = settings.on(dataset)
    model = settings.build_model(dataset)
    loss = settings.definition.loss()
    (spec,) = settings.definition.layer_specs(model).values()
    data = dataset.sample(30, settings.seed)
    by_hand = ks.measure(
        model, loss, data, [spec], forward=logits, approximations=("optimal", "shampoo2", "shampoo"), progress=False
    )
    first = results.select(truth="gauss_newton", step=0)
    assert [row.cosine for row in first] == [row.cosine for row in by_hand]
    assert results.select(truth="gauss_newton").steps == (0, 1, 4)
    assert results.select(truth="adagrad").steps == (1, 4)
    history = ks.GradientHistory.open(tmp_path / "history")
    adagrad = ks.measure_history(history, at=[1, 4], progress=False)
    assert [row.cosine for row in results.select(truth="adagrad")] == [row.cosine for row in adagrad]


def test_results_hold_no_times_and_say_what_was_cut(tmp_path: Path) -> None:
    results = _run(tmp_path)
    assert all(math.isnan(row.seconds) for row in results)
    assert any("steps 25 -> 4" in cut for cut in results.settings["cut"])
    assert results.settings["environment"]["torch"] == str(torch.__version__)
    assert results == ks.Results.load(tmp_path / "results.json")


def test_the_same_run_twice_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _run(tmp_path / name, "figure3")
    assert (tmp_path / "a" / "results.json").read_bytes() == (tmp_path / "b" / "results.json").read_bytes()


def test_a_finished_run_is_read_not_run_again(tmp_path: Path) -> None:
    first = _run(tmp_path)
    happened: list[Event] = []
    assert _run(tmp_path, resume=True, show=happened.append) == first
    assert happened == []
    with pytest.raises(RunError, match="--resume"):
        _run(tmp_path)
    with pytest.raises(RunError, match=r"figure is 'figure1' there, 'figure2' was asked"):
        _run(tmp_path, "figure2", resume=True)


def test_probes_are_kept_beside_the_exact_values(tmp_path: Path) -> None:
    exact = _run(tmp_path, options=Options(probes=200)).select(truth="gauss_newton")
    probes = ks.Results.load(tmp_path / "probes.json")
    assert probes.settings["estimator"] == "probes"
    for one, other in zip(exact, probes, strict=True):
        assert one.key == other.key
        assert other.stderr > 0 or one.cosine == pytest.approx(1.0)
        assert other.cosine == pytest.approx(one.cosine, abs=6 * other.stderr + 1e-6)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_interruption_while_measuring_goes_on_with_the_same_numbers(tmp_path: Path, at: int) -> None:
    undisturbed = _run(tmp_path / "a", "figure2")

    def press(event: Event) -> None:
        if event.kind == "measure" and event.step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "b", "figure2", show=press)
    assert not Run.open(tmp_path / "b").done
    assert _run(tmp_path / "b", "figure2", resume=True) == undisturbed
    assert (tmp_path / "a" / "results.json").read_bytes() == (tmp_path / "b" / "results.json").read_bytes()


def test_a_measurement_cut_short_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*arguments: Any, **options: Any) -> tuple[ks.Results, ...]:
        measured = ks.measure_fits(*arguments, **options)
        return tuple(ks.Results(results.rows[:1], (), results.settings, partial=True) for results in measured)

    monkeypatch.setattr("kronscope.paper.measurements.measure_fits", cut)
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "b")
    assert Run.open(tmp_path / "b").stored("gauss_newton-0-0") is None
    monkeypatch.undo()
    assert _run(tmp_path / "b", resume=True) == _run(tmp_path / "a")


# ---------------------------------------------------------------------- kills


@pytest.fixture
def killer() -> Killer:
    return Killer(killable_experiment.work)


@pytest.mark.parametrize("wanted", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_with_the_same_results(tmp_path: Path, killer: Killer, wanted: int) -> None:
    killer.run_both(tmp_path / "undisturbed", tmp_path / "killed", wanted)
    for name in ("results.json", "probes.json", "metrics.jsonl", "config.json"):
        ours, theirs = ((tmp_path / folder / name).read_bytes() for folder in ("killed", "undisturbed"))
        assert ours == theirs, name


def test_one_gradient_in_so_many_is_recorded_and_its_rows_have_error_bars(tmp_path: Path) -> None:
    settings = scaled("digits-linear", steps=12, samples=32, measure_at=[12], history_every=3)
    assert "gradients recorded all -> one in 3" in settings.cuts
    experiment = Experiment(plans.get("figure1"), settings, settings.load_data())
    rows = [row for row in experiment.run(tmp_path / "run", show_bars=False) if row.truth == "adagrad"]
    assert {row.samples for row in rows} == {4}
    assert all(math.isfinite(row.stderr) and "4 of 12 steps were recorded" in row.note for row in rows)
    assert experiment.config["history_every"] == 3
    usual = scaled("digits-linear", steps=12)
    assert "history_every" not in usual.config(usual.load_data())
    with pytest.raises(ks.errors.OptionError, match="history_every must be at least 1"):
        scaled("digits-linear", history_every=0)


def test_the_accuracy_reaches_the_measurement_and_the_default_is_no_part_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def noted(*args: Any, **named: Any) -> tuple[ks.Results, ...]:
        given.append(named["accuracy"])
        return ks.measure_fits(*args, **named)

    monkeypatch.setattr(measurements, "measure_fits", noted)
    settings = scaled("digits-linear", steps=1, samples=32, measure_at=[1])
    for accuracy in (0.05, Options.accuracy):
        options = Options(accuracy=accuracy)
        experiment = Experiment(plans.get("figure4"), settings, settings.load_data(), options)
        experiment.run(tmp_path / f"{accuracy}", show_bars=False)
        assert ("accuracy" in experiment.config["options"]) is (accuracy != Options.accuracy)
    assert given == [0.05, 0.01]
