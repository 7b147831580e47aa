"""Per-sample matrices by the most direct route: one sample, one output, one backward pass at a time.

Nothing of the library's capture is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.gradients.matrices import LayerSpec
from kronscope.gradients.stream import GradientStream

Call = Callable[[nn.Module, Any], Tensor]


def one(inputs: Any, index: int) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[index : index + 1]
    if isinstance(inputs, dict):
        return {key: one(value, index) for key, value in inputs.items()}
    return tuple(one(value, index) for value in inputs)


def rows_of(model: nn.Module, spec: LayerSpec, grads: dict[str, Tensor]) -> Tensor:
    parts = [
        grads[name].reshape(grads[name].shape[0], -1)[start:stop, first:last]
        for name, start, stop, first, last in spec.segments
    ]
    return torch.cat(parts)


def jacobian(model: nn.Module, call: Call, inputs: Any, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """One sample's outputs, and their derivatives by the layer (outputs, m*n)."""
    parameters = dict(model.named_parameters())
    names = list(dict.fromkeys(segment[0] for segment in spec.segments))
    outputs = call(model, inputs)
    rows = []
    for index in range(outputs.numel()):
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            outputs.flatten()[index], [parameters[name] for name in names], retain_graph=True, allow_unused=True
        )
        grads = {
            name: torch.zeros_like(parameters[name]) if grad is None else grad
            for name, grad in zip(names, found, strict=True)
        }
        rows.append(rows_of(model, spec, grads).flatten())
    return outputs.detach(), torch.stack(rows)


def matrices(
    model: nn.Module, call: Call, loss: nn.Module, inputs: Any, targets: Tensor, spec: LayerSpec, labels: str
) -> Tensor:
    """Every sample's Gauss–Newton matrix (``exact``) or outer product of its gradient (``real``), (N, mn, mn)."""
    training = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    for parameter, _ in flags:
        parameter.requires_grad_(True)
    found = []
    for index in range(len(targets)):
        outputs, J = jacobian(model, call, one(inputs, index), spec)
        target = targets[index : index + 1]
        if labels == "exact":
            hessian = torch.autograd.functional.hessian(lambda out, y=target: loss(out, y), outputs)
            assert isinstance(hessian, Tensor)
            found.append(J.T @ hessian.reshape(outputs.numel(), outputs.numel()) @ J)
        else:
            leaf = outputs.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(leaf, target), leaf)
            vector = gradient.flatten() @ J
            found.append(torch.outer(vector, vector))
    for module, flag in training:
        module.training = flag
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    return torch.stack(found)


def stream_matrices(stream: GradientStream) -> Tensor:
    """The same from a stream; checks that samples come in order with weight 1/N."""
    found = []
    for chunk in stream:
        grads = chunk.dense().grads.double().flatten(2)
        found.append(torch.einsum("kca,kcb->kab", grads, grads))
        assert torch.allclose(chunk.weights, torch.full_like(chunk.weights, 1 / stream.num_samples))
        assert chunk.samples.tolist() == list(range(int(chunk.samples[0]), int(chunk.samples[0]) + len(grads)))
    samples = [sample for chunk in stream for sample in chunk.samples.tolist()]
    assert samples == list(range(stream.num_samples))
    return torch.cat(found)


def plain_call(model: nn.Module, inputs: Any) -> Tensor:
    output: Tensor = model(inputs)
    return output


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    return float((actual - expected).norm()) <= tolerance * float(expected.norm())


def batches(inputs: Any, targets: Tensor, sizes: Sequence[int]) -> list[tuple[Any, Tensor]]:
    """Cut samples into batches."""
    found, start = [], 0
    for size in sizes:
        cut = slice(start, start + size)
        piece = {k: v[cut] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[cut]
        found.append((piece, targets[cut]))
        start += size
    return found
