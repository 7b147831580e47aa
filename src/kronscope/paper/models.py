"""The paper's models, built from transformers configurations without a download, and its layers' names."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kronscope.errors import LayerError, MissingExtraError

__all__ = [
    "convnext_tiny",
    "linear_classifier",
    "logits",
    "paper_layer",
    "resnet18",
    "small_resnet",
    "small_vit",
    "vit",
]


def linear_classifier(*, classes: int, channels: int, image_size: int) -> nn.Module:
    """One linear layer on flattened images.

    >>> tuple(linear_classifier(classes=1, channels=1, image_size=28).weight.shape)
    (1, 784)
    """
    return nn.Linear(channels * image_size**2, classes)


def resnet18(*, classes: int, channels: int, image_size: int) -> nn.Module:
    """ResNet18 with the usual CIFAR stem: 3×3, stride 1, no pooling, which suits small images of any size.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    return _resnet((64, 128, 256, 512), classes, channels)


def small_resnet(*, classes: int, channels: int, image_size: int) -> nn.Module:
    """ResNet18's first two stages at width 16 and 32: 43 thousand parameters for 8×8 images.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    return _resnet((16, 32), classes, channels)


def convnext_tiny(*, classes: int, channels: int, image_size: int) -> nn.Module:
    """ConvNeXt-T: depths 3, 3, 9, 3 and widths 96 to 768.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    transformers = _transformers()
    config = transformers.ConvNextConfig(
        num_channels=channels,
        depths=[3, 3, 9, 3],
        hidden_sizes=[96, 192, 384, 768],
        image_size=image_size,
        num_labels=classes,
    )
    return _module(transformers.ConvNextForImageClassification(config))


def vit(*, classes: int, channels: int, image_size: int) -> nn.Module:
    """The paper's ViT: patch 4, width 512, MLP width 512, 6 layers, 8 heads.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    return _vit(classes, channels, image_size, patch=4, width=512, layers=6, heads=8)


def small_vit(*, classes: int, channels: int, image_size: int) -> nn.Module:
    """The same ViT at patch 2, width 32, 4 layers, 4 heads: 27 thousand parameters for 8×8 images.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    return _vit(classes, channels, image_size, patch=2, width=32, layers=4, heads=4)


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's logits, whether it returns them or an output object that has them."""
    output = model(inputs)
    result: Tensor = output if isinstance(output, Tensor) else output.logits
    return result


@dataclass(frozen=True)
class _Rows:
    """A parameter, or the leading thirds of the rows of a fused one."""

    suffix: str
    thirds: tuple[int, int] | None = None

    def spec(self, shapes: dict[str, int]) -> str | None:
        """The layer in the library's grammar, or None where the model has no such parameter, or several."""
        found = [name for name in shapes if name == self.suffix or name.endswith(f".{self.suffix}")]
        if len(found) != 1:
            return None
        if self.thirds is None:
            return found[0]
        start, stop = (shapes[found[0]] * third // 3 for third in self.thirds)
        return f"{found[0]}[{start}:{stop}]"


def _either(*suffixes: str) -> tuple[tuple[_Rows, ...], ...]:
    return tuple((_Rows(suffix),) for suffix in suffixes)


def _attention(*, query: bool, key: bool) -> tuple[tuple[_Rows, ...], ...]:
    separate = (
        ("layers.3.attention.q_proj.weight", "layers.3.attention.k_proj.weight"),  # transformers 5
        (
            "encoder.layer.3.attention.attention.query.weight",
            "encoder.layer.3.attention.attention.key.weight",
        ),
    )
    fused = ("blocks.3.attn.qkv.weight", "encoder_layer_3.self_attention.in_proj_weight")  # timm, torchvision
    thirds = (0 if query else 1, 2 if key else 1)
    return (
        *(tuple(_Rows(name) for name, wanted in zip(pair, (query, key), strict=True) if wanted) for pair in separate),
        *((_Rows(name, thirds),) for name in fused),
    )


# What the paper calls a layer, and the parameters it is in transformers (two generations), timm, torchvision
# and the original code. The first alternative the model has is taken, whatever stands before its names.
_PAPER_LAYERS: dict[str, tuple[tuple[_Rows, ...], ...]] = {
    "linear": _either("weight"),
    "layer1.1.conv1": _either("encoder.stages.0.layers.1.layer.0.convolution.weight", "layer1.1.conv1.weight"),
    "stages.2.1.pwconv1": _either(
        "encoder.stages.2.layers.1.pwconv1.weight",
        "stages.2.1.pwconv1.weight",
        "stages.2.blocks.1.mlp.fc1.weight",
        "features.5.1.block.3.weight",
    ),
    "FFN Linear Layer 1": _either(
        "layers.3.mlp.fc1.weight",
        "encoder.layer.3.intermediate.dense.weight",
        "blocks.3.mlp.fc1.weight",
        "encoder_layer_3.mlp.0.weight",
    ),
    "FFN Linear Layer 2": _either(
        "layers.3.mlp.fc2.weight",
        "encoder.layer.3.output.dense.weight",
        "blocks.3.mlp.fc2.weight",
        "encoder_layer_3.mlp.3.weight",
    ),
    "Q-K Projection Layer": _attention(query=True, key=True),
    "Q": _attention(query=True, key=False),
    "K": _attention(query=False, key=True),
}


def paper_layer(model: nn.Module, name: str) -> str:
    """The layer the paper calls ``name``, as ``ks.measure`` wants it for this model.

    Knows the parameter names of transformers, timm and torchvision; stacked rows come as
    ``a.weight+b.weight`` and rows of a fused projection as ``qkv.weight[0:1024]``.

    Raises:
        LayerError: The paper has no such layer, or the model does not have it.

    >>> paper_layer(linear_classifier(classes=1, channels=1, image_size=28), "linear")
    'weight'
    """
    if name not in _PAPER_LAYERS:
        known = ", ".join(repr(known) for known in _PAPER_LAYERS)
        raise LayerError(f"The paper has no layer {name!r}; choose one of {known}.")
    shapes = {parameter: tensor.shape[0] for parameter, tensor in model.named_parameters() if tensor.ndim > 1}
    for alternative in _PAPER_LAYERS[name]:
        specs = [rows.spec(shapes) for rows in alternative]
        if None not in specs:
            return "+".join(spec for spec in specs if spec is not None)
    wanted = _PAPER_LAYERS[name][0][0].suffix
    nearest = difflib.get_close_matches(wanted, shapes, n=3, cutoff=0.0)
    raise LayerError(
        f"This model has no {name!r} (looked for …{wanted} and its names in other libraries); "
        f"nearest parameters: {', '.join(nearest) or 'none'}. Pass the parameter's own name instead."
    )


def _resnet(widths: tuple[int, ...], classes: int, channels: int) -> nn.Module:
    transformers = _transformers()
    config = transformers.ResNetConfig(
        num_channels=channels,
        embedding_size=widths[0],
        hidden_sizes=list(widths),
        depths=[2] * len(widths),
        layer_type="basic",
        num_labels=classes,
    )
    model = _module(transformers.ResNetForImageClassification(config))
    stem = nn.Conv2d(channels, widths[0], kernel_size=3, stride=1, padding=1, bias=False)
    # As transformers initialises its own convolutions.
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    _replace(model, lambda module: isinstance(module, nn.Conv2d) and module.kernel_size == (7, 7), stem)
    _replace(model, lambda module: isinstance(module, nn.MaxPool2d), nn.Identity())
    return model


def _vit(classes: int, channels: int, image_size: int, *, patch: int, width: int, layers: int, heads: int) -> nn.Module:
    transformers = _transformers()
    config = transformers.ViTConfig(
        num_channels=channels,
        image_size=image_size,
        patch_size=patch,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_labels=classes,
        # The fused attention kernels have no forward-mode derivative, which torch.func.jvp needs.
        attn_implementation="eager",
    )
    return _module(transformers.ViTForImageClassification(config))


def _replace(model: nn.Module, wanted: Any, new: nn.Module) -> None:
    name = next(name for name, module in model.named_modules() if wanted(module))
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def _module(model: Any) -> nn.Module:
    module: nn.Module = model
    return module


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            "The paper's models come from transformers; install it with: pip install 'kronscope[paper]'"
        ) from error
    return transformers
