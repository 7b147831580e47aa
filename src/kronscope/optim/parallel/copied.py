"""Several processes that hold the same parameters (DDP), each with the whole state: only roots are divided.

What one process saves is the whole, so it does not matter who saves, and how many load. Every process takes the same
gradients into all factors, which costs it products it could have left to others; the roots, which cost most, are
divided and gathered, and updates are formed everywhere. Dividing factors and moments too is :class:`Distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from kronscope.errors import StateError
from kronscope.optim.parallel.agreement import Agreement, check_same_plan, described
from kronscope.optim.parallel.placement import Apply, Planned, Ranges
from kronscope.optim.parallel.shared_roots import SharedRoots
from kronscope.optim.parallel.single import LocalExchange, Whole

__all__ = ["Copied"]


@final
class Copied(Whole):
    """The placement of a run in several processes that keep the whole state each.

    Args:
        group: The processes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.roots = SharedRoots(group)
        self._agreement = Agreement(group)
        self._entries: list[Planned] = []

    def compare(self, groups: Sequence[dict[str, Any]], names: Mapping[Tensor, str]) -> None:
        """Ask all processes whether they have the same groups.

        Raises:
            DistributedError: they have not.
        """
        check_same_plan(described(groups, names), self.group)

    def add(self, entries: Sequence[Planned], ranges: Ranges | None = None) -> None:
        """Take note of more parameters.

        Raises:
            StateError: the run that is being restored had another division of its work.
        """
        if ranges:
            raise StateError("an optimizer that divides its state was copied to one that does not; use state_dict().")
        self._entries += entries
        self._agreement.names.update({entry.param: entry.name for entry in entries})

    def agreed(self, params: Sequence[Tensor], finite: Mapping[Tensor, bool]) -> dict[Tensor, bool]:
        """Ask all processes which gradients are there and finite; at the first step also whether they are the same.

        Raises:
            GradientError: a parameter has a gradient on some processes only.
            DistributedError: parameters or gradients are not the same, or a process does not answer.
        """
        return self._agreement.on_gradients(params, finite, lambda param: True)

    def open(
        self, active: Mapping[Tensor, int], groups: Sequence[dict[str, Any]], apply: Apply, *, whole: bool = False
    ) -> LocalExchange:
        """Begin a step; parameters step when all roots are there, so that none does if a process fails to send its."""
        return LocalExchange(active, groups, apply, at_once=False)

    def describe(self, sizes: Mapping[Tensor, Mapping[str, int]]) -> str:
        """Say what each process keeps and receives."""
        state = sum(size for tensors in sizes.values() for size in tensors.values())
        roots = sum(
            size / entry.hyper.refresh.period
            for entry in self._entries
            for name, size in sizes[entry.param].items()
            if name.split(".")[-1].startswith(("root", "basis", "spectrum"))
        )
        received = roots * (self.size - 1) / self.size
        return (
            f"replicated over {self.size} processes: each keeps all {state / 2**20:.2f} MiB of state and takes a share "
            f"of the roots; a step brings a process {received / 2**20:.2f} MiB of them on average"
        )
