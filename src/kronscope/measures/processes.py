"""Several processes that measure together: what they must agree on before the work begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.gradients.data import checksum
from kronscope.gradients.forward import common_device
from kronscope.gradients.matrices import check_plain, unwrap
from kronscope.measures.budget import parse_budget
from kronscope.support.processes import Processes

__all__ = ["common_budget", "same_model"]


def common_budget(budget: int | str | None, processes: Processes, model: nn.Module) -> int:
    """Bytes each process may take: as given, or the default of the model's device, divided over those who share it."""
    if budget is not None:
        return parse_budget(budget)
    device = common_device(unwrap(model))
    # each process of a machine has a GPU of its own, as launchers place them
    shared = 1 if device is not None and device.type == "cuda" else processes.local_world_size()
    return min(processes.all_gather_object(parse_budget(None, device) // shared))


@contextmanager
def same_model(processes: Processes, model: nn.Module, asked: Mapping[str, Any]) -> Iterator[None]:
    """Check that options and parameters are equal on all processes, and use rank 0's buffers inside.

    Data-parallel training leaves each process with running statistics of its own batches; as in its next forward pass,
    those of rank 0 count.

    Raises:
        DistributedError: options or parameters differ; the text names them.
        ModelError: a parameter is sharded.
    """
    if processes.world_size == 1:
        yield
        return
    inner = unwrap(model)
    for name, parameter in inner.named_parameters():
        check_plain(name, parameter)
    tensors = [(f"parameter {name}", tensor) for name, tensor in inner.named_parameters()]
    with processes.failing_together():
        sums = {name: f"of shape {tuple(tensor.shape)}, checksum {checksum(tensor):08x}" for name, tensor in tensors}
    processes.check_equal("ks.measure", {**asked, **sums})
    own: list[tuple[Tensor, Tensor]] = []
    try:
        for buffer in inner.buffers():
            if len(set(processes.all_gather_object((tuple(buffer.shape), str(buffer.dtype), checksum(buffer))))) > 1:
                own.append((buffer, buffer.detach().clone()))
                first = processes.broadcast_object(buffer.detach().cpu())
                with torch.no_grad():
                    buffer.copy_(first)
        yield
    finally:
        with torch.no_grad():
            for buffer, value in own:
                buffer.copy_(value)
