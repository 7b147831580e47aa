"""Measuring keeps to its fraction of training's time at every moment, with a clock of the test's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kronscope as ks
from kronscope.measures.rows import Row
from kronscope.watching.clock import StepClock
from kronscope.watching.costs import Costs
from kronscope.watching.measuring import ACCURACY, FIRST_COLUMNS, FIRST_LOOK, MOST_COLUMNS
from tests.watching.running import LOSS


@dataclass
class Machine:
    """Where everything takes as long as the test says: steps, passes through the model, products of a layer."""

    step: float
    forward: float
    products: float  # of the smallest layer, for each column of each sample
    overhead: float = 0.02
    outputs: int = 4
    samples: int = 8
    slower: Callable[[int], float] = lambda call: 1.0
    stderr: Callable[[int], float] = lambda columns: math.nan
    now: float = 0.0
    calls: list[tuple[int, tuple[str, ...], int, int]] = field(default_factory=list)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, self.outputs))
        model.register_forward_hook(lambda *_: self._pass(self.forward))
        return model

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(self.samples, 4), torch.zeros(self.samples, dtype=torch.long)

    def measure(
        self,
        model: nn.Module,
        *_: object,
        layers: list[str],
        max_samples: int | None,
        max_columns: int,
        step: int,
        **__: object,
    ) -> ks.Results:
        samples = min(max_samples or self.samples, self.samples)
        exact = self.outputs - 1
        columns = exact if exact <= max_columns else max_columns
        self.calls.append((step, tuple(layers), samples, columns))
        pace = self.slower(len(self.calls))
        self.now += pace * self.passes(samples, columns)
        rows = []
        for layer in layers:
            m, n = model.get_parameter(layer).shape
            taken = pace * self.products * samples * columns * m * n * (m + n) / 128
            self.now += taken
            for kind in ("optimal", "shampoo2", "live"):
                row = Row(layer, m, n, step, "gauss_newton", "exact", 1, kind, 0.5, self.stderr(columns), 0.5, samples)
                rows.append(Row(**{**vars_of(row), "seconds": taken / 3}))
        return ks.Results(rows)

    def passes(self, samples: int, columns: int) -> float:
        return self.overhead + self.forward * (6 + 2 * samples * columns / 3)

    def cost(self, samples: int, columns: int) -> float:
        """Of the smallest layer."""
        return self.passes(samples, columns) + self.products * samples * columns

    def run(self, monkeypatch: pytest.MonkeyPatch, steps: int, every: int, **options: Any) -> ks.watching.Watch:
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr("kronscope.watching.measuring.measure", self.measure)
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"data": [self.data()], "budget": 0.1, **options}
        with ks.watch(optimizer, model, every, LOSS, **options) as watch:
            for _ in range(steps):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                self.now += self.step
                optimizer.step()
        return watch


def vars_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


MACHINES = {
    # 1000 steps of a tiny network
    "tiny": (Machine(step=1e-3, forward=3e-5, products=3e-6, samples=32), 1000, 50),
    # the character GPT: 65 letters at 64 places
    "characters": (Machine(step=0.1, forward=3.5e-3, products=2e-3, outputs=4161, samples=2), 100, 10),
    # 30 steps of something heavier, and much heavier; steps are no longer than the passes of measuring
    "heavier": (Machine(step=2.0, forward=0.2, products=5e-3, samples=8), 30, 1),
    "one sample a step": (Machine(step=1.0, forward=0.3, products=0.05, samples=16), 200, 10),
    # passes are nothing beside products: predicted from passes alone they come as a surprise
    "wide": (Machine(step=0.05, forward=1e-3, products=2e-3, samples=64), 500, 50),
    # others take the machine for a while
    "busy": (
        Machine(step=0.1, forward=1e-3, products=1e-3, slower=lambda call: 1 + 0.45 * (call % 2)),
        500,
        10,
    ),
}


@pytest.mark.parametrize("budget", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("name", MACHINES)
def test_measuring_keeps_to_its_budget_at_every_moment(
    name: str, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, steps, every = MACHINES[name]
    machine = Machine(**{**vars(machine), "now": 0.0, "calls": []})
    watch = machine.run(monkeypatch, steps, every, budget=budget)
    for record in watch.records:
        allowed = max(budget * record["run"]["training_seconds"], FIRST_LOOK)
        assert record["run"]["measuring_seconds"] <= allowed, record["step"]
    last = watch.records[-1]["run"]
    assert last["training_seconds"] == pytest.approx((steps - 1) * machine.step)
    if budget >= 0.1:
        assert last["measuring_seconds"] <= budget * last["training_seconds"]
        columns = min(machine.outputs - 1, FIRST_COLUMNS)
        paid = last["training_seconds"] * budget / machine.cost(machine.samples, columns)
        assert watch.results.layers or paid < 4
        # rows are of all samples, however small the trials were
        assert {row.samples for row in watch.results} <= {machine.samples}


def test_cosines_come_as_early_as_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones within three times the training that pays for them; then a turn whenever one is paid for."""
    machine = Machine(step=0.1, forward=1e-3, products=5e-3, samples=32)
    watch = machine.run(monkeypatch, 1000, 5)
    first = watch.results.rows[0]
    assert first.step * machine.step <= 3 * machine.cost(32, 3) / 0.1
    last = watch.records[-1]["run"]
    assert last["measuring_seconds"] >= 0.8 * 0.1 * last["training_seconds"]
    assert [names for _, names, *_ in machine.calls[:2]] == [("0.weight",), ("0.weight",)]  # the smallest first


def test_a_first_look_comes_at_once_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(step=1e-3, forward=3e-5, products=3e-6, samples=32)
    watch = machine.run(monkeypatch, 20, 5)
    assert watch.results.steps == (5,)
    assert set(watch.results.layers) == {"0.weight", "1.weight", "2.weight"}
    assert watch.records[-1]["run"]["measuring_seconds"] <= FIRST_LOOK


def test_estimates_get_more_columns_while_their_error_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(
        step=0.1,
        forward=1e-4,
        products=1e-5,
        outputs=101,
        samples=1,
        stderr=lambda columns: 38 * ACCURACY / columns,
    )
    machine.run(monkeypatch, 1000, 10)
    counts = [columns for _, names, _, columns in machine.calls if "0.weight" in names]
    assert counts[:3] == [FIRST_COLUMNS, 2 * FIRST_COLUMNS, MOST_COLUMNS]
    assert set(counts[3:]) == {MOST_COLUMNS}


def test_every_record_says_when_the_next_cosines_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(step=1.0, forward=0.2, products=0.02, samples=6)
    watch = machine.run(monkeypatch, 300, 1)
    texts = [record["measuring"] for record in watch.records]
    assert texts[0] == (
        "at about step 16 a forward pass of one sample, to see how long measuring takes, which takes about 1 s. "
        "Measuring may use 10 % of training's time: 0 s until now, of which 0 s are used"
    )
    trial = next(text for text in texts if "a trial on 1 sample" in text)
    assert trial.endswith("of which 0.2 s are used")
    # what was said before the first cosines comes true
    first = watch.results.rows[0].step
    said = next(text for text in texts if "cosines of" in text)
    assert said.startswith(f"at about step {first} cosines of 0.weight")
    assert "next at about step" in repr(watch)
    inf = machine.run(monkeypatch, 3, 1, budget=math.inf)
    assert {record["measuring"] for record in inf.records} == {""}


def test_data_of_unknown_length_are_tried_in_growing_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(step=0.1, forward=0.02, products=1e-4, samples=50)
    inputs, targets = machine.data()

    class Stream:
        def __iter__(self) -> Any:
            return iter([(inputs, targets)])

    machine.run(monkeypatch, 1500, 10, data=Stream())
    assert [samples for _, _, samples, _ in machine.calls[:4]] == [1, 8, 50, 50]
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=7)
    machine.calls.clear()
    machine.now = 0.0
    watch = machine.run(monkeypatch, 500, 10, data=loader, max_samples=20)
    assert {samples for _, _, samples, _ in machine.calls} == {1, 8, 20}
    assert {row.samples for row in watch.results} == {20}


def test_a_pause_between_steps_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that stood still for a night pays for no measurement."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StepClock()
    now[0] += 60.0  # setting up
    for seconds in (30.0, 1.0, 1.0, 1.0, 30000.0, 1.0):  # the first compiles
        now[0] += seconds
        clock.tick()
        clock.pause()
        now[0] += 0.25
        clock.go_on()
    assert clock.training == 4.0 + 20.0
    assert clock.watching == 1.5


def test_predictions_are_of_the_size_of_what_was_taken() -> None:
    costs = Costs({"small": (4, 4), "large": (40, 40), "other": (20, 20)}, forward=0.001)
    assert costs.predict(["small"], 10) == pytest.approx(0.03 + 0.03)
    rows = [Row("small", 4, 4, 1, "gauss_newton", "exact", 1, "optimal", 0.5, math.nan, 0.5, 5, seconds=0.1)]
    costs.learn(["small"], 10, 0.3, rows)
    assert costs.predict(["small"], 10) == pytest.approx(0.3)
    # passes that are made for any number of samples: 0.02 of 0.2
    assert costs.predict(["small"], 30) == pytest.approx(0.02 + 3 * 0.18 + 3 * 0.1)
    # fewer columns are not counted as cheaper, larger layers as dearer
    assert costs.predict(["small"], 1) == pytest.approx(0.3)
    assert costs.predict(["large"], 10) == pytest.approx(0.2 + 100.0)
    rows = [Row("large", 40, 40, 1, "gauss_newton", "exact", 1, "optimal", 0.5, math.nan, 0.5, 5, seconds=2.0)]
    costs.learn(["large"], 10, 2.2, rows)
    # the nearest says most: no more than the large one
    assert costs.predict(["other"], 10) == pytest.approx(0.2 + 2.0)
