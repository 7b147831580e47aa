"""Do all processes mean the same run? Asked when an optimizer is made, at the first step, and about every gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronscope.errors import DistributedError, GradientError
from kronscope.optim.config import encode
from kronscope.optim.parallel.collectives import gather_flat, sum_over
from kronscope.optim.parallel.shards import is_dtensor
from kronscope.support.processes import GroupProcesses

__all__ = ["Agreement", "agreed_gradients", "check_same_plan", "check_same_values", "described"]

_ALONE = "If each process trains a model of its own, make the optimizer with parallel='single'."


def described(groups: Sequence[dict[str, Any]], names: Mapping[Tensor, str]) -> dict[str, str]:
    """Describe options and parameters in words, one entry each, for comparison between processes."""
    words: dict[str, str] = {"number of parameter groups": str(len(groups))}
    for index, group in enumerate(groups):
        words[f"number of parameters in group {index}"] = str(len(group["params"]))
        for name, value in group.items():
            if name not in ("params", "param_names"):
                words[f"option {name} of group {index}"] = _worded(value)
        for position, param in enumerate(group["params"]):
            place = f" on {param.placements}" if is_dtensor(param) else ""
            words[f"parameter {position} of group {index}"] = (
                f"{names.get(param, 'frozen')}: {tuple(param.shape)} {param.dtype} on {param.device.type}{place}"
            )
    return words


def check_same_plan(words: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Compare descriptions.

    Raises:
        DistributedError: they differ; the text names the first difference and the processes.
    """
    for one in GroupProcesses(group).differences(words):
        raise DistributedError(
            f"the processes differ: {one.name} is {one.first} on rank 0 but {one.other} on rank {one.rank}. All must "
            f"make the optimizer with the same parameters, in the same order, and the same options. {_ALONE}"
        )


def agreed_gradients(
    params: Sequence[Tensor], finite: Mapping[Tensor, bool], names: Mapping[Tensor, str], group: dist.ProcessGroup
) -> dict[Tensor, bool]:
    """Agree on which parameters have gradients, and which of those are finite everywhere, in one small sum.

    Raises:
        GradientError: a parameter has a gradient on some processes only.
    """
    count = len(params)
    flags = [int(param in finite) for param in params] + [int(not finite.get(param, True)) for param in params]
    there = torch.tensor(flags, dtype=torch.int32, device=params[0].device)
    totals = sum_over(there, group, "comparing gradients between processes").tolist()
    size = dist.get_world_size(group)
    for param, total in zip(params, totals[:count], strict=True):
        if total not in (0, size):
            raise GradientError(
                f"{names[param]} has a gradient on {total} of {size} processes; all of them must use the same "
                f"parameters in a step (DistributedDataParallel(find_unused_parameters=True) sees to that)."
            )
    return {param: totals[count + index] == 0 for index, param in enumerate(params) if totals[index] == size}


def check_same_values(params: Sequence[Tensor], names: Mapping[Tensor, str], group: dist.ProcessGroup) -> None:
    """Compare sums over replicated parameters and their gradients.

    Raises:
        DistributedError: they differ.
    """
    if not params:
        return
    wide = torch.float32 if params[0].device.type == "mps" else torch.float64
    sums = []
    for tensor in [*params, *(param.grad for param in params)]:
        assert tensor is not None
        plain = tensor.to_local() if is_dtensor(tensor) else tensor
        values = plain.detach().to(wide)
        sums += [values.sum(), values.abs().sum()]
    mine = torch.stack([value.to(params[0].device) for value in sums])
    sizes = [len(sums)] * dist.get_world_size(group)
    everyone = torch.stack(gather_flat(mine, sizes, group, "comparing values between processes", padded=True))
    first, spread = everyone[0].view(-1, 2), (everyone - everyone[0]).abs().view(len(everyone), -1, 2).amax((0, 2))
    size = first[:, 1].clamp_min(torch.finfo(wide).tiny)
    relative = (spread / size).tolist()
    for index, param in enumerate(params):
        if relative[index] > 1e-6:
            raise DistributedError(
                f"{names[param]} has different values on different processes. Wrap the model in "
                f"DistributedDataParallel, or broadcast its parameters, before the first step. {_ALONE}"
            )
        if relative[len(params) + index] > 1e-3:
            raise DistributedError(
                f"the gradient of {names[param]} differs between processes. Average gradients before the step, "
                f"as DistributedDataParallel does. {_ALONE}"
            )


class Agreement:
    """What processes agree upon in every step.

    Args:
        group: The processes.

    Attributes:
        names: The names of all parameters.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._compared = group, False
        self.names: dict[Tensor, str] = {}

    def on_gradients(
        self, params: Sequence[Tensor], finite: Mapping[Tensor, bool], is_whole: Callable[[Tensor], bool]
    ) -> dict[Tensor, bool]:
        """Ask all processes which gradients are there and finite; at the first step also whether they are the same.

        Args:
            params: All parameters, in order.
            finite: The answer of this process, for those that have a gradient here.
            is_whole: Whether every process holds all of a parameter, and of its gradient.

        Raises:
            GradientError: a parameter has a gradient on some processes only.
            DistributedError: parameters or gradients that should be the same are not, or a process does not answer.
        """
        found = agreed_gradients(params, finite, self.names, self._group)
        if not self._compared and found and all(found.values()):
            check_same_values([param for param in found if is_whole(param)], self.names, self._group)
            self._compared = True
        return found


def _worded(value: object) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist())
    text = str(encode(value))
    return type(value).__qualname__ if " at 0x" in text else text
