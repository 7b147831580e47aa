"""The training runs behind the paper's figures, and small ones on embedded data."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from kronscope.errors import OptionError
from kronscope.paper import models

__all__ = ["Preset", "Workload", "get", "names"]


@dataclass(frozen=True)
class Preset:
    """How long and on how much a workload runs.

    Args:
        steps: Training steps.
        batch: Training batch, None for all samples.
        samples: Samples the Gauss–Newton matrix is measured on.
        measure_at: Steps after which to measure; 0 is before training.
        image_size: Pixels a side.
    """

    steps: int
    batch: int | None
    samples: int
    measure_at: tuple[int, ...]
    image_size: int


@dataclass(frozen=True)
class Workload:
    """A model, its data and how it is trained.

    Args:
        name: What the command line calls it.
        title: What figures call it.
        datasets: Names of the data sets it may run on, the paper's own first.
        data_title: The paper's own data.
        classes: Classes of the paper's own data (1: a single logit).
        build: Makes the model from ``classes``, ``channels`` and ``image_size``.
        loss: Makes the loss.
        optimizer: ``sgd`` (with no momentum: gradient descent) or ``adamw``.
        lr: Learning rate, constant.
        weight_decay: Weight decay.
        momentum: Momentum of SGD, or the first beta of AdamW.
        layers: The paper's names of the layers measured.
        paper: The paper's settings.
        small: What two processor cores manage in about a quarter of an hour.
        notes: What the paper leaves open and how it is settled here.
    """

    name: str
    title: str
    datasets: tuple[str, ...]
    data_title: str
    classes: int
    build: Callable[..., nn.Module]
    loss: Callable[[], nn.Module]
    optimizer: Literal["sgd", "adamw"]
    lr: float
    weight_decay: float
    momentum: float
    layers: tuple[str, ...]
    paper: Preset
    small: Preset
    notes: tuple[str, ...] = ()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The workload's optimizer over all parameters of the model."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(
                model.parameters(), lr=self.lr, betas=(self.momentum, 0.999), weight_decay=self.weight_decay
            )
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def layer_specs(self, model: nn.Module) -> dict[str, str]:
        """The paper's layer names and what ``ks.measure`` calls those layers in this model."""
        return {name: models.paper_layer(model, name) for name in self.layers}


_SAMPLES = "the paper does not say on how many samples it measures; ours are listed with every result"
_CONSTANT = "no learning rate schedule is stated: constant"
_VIT_LAYERS = ("FFN Linear Layer 1", "FFN Linear Layer 2", "Q-K Projection Layer", "Q", "K")
_GD_POINTS = (0, 1, 2, 5, 10, 15, 20, 25)

_MNIST2 = Workload(
    name="mnist2",
    title="MNIST-2, linear classifier",
    datasets=("mnist2",),
    data_title="MNIST, digits 0 and 1",
    classes=1,
    build=models.linear_classifier,
    loss=nn.BCEWithLogitsLoss,
    optimizer="sgd",
    lr=0.01,
    weight_decay=0.0,
    momentum=0.0,
    layers=("linear",),
    paper=Preset(steps=25, batch=None, samples=12665, measure_at=_GD_POINTS, image_size=28),
    small=Preset(steps=25, batch=None, samples=2048, measure_at=_GD_POINTS, image_size=28),
    notes=("a single logit with a bias; full-batch gradient descent", _SAMPLES),
)

_RESNET18 = Workload(
    name="cifar-resnet18",
    title="CIFAR, ResNet18",
    datasets=("cifar-5m", "cifar-10"),
    data_title="CIFAR-5M",
    classes=10,
    build=models.resnet18,
    loss=nn.CrossEntropyLoss,
    optimizer="sgd",
    lr=0.02,
    weight_decay=0.0,
    momentum=0.9,
    layers=("layer1.1.conv1",),
    paper=Preset(
        steps=10_000,
        batch=128,
        samples=2048,
        measure_at=(0, 100, 500, 1000, 2000, 4000, 6000, 8000, 10_000),
        image_size=32,
    ),
    small=Preset(steps=300, batch=32, samples=128, measure_at=(0, 25, 50, 100, 200, 300), image_size=32),
    notes=("stem 3×3 with stride 1 and no pooling, as is usual on CIFAR", _CONSTANT, _SAMPLES),
)

_CONVNEXT = Workload(
    name="imagenet-convnext",
    title="ImageNet, ConvNeXt-T",
    datasets=("imagenet", "tiny-imagenet", "imagenet-sample"),
    data_title="ImageNet",
    classes=1000,
    build=models.convnext_tiny,
    loss=nn.CrossEntropyLoss,
    optimizer="adamw",
    lr=3e-3,
    weight_decay=5e-3,
    momentum=0.9,
    layers=("stages.2.1.pwconv1",),
    paper=Preset(
        steps=50_000,
        batch=2048,
        samples=2048,
        measure_at=(0, 500, 1000, 5000, 10_000, 20_000, 30_000, 40_000, 50_000),
        image_size=224,
    ),
    # At this learning rate and on Tiny ImageNet, one seed each: with batches of 32 the loss rose from 5.6 to 6.4
    # and stayed there for 40 steps; with 128 it rose to 6.0 and was back at 5.5 after 30. Chance is 5.3.
    small=Preset(steps=100, batch=128, samples=128, measure_at=(0, 10, 25, 50, 75, 100), image_size=64),
    notes=("no drop path, no augmentation", _CONSTANT, _SAMPLES),
)

_VIT = Workload(
    name="cifar-vit",
    title="CIFAR, ViT",
    datasets=("cifar-5m", "cifar-10"),
    data_title="CIFAR-5M",
    classes=10,
    build=models.vit,
    loss=nn.CrossEntropyLoss,
    optimizer="adamw",
    lr=1e-3,
    weight_decay=1e-2,
    momentum=0.9,
    layers=_VIT_LAYERS,
    paper=_RESNET18.paper,
    small=_RESNET18.small,
    notes=(
        "optimizer unstated in the paper: ours is AdamW, lr 1e-3, weight decay 1e-2, batch 128, 10000 steps",
        _CONSTANT,
        _SAMPLES,
    ),
)

_DIGITS_POINTS = (0, 10, 25, 50, 75, 100)
_DIGITS = Preset(steps=1000, batch=128, samples=1797, measure_at=(0, 50, 100, 200, 400, 600, 800, 1000), image_size=8)
_DIGITS_SMALL = Preset(steps=100, batch=128, samples=256, measure_at=_DIGITS_POINTS, image_size=8)

_WORKLOADS = (
    _MNIST2,
    _RESNET18,
    _CONVNEXT,
    _VIT,
    replace(
        _MNIST2,
        name="digits-linear",
        title="digits 0 and 1, linear classifier",
        datasets=("digits2",),
        data_title="scikit-learn digits, 0 and 1",
        paper=Preset(steps=25, batch=None, samples=360, measure_at=_GD_POINTS, image_size=8),
        small=Preset(steps=25, batch=None, samples=360, measure_at=_GD_POINTS, image_size=8),
        notes=("embedded stand-in for mnist2, not in the paper",),
    ),
    replace(
        _RESNET18,
        name="digits-resnet",
        title="digits, small ResNet",
        datasets=("digits",),
        data_title="scikit-learn digits",
        build=models.small_resnet,
        paper=_DIGITS,
        small=_DIGITS_SMALL,
        notes=("embedded stand-in for cifar-resnet18, not in the paper",),
    ),
    replace(
        _VIT,
        name="digits-vit",
        title="digits, small ViT",
        datasets=("digits",),
        data_title="scikit-learn digits",
        build=models.small_vit,
        paper=_DIGITS,
        small=_DIGITS_SMALL,
        notes=("embedded stand-in for cifar-vit, not in the paper",),
    ),
)
_BY_NAME = {workload.name: workload for workload in _WORKLOADS}


def names() -> tuple[str, ...]:
    """The names of all workloads, the paper's first.

    >>> names()[:4]
    ('mnist2', 'cifar-resnet18', 'imagenet-convnext', 'cifar-vit')
    """
    return tuple(_BY_NAME)


def get(name: str) -> Workload:
    """The workload of that name.

    Raises:
        OptionError: There is none.

    >>> get("cifar-resnet18").lr
    0.02
    """
    if name not in _BY_NAME:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise OptionError(f"There is no workload {name!r}. {hint}Choose one of {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]
