"""Whole per-sample gradients for any model: ``torch.func`` where it can follow, sample by sample where not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kronscope.gradients.data import Batch, map_tensors, tensors_of
from kronscope.gradients.forward import Forward

__all__ = ["gradients_alone", "gradients_vmapped"]


def gradients_alone(
    forward: Forward, batch: Batch, parameters: Mapping[str, Tensor], columns: Iterable[Tensor]
) -> Iterator[dict[str, Tensor | None]]:
    r"""Pull columns back through one sample's forward pass by plain autograd; the reference for everything else.

    Args:
        forward: The model.
        batch: A batch of one sample.
        parameters: What to differentiate by, requiring gradients.
        columns: Vectors :math:`v_c` shaped like the outputs.

    Yields:
        For each column :math:`J^\top v_c` by parameter, ``None`` where the outputs do not depend on it.
    """
    outputs = forward.outputs(batch)
    for column in columns:
        if not outputs.requires_grad:
            yield dict.fromkeys(parameters)
            continue
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            outputs, list(parameters.values()), column.to(outputs), retain_graph=True, allow_unused=True
        )
        yield {
            name: grad.to_dense() if grad is not None and grad.layout is not torch.strided else grad
            for name, grad in zip(parameters, grads, strict=True)
        }


def gradients_vmapped(
    forward: Forward, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    r"""Pull columns back through all samples at once, each as a batch of its own.

    Args:
        forward: The model.
        batch: The samples.
        parameters: What to differentiate by.
        columns: Vectors :math:`v_{\cdot c}` shaped like the outputs, samples first.

    Returns:
        For each column the gradients ``(samples, *parameter shape)`` by parameter.

    Raises:
        Exception: Whatever ``vmap`` raises on a model it cannot follow.
    """
    leaves = [tensor for tensor in tensors_of(batch.inputs) if tensor.dim()]
    frozen = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}

    def one_sample(own: list[Tensor], own_columns: list[Tensor]) -> list[dict[str, Tensor]]:
        following = iter(own)
        inputs = map_tensors(lambda t: next(following).unsqueeze(0) if t.dim() else t, batch.inputs)

        def output(weights: dict[str, Tensor]) -> Tensor:
            result: Tensor = torch.func.functional_call(forward, weights, (inputs,))
            return result[0]

        pull_back = torch.func.vjp(output, frozen)[1]
        return [pull_back(column)[0] for column in own_columns]

    # vjp differentiates all the same; without no_grad a second graph would be built through the other parameters.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        found = torch.vmap(one_sample, randomness="different")(leaves, list(columns))
    return [{name: grads[f"model.{name}"] for name in parameters} for grads in found]
