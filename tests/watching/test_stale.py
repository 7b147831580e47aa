"""A warning of old roots comes where they spoil the step, and not in a run with the usual settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.optim import Adaptive
from kronscope.optim.base import KroneckerOptimizer
from kronscope.watching.findings import findings

FAMILIES: dict[str, Callable[..., KroneckerOptimizer]] = {
    "shampoo": ks.Shampoo,
    "kl": ks.KLShampoo,
    "soap": ks.SOAP,
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(12, 8), nn.LSTM(8, 10, batch_first=True), nn.Linear(10, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.rnn(self.table(tokens))[0][:, -1])
        return found


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 16), nn.Linear(16, 12)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.block(self.table(tokens)).mean(1))
        return found


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 6))


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6)]
    return nn.Sequential(*layers)


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(24, 1, 6, 6, generator=generator)
    return inputs, inputs[:, 0, 0].argmax(1)


def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(12, (24, 5), generator=generator)
    return inputs, (inputs[:, 0] + inputs[:, -1]) % 12


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Tensor, Tensor]]]] = {
    "perceptron": (perceptron, images),
    "convolutions": (convolutions, images),
    "recurrent": (Recurrent, tokens),
    "attention": (Attention, tokens),
}


def watched(
    kind: str, family: str, steps: int, every: int, **options: Any
) -> tuple[KroneckerOptimizer, ks.watching.Watch]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    build, batch = KINDS[kind]
    model = build()
    optimizer = FAMILIES[family](model.named_parameters(), lr=3e-3, **options)
    with ks.watch(optimizer, model, every) as watch:
        for _ in range(steps):
            inputs, targets = batch(generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return optimizer, watch


def said(watch: ks.watching.Watch) -> list[tuple[int, str]]:
    return [(one["step"], text) for one in watch.records for text in one["warnings"] if text.startswith("roots of")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_is_not_warned_of(kind: str, family: str) -> None:
    _, watch = watched(kind, family, 40, 4)
    assert said(watch) == []
    # roots are not fresh, and by the size of their residuals one could think that they are of no use
    assert max(max(filter(None, one["layers"]["staleness"]), default=0) for one in watch.records) >= 7
    _, watch = watched(kind, family, 16, 4, refresh=10)
    assert said(watch) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["perceptron", "attention"])
def test_a_run_with_roots_of_long_ago_is(kind: str, family: str) -> None:
    optimizer, watch = watched(kind, family, 60, 20, refresh=200)
    if family != "soap":  # in old bases its step is still Adam's: it may be as good
        assert [step for step, _ in said(watch)][-2:] == [40, 60]
        assert "59 steps old" in said(watch)[-1][1]
        assert said(watch)[-1][1].endswith("lower refresh")
    # what is said of the step is so: roots are taken now, and it is formed again
    numbers = watch.records[-1]["layers"]
    ((place, cosine),) = [(i, value) for i, value in enumerate(numbers["fresh_cosine"]) if value is not None]
    name = list(watch._records.layers)[place]
    (param,) = [param for param, other in optimizer._names().items() if other == name]
    inner, stored, fresh = optimizer._fresh_products(param)
    assert cosine == pytest.approx(inner / math.sqrt(stored * fresh))
    assert numbers["fresh_length"][place] == pytest.approx(math.sqrt(fresh / stored))


def test_with_fresh_roots_the_step_is_the_same() -> None:
    """Roots of every step: nothing to compare, and comparing changes no state."""
    optimizer, _ = watched("perceptron", "shampoo", 12, 3, refresh=1)
    for param, state in optimizer.state.items():
        if param.dim() < 2:
            continue
        before = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
        inner, stored, fresh = optimizer._fresh_products(param)
        assert inner == pytest.approx(stored, rel=1e-4)
        assert fresh == pytest.approx(stored, rel=1e-4)
        after = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_tolerance_that_is_never_reached_is_warned_of() -> None:
    _, watch = watched("perceptron", "shampoo", 60, 20, refresh=Adaptive(tolerance=1e9))
    assert [step for step, _ in said(watch)] == [60]


@pytest.mark.parametrize(
    ("cosine", "length", "text"), [(0.9, 0.9, None), (0.5, 1.0, "a cosine of 0.5"), (0.9, 0.5, "is 2 times")]
)
def test_steps_that_are_turned_or_too_long_are_said(cosine: float, length: float, text: str | None) -> None:
    layers = {"fresh_cosine": [cosine], "fresh_length": [length], "staleness": [40]}
    found = findings(["a"], {"layers": layers, "run": {}, "cosines": []})
    assert found == [] if text is None else text in found[0]


def test_an_estimate_is_not_warned_of_for_its_error() -> None:
    row = {"layer": "a", "approximation": "optimal", "cosine": 0.4, "stderr": 0.1}
    assert findings(["a"], {"layers": {}, "run": {}, "cosines": [row]}) == []
    sure = findings(["a"], {"layers": {}, "run": {}, "cosines": [{**row, "stderr": None}]})
    assert sure == ["no Kronecker product fits a: the best has a cosine of 0.40"]


def test_a_live_matrix_below_the_best_product_is_no_warning() -> None:
    """It is so in every run with Adam, whose matrix is diagonal."""
    kinds = (("live", 0.2), ("optimal", 0.98))
    rows = [{"layer": "a", "approximation": kind, "cosine": value, "stderr": None} for kind, value in kinds]
    assert findings(["a"], {"layers": {}, "run": {}, "cosines": rows}) == []
