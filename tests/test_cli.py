"""The command line: what each command leaves in its folder, and that mistakes end in one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

import kronscope as ks
from kronscope import cli
from kronscope.measures.measurement import Measurement
from kronscope.paper.training import Event
from kronscope.support.locks import HeldError, lock_folder
from tests.commands import Command, assert_refused, kronscope

__all__ = ["kronscope"]

# ---------------------------------------------------------------------- measure


def test_measure_leaves_results_picture_and_report(kronscope: Command, tmp_path: Path) -> None:
    ended = kronscope("measure", "mine:build", "--data", "mine:data", "--out", "out", "--step", 5)
    assert ended.code == 0, ended.err
    for name in ("results.json", "figure.png", "figure.pdf", "report.html", "config.json", "environment.json"):
        assert (tmp_path / "out" / name).stat().st_size > 0, name
        assert name in ended.out or name in ("config.json", "environment.json")
    results = ks.Results.load(tmp_path / "out" / "results.json")
    import mine  # type: ignore[import-not-found]

    expected = ks.measure(mine.build(), torch.nn.CrossEntropyLoss(), mine.batches, step=5, progress=False)
    assert [row.cosine for row in results] == [row.cosine for row in expected]
    assert {row.step for row in results} == {5}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model"] == "mine:build"
    assert "shampoo2" in ended.out
    assert "0.weight" in ended.out


def test_measure_honours_its_options(kronscope: Command, tmp_path: Path) -> None:
    torch.save({"model": {k: torch.zeros_like(v) for k, v in _weights().items()}}, tmp_path / "zeros.pt")
    ended = kronscope(
        *(
            "measure",
            "mine:network",
            "--data",
            "mine:batches",
            "--out",
            "out",
            "--layer",
            "2.weight",
            "--labels",
            "real",
        ),
        *("--batch-size", 4, "--approximation", "shampoo2", "--approximation", "diagonal", "--max-samples", 7),
        *("--detail", "exponents", "--checkpoint", "zeros.pt", "--truth", "gauss_newton", "--memory-budget", "1GiB"),
        *("--accuracy", 0.02, "--max-columns", 50),
    )
    assert ended.code == 0, ended.err
    results = ks.Results.load(tmp_path / "out" / "results.json")
    assert (results.settings["accuracy"], results.settings["max_columns"]) == (0.02, 50)
    assert {(row.layer, row.labels, row.batch_size, row.samples) for row in results} == {("2.weight", "real", 4, 7)}
    assert results.approximations == ("shampoo2", "diagonal")
    assert [detail.kind for detail in results.details] == ["exponents"]
    # the checkpoint's weights were measured: with zeros the hidden layer is constant and its gradients vanish
    assert all("zero" in row.note for row in results)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["checkpoint"] == "zeros.pt"
    assert config["memory_budget"] == "1GiB"
    command: Any = typer.main.get_command(cli.app)
    options = {parameter.name for parameter in command.commands["measure"].params} - {"out", "verbose", "help"}
    several = {"layer": "layers", "approximation": "approximations", "detail": "details"}
    assert {several.get(name, name) for name in options} <= set(config)


def _weights() -> dict[str, torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    return model.state_dict()


@pytest.mark.parametrize("form", ["npz", "pt", "pair"])
def test_data_from_files(kronscope: Command, tmp_path: Path, form: str) -> None:
    inputs, targets = torch.randn(9, 4), torch.randn(9, 2)
    path = tmp_path / ("data.npz" if form == "npz" else "data.pt")
    if form == "npz":
        np.savez(path, x=inputs.numpy(), y=targets.numpy())
    else:
        torch.save({"inputs": inputs, "targets": targets} if form == "pt" else (inputs, targets), path)
    ended = kronscope(
        "measure", "mine:build", "--data", path, "--loss", "mse", "--approximation", "all", "--out", "out"
    )
    assert ended.code == 0, ended.err
    results = ks.Results.load(tmp_path / "out" / "results.json")
    assert {row.samples for row in results} == {9}
    assert set(results.approximations) == set(ks.approx.names())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothere:build", "--data", "mine:data"), ("nothere",)),
        (("mine:absent", "--data", "mine:data"), ("absent",)),
        (("mine", "--data", "mine:data"), ("package.module:name",)),
        (("mine:number", "--data", "mine:data"), ("torch.nn.Module",)),
        (("mine:build", "--data", "mine:empty"), ("empty",)),
        (("mine:build", "--data", "absent.npz"), ("absent.npz", "cannot be read")),
        (("mine:build", "--data", "mine:data", "--loss", "hinge"), ("--loss", "cross-entropy")),
        (("mine:build", "--data", "mine:data", "--truth", "hessian"), ("truth", "gauss_newton")),
        (("mine:build", "--data", "mine:data", "--layer", "0.wieght"), ("0.weight",)),
        (("mine:build", "--data", "mine:data", "--approximation", "shampo"), ("did you mean",)),
        (("mine:build", "--data", "mine:data", "--checkpoint", "absent.pt"), ("absent.pt",)),
        (("mine:build", "--data", "mine:data", "--memory-budget", "lots"), ("2GiB",)),
        (("mine:build", "--data", "mine:data", "--batch-size", "0"), ("batch_size",)),
        (("mine:build", "--data", "mine:data", "--detail", "all"), ("spectrum",)),
        (("mine:build", "--data", "mine:data", "--approximation", "all", "--approximation", "nope"), ("nope",)),
    ],
)
def test_mistakes_end_in_one_line_and_the_folder_stays_free(
    kronscope: Command, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(kronscope("measure", *arguments, "--out", "out"), *words)
    assert not (tmp_path / "out").exists()


_LANGUAGE_MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))

tokens = torch.arange(18).reshape(6, 3) % 5
batches = [(tokens, (tokens + 1) % 5)]
number = 3

def classes_second(model, inputs):
    return model(inputs).transpose(1, 2)

def wrong(model, inputs):
    return model(inputs).logits
"""


@pytest.mark.parametrize("command", ["measure", "advise"])
def test_a_model_with_classes_last_is_measured_with_forward(kronscope: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "mine.py").write_text(_LANGUAGE_MODEL)
    asked = (command, "mine:build", "--data", "mine:batches", "--layer", "1.weight", "--out", "out")
    assert_refused(kronscope(*asked), "lambda model, x: model(x).transpose(1, 2)", "--forward module:function")
    assert_refused(kronscope(*asked, "--forward", "mine:number"), "--forward", "(model, inputs) -> logits", "int")
    assert_refused(kronscope(*asked, "--forward", "mine:absent"), "absent")
    assert_refused(kronscope(*asked, "--forward", "mine:wrong"), "the model fails", "mine.py", "logits")
    ended = kronscope(*asked, "--forward", "mine:classes_second")
    assert ended.code == 0, ended.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["forward"] == "mine:classes_second"
    assert {row.layer for row in ks.Results.load(tmp_path / "out" / "results.json")} == {"1.weight"}


def test_a_refused_measurement_leaves_an_old_folder_as_it_was(kronscope: Command, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    arguments = ("measure", "mine:build", "--data", "mine:data", "--approximation", "identity", "--out", "out")
    assert_refused(kronscope(*arguments, "--layer", "typo"), "typo")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    again = kronscope(*arguments)
    assert again.code == 0, again.err


def test_more_samples_than_the_machine_can_count_are_all_samples(kronscope: Command) -> None:
    ended = kronscope("measure", "mine:build", "--data", "mine:data", "--max-samples", 10**30, "--out", "out")
    assert ended.code == 0, ended.err


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be removed there")
def test_a_current_folder_that_is_gone_is_said_to_be(kronscope: Command, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_refused(
        kronscope("measure", "mine:build", "--data", "mine:data", "--out", tmp_path / "out"), "is gone", "cd"
    )


def test_float64_of_numpy_is_converted_and_that_is_said(kronscope: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", inputs=np.random.default_rng(0).normal(size=(9, 4)), targets=np.arange(9) % 2)
    ended = kronscope("measure", "mine:build", "--data", "data.npz", "--approximation", "identity")
    assert ended.code == 0, ended.err
    assert "data.npz: float64 converted to the model's float32\n" in ended.out


def test_a_folder_that_holds_a_run_is_not_written_to(kronscope: Command, tmp_path: Path) -> None:
    arguments = ("measure", "mine:build", "--data", "mine:data", "--approximation", "identity", "--out", "out")
    assert kronscope(*arguments).code == 0
    before = (tmp_path / "out" / "results.json").read_bytes()
    ended = kronscope(*arguments)
    assert_refused(ended, "already holds a run", "--out")
    assert "--resume" not in ended.err
    assert (tmp_path / "out" / "results.json").read_bytes() == before
    assert "--resume" not in kronscope("demo", "--out", "out").err


def test_the_same_command_goes_on_with_a_stopped_run_also_in_its_own_folder(kronscope: Command, tmp_path: Path) -> None:
    arguments = ("measure", "mine:build", "--data", "mine:data", "--approximation", "identity")
    assert kronscope(*arguments).code == 0
    first = tmp_path / "runs" / "measure"
    kept = (first / "results.json").read_bytes()
    for lost in ("done.json", "report.html"):
        (first / lost).unlink()
    # somebody else's, or still going on: not this run
    lock = lock_folder(first)
    assert kronscope(*arguments).code == 0
    lock.release()
    assert kronscope(*arguments, "--seed", 1).code == 0
    again = kronscope(*arguments)
    assert again.out.startswith("Going on with the run in runs/measure, which was stopped")
    assert (first / "report.html").exists()
    assert (first / "results.json").read_bytes() == kept
    assert "Going on" not in kronscope(*arguments).out
    assert sorted(path.name for path in first.parent.iterdir()) == [f"measure{n}" for n in ("", "-2", "-3", "-4")]


def test_ctrl_c_ends_with_130(kronscope: Command, tmp_path: Path) -> None:
    ended = kronscope("measure", "mine:build", "--data", "mine:pressed", "--out", "out")
    assert ended.code == 130
    assert ended.err == "kronscope: interrupted.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("labels", ["exact", "sampled"])
def test_ctrl_c_after_a_layer_keeps_it_and_the_same_command_goes_on(
    kronscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: str
) -> None:
    asked = ("measure", "mine:build", "--data", "mine:data", "--approximation", "all", "--labels", labels, "--out")
    assert kronscope(*asked, "whole").code == 0
    measured: list[str] = []
    real = Measurement._measure_fit

    def press(self: Measurement, streams: Any, condition: Any, record: Any, bar: Any) -> None:
        measured.append(condition.layer)
        real(self, streams, condition, record, bar)
        if len(measured) == 2:
            record.rows[condition.layer].pop()  # in the middle of the second layer
            raise KeyboardInterrupt

    monkeypatch.setattr(Measurement, "_measure_fit", press)
    pressed = kronscope(*asked, "out")
    assert pressed.code == 130
    assert pressed.err == "kronscope: interrupted.\n"
    assert "PARTIAL" in pressed.out
    assert "1 of 2 layers done" in pressed.out
    assert "the same command goes on" in pressed.out
    assert not (tmp_path / "out" / "done.json").exists()
    partial = ks.Results.load(tmp_path / "out" / "results.json")
    assert partial.partial
    assert partial.layers == ("0.weight", "2.weight")
    ended = kronscope(*asked, "out")
    assert ended.code == 0, ended.err
    assert measured == ["0.weight", "2.weight", "2.weight"]
    assert (tmp_path / "out" / "done.json").exists()
    whole, resumed = (ks.Results.load(tmp_path / name / "results.json") for name in ("whole", "out"))
    assert [replace(row, seconds=0.0) for row in resumed] == [replace(row, seconds=0.0) for row in whole]
    assert resumed.settings == whole.settings
    assert not resumed.partial
    assert_refused(kronscope(*asked, "out"), "finished")


def test_ctrl_c_during_advise_is_no_end(kronscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Measurement._measure_fit

    def press(self: Measurement, *arguments: Any) -> None:
        real(self, *arguments)
        raise KeyboardInterrupt

    asked = ("advise", "mine:build", "--data", "mine:data", "--out", "out")
    with monkeypatch.context() as during:
        during.setattr(Measurement, "_measure_fit", press)
        assert kronscope(*asked).code == 130
    assert not (tmp_path / "out" / "done.json").exists()
    ended = kronscope(*asked)
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert [entry["layer"] for entry in found["layers"]] == ["0.weight", "2.weight"]


def test_ctrl_c_names_resume_where_there_is_one(kronscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kronscope.paper.experiment.Experiment.run", pressed)
    ended = kronscope("paper", "figure1", "--workload", "digits-linear")
    assert ended.code == 130
    assert ended.err == "kronscope: interrupted; the same command with --resume goes on.\n"


# ---------------------------------------------------------------------- demo


def test_a_demo_that_was_interrupted_goes_on_and_one_that_ended_is_refused(
    kronscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kronscope.cli.demo._WORKLOADS", ("digits-linear",))
    steps: list[int] = []

    def press(show: object, event: Event) -> None:
        steps.append(event.step)
        if len(steps) == 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("kronscope.cli.terminal.ShowTraining.__call__", press)
        pressed = kronscope("demo", "--out", "out")
        assert pressed.code == 130
        assert "the same command goes on, with the demo's folder as --out" in pressed.err
        assert_refused(kronscope("demo", "--out", "out", "--seed", 1), "seed is 0 there, 1 was asked")
        ended = kronscope("demo", "--out", "out")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "What the picture shows: each line says how much of a layer's curvature matrix" in said
    assert re.search(r"Shampoo², are on average -?\d\.\d\d below the best", said)
    assert said.endswith("python -m webbrowser out/report.html")
    assert steps[20:] == sorted(steps[20:])
    assert steps[20] > 0, "it went on from a checkpoint"
    for name in ("results.json", "figure1.png", "figure1.pdf", "report.html", "config.json", "done.json"):
        assert (tmp_path / "out" / name).stat().st_size > 0, name
    assert_refused(kronscope("demo", "--out", "out"), "already holds a run", "finished", "--out")


# ---------------------------------------------------------------------- report


def test_report_of_one_and_of_several_runs(kronscope: Command, tmp_path: Path) -> None:
    row = ks.measures.Row("fc<b>.weight", 3, 4, 0, "gauss_newton", "exact", 1, "shampoo2", 0.9)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        ks.Results([row]).save(tmp_path / name / "results.json")
    ended = kronscope("report", "a")
    assert ended.code == 0, ended.err
    page = (tmp_path / "a" / "report.html").read_text()
    assert "fc<b>.weight" not in page
    ended = kronscope("report", "a", "b/results.json", "--out", "both.html", "--title", "Both & more")
    assert ended.code == 0, ended.err
    assert "both.html" in ended.out
    assert "Both &amp; more" in (tmp_path / "both.html").read_text()


def test_a_run_is_not_reported_twice(kronscope: Command, tmp_path: Path) -> None:
    row = ks.measures.Row("fc.weight", 3, 4, 0, "gauss_newton", "exact", 1, "shampoo2", 0.9)
    (tmp_path / "a").mkdir()
    ks.Results([row]).save(tmp_path / "a" / "results.json")
    assert_refused(kronscope("report", "a", "a/results.json"), "twice")
    assert not (tmp_path / "a" / "report.html").exists()


def test_a_report_of_nothing_is_refused(kronscope: Command, tmp_path: Path) -> None:
    assert_refused(kronscope("report", "absent"), "absent", "kronscope measure --out", "Results.save")
    (tmp_path / "results.json").write_text("{")
    assert_refused(kronscope("report", "."), "results.json")


# ---------------------------------------------------------------------- the paper


def test_a_figure_of_the_paper_and_going_on_with_it(kronscope: Command, tmp_path: Path) -> None:
    arguments = ("paper", "figure1", "--workload", "digits-linear", "--steps", 5, "--samples", 50, "--out", "run/here")
    ended = kronscope(*arguments)
    assert ended.code == 0, ended.err
    folder = tmp_path / "run" / "here"
    for name in ("results.json", "figure1.png", "figure1.pdf", "report.html", "config.json", "table.csv"):
        assert (folder / name).stat().st_size > 0, name
    results = ks.Results.load(folder / "results.json")
    assert {row.truth for row in results} == {"gauss_newton", "adagrad"}
    assert max(results.steps) == 5
    for row in results.select(approximation="shampoo2"):
        # one logit: the matrix has rank one on its left side
        assert row.cosine == pytest.approx(1.0, abs=1e-6)
    assert "steps 25 -> 5" in ended.out
    before = (folder / "results.json").read_bytes()
    assert_refused(kronscope(*arguments), "--resume", "--out")
    (folder / "figure1.png").unlink()
    again = kronscope(*arguments, "--resume")
    assert again.code == 0, again.err
    assert (folder / "results.json").read_bytes() == before
    assert (folder / "figure1.png").exists()
    assert_refused(
        kronscope(*arguments[:-2], "--seed", 1, "--out", folder, "--resume"), "another configuration", "seed"
    )


def test_pictures_are_written_while_nobody_else_may_write(kronscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on with a run removes unfinished files; those of another process that is still writing must stay."""
    arguments = ("paper", "figure1", "--workload", "digits-linear", "--steps", 2, "--samples", 20, "--out", "run")

    def other_writer(*_: object) -> list[Path]:
        with pytest.raises(HeldError):
            lock_folder(Path("run"))
        return []

    monkeypatch.setattr("kronscope.cli.paper.write_outputs", other_writer)
    assert kronscope(*arguments).code == 0
    assert kronscope(*arguments, "--resume").code == 0


def test_figure3_has_real_labels_and_two_batch_sizes(kronscope: Command, tmp_path: Path) -> None:
    ended = kronscope(
        *("paper", "figure3", "--workload", "digits-linear", "--steps", 3, "--samples", 40, "--measure-at", "0,3"),
        *("--out", "out", "--probes", 4),
    )
    assert ended.code == 0, ended.err
    results = ks.Results.load(tmp_path / "out" / "results.json")
    assert {(row.labels, row.batch_size, row.step) for row in results} == {
        ("real", size, step) for size in (1, 256) for step in (0, 3)
    }
    assert (tmp_path / "out" / "figure3.png").exists()
    probes = ks.Results.load(tmp_path / "out" / "probes.json")
    assert all(row.stderr >= 0 for row in probes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("figure1", "--workload", "nope"), ("nope", "digits-linear")),
        (("figure1", "--workload", "digits-linear", "--steps", "0"), ("steps", "at least 1")),
        (("figure1", "--workload", "digits-linear", "--measure-at", "a,b"), ("--measure-at",)),
        (("figure1", "--workload", "digits-linear", "--measure-at", "99"), ("measure_at",)),
        (("figure1", "--workload", "digits-linear", "--scale", "huge"), ("scale",)),
        (("figure1", "--workload", "digits-linear", "--labels", "real"), ("figure3",)),
        (("figure1", "--workload", "digits-linear", "--device", "abacus"), ("abacus",)),
        (("figure1", "--workload", "digits-linear", "--device", "cuda:99"), ("cuda:99", "cpu")),
        (("figure1", "--workload", "digits-linear", "--device", "meta"), ("meta", "cpu")),
        (("figure1", "--workload", "mnist2", "--data-dir", "."), ("MNIST",)),
    ],
)
def test_mistakes_in_paper_commands(
    kronscope: Command, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(kronscope("paper", *arguments, "--out", "out"), *words)
    assert not (tmp_path / "out").exists()


def test_the_commands_of_the_documents_table_exist(kronscope: Command) -> None:
    text = (Path(__file__).parent.parent / "docs" / "command-line.md").read_text(encoding="utf-8")
    table = text[text.index("| command |") : text.index("## demo")]
    commands = re.findall(r"`kronscope ([^`]+)`", table)
    assert "demo" in commands
    for command in commands:
        assert kronscope(*command.split(), "--help").code == 0, command


def test_the_help_shows_every_summary_whole_and_begins_with_the_first_look(
    kronscope: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = kronscope("--help").out
    commands = shown[shown.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in commands] == ["demo", "measure", "advise", "watch", "report", "paper"]
    for text in (shown, kronscope("paper", "--help").out):
        assert not re.search(r"\.\.\.|…", text[text.index("Commands:") :])
    assert "lemmas" not in kronscope("measure", "--help").out


def test_the_installed_command_runs(kronscope: Command) -> None:
    command = Path(sys.executable).with_name("kronscope")
    assert command.exists()
    shown = subprocess.run([str(command), "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ks.__version__
    # each such start takes seconds; the rest is the same in this process
    assert kronscope("--version").out == shown.stdout
    told = kronscope("paper", "--help")
    for name in ("figure1", "figure2", "figure3", "figure4", "figure5"):
        assert name in told.out
    wrong = kronscope("paper", "figure1", "--steps", "x")
    assert wrong.code == 2
    assert "Traceback" not in wrong.err


# ---------------------------------------------------------------------- watch and advise


def test_watch_serves_a_run_and_opens_its_page(
    kronscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kronscope.watching.server import LiveServer
    from tests.watching.running import OPTIMIZERS, network, train

    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    with ks.watch(optimizer, model, every=1, path=tmp_path / "run"):
        train(model, optimizer, 2)

    def interrupted(server: LiveServer) -> None:
        raise KeyboardInterrupt

    opened: list[str] = []
    monkeypatch.setattr(LiveServer, "serve_forever", interrupted)
    monkeypatch.setattr("webbrowser.open", opened.append)
    ended = kronscope("watch", "run", "--open")
    assert ended.code == 0
    assert ended.out.startswith("http://127.0.0.1:")
    assert opened == [ended.out.split()[0]]
    assert kronscope("watch", "run").code == 0
    assert len(opened) == 1
    assert_refused(kronscope("watch", "elsewhere"), "holds no run")


def test_advise_leaves_advice_and_results(kronscope: Command, tmp_path: Path) -> None:
    ended = kronscope("advise", "mine:build", "--data", "mine:data", "--max-samples", 8, "--out", "advice")
    assert ended.code == 0, ended.err
    assert "recommended" in ended.out
    assert "0.weight" in ended.out
    names = {path.name for path in (tmp_path / "advice").iterdir()}
    assert {"advice.json", "advice.html", "results.json", "report.html", "config.json", "figure.png"} <= names
    found = json.loads((tmp_path / "advice" / "advice.json").read_text())
    assert [entry["layer"] for entry in found["layers"]] == ["0.weight", "2.weight"]
    assert {row.samples for row in ks.Results.load(tmp_path / "advice" / "results.json")} == {8}
    assert_refused(kronscope("advise", "mine:build", "--data", "mine:data", "--tolerance", 2), "tolerance must be")
