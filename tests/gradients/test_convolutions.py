"""Convolutions of random shapes: windows times output gradients are the weight's gradient."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn

from kronscope.gradients.capture import Recorder
from kronscope.gradients.matrices import resolve_layers
from tests.gradients.naive import close, matrices, plain_call, stream_matrices
from tests.gradients.zoo import images


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=40)
@given(data=st.data(), dims=st.integers(1, 3), groups=st.sampled_from([1, 1, 2, 3]), bias=st.booleans())
def test_any_convolution(data: st.DataObject, dims: int, groups: int, bias: bool) -> None:
    def sizes(low: int, high: int) -> tuple[int, ...]:
        return data.draw(st.tuples(*[st.integers(low, high)] * dims))

    kernel, dilation, shape = sizes(1, 3), sizes(1, 2), sizes(1, 5)
    mode = data.draw(st.sampled_from(["numbers", "same", "valid"]))
    stride = (1,) * dims if mode == "same" else sizes(1, 3)
    padding = sizes(0, 2) if mode == "numbers" else mode
    widths = padding if isinstance(padding, tuple) else (0,) * dims
    spans = [gap * (size - 1) + 1 for gap, size in zip(dilation, kernel, strict=True)]
    assume(mode == "same" or all(s + 2 * w >= span for s, w, span in zip(shape, widths, spans, strict=True)))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1]
    channels, outputs = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    conv = kind(channels, outputs, kernel, stride, padding, dilation, groups, bias)  # type: ignore[arg-type]
    model = nn.Sequential(conv, nn.Tanh(), pool(1), nn.Flatten()).double()
    samples = data.draw(st.integers(1, 4))
    inputs, targets = images(samples, channels, *shape), torch.randn(samples, outputs, dtype=torch.float64)
    (spec,) = resolve_layers(model)
    recorder = Recorder(model, nn.MSELoss(), [(inputs, targets)], [spec], backend="hooks")
    truth = matrices(model, plain_call, nn.MSELoss(), inputs, targets, spec, "exact")
    for form in ("factored", "dense"):
        assert close(stream_matrices(recorder.streams(form=form)[spec.name]), truth)
