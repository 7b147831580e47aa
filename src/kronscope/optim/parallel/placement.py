"""The seam: what a step asks of the processes that share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kronscope.optim.blocks import Layout
from kronscope.optim.config import Hyper
from kronscope.optim.parallel.assign import Range
from kronscope.optim.stacks import Member
from kronscope.optim.step import RootTaker

__all__ = ["Apply", "Exchange", "Placement", "Planned", "Ranges", "Tensors", "apply_by_group"]

Tensors = dict[str, Tensor]
# For each parameter, for each of its tiles (or for the rows of an elementwise one), the range of each process.
Ranges = dict[Tensor, list[list[Range]]]
# (parameters, tensors to change in their stead, updates, group)
Apply = Callable[[list[Tensor], list[Tensor], list[Tensor], dict[str, Any]], None]


class Planned(NamedTuple):
    """What a plan needs to know of a parameter."""

    name: str
    param: Tensor
    layout: Layout
    hyper: Hyper


class Exchange(Protocol):
    """The data of one step: gradients in, updates out, wherever either is."""

    def part(self, param: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what this process changes of an elementwise parameter, in place, and its gradient; None: nothing."""
        ...

    def blocks(self, member: Member) -> Tensor:
        """Return the gradients (count, *block) of this process's blocks of a tile."""
        ...

    def put(self, updates: Sequence[tuple[Member, Tensor]]) -> None:
        """Take the updates of the same blocks, of some members; called from any thread."""
        ...

    def sends(self, param: Tensor) -> bool:
        """Whether what :meth:`part` returns is a copy, which :meth:`gather` sends to the other processes."""
        ...

    def gather(self) -> None:
        """Get from other processes what :meth:`finish` needs; changes no parameter."""
        ...

    def finish(self) -> None:
        """Change the parameters, on every process alike; asks nobody."""
        ...


class Placement(Protocol):
    """Which process works on what, for a whole run."""

    @property
    def ranges(self) -> Ranges:
        """The range of each process; empty for one process."""
        ...

    @property
    def roots(self) -> RootTaker:
        """Who takes the roots that are due in a step."""
        ...

    def compare(self, groups: Sequence[dict[str, Any]], names: Mapping[Tensor, str]) -> None:
        """Ask all processes whether they have the same groups; every process must ask at the same time.

        Args:
            groups: All parameter groups.
            names: The names of all parameters that are not frozen.
        """
        ...

    def add(self, entries: Sequence[Planned], ranges: Ranges | None = None) -> None:
        """Divide the work on more parameters; what was divided before stays as it is.

        Args:
            entries: The parameters.
            ranges: How the work was divided in the run that is being restored; None to decide now.
        """
        ...

    def share(self, param: Tensor, layout: Layout) -> Layout:
        """Return a layout whose tiles say which blocks this process works on."""
        ...

    def held(self, param: Tensor) -> Tensor:
        """Return the part of an elementwise parameter whose state this process keeps."""
        ...

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient as far as this process has it."""
        ...

    def agreed(self, params: Sequence[Tensor], finite: Mapping[Tensor, bool]) -> dict[Tensor, bool]:
        """Return for each parameter that has a gradient whether it is finite on every process.

        Args:
            params: All parameters, in order.
            finite: The answer of this process, for those that have a gradient here.
        """
        ...

    def open(
        self, active: Mapping[Tensor, int], groups: Sequence[dict[str, Any]], apply: Apply, *, whole: bool = False
    ) -> Exchange:
        """Begin a step.

        Args:
            active: The parameters that take part, and their groups.
            groups: All parameter groups.
            apply: Changes parameters.
            whole: Change no parameter before all updates are there.
        """
        ...

    def check_saving(self) -> None:
        """Refuse to hand out a state that would be taken for the whole and is not."""
        ...

    def packed(self, param: Tensor, state: Tensors) -> Tensors:
        """Return a parameter's state with each tensor saying which part of the whole it is."""
        ...

    def unpacked(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        """Return this process's part of a saved tensor."""
        ...

    def whole(self, param: Tensor, state: Tensors) -> Tensors:
        """Return a parameter's state with whole tensors; every process must ask at the same time."""
        ...

    def is_counted(self, param: Tensor) -> bool:
        """Whether this process's part of an elementwise parameter's state is not also another's."""
        ...

    def square_norm(self, param: Tensor, *, alone: bool = False) -> float:
        """Return the squares of the parameter's entries that this process counts, when all are summed.

        Args:
            param: The parameter.
            alone: Nothing will be summed: return NaN unless this process holds, and works on, the whole parameter.
        """
        ...

    def everyone(self, value: object) -> list[Any]:
        """Return the values of all processes, in order; every process must ask at the same time."""
        ...

    def describe(self, sizes: Mapping[Tensor, Mapping[str, int]]) -> str:
        """Say who does what, keeps what and sends what; empty for one process.

        Args:
            sizes: Bytes of each tensor of each parameter's whole state.
        """
        ...


def apply_by_group(
    changes: Sequence[tuple[Tensor, Tensor, Tensor]],
    active: Mapping[Tensor, int],
    groups: Sequence[dict[str, Any]],
    apply: Apply,
) -> None:
    """Apply updates with one call per parameter group.

    Args:
        changes: Parameters, the tensors to change in their stead, and updates.
        active: The groups of parameters.
        groups: All parameter groups.
        apply: Changes parameters.
    """
    for index, group in enumerate(groups):
        mine = [change for change in changes if active[change[0]] == index]
        if mine:
            params, targets, updates = (list(column) for column in zip(*mine, strict=True))
            apply(params, targets, updates, group)
