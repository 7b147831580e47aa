"""Training repeats bit for bit: from a seed, after an exception, and after SIGKILL at any moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from kronscope.errors import NonFiniteError, OptionError
from kronscope.paper import Settings, Training, scaled
from kronscope.paper.data import Dataset
from kronscope.runs import Run
from tests.paper import killable
from tests.paper.killing import Killer
from tests.paper.looping import train

pytest.importorskip("transformers")
pytest.importorskip("sklearn")


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])


def _prepare(name: str, **options: Any) -> tuple[Settings, Dataset]:
    settings = scaled(name, **options)
    dataset = settings.load_data()
    return settings.on(dataset), dataset


@pytest.mark.parametrize("name", ["digits-linear", "digits-resnet", "digits-vit"])
def test_training_repeats_bit_for_bit_and_lowers_the_loss(tmp_path, name):
    settings, dataset = _prepare(name, steps=12)
    losses = []
    models = []
    for attempt in range(2):
        torch.manual_seed(attempt)
        with Run.create(tmp_path / str(attempt), settings.config(dataset)) as run:
            models.append(train(settings, dataset, run=run))
            losses.append([line["loss"] for line in run.metrics()])
    assert losses[0] == losses[1]
    assert torch.equal(_weights(models[0]), _weights(models[1]))
    assert losses[0][-1] < losses[0][0]
    assert len(losses[0]) == 12


def test_gradient_descent_is_gradient_descent():
    """Twenty-five steps of the linear workload against the update written out."""
    settings, dataset = _prepare("digits-linear")
    inputs, targets = (tensor.double() for tensor in dataset.batch(torch.arange(len(dataset))))
    model = settings.build_model(dataset).double()
    weight, bias = (parameter.detach().clone() for parameter in model.parameters())
    for _ in range(25):
        error = (inputs @ weight.T + bias).sigmoid() - targets
        weight -= 0.01 * error.T @ inputs / len(inputs)
        bias -= 0.01 * error.mean(0)
    trained = train(settings, dataset)
    torch.testing.assert_close(trained.weight.double(), weight, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(trained.bias.double(), bias, atol=1e-6, rtol=1e-5)


def test_measuring_changes_nothing_even_if_it_uses_the_random_state_and_the_mode():
    settings, dataset = _prepare("digits-resnet", steps=6, measure_at=[0, 2, 6])
    seen = []

    def disturb(step: int, model: nn.Module) -> None:
        seen.append(step)
        assert model.training
        model.eval()
        torch.rand(step + 1)

    assert torch.equal(_weights(train(settings, dataset)), _weights(train(settings, dataset, on_measure=disturb)))
    assert seen == [0, 2, 6]


def test_global_state_is_as_before_also_after_an_error():
    settings, dataset = _prepare("digits-linear", steps=3)
    before = torch.get_rng_state()

    def fail(step: int, model: nn.Module) -> None:
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError("measuring failed")

    with pytest.raises(RuntimeError, match="measuring failed"):
        train(settings, dataset, on_measure=fail)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_progress_counts_steps_and_estimates_the_time_left():
    settings, dataset = _prepare("digits-linear", steps=4)
    calls: list[tuple[int, int, float, float]] = []
    train(settings, dataset, progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert calls[0][3] > 0
    assert calls[-1][3] == 0


def test_divergence_is_said(monkeypatch):
    settings, dataset = _prepare("digits-linear", steps=3)
    broken = settings.build_model(dataset)
    with torch.no_grad():
        broken.get_parameter("weight").fill_(float("nan"))
    monkeypatch.setattr(Settings, "build_model", lambda self, dataset: broken)
    with pytest.raises(NonFiniteError, match=r"nan at step 1.*--batch"):
        train(settings, dataset)


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", ["digits-resnet", "digits-vit"])
@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9])
def test_resuming_after_an_exception_is_bit_exact(tmp_path, name, checkpoint_seconds):
    """With checkpoints at every step, and only at measurements (steps 0 and 4, so that 5 and 6 are repeated)."""
    settings, dataset = _prepare(name, steps=9, batch=64, measure_at=[0, 4])
    reference = train(settings, dataset)

    def stop(step: int, steps: int, loss: float, seconds_left: float) -> None:
        if step == 6:
            raise _StoppedError

    config = settings.config(dataset)
    with Run.start(tmp_path, config) as run, pytest.raises(_StoppedError):
        train(
            settings,
            dataset,
            run=run,
            on_measure=lambda step, model: None,
            progress=stop,
            checkpoint_seconds=checkpoint_seconds,
        )
    with Run.start(tmp_path, config, resume=True) as run:
        checkpoint = run.latest()
        assert checkpoint is not None
        assert checkpoint.step == (6 if checkpoint_seconds == 0 else 4)
        resumed = train(settings, dataset, run=run)
        assert [line["step"] for line in run.metrics()] == list(range(1, 10))
    assert torch.equal(_weights(resumed), _weights(reference))


def test_hooks_attached_at_the_start_see_every_step_once_over_a_resume(tmp_path):
    settings, dataset = _prepare("digits-linear", steps=8, measure_at=[3])

    class Counter:
        def __init__(self, optimizer: Optimizer) -> None:
            self.norms: list[float] = []
            self.optimizer = optimizer
            optimizer.register_step_pre_hook(self.record)

        def record(self, *_: Any) -> None:
            gradient = self.optimizer.param_groups[0]["params"][0].grad
            self.norms.append(float(gradient.norm()))

        def state_dict(self) -> dict[str, Any]:
            return {"norms": self.norms}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.norms = list(state_dict["norms"])

    def start(model: nn.Module, optimizer: Optimizer) -> dict[str, Counter]:
        counters.append(Counter(optimizer))
        return {"counter": counters[-1]}

    def stop(step: int, steps: int, loss: float, seconds_left: float) -> None:
        if step == 5:
            raise _StoppedError

    counters: list[Counter] = []
    train(settings, dataset, on_start=start)
    with Run.start(tmp_path, {}) as run, pytest.raises(_StoppedError):
        train(settings, dataset, run=run, on_start=start, on_measure=lambda *_: None, progress=stop)
    with Run.start(tmp_path, {}, resume=True) as run:
        train(settings, dataset, run=run, on_start=start)
    assert len(counters[0].norms) == 8
    assert counters[2].norms == counters[0].norms


@pytest.fixture
def killer() -> Killer:
    return Killer(killable.work)


def test_a_run_killed_at_ten_random_moments_ends_with_the_same_files(tmp_path, killer):
    killer.run_both(tmp_path / "undisturbed", tmp_path / "killed", 10)
    undisturbed, killed = Run.open(tmp_path / "undisturbed"), Run.open(tmp_path / "killed")
    assert killed.done
    names = ("config.json", "environment.json", "metrics.jsonl", "done.json")
    for name in (*names, *(f"stored/step-{step}.json" for step in (0, 7, 20, 30))):
        assert (killed.folder / name).read_bytes() == (undisturbed.folder / name).read_bytes(), name
    ours, theirs = killed.latest(), undisturbed.latest()
    assert ours is not None
    assert theirs is not None
    assert ours.step == theirs.step == 30
    for name, tensor in theirs.state["model"].items():
        assert torch.equal(tensor, ours.state["model"][name]), name
    assert torch.equal(ours.state["watchers"]["sum"]["total"], theirs.state["watchers"]["sum"]["total"])
    assert not list(killed.folder.rglob("*.tmp"))


def test_the_learning_rate_rises_during_a_warm_up_and_a_run_without_one_is_called_as_before(tmp_path):
    settings, dataset = _prepare("digits-linear", steps=5, warmup=3)
    assert "warm-up none -> 3 steps" in settings.cuts
    assert settings.config(dataset)["warmup"] == 3
    with Training(settings, dataset) as training:
        group, base = training.optimizer.param_groups[0], settings.definition.lr
        rates = [group["lr"] / base for event in training.events() if event.kind == "train"]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])
    plain, _ = _prepare("digits-linear", steps=5)
    assert "warmup" not in plain.config(dataset)
    with pytest.raises(OptionError, match="steps of warm-up"):
        scaled("digits-linear", warmup=-1)


def test_another_learning_rate_is_used_said_and_checked():
    settings, dataset = _prepare("digits-linear", steps=2, lr=0.5, warmup=2)
    assert "learning rate 0.01 -> 0.5" in settings.cuts
    config = settings.config(dataset)
    assert config["lr"] == 0.5
    assert "learning_rate" not in config
    with Training(settings, dataset) as training:
        assert training.optimizer.param_groups[0]["lr"] == 0.5
        list(training.events())
        assert training.optimizer.param_groups[0]["lr"] == 0.5
    assert scaled("digits-linear", lr=0.01).cuts == scaled("digits-linear").cuts
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="learning rate must be positive"):
            scaled("digits-linear", lr=bad)
