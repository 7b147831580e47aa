"""The paper's table, its layers' shapes, and the record of what a small run cuts."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from kronscope.errors import LayerError, OptionError
from kronscope.paper import models, workloads
from kronscope.paper.data.dataset import Dataset, Normalization, TensorImages
from kronscope.paper.scale import Settings, scaled

pytest.importorskip("transformers")


def _blank(name: str, title: str, *, classes: int, size: int, channels: int = 3, images: int = 4) -> Dataset:
    """A data set of black images, to build models for."""
    flat = classes == 1
    return Dataset(
        name=name,
        title=title,
        images=TensorImages(torch.zeros(images, channels, size, size, dtype=torch.uint8)),
        targets=torch.zeros(images, 1) if flat else torch.zeros(images, dtype=torch.long),
        classes=classes,
        normalization=Normalization((0.0,) * channels, (1.0,) * channels),
        flatten=flat,
    )


_BLANKS = {
    "mnist2": _blank("mnist2", "MNIST", classes=1, size=28, channels=1),
    "cifar-resnet18": _blank("cifar-10", "CIFAR-10", classes=10, size=32),
    "imagenet-convnext": _blank("imagenet", "ImageNet", classes=1000, size=64),
    "cifar-vit": _blank("cifar-5m", "CIFAR-5M", classes=10, size=32),
    "digits-linear": _blank("digits2", "digits", classes=1, size=8, channels=1),
    "digits-resnet": _blank("digits", "digits", classes=10, size=8, channels=1),
    "digits-vit": _blank("digits", "digits", classes=10, size=8, channels=1),
}

# rows × columns of every layer measured
_SHAPES = {
    "mnist2": {"linear": (1, 784)},
    "cifar-resnet18": {"layer1.1.conv1": (64, 576)},
    "imagenet-convnext": {"stages.2.1.pwconv1": (1536, 384)},
    "cifar-vit": {
        "FFN Linear Layer 1": (512, 512),
        "FFN Linear Layer 2": (512, 512),
        "Q-K Projection Layer": (1024, 512),
        "Q": (512, 512),
        "K": (512, 512),
    },
    "digits-linear": {"linear": (1, 64)},
    "digits-resnet": {"layer1.1.conv1": (16, 144)},
    "digits-vit": {
        "FFN Linear Layer 1": (32, 32),
        "FFN Linear Layer 2": (32, 32),
        "Q-K Projection Layer": (64, 32),
        "Q": (32, 32),
        "K": (32, 32),
    },
}


def _matrix_shape(model: nn.Module, spec: str) -> tuple[int, int]:
    parameters = dict(model.named_parameters())
    parts = [parameters[name].flatten(1) for name in spec.split("+")]
    return sum(len(part) for part in parts), parts[0].shape[1]


@pytest.mark.parametrize("name", workloads.names())
def test_layers_have_the_papers_shapes_and_the_model_runs(name):
    workload, dataset = workloads.get(name), _BLANKS[name]
    model = scaled(workload).build_model(dataset)
    shapes = {label: _matrix_shape(model, spec) for label, spec in workload.layer_specs(model).items()}
    assert shapes == _SHAPES[name]
    inputs, targets = dataset.batch(torch.arange(2))
    logits = models.logits(model, inputs)
    assert logits.shape == (2, dataset.classes)
    workload.loss()(logits, targets).backward()
    for spec in workload.layer_specs(model).values():
        for parameter in spec.split("+"):
            assert dict(model.named_parameters())[parameter].grad is not None


def test_the_papers_table():
    table = {
        name: (w.paper.steps, w.paper.batch, w.lr, w.weight_decay, w.momentum)
        for name in workloads.names()[:4]
        for w in [workloads.get(name)]
    }
    assert table == {
        "mnist2": (25, None, 0.01, 0.0, 0.0),
        "cifar-resnet18": (10_000, 128, 0.02, 0.0, 0.9),
        "imagenet-convnext": (50_000, 2048, 3e-3, 5e-3, 0.9),
        "cifar-vit": (10_000, 128, 1e-3, 1e-2, 0.9),
    }
    assert any("unstated in the paper: ours is AdamW" in note for note in workloads.get("cifar-vit").notes)


def test_optimizers_are_the_papers():
    model = nn.Linear(2, 2)
    descent = workloads.get("mnist2").make_optimizer(model)
    momentum = workloads.get("cifar-resnet18").make_optimizer(model)
    adamw = workloads.get("imagenet-convnext").make_optimizer(model)
    assert isinstance(descent, torch.optim.SGD)
    assert (descent.defaults["momentum"], descent.defaults["lr"]) == (0.0, 0.01)
    assert isinstance(momentum, torch.optim.SGD)
    assert (momentum.defaults["momentum"], momentum.defaults["nesterov"]) == (0.9, False)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (adamw.defaults["betas"], adamw.defaults["weight_decay"]) == ((0.9, 0.999), 5e-3)


def test_the_papers_resnet_keeps_the_resolution_of_small_images():
    model = models.resnet18(classes=10, channels=3, image_size=32)
    seen = []
    layer = model.get_submodule("resnet.encoder.stages.0.layers.1.layer.0.convolution")
    layer.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    models.logits(model, torch.zeros(1, 3, 32, 32))
    assert seen == [(1, 64, 32, 32)]
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962


def test_attention_is_written_out():
    model = models.vit(classes=10, channels=3, image_size=32)
    config: Any = model.config
    assert config._attn_implementation == "eager"


class _Named(nn.Module):
    """A module whose parameters have the given dotted names and shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("library", "shapes", "expected"),
    [
        (
            "torchvision",
            {"layer1.1.conv1.weight": (64, 64, 3, 3), "layer2.1.conv1.weight": (128, 128, 3, 3)},
            {"layer1.1.conv1": "layer1.1.conv1.weight"},
        ),
        (
            "torchvision ConvNeXt",
            {"features.5.1.block.3.weight": (1536, 384), "features.5.1.block.5.weight": (384, 1536)},
            {"stages.2.1.pwconv1": "features.5.1.block.3.weight"},
        ),
        (
            "timm ConvNeXt",
            {"stages.2.blocks.1.mlp.fc1.weight": (1536, 384), "stages.2.blocks.11.mlp.fc1.weight": (1536, 384)},
            {"stages.2.1.pwconv1": "stages.2.blocks.1.mlp.fc1.weight"},
        ),
        (
            "timm ViT",
            {
                "blocks.3.attn.qkv.weight": (1536, 512),
                "blocks.3.mlp.fc1.weight": (512, 512),
                "blocks.3.mlp.fc2.weight": (512, 512),
                "blocks.4.mlp.fc2.weight": (512, 512),
            },
            {
                "Q-K Projection Layer": "blocks.3.attn.qkv.weight[0:1024]",
                "Q": "blocks.3.attn.qkv.weight[0:512]",
                "K": "blocks.3.attn.qkv.weight[512:1024]",
                "FFN Linear Layer 1": "blocks.3.mlp.fc1.weight",
                "FFN Linear Layer 2": "blocks.3.mlp.fc2.weight",
            },
        ),
        (
            "transformers 4 ViT",
            {
                "vit.encoder.layer.3.attention.attention.query.weight": (512, 512),
                "vit.encoder.layer.3.attention.attention.key.weight": (512, 512),
                "vit.encoder.layer.3.attention.output.dense.weight": (512, 512),
                "vit.encoder.layer.3.intermediate.dense.weight": (512, 512),
                "vit.encoder.layer.3.output.dense.weight": (512, 512),
            },
            {
                "Q-K Projection Layer": "vit.encoder.layer.3.attention.attention.query.weight"
                "+vit.encoder.layer.3.attention.attention.key.weight",
                "Q": "vit.encoder.layer.3.attention.attention.query.weight",
                "K": "vit.encoder.layer.3.attention.attention.key.weight",
                "FFN Linear Layer 1": "vit.encoder.layer.3.intermediate.dense.weight",
                "FFN Linear Layer 2": "vit.encoder.layer.3.output.dense.weight",
            },
        ),
    ],
)
def test_the_papers_layers_are_found_in_other_libraries(library, shapes, expected):
    model = _Named(shapes)
    assert {label: models.paper_layer(model, label) for label in expected} == expected


def test_a_layer_the_model_does_not_have_lists_near_names():
    model = _Named({"encoder.stages.0.layers.0.layer.0.convolution.weight": (64, 64, 3, 3)})
    with pytest.raises(LayerError, match=r"nearest parameters: encoder\.stages\.0\.layers\.0"):
        models.paper_layer(model, "layer1.1.conv1")
    with pytest.raises(LayerError, match=r"The paper has no layer 'conv9'; choose one of 'linear'"):
        models.paper_layer(model, "conv9")


def test_an_unknown_workload_suggests_the_nearest():
    with pytest.raises(OptionError, match="Did you mean 'cifar-resnet18'"):
        workloads.get("cifar-resnet")


@pytest.mark.parametrize("name", workloads.names())
def test_paper_scale_cuts_nothing_on_the_papers_own_data(name):
    workload = workloads.get(name)
    settings = scaled(name, "paper")
    assert settings.cuts == ()
    own = dataclasses.replace(
        _BLANKS[name],
        name=workload.datasets[0],
        classes=workload.classes,
        images=TensorImages(
            torch.zeros(1, 1, workload.paper.image_size, workload.paper.image_size).expand(50_000, -1, -1, -1)
        ),
        targets=torch.zeros(1).expand(50_000),
    )
    assert settings.on(own).cuts == ()
    assert (settings.steps, settings.batch) == (workload.paper.steps, workload.paper.batch)


@pytest.mark.parametrize("name", workloads.names())
def test_small_scale_keeps_optimizer_and_measures_at_five_steps_or_more(name):
    small = scaled(name)
    assert small.measure_at[0] == 0
    assert small.measure_at[-1] == small.steps
    # Five for Adagrad's matrix too, which does not exist before the first step.
    assert len([step for step in small.measure_at if step > 0]) >= 5
    assert small.definition is workloads.get(name)


def test_everything_cut_is_listed():
    settings = scaled("imagenet-convnext")
    assert settings.cuts == (
        "steps 50000 -> 100",
        "batch 2048 -> 128",
        "samples 2048 -> 128",
        "image size 224 -> 64",
    )
    tiny = _blank("tiny-imagenet", "Tiny ImageNet (130 images, 200 classes)", classes=200, size=32, images=130)
    on = scaled("imagenet-convnext", samples=500).on(tiny)
    assert on.cuts == (
        "data ImageNet -> Tiny ImageNet (130 images, 200 classes)",
        "steps 50000 -> 100",
        "batch 2048 -> 128",
        "classes 1000 -> 200",
        "image size 224 -> 32",
        "samples 2048 -> 130",
    )
    assert (on.samples, on.image_size) == (130, 32)
    assert scaled("mnist2", batch=100).cuts[0] == "batch all -> 100"
    assert scaled("cifar-vit", "paper", steps=20_000).cuts == ("steps 10000 -> 20000",)


def test_measuring_points_stretch_with_the_steps():
    assert scaled("cifar-resnet18", steps=30).measure_at == (0, 2, 5, 10, 20, 30)
    assert scaled("digits-linear", steps=1).measure_at == (0, 1)
    assert scaled("mnist2", measure_at=[5, 0, 5]).measure_at == (0, 5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scale": "huge"}, "'paper' or 'small', got 'huge'"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"samples": -3}, "samples must be at least 1"),
        ({"measure_at": [26]}, "between 0 and 25"),
        ({"measure_at": [-1]}, "between 0 and 25"),
        ({"measure_at": []}, "between 0 and 25"),
        ({"dataset": "cifar-10"}, "cannot run on 'cifar-10'"),
        ({"device": "abacus"}, "no device 'abacus'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, match):
    with pytest.raises(OptionError, match=match):
        scaled("mnist2", **options)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(OptionError, match="between 1 and 4"):
        scaled("cifar-vit").on(_BLANKS["cifar-vit"])


def test_the_seed_decides_the_weights_and_nothing_else_does():
    def weights(settings: Settings) -> torch.Tensor:
        model = settings.build_model(_BLANKS["digits-resnet"])
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    before = torch.get_rng_state()
    first = weights(scaled("digits-resnet"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(weights(scaled("digits-resnet")), first)
    assert not torch.equal(weights(scaled("digits-resnet", seed=1)), first)


def test_the_configuration_is_plain_data_and_complete():
    settings = scaled("digits-vit", seed=7)
    config = settings.config(_BLANKS["digits-vit"])
    assert json.loads(json.dumps(config))["seed"] == 7
    assert config["data"]["augmentation"] == "none"
    assert config["data"]["mean"] == [0.0]
    assert config["cuts"] == settings.cuts
    assert {"optimizer", "lr", "weight_decay", "momentum", "notes", "seeds", "layers"} <= set(config)
