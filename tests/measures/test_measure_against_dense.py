"""Every cosine that ``ks.measure`` gives equals the one of full matrices made of Jacobians, to 1e-9."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from tests.gradients import zoo
from tests.measures.dense import NAMES, Layer, Problem, Setting, classes_for, dense_cosines

Build = Callable[[], tuple[nn.Module, Tensor]]
Make = Callable[[], nn.Module]


def _mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), zoo.images(9, 5)


def _sequence() -> tuple[nn.Module, Tensor]:
    return zoo.SequenceLinear(), zoo.images(6, 3, 5)


def _convolution() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=2, dilation=2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return model, zoo.images(5, 2, 7, 5)


def _tied() -> tuple[nn.Module, Tensor]:
    return zoo.TiedLanguageModel(), torch.randint(0, 5, (6, 3))


def _transformer() -> tuple[nn.Module, Tensor]:
    return zoo.Transformer(), zoo.images(5, 3, 5)


class _Residual(nn.Module):
    """A residual block with BatchNorm; nothing is overwritten, since the oracle watches outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.drop = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)
        # statistics other than those of the data: measuring with batch statistics would be seen
        nn.init.uniform_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.stem(x)).relu()
        x = x + self.conv(x).relu()
        return self.head(self.drop(x.mean((2, 3))))


def _residual() -> tuple[nn.Module, Tensor]:
    return _Residual().train(), zoo.images(6, 2, 4, 3)


LOSSES: dict[str, Make] = {
    "ce": nn.CrossEntropyLoss,
    "ce-sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "ce-ignore": lambda: nn.CrossEntropyLoss(ignore_index=-1),
    "ce-ignore-sum": lambda: nn.CrossEntropyLoss(ignore_index=-1, reduction="sum"),
    "mse": nn.MSELoss,
    "mse-sum": lambda: nn.MSELoss(reduction="sum"),
    "bce": nn.BCEWithLogitsLoss,
    "bce-sum": lambda: nn.BCEWithLogitsLoss(reduction="sum"),
}


def _whole(name: str) -> Layer:
    return Layer(f"{name}.weight", (f"{name}.weight",), modules=(name,))


def _rows(name: str, start: int, stop: int) -> Layer:
    return Layer(f"{name}.weight[{start}:{stop}]", (f"{name}.weight",), slice(start, stop), (name,))


ALL_LOSSES = ["ce", "ce-sum", "mse", "mse-sum", "bce", "bce-sum"]
MODELS: dict[str, tuple[Build, list[Layer], list[str]]] = {
    "mlp": (_mlp, [_whole("0"), _whole("2")], ALL_LOSSES),
    "sequence": (_sequence, [_whole("inner"), _whole("outer")], ALL_LOSSES),
    "convolution": (_convolution, [_whole("0"), _whole("2")], ALL_LOSSES),
    "tied": (
        _tied,
        [Layer("tokens.weight", ("tokens.weight",), modules=("tokens", "head")), _whole("hidden"), _whole("positions")],
        [*ALL_LOSSES, "ce-ignore", "ce-ignore-sum"],
    ),
    "transformer": (
        _transformer,
        [
            _rows("blocks.0.qkv", 0, 4),
            _rows("blocks.0.qkv", 4, 8),
            _rows("blocks.0.qkv", 0, 8),
            _whole("blocks.1.qkv"),
            _whole("blocks.1.down"),
            Layer(
                "blocks.0.out.weight+blocks.1.out.weight",
                ("blocks.0.out.weight", "blocks.1.out.weight"),
                modules=("blocks.0.out", "blocks.1.out"),
            ),
        ],
        ALL_LOSSES,
    ),
    "residual": (_residual, [_whole("stem"), _whole("conv"), _whole("head")], ALL_LOSSES),
}

SETTINGS = {
    "exact": Setting(),
    "exact, B=5 changes nothing": Setting(labels="exact", batch_size=5),
    "real": Setting(labels="real"),
    "real, B=4": Setting(labels="real", batch_size=4),
    "real, B=4 without replacement": Setting(labels="real", batch_size=4, replacement=False),
    "sampled": Setting(labels="sampled"),
    "sampled, B=3, three draws": Setting(labels="sampled", batch_size=3, draws=3, seed=7),
    "empirical": Setting("empirical_fisher"),
    "empirical, B=3": Setting("empirical_fisher", batch_size=3),
    "empirical, fitted on exact": Setting("empirical_fisher", "exact"),
    "empirical, fitted on sampled": Setting("empirical_fisher", "sampled", draws=2),
}


@lru_cache(maxsize=1)
def _problem(name: str, loss: str) -> Problem:
    torch.manual_seed(3)
    model, inputs = MODELS[name][0]()
    model = model.double()
    make = LOSSES[loss]
    bare = Problem(model, make(), inputs, torch.empty(0))
    return Problem(model, make(), inputs, classes_for(make, bare.outputs()))


_FEW = ("exact", "real, B=4", "sampled, B=3, three draws")


def _arbitrary(layer: Layer) -> tuple[str, ...]:
    """What rounding or convention decides, so that there is nothing to agree on."""
    if layer.name == "blocks.0.qkv.weight[4:8]":
        # softmax ignores a shift of all scores, so the gradients of the keys sum up to zero over positions
        return ("kfac-reduce",)
    return ()


def _cases() -> Iterator[tuple[str, str, str]]:
    """Each model with each setting, and with each loss.

    What labels and a loss have to do with each other is how many terms a sample has, and how they are averaged: where
    samples have several, each loss is asked in each way, and elsewhere in one of them, another one for the next model.
    """
    for number, (model, (_, _, losses)) in enumerate(MODELS.items()):
        for place, loss in enumerate(losses):
            few = _FEW if model == "tied" else (_FEW[(number + place) % len(_FEW)],)
            for setting in SETTINGS if place == 0 else few:
                yield model, loss, setting


def _names(model: str, setting: Setting) -> list[str]:
    # with few gradients the KL-optimal factors do not exist, or the flip-flop creeps towards them
    known = setting.fitted == "exact" and model != "transformer"
    return [name for name in NAMES if name != "kl" or known]


@pytest.mark.parametrize(("model", "loss", "asked"), list(_cases()))
def test_every_cosine_is_the_dense_one(model: str, loss: str, asked: str) -> None:
    problem, layers, setting = _problem(model, loss), MODELS[model][1], SETTINGS[asked]
    names = _names(model, setting)
    results = ks.measure(
        problem.model,
        problem.loss,
        problem.batches(4),
        layers=[layer.name for layer in layers],
        truth=setting.truth,
        labels=setting.labels,
        batch_size=setting.batch_size,
        replacement=setting.replacement,
        draws=setting.draws,
        seed=setting.seed,
        approximations=names,
        progress=False,
    )
    assert len(results) == len(layers) * len(names)
    for layer in layers:
        expected = dense_cosines(problem, layer, setting, names)
        for row in results.select(layer=layer.name):
            if row.approximation in _arbitrary(layer):
                continue
            value = expected[row.approximation]
            if math.isnan(value):
                assert math.isnan(row.cosine), (row, value)
                assert row.note
            else:
                assert row.cosine == pytest.approx(value, abs=1e-9), (row, value)
            assert row.truth == setting.truth
            assert row.labels == setting.fitted
            assert row.batch_size == setting.batch_size
            assert row.samples == len(problem.targets)
