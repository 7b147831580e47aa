"""Watching changes nothing, records what any optimizer does, and never ends a run."""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.errors import DataError, LayerError, MemoryBudgetError, OptionError, RunError
from kronscope.watching import WatchRecords
from tests.watching.running import LAYERS, LOSS, OPTIMIZERS, bits, network, points, train


@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same_to_the_bit(name: str, with_data: bool, tmp_path: Path) -> None:
    found = []
    for watched in (False, True):
        model = network()
        optimizer = OPTIMIZERS[name](model)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        if watched:
            options: dict[str, Any] = {"loss": LOSS, "data": [points()], "budget": math.inf} if with_data else {}
            with ks.watch(optimizer, model, every=2, path=tmp_path / "run", **options) as watch:
                train(model, optimizer, 7)
            assert [record["step"] for record in watch.records] == [2, 4, 6]
            assert watch.results.steps == ((2, 4, 6) if with_data else ())
        else:
            train(model, optimizer, 7)
        state = {str(key): value for key, value in optimizer.state_dict()["state"].items()}
        drawn = (torch.rand(3), random.random(), np.random.random())  # noqa: NPY002
        found.append((bits(model), state, drawn, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms_are_those_of_the_step(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model)
    with ks.watch(optimizer, model, every=3) as watch:
        train(model, optimizer, 2)
        before = bits(model)
        train(model, optimizer, 1, first=3)
    (record,) = watch.records
    assert list(watch._records.layers) == list(LAYERS)
    for place, layer in enumerate(LAYERS):
        weight = model.get_parameter(layer)
        numbers = {key: values[place] for key, values in record["layers"].items()}
        assert weight.grad is not None
        assert numbers["gradient_norm"] == pytest.approx(float(weight.grad.norm()), rel=1e-5)
        assert numbers["weight_norm"] == pytest.approx(float(before[layer].norm()), rel=1e-5)
        change = float((weight.detach() - before[layer]).norm() / before[layer].norm())
        assert numbers["update_ratio"] == pytest.approx(change, rel=1e-4)


def test_ours_tell_of_their_roots() -> None:
    model = network()
    optimizer = OPTIMIZERS["shampoo"](model)
    with ks.watch(optimizer, model, every=5) as watch:
        train(model, optimizer, 5)
    rows = {row.name: row for row in optimizer.diagnostics(quick=True).rows}  # type: ignore[attr-defined]
    for place, layer in enumerate(LAYERS):
        for number in ("condition", "effective_rank", "staleness", "residual"):
            assert watch.records[0]["layers"][number][place] == getattr(rows[layer], number)
    run = watch.records[0]["run"]
    assert run["skipped_steps"] == 0
    assert 0 < run["optimizer_seconds"] < 10
    assert 0 < run["watching_seconds"] < 10


def test_a_layer_may_be_rows_or_a_stack() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model)
    with ks.watch(optimizer, model, every=1, layers=["0.weight[2:5]", "0.weight[0:1]+0.weight[6:8]"]) as watch:
        train(model, optimizer, 1)
    grad = model.get_parameter("0.weight").grad
    assert grad is not None
    expected = [float(grad[2:5].norm()), float(grad[[0, 6, 7]].norm())]
    assert watch.records[0]["layers"]["gradient_norm"] == pytest.approx(expected)


def test_cosines_are_those_of_measure() -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    with ks.watch(optimizer, model, every=4, loss=LOSS, data=[points()], budget=math.inf) as watch:
        train(model, optimizer, 4)
    model.eval()
    measured = ks.measure(
        *(model, LOSS, [points()]),
        approximations=("optimal", "shampoo2"),
        operators={"live": optimizer},
        step=4,
        progress=False,
    )
    assert [row.approximation for row in watch.results][:3] == ["optimal", "shampoo2", "live"]
    assert [row.cosine for row in watch.results] == [row.cosine for row in measured]
    assert all(0 < row.cosine <= 1 for row in watch.results)
    frame = watch.to_pandas()
    assert frame["cosine_live"].tolist() == [row.cosine for row in measured if row.approximation == "live"]
    assert frame["layer"].tolist() == list(LAYERS)


def test_a_layer_that_cannot_be_measured_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*args: Any, **options: Any) -> ks.Results:
        if "0.weight" in options["layers"]:
            raise MemoryBudgetError("it is too large")
        return ks.measure(*args, **options)

    monkeypatch.setattr("kronscope.watching.measuring.measure", measure)
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    with (
        ks.watch(optimizer, model, every=1, loss=LOSS, data=[points()], budget=math.inf) as watch,
        pytest.warns(RuntimeWarning, match=r"0\.weight is no longer measured: it is too large"),
    ):
        train(model, optimizer, 3)
    assert watch.results.layers == ("3.weight",)
    assert watch.results.steps == (1, 2, 3)


def test_every_record_is_logged(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    model = network()
    optimizer = OPTIMIZERS["kl"](model)
    watch = ks.watch(
        *(optimizer, model, 2, LOSS, [points()], "0.weight"),
        log=lambda step, values: seen.append((step, dict(values))),
    )
    watch.note(loss=1.5)
    train(model, optimizer, 4)
    watch.detach()
    assert [step for step, _ in seen] == [2, 4]
    first = seen[0][1]
    assert first["kronscope/loss"] == 1.5
    assert "kronscope/loss" not in seen[1][1]
    assert {"kronscope/update_ratio/0.weight", "kronscope/cosine_live/0.weight"} <= first.keys()
    assert all(math.isfinite(value) for _, values in seen for value in values.values())


def test_detached_it_is_gone() -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    watch = ks.watch(optimizer, model, every=1)
    train(model, optimizer, 2)
    watch.detach()
    watch.detach()
    train(model, optimizer, 2)
    assert [record["step"] for record in watch.records] == [1, 2]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_wrapped_optimizer_is_found() -> None:
    class Wrapper:
        def __init__(self, optimizer: object) -> None:
            self.optimizer = optimizer

    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    with ks.watch(Wrapper(Wrapper(optimizer)), model, every=1) as watch:  # type: ignore[arg-type]
        train(model, optimizer, 1)
    assert len(watch.records) == 1


def test_what_cannot_be_watched_is_said_at_once(tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    with pytest.raises(OptionError, match="needs a torch optimizer"):
        ks.watch(model, model)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="every must be"):
        ks.watch(optimizer, model, every=0)
    with pytest.raises(OptionError, match="given together"):
        ks.watch(optimizer, model, loss=LOSS)
    with pytest.raises(OptionError, match="The loss must be"):
        ks.watch(optimizer, model, loss=nn.L1Loss(), data=[points()])
    with pytest.raises(OptionError, match="budget must be"):
        ks.watch(optimizer, model, loss=LOSS, data=[points()], budget=0)
    with pytest.raises(DataError, match="more than once"):
        ks.watch(optimizer, model, loss=LOSS, data=iter([points()]))
    with pytest.raises(LayerError, match="Unknown layer"):
        ks.watch(optimizer, model, layers="9.weight")
    with pytest.raises(LayerError, match="does not train"):
        ks.watch(torch.optim.SGD([model.get_parameter("0.weight")], lr=0.1), model, layers=["3.weight"])
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(RunError, match="folder of its own"):
        ks.watch(optimizer, model, path=tmp_path)
    assert not optimizer._optimizer_step_post_hooks


def test_what_is_not_trained_is_left_out() -> None:
    model = network()
    optimizer = torch.optim.SGD([model.get_parameter("0.weight")], lr=0.1)
    with ks.watch(optimizer, model, every=1) as watch:
        train(model, optimizer, 1)
    assert list(watch.to_pandas()["layer"]) == ["0.weight"]


def test_frozen_layers_are_left_out_and_later_ones_named() -> None:
    """Beside an adapter the frozen layers are most of a model, and would be copied for every record."""
    model = network()
    model.get_parameter("0.weight").requires_grad_(False)
    optimizer = torch.optim.SGD([model.get_parameter("0.weight"), model.get_parameter("3.weight")], lr=0.1)
    with ks.watch(optimizer, model, every=1) as watch:
        train(model, optimizer, 1)
    assert list(watch.to_pandas()["layer"]) == ["3.weight"]
    assert repr(watch) == "<Watch: 1 layer, step 1, 1 record>"
    model = network()
    optimizer = torch.optim.SGD([model.get_parameter("0.weight")], lr=0.1)
    with ks.watch(optimizer, model, every=1) as watch:
        train(model, optimizer, 1)
        optimizer.add_param_group({"params": [model.get_parameter("3.weight"), model.get_parameter("3.bias")]})
        with pytest.warns(RuntimeWarning, match=r"now trains 3\.weight too, which is not watched"):
            train(model, optimizer, 2)
    assert len(watch.records) == 3


def test_failures_end_the_watch_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    watch = ks.watch(optimizer, model, every=2)
    monkeypatch.setattr(watch._layers, "numbers", lambda: 1 / 0)
    with pytest.warns(RuntimeWarning, match="watching ends at step 2, training goes on: ZeroDivisionError"):
        train(model, optimizer, 4)
    assert watch.records == []


def test_where_warnings_are_errors_the_run_goes_on_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    watch = ks.watch(optimizer, model, every=2, path=tmp_path / "watch")
    monkeypatch.setattr(watch._layers, "numbers", lambda: 1 / 0)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        train(model, optimizer, 4)
    assert [Path(warning.filename).name for warning in shown] == ["running.py"]
    assert "watching ends at step 2, training goes on" in str(shown[0].message)
    monkeypatch.undo()
    # neither its hooks nor its hold of the folder are left
    with ks.watch(optimizer, model, every=2, path=tmp_path / "watch") as again:
        train(model, optimizer, 2, first=5)
    assert [record["step"] for record in again.records] == [6]


def test_a_logger_that_fails_is_dropped() -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)

    def log(step: int, values: object) -> None:
        raise ConnectionError("no route")

    with ks.watch(optimizer, model, every=1, log=log) as watch, pytest.warns(RuntimeWarning, match="no route"):
        train(model, optimizer, 3)
    assert len(watch.records) == 3


def test_a_run_that_diverged_is_still_watched() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model)
    with ks.watch(optimizer, model, every=1, loss=LOSS, data=[points()], budget=math.inf) as watch:
        train(model, optimizer, 1)
        with torch.no_grad():
            model.get_parameter("0.weight").fill_(math.nan)
        with pytest.warns(RuntimeWarning, match="no cosines at step 2"):
            train(model, optimizer, 1, first=2)
    assert [record["step"] for record in watch.records] == [1, 2]
    assert watch.records[1]["layers"]["gradient_norm"][0] is None


def test_ctrl_c_while_measuring_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    monkeypatch.setattr("kronscope.watching.measuring.measure", lambda *a, **k: ks.Results([], partial=True))
    with (
        pytest.raises(KeyboardInterrupt),
        ks.watch(optimizer, model, every=1, loss=LOSS, data=[points()], path=tmp_path / "run"),
    ):
        train(model, optimizer, 1)
    assert '"how": "ended by KeyboardInterrupt"' in (tmp_path / "run" / "watch.jsonl").read_text()


def test_skipped_steps_and_large_steps_are_said_in_words() -> None:
    model = network()
    optimizer = ks.Shampoo(model.named_parameters(), lr=5.0)
    with ks.watch(optimizer, model, every=2) as watch:
        train(model, optimizer, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model[0].weight.grad = torch.full((8, 6), math.nan)
            optimizer.step()
        assert watch.warnings == ["1 step skipped since the last record: a gradient was not finite"]
        train(model, optimizer, 2, first=3)
    assert watch.warnings[0].startswith("a step moves ")
    assert "lower the learning rate" in watch.warnings[0]


# ---------------------------------------------------------------------- in a folder


@pytest.mark.parametrize("name", ["adamw", "sgd", "shampoo"])
def test_a_resumed_run_goes_on_in_its_folder(name: str, tmp_path: Path) -> None:
    """Stopped without a word after step 7, gone on with from a checkpoint of step 6."""
    path = tmp_path / "run"
    model = network()
    optimizer = OPTIMIZERS[name](model)
    watch = ks.watch(optimizer, model, every=2, path=path)
    train(model, optimizer, 6)
    saved = bits(model), optimizer.state_dict()
    del watch, model, optimizer
    again = network()
    other = OPTIMIZERS[name](again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    with ks.watch(other, again, every=2, path=path) as watch:
        train(again, other, 5, first=7)
        assert watch.step == 11
    assert [record["step"] for record in watch.records] == [2, 4, 6, 8, 10]
    assert WatchRecords.load(path).records == watch.records


def test_a_run_that_went_back_hides_what_is_out_of_date(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    with ks.watch(optimizer, model, every=1, path=path):
        train(model, optimizer, 3)
        saved = bits(model), optimizer.state_dict()
        saved = torch.load(_saved(tmp_path, saved))
        train(model, optimizer, 4, first=4)
    again = network()
    other = OPTIMIZERS["adamw"](again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    with ks.watch(other, again, every=1, path=path) as watch:
        train(again, other, 2, first=4)
    assert [record["step"] for record in watch.records] == [1, 2, 3, 4, 5]
    # nothing is taken out of the file
    assert (path / "watch.jsonl").read_text().count('"layers"') == 9


def _saved(folder: Path, state: object) -> Path:
    torch.save(state, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def test_a_run_from_the_start_does_not_count_on(tmp_path: Path) -> None:
    """Killed before its first checkpoint: Adam's own count says so, SGD has none and the given start does."""
    for name, start in (("adamw", None), ("sgd", 0)):
        for _ in range(2):
            model = network()
            optimizer = OPTIMIZERS[name](model)
            with ks.watch(optimizer, model, every=1, path=tmp_path / name, start=start) as watch:
                train(model, optimizer, 3)
        assert [record["step"] for record in watch.records] == [1, 2, 3]


def test_a_folder_has_one_watch_and_one_model(tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    with (
        ks.watch(optimizer, model, path=tmp_path / "run"),
        pytest.raises(RunError, match=r"being written by this process: .*detach\(\)"),
    ):
        ks.watch(optimizer, model, path=tmp_path / "run")
    other = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(RunError, match="another configuration"):
        ks.watch(torch.optim.AdamW(other.parameters()), other, path=tmp_path / "run")


def test_cosines_are_results_that_report_reads(tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["soap"](model)
    with ks.watch(optimizer, model, every=1, loss=LOSS, data=[points()], path=tmp_path / "run") as watch:
        train(model, optimizer, 2)
    assert ks.Results.load(tmp_path / "run" / "results.json") == watch.results
    assert WatchRecords.load(tmp_path / "run").results == watch.results
    frame = WatchRecords.load(tmp_path / "run").to_pandas()
    assert frame.shape[0] == 4


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model)
    watch = ks.watch(optimizer, model, every=1, path=tmp_path / "run")
    train(model, optimizer, 1)

    def full(line: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch._lines, "append", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        train(model, optimizer, 2, first=2)
    watch.detach()
    assert [record["step"] for record in watch.records] == [1, 2, 3]
    assert [record["step"] for record in WatchRecords.load(tmp_path / "run").records] == [1]


def test_results_that_cannot_be_written_end_in_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = OPTIMIZERS["soap"](model)
    watch = ks.watch(optimizer, model, every=1, loss=LOSS, data=[points()], path=tmp_path / "run")
    train(model, optimizer, 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.warns(RuntimeWarning, match=r"not written as results.*No space left"):
        watch.detach()
    monkeypatch.undo()
    assert WatchRecords.load(tmp_path / "run").results == watch.results
    assert not (tmp_path / "run" / "results.json").exists()
