"""From a workload to the settings of one run, and a list of everything that was cut on the way.

The small scale keeps optimizer, learning rate and architecture (no workload needs a narrower model) and cuts
steps, batch, samples and image size. On two idle processor cores a batch of 32 took about a second for each of
``cifar-resnet18``, ``cifar-vit`` and (at 64 pixels) ``imagenet-convnext``, and a batch of 128 digits 20 ms.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from kronscope.errors import OptionError
from kronscope.paper import data, workloads
from kronscope.paper.data import Dataset, derive_seed

__all__ = ["Settings", "scaled"]


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run.

    Made by :func:`scaled`; :meth:`on` adds what the data decides.

    Args:
        workload: Name of the workload.
        scale: ``paper`` or ``small``.
        steps: Training steps.
        batch: Training batch, None for all samples.
        samples: Samples the Gauss–Newton matrix is measured on.
        held_out: Samples never trained on, for loss and accuracy at the measured steps; 0 where there are none.
        measure_at: Steps after which to measure, ascending; 0 is before training.
        image_size: Pixels a side.
        seed: Decides initial weights, the order of the data, and the samples measured.
        device: Where training runs.
        datasets: Data sets to look for, in this order.
        cuts: What differs from the paper, one line each.
        warmup: Steps in which the learning rate rises to its value; 0 for the paper's constant one.
        learning_rate: The learning rate, None for the workload's.
        history_every: One gradient in so many is recorded for Adagrad's matrix.
    """

    workload: str
    scale: str
    steps: int
    batch: int | None
    samples: int
    measure_at: tuple[int, ...]
    image_size: int
    seed: int
    device: str
    datasets: tuple[str, ...]
    cuts: tuple[str, ...] = ()
    held_out: int = 0
    warmup: int = 0
    learning_rate: float | None = None
    history_every: int = 1

    @property
    def definition(self) -> workloads.Workload:
        """The workload these are the settings of, with their learning rate."""
        workload = workloads.get(self.workload)
        return workload if self.learning_rate is None else replace(workload, lr=self.learning_rate)

    def load_data(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        download: bool = False,
    ) -> Dataset:
        """The first of the workload's data sets that is there; see :func:`kronscope.paper.data.load`.

        Raises:
            MissingDataError: None is there.
            DataError: A file is damaged.
        """
        return data.load_first(
            self.datasets,
            data_dir,
            image_size=self.image_size,
            # Nothing beyond the images training draws would ever be used.
            limit=None if self.batch is None else max(self.steps * self.batch, self.samples),
            download=download,
        )

    def on(self, dataset: Dataset) -> Settings:
        """The settings as they are on this data: sizes it limits, and what that cuts.

        Raises:
            OptionError: The batch is larger than the data set.
        """
        workload, cuts = self.definition, list(self.cuts)
        other = f"data {workload.data_title} -> {dataset.title}"
        # asked twice, the answer is the same
        if dataset.name != workload.datasets[0] and other not in cuts:
            cuts.insert(0, other)
        cuts += [cut for cut in _changed("classes", workload.classes, dataset.classes) if cut not in cuts]
        if dataset.image_size != self.image_size:
            cuts = [cut for cut in cuts if not cut.startswith("image size ")]
            cuts += _changed("image size", workload.paper.image_size, dataset.image_size)
        if self.samples > len(dataset):
            cuts = [cut for cut in cuts if not cut.startswith("samples ")]
            cuts += _changed("samples", workload.paper.samples, len(dataset))
        # Raises for a batch that does not fit.
        data.batch_indices(len(dataset), self.batch, self.seed, 0)
        return replace(
            self,
            samples=min(self.samples, len(dataset)),
            held_out=min(self.held_out, len(dataset.held_out)) if dataset.held_out is not None else 0,
            image_size=dataset.image_size,
            cuts=tuple(cuts),
        )

    def build_model(self, dataset: Dataset) -> nn.Module:
        """The untrained model for this data; the same seed gives the same weights.

        The global random state is left as it was.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.seed, "model"))
            model = self.definition.build(
                classes=dataset.classes, channels=dataset.channels, image_size=dataset.image_size
            )
        return model.to(self.device)

    def config(self, dataset: Dataset) -> dict[str, Any]:
        """All of it as plain data, for a run's ``config.json``."""
        workload = self.definition
        settings = asdict(self)
        del settings["datasets"], settings["learning_rate"]  # what there was, and the rate in use, follow below
        for name, usual in (("warmup", 0), ("history_every", 1)):
            if settings[name] == usual:
                del settings[name]  # as in runs from before there was one
        return {
            **settings,
            "title": workload.title,
            "optimizer": workload.optimizer,
            "lr": workload.lr,
            "weight_decay": workload.weight_decay,
            "momentum": workload.momentum,
            "layers": list(workload.layers),
            "notes": list(workload.notes),
            "data": dataset.describe(),
            "seeds": {purpose: derive_seed(self.seed, purpose) for purpose in ("model", "samples")},
        }


def scaled(
    workload: workloads.Workload | str,
    scale: str = "small",
    *,
    steps: int | None = None,
    batch: int | None = None,
    samples: int | None = None,
    held_out: int = 1000,
    measure_at: Sequence[int] | None = None,
    image_size: int | None = None,
    dataset: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    warmup: int = 0,
    lr: float | None = None,
    history_every: int = 1,
) -> Settings:
    """The settings of a run: the paper's or the small ones, with single values replaced.

    Args:
        workload: A workload or its name.
        scale: ``paper`` or ``small``.
        steps: Training steps; the default measuring points are stretched to them.
        batch: Training batch.
        samples: Samples to measure on.
        held_out: Samples of the test data, if there is some, for loss and accuracy at the measured steps; 0 for none.
        measure_at: Steps after which to measure.
        image_size: Pixels a side.
        dataset: Use this data set only, instead of the first that is there.
        seed: Seed of everything random.
        device: Where to train.
        warmup: Steps in which the learning rate rises linearly to its value.
        lr: Another learning rate than the workload's.
        history_every: Record one gradient in so many for Adagrad's matrix, whose rows then have error bars.

    Raises:
        OptionError: A value that makes no sense, or a device this machine does not have.

    >>> scaled("cifar-resnet18").cuts
    ('steps 10000 -> 300', 'batch 128 -> 32', 'samples 2048 -> 128')
    """
    workload = workloads.get(workload) if isinstance(workload, str) else workload
    if scale not in ("paper", "small"):
        raise OptionError(f"scale must be 'paper' or 'small', got {scale!r}.")
    at_least_one = {"steps": steps, "batch": batch, "samples": samples, "image size": image_size}
    for name, value in {**at_least_one, "history_every": history_every}.items():
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}.")
    for name, value in (("held-out samples", held_out), ("steps of warm-up", warmup)):
        if value < 0:
            raise OptionError(f"{name} cannot be fewer than 0, got {value}.")
    if lr is not None and not 0 < lr < math.inf:
        raise OptionError(f"the learning rate must be positive, got {lr}.")
    if dataset is not None and dataset not in workload.datasets:
        raise OptionError(f"{workload.name} cannot run on {dataset!r}; it knows {', '.join(workload.datasets)}.")
    paper, preset = workload.paper, workload.paper if scale == "paper" else workload.small
    total = preset.steps if steps is None else steps
    settings = Settings(
        workload=workload.name,
        scale=scale,
        steps=total,
        batch=preset.batch if batch is None else batch,
        samples=preset.samples if samples is None else samples,
        measure_at=_points(measure_at, total, preset),
        image_size=preset.image_size if image_size is None else image_size,
        seed=seed,
        device=_device(device),
        datasets=workload.datasets if dataset is None else (dataset,),
        held_out=held_out,
        warmup=warmup,
        learning_rate=lr,
        history_every=history_every,
    )
    cuts = [
        *_changed("steps", paper.steps, settings.steps),
        *_changed("batch", paper.batch or "all", settings.batch or "all"),
        *_changed("samples", paper.samples, settings.samples),
        *_changed("image size", paper.image_size, settings.image_size),
        *_changed("warm-up", "none", f"{warmup} steps" if warmup else "none"),
        *_changed("learning rate", f"{workload.lr:g}", f"{settings.definition.lr:g}"),
        *_changed("gradients recorded", "all", "all" if history_every == 1 else f"one in {history_every}"),
    ]
    return replace(settings, cuts=tuple(cuts))


def _points(asked: Sequence[int] | None, steps: int, preset: workloads.Preset) -> tuple[int, ...]:
    if asked is None:
        return tuple(sorted({round(point * steps / preset.steps) for point in preset.measure_at}))
    points = tuple(sorted(set(asked)))
    if not points or points[0] < 0 or points[-1] > steps:
        raise OptionError(f"measure_at needs steps between 0 and {steps} (the last one), got {list(asked)}.")
    return points


def _changed(what: str, paper: object, ours: object) -> list[str]:
    return [] if paper == ours else [f"{what} {paper} -> {ours}"]


def _device(name: str) -> str:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"There is no device {name!r}; try cpu, cuda or mps.") from error
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each backend fails in its own way, also with AssertionError
        reason = textwrap.shorten(str(error), 100, placeholder="…")
        raise OptionError(
            f"The device {name!r} cannot be used here ({reason}); choose another, such as cpu."
        ) from error
    return str(device)
