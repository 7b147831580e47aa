"""Several processes that measure together: what they must agree on before the work begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.approx import Approximation
from kronscope.gradients.data import checksum
from kronscope.gradients.matrices import unwrap
from kronscope.measures.budget import parse_budget
from kronscope.support.processes import Shards

__all__ = ["common_budget", "described", "same_model"]


def described(approximations: Sequence[Approximation]) -> list[str]:
    """Texts that tell approximations and their options apart, the same in every process."""
    # the default repr of other classes holds an address
    return [item.name if type(item).__repr__ is object.__repr__ else repr(item) for item in approximations]


def common_budget(budget: int | str | None, shards: Shards | None) -> int:
    """Bytes each process may take: as given, or the default divided over the processes of a machine."""
    if shards is None or budget is not None:
        return parse_budget(budget)
    neighbours = shards.neighbours()
    return min(shards.gathered(parse_budget(None) // neighbours))


@contextmanager
def same_model(shards: Shards | None, model: nn.Module, asked: Mapping[str, Any]) -> Iterator[None]:
    """Check that options and parameters are equal on all processes, and use the first one's buffers inside.

    Data-parallel training leaves each process with running statistics of its own batches; as in its next forward pass,
    the first process's count.

    Raises:
        DistributedError: options or parameters differ; the text names them.
    """
    if shards is None:
        yield
        return
    inner = unwrap(model)
    tensors = [(f"parameter {name}", tensor) for name, tensor in inner.named_parameters()]
    with shards.together():
        sums = {name: f"of shape {tuple(tensor.shape)}, checksum {checksum(tensor):08x}" for name, tensor in tensors}
    shards.compare("ks.measure", {**asked, **sums})
    own: list[tuple[Tensor, Tensor]] = []
    try:
        for buffer in inner.buffers():
            if len(set(shards.gathered((tuple(buffer.shape), str(buffer.dtype), checksum(buffer))))) > 1:
                own.append((buffer, buffer.detach().clone()))
                first = shards.told_by(0, buffer.detach().cpu())
                with torch.no_grad():
                    buffer.copy_(first)
        yield
    finally:
        with torch.no_grad():
            for buffer, value in own:
                buffer.copy_(value)
