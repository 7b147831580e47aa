"""Loss and accuracy on data never trained on: right, in the results, and without a trace in the training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.errors import OptionError
from kronscope.paper import Experiment, plans, scaled
from kronscope.paper.data import Dataset, load
from kronscope.paper.data.dataset import TensorImages
from kronscope.paper.held_out import evaluate
from kronscope.paper.training import Event


def _divided(dataset: Dataset, train: int) -> Dataset:
    """The first ``train`` samples, and the others as those held out."""
    chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    parts = [
        replace(dataset, images=TensorImages(dataset.images.read(part)), targets=dataset.targets[part])
        for part in (chosen[:train], chosen[train:])
    ]
    return replace(parts[0], held_out=parts[1])


def _run(folder: Path, held_out: int, **how: object) -> ks.Results:
    settings = scaled("digits-linear", steps=4, samples=30, measure_at=[0, 2, 4], held_out=held_out)
    dataset = _divided(load("digits2"), 300)
    return Experiment(plans.get("figure1"), settings, dataset).run(folder, show_bars=False, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("workload", ["digits-linear", "digits-resnet"])
def test_loss_and_accuracy_are_those_of_one_batch_by_hand(workload: str) -> None:
    settings = scaled(workload)
    dataset = settings.load_data()
    model, loss = settings.build_model(dataset).train(), settings.definition.loss()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = evaluate(model, loss, dataset.sample(50, seed=3, batch=16))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ((inputs, targets),) = dataset.sample(50, seed=3, batch=50)
    with torch.no_grad():
        output = model.eval()(inputs)
    output = output if isinstance(output, torch.Tensor) else output.logits
    right = ((output > 0).float() == targets) if workload == "digits-linear" else (output.argmax(1) == targets)
    assert found["accuracy"] == pytest.approx(float(right.float().mean()))
    assert found["loss"] == pytest.approx(float(loss(output, targets)), rel=1e-5)
    assert found["samples"] == 50


def test_results_have_them_at_every_measured_step_and_training_does_not_notice(tmp_path: Path) -> None:
    with_them, without = _run(tmp_path / "a", 60), _run(tmp_path / "b", 0)
    found = with_them.settings["held_out"]
    assert [(item["step"], item["samples"]) for item in found] == [(0, 60), (2, 60), (4, 60)]
    assert found[-1]["accuracy"] > found[0]["accuracy"]
    assert found[-1]["loss"] < found[0]["loss"]
    assert "held_out" not in without.settings
    assert [row.cosine for row in with_them] == [row.cosine for row in without]
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in "ab"]
    assert metrics[0] == metrics[1]


def test_a_run_that_was_stopped_has_the_same(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "train" and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "b", 60, show=stop)
    assert _run(tmp_path / "b", 60, resume=True) == _run(tmp_path / "a", 60)


def test_the_table_shows_them_and_without_test_data_there_are_none(tmp_path: Path) -> None:
    settings = {"held_out": [{"step": 1000, "accuracy": 0.512, "loss": 1.25, "samples": 2000}]}
    row = ks.measures.Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.97, samples=128)
    text = " ".join(str(ks.Results([row], settings=settings)).split())
    assert "On 2,000 samples never trained on: step 1,000 accuracy 51.2%, loss 1.25." in text
    asked = scaled("digits-linear", held_out=50)
    assert asked.on(asked.load_data()).held_out == 0
    with pytest.raises(OptionError, match="cannot be fewer than 0"):
        scaled("digits-linear", held_out=-1)


def test_a_loss_of_one_logit_needs_no_classes() -> None:
    model = nn.Linear(64, 1)
    samples = load("digits2").sample(360, seed=0)
    assert 0 <= evaluate(model, nn.BCEWithLogitsLoss(), samples)["accuracy"] <= 1
