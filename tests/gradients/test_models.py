"""Atoms of every kind of model equal those of plain autograd, sample by sample, with every back end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronscope.gradients.capture import Recorder
from kronscope.gradients.matrices import resolve_layers
from tests.gradients import zoo
from tests.gradients.naive import close, matrices, plain_call, stream_matrices

HOOKS, FUNC, LOOP = "hooks", "func", "loop"
Builder = Callable[[], tuple[nn.Module, Tensor]]


def _mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)), zoo.images(6, 5)


def _inplace() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.SELU(inplace=True))
    return model, zoo.images(6, 5)


def _conv(*layers: nn.Module, pool: type[nn.Module], shape: tuple[int, ...]) -> Builder:
    return lambda: (nn.Sequential(*layers, pool(1), nn.Flatten()), zoo.images(5, *shape))


# name: model and inputs, the layers asked for, the back end expected for each of them
CASES: dict[str, tuple[Builder, list[str] | None, str | list[str]]] = {
    "mlp": (_mlp, None, HOOKS),
    "in-place activations": (_inplace, None, HOOKS),
    "linear over a sequence": (lambda: (zoo.SequenceLinear(), zoo.images(5, 3, 5)), None, HOOKS),
    "hidden sequence first": (lambda: (zoo.SequenceFirst(), zoo.images(5, 3, 5)), None, HOOKS),
    "as many positions as samples": (lambda: (zoo.SequenceFirst(), zoo.images(3, 3, 5)), None, HOOKS),
    "attention batch first": (
        lambda: (zoo.Attention(True), zoo.images(5, 3, 5)),
        ["attention.in_proj_weight", "attention.in_proj_weight[0:12]", "attention.out_proj.weight", "embed", "head"],
        HOOKS,
    ),
    "attention sequence first": (lambda: (zoo.Attention(False), zoo.images(5, 3, 5)), None, HOOKS),
    "cross-attention": (lambda: (zoo.Attention(True, cross=True), zoo.images(5, 3, 5)), None, HOOKS),
    "cross-attention sequence first": (lambda: (zoo.Attention(False, cross=True), zoo.images(4, 3, 5)), None, HOOKS),
    "encoder layer": (
        lambda: (
            nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.Flatten(), nn.Linear(12, 3)),
            zoo.images(4, 3, 4),
        ),
        None,
        HOOKS,
    ),
    "pre-norm transformer with fused qkv": (
        lambda: (zoo.Transformer(), zoo.images(4, 3, 5)),
        ["blocks.0.qkv.weight[0:4]", "blocks.0.qkv.weight[4:8]", "blocks.1.qkv.weight[0:8]", "*.down.weight"],
        HOOKS,
    ),
    "stacked projections": (
        lambda: (zoo.SeparateProjections(), zoo.images(4, 3, 5)),
        ["q.weight+k.weight", "k.weight[1:3]+v.weight[0:2]", "v.weight[2:4]+q.weight+k.weight[0:1]"],
        HOOKS,
    ),
    "strided grouped dilated convolution": (
        _conv(
            nn.Conv2d(4, 6, 3, stride=(2, 1), padding=(1, 0), groups=2),
            nn.Conv2d(6, 3, 2, dilation=2, padding="same"),
            pool=nn.AdaptiveAvgPool2d,
            shape=(4, 6, 5),
        ),
        None,
        HOOKS,
    ),
    "circular padding": (
        _conv(
            nn.Conv1d(3, 4, 3, padding=2, padding_mode="circular"),
            nn.Tanh(),
            nn.Conv1d(4, 3, 2, padding="valid"),
            pool=nn.AdaptiveAvgPool1d,
            shape=(3, 6),
        ),
        None,
        HOOKS,
    ),
    "3d convolution": (
        _conv(
            nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 2), dilation=(1, 1, 2), groups=2),
            nn.Tanh(),
            nn.Conv3d(4, 3, 1),
            pool=nn.AdaptiveMaxPool3d,
            shape=(2, 2, 3, 4),
        ),
        None,
        HOOKS,
    ),
    "depthwise convolution": (
        _conv(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 3, 1), pool=nn.AdaptiveAvgPool2d, shape=(4, 5, 4)),
        None,
        HOOKS,
    ),
    "transposed convolution": (
        _conv(nn.ConvTranspose2d(2, 4, 3, stride=2), nn.Conv2d(4, 3, 1), pool=nn.AdaptiveAvgPool2d, shape=(2, 3, 3)),
        None,
        [FUNC, HOOKS],
    ),
    "channels last": (
        lambda: (
            _channels_last(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
            zoo.images(5, 3, 5, 4).to(memory_format=torch.channels_last),
        ),
        ["0.weight", "0.weight[1:3]"],
        HOOKS,
    ),
    "residual convnet with BatchNorm and dropout": (
        lambda: (_trained(zoo.ResidualConvnet()), zoo.images(5, 2, 4, 3)),
        None,
        HOOKS,
    ),
    "lstm": (lambda: (zoo.Recurrent(nn.LSTM), zoo.images(4, 3, 3)), None, [LOOP, LOOP, HOOKS]),
    "gru": (lambda: (zoo.Recurrent(nn.GRU), zoo.images(4, 3, 3)), None, [LOOP, LOOP, HOOKS]),
    "unrolled recurrence": (lambda: (zoo.Unrolled(), zoo.images(4, 3, 3)), None, HOOKS),
    "plain products": (lambda: (zoo.Products(), zoo.images(4, 3, 5)), ["a", "a[1:3]", "b", "c", "d"], HOOKS),
    "uses that are not watched": (lambda: (zoo.Hidden(), zoo.images(4, 5)), ["a", "b", "c"], FUNC),
    "weight norm": (
        lambda: (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
            zoo.images(4, 5),
        ),
        ["0.parametrizations.weight.original0", "0.parametrizations.weight.original1", "2"],
        [FUNC, FUNC, HOOKS],
    ),
    "bilinear": (lambda: (_Bilinear(), zoo.images(4, 5)), None, FUNC),
    "samples routed by value": (lambda: (zoo.Routed(), zoo.images(8, 5)), None, LOOP),
}


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(2, 3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.form(x[:, :2], x[:, 2:])


def _channels_last(model: Any) -> nn.Module:
    converted: nn.Module = model.to(memory_format=torch.channels_last)
    return converted


def _trained(model: nn.Module) -> nn.Module:
    """Running statistics away from their start; left in train mode."""
    model.double()(zoo.images(16, 2, 4, 3))
    return model.train()


@pytest.mark.parametrize("name", CASES)
def test_atoms_equal_plain_autograd(name: str) -> None:
    build, layers, expected = CASES[name]
    model, inputs = build()
    model = model.double()
    targets = torch.randint(0, 3, (len(inputs),))
    loss = nn.CrossEntropyLoss()
    specs = resolve_layers(model, layers)
    recorder = Recorder(model, loss, [(inputs[:-1], targets[:-1]), (inputs[-1:], targets[-1:])], specs)
    backends = [plan.backend for plan in recorder.plan()]
    assert backends == ([expected] * len(specs) if isinstance(expected, str) else expected)
    general = Recorder(model, loss, [(inputs, targets)], specs, backend="func")
    assert all(plan.backend in (FUNC, LOOP) for plan in general.plan())
    for labels in ("exact", "real"):
        fast, whole = recorder.streams(labels), recorder.streams(labels, form="dense")
        slow = general.streams(labels)
        for spec in specs:
            truth = matrices(model, plain_call, loss, inputs, targets, spec, labels)
            for streams in (fast, whole, slow):
                assert close(stream_matrices(streams[spec.name]), truth), (spec.name, labels)


@pytest.mark.parametrize("padding_idx", [None, 0, -2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tied_language_model(padding_idx: int | None, reduction: str) -> None:
    model = zoo.TiedLanguageModel(padding_idx).double()
    tokens, targets = torch.randint(0, 5, (4, 3)), torch.randint(0, 5, (4, 3))
    targets[1, 1:] = -100
    targets[2, 0] = -100
    loss = nn.CrossEntropyLoss(reduction=reduction)
    specs = resolve_layers(model, ["tokens.weight", "head.weight[1:4]", "hidden.weight", "positions.weight"])
    recorder = Recorder(model, loss, [(tokens, targets)], specs)
    assert {plan.backend for plan in recorder.plan()} == {HOOKS}
    # The tied weight has 3 positions as a table and 3 as a head; the hidden layer is called twice.
    assert [plan.positions for plan in recorder.plan()] == [6, 6, 6, 3]
    general = Recorder(model, loss, [(tokens, targets)], specs, backend="func")
    for labels in ("exact", "real"):
        truth = {spec: matrices(model, plain_call, loss, tokens, targets, spec, labels) for spec in specs}
        for streams in (recorder.streams(labels), general.streams(labels), recorder.streams(labels, form="dense")):
            for spec in specs:
                assert close(stream_matrices(streams[spec.name]), truth[spec]), (spec.name, labels)


def test_stacks_of_one_input_share_positions() -> None:
    model = zoo.SeparateProjections().double()
    data = [(zoo.images(4, 3, 5), torch.randint(0, 3, (4,)))]
    recorder = Recorder(model, nn.CrossEntropyLoss(), data, resolve_layers(model, ["q.weight+k.weight"]))
    (plan,) = recorder.plan()
    assert (plan.positions, plan.shape) == (3, (8, 5))
    (chunk,) = recorder.streams("real")["q.weight+k.weight"]
    parts = recorder.streams("real", names=["q.weight+k.weight"], form="dense")
    (dense,) = parts["q.weight+k.weight"]
    assert torch.allclose(chunk.dense().grads, dense.dense().grads)


def test_factored_atoms_hold_inputs_and_output_gradients() -> None:
    model = nn.Linear(3, 4, bias=False).double()
    inputs, targets = zoo.images(5, 3), torch.randint(0, 4, (5,))
    recorder = Recorder(model, nn.CrossEntropyLoss(), [(inputs, targets)], resolve_layers(model))
    (chunk,) = recorder.streams("real")["weight"]
    expected = model(inputs).softmax(1) - nn.functional.one_hot(targets, 4)
    assert torch.equal(chunk.col_factors[:, 0, 0], inputs)  # type: ignore[union-attr]
    assert torch.allclose(chunk.row_factors[:, 0, 0], expected)  # type: ignore[union-attr]


def test_factors_of_a_grouped_convolution_put_groups_at_further_positions() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2, bias=False), nn.Flatten(), nn.Linear(24, 2)).double()
    data = [(zoo.images(3, 4, 2, 2), torch.tensor([0, 1, 1]))]
    recorder = Recorder(model, nn.CrossEntropyLoss(), data, resolve_layers(model, ["0"]))
    (chunk,) = recorder.streams("real")["0.weight"]
    rows = chunk.row_factors[:, 0]  # type: ignore[union-attr]
    assert rows.shape == (3, 8, 6)
    assert bool((rows[:, :4, 3:] == 0).all())
    assert bool((rows[:, 4:, :3] == 0).all())
    assert bool((rows[:, :4, :3] != 0).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    inputs, targets = zoo.images(6, 5), torch.randint(0, 4, (6,))
    loss = nn.CrossEntropyLoss()
    specs = resolve_layers(model)
    truth = {spec: matrices(model, plain_call, loss, inputs, targets, spec, "exact") for spec in specs}
    for backend in ("hooks", "func"):
        recorder = Recorder(model.to(dtype), loss, [(inputs.to(dtype), targets)], specs, backend=backend)
        for spec in specs:
            stream = recorder.streams()[spec.name]
            assert all(chunk.dense().grads.dtype == torch.float32 for chunk in stream)
            assert close(stream_matrices(stream), truth[spec], {torch.float32: 1e-5}.get(dtype, 0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_float32_do_not_hide_that_the_model_is_coarse(dtype: torch.dtype) -> None:
    class Upcast(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Any:
            return self.layers(x).float()

    layers = [module for _ in range(6) for module in (nn.Linear(16, 16), nn.GELU())]
    model = Upcast(*layers, nn.Linear(16, 4)).to(dtype)
    data = [(torch.randn(9, 16, dtype=dtype), torch.randint(0, 4, (9,)))]
    recorder = Recorder(model, nn.CrossEntropyLoss(), data, resolve_layers(model))
    assert {plan.backend for plan in recorder.plan()} == {HOOKS}
    assert len(recorder.streams()) == 7


def test_half_precision_survives_tiny_columns() -> None:
    # Confident predictions: columns near 1e-6, gradients near 1e-8 would underflow in float16.
    inner, outer = nn.Linear(4, 4), nn.Linear(4, 2)
    model = nn.Sequential(inner, nn.Tanh(), outer)
    with torch.no_grad():
        outer.weight[0] += 6
        outer.weight[1] -= 6
        inner.bias.fill_(1.5)
    inputs, targets = torch.randn(3, 4) / 4, torch.tensor([0, 1, 0])
    specs = resolve_layers(model, ["0"])
    (full,) = Recorder(model, nn.CrossEntropyLoss(), [(inputs, targets)], specs).streams().values()
    for backend in ("hooks", "func"):
        recorder = Recorder(model.half(), nn.CrossEntropyLoss(), [(inputs.half(), targets)], specs, backend=backend)
        (half,) = recorder.streams().values()
        assert float(stream_matrices(full).abs().max()) < 1e-9
        assert close(stream_matrices(half), stream_matrices(full), 0.2)


def test_frozen_parameters_and_no_grad_around() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    inputs, targets = zoo.images(5, 5), torch.randint(0, 4, (5,))
    loss, specs = nn.CrossEntropyLoss(), resolve_layers(model)
    truth = {spec: matrices(model, plain_call, loss, inputs, targets, spec, "exact") for spec in specs}
    model.requires_grad_(False)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            streams = Recorder(model, loss, [(inputs, targets)], specs).streams()
            for spec in specs:
                assert close(stream_matrices(streams[spec.name]), truth[spec])
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["tuple", "dict", "named output"])
def test_conventions_of_inputs_and_outputs(kind: str) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, a: Tensor, b: Tensor) -> Any:
            out = self.fc(torch.cat([a, b], 1))
            return {"logits": out, "loss": None} if kind == "named output" else out

    model = Wide().double()
    a, b, targets = zoo.images(4, 2), zoo.images(4, 3), torch.randint(0, 3, (4,))
    inputs: Any = (a, b) if kind == "tuple" else {"a": a, "b": b}
    (spec,) = resolve_layers(model)
    whole = nn.Sequential(model.fc)
    truth = matrices(
        whole, plain_call, nn.CrossEntropyLoss(), torch.cat([a, b], 1), targets, resolve_layers(whole)[0], "exact"
    )
    for backend in ("hooks", "func"):
        recorder = Recorder(model, nn.CrossEntropyLoss(), [(inputs, targets)], [spec], backend=backend)
        assert close(stream_matrices(recorder.streams()["fc.weight"]), truth)


def test_compiled_and_parallel_wrappers_are_seen_through() -> None:
    inner = nn.Sequential(nn.Linear(5, 3)).double()
    data = [(zoo.images(4, 5), torch.randint(0, 3, (4,)))]
    compiled = torch.compile(inner, backend="eager")
    assert isinstance(compiled, nn.Module)
    for model in (compiled, nn.DataParallel(inner), nn.DataParallel(compiled)):
        specs = resolve_layers(model, ["_orig_mod.0.weight"])
        assert [spec.name for spec in specs] == ["0.weight"]
        stream = Recorder(model, nn.CrossEntropyLoss(), data, specs).streams()["0.weight"]
        truth = matrices(inner, plain_call, nn.CrossEntropyLoss(), *data[0], specs[0], "exact")
        assert close(stream_matrices(stream), truth)


def test_longer_sequences_than_in_the_first_batch() -> None:
    model = zoo.Unrolled().double()
    short, long = zoo.images(4, 2, 3), zoo.images(3, 5, 3)
    targets = torch.randint(0, 3, (7,))
    specs = resolve_layers(model)
    data = [(short, targets[:4]), (long, targets[4:])]
    streams = Recorder(model, nn.CrossEntropyLoss(), data, specs).streams()
    for spec in specs:
        truth = torch.cat([matrices(model, plain_call, nn.CrossEntropyLoss(), x, y, spec, "exact") for x, y in data])
        assert close(stream_matrices(streams[spec.name]), truth)


def test_gradient_hooks_of_parameters_do_not_count() -> None:
    # A hook changes what training does with the gradient, not the loss's curvature.
    model = nn.Linear(3, 2).double()
    data = [(zoo.images(4, 3), torch.randint(0, 2, (4,)))]
    (spec,) = resolve_layers(model)
    truth = matrices(model, plain_call, nn.CrossEntropyLoss(), *data[0], spec, "exact")
    handle = model.weight.register_hook(lambda grad: 2 * grad)
    for backend in ("hooks", "func"):
        stream = Recorder(model, nn.CrossEntropyLoss(), data, [spec], backend=backend).streams()["weight"]
        assert close(stream_matrices(stream), truth)
    (grad,) = torch.autograd.grad(model(data[0][0]).sum(), model.weight)
    handle.remove()
    (plain,) = torch.autograd.grad(model(data[0][0]).sum(), model.weight)
    assert torch.allclose(grad, 2 * plain)
