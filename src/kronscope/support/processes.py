"""Samples spread over the processes of a group: each holds its own, sums are taken over all."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kronscope import errors
from kronscope.errors import DistributedError, OptionError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Shards", "find_shards", "together"]

# How long the others may take to arrive where one process waits for them; work before that differs by less.
MEETING_SECONDS = 120.0
_T = TypeVar("_T")


def find_shards(distributed: bool | ProcessGroup | None) -> Shards | None:
    """Return the processes that share the data; None where this process is alone.

    Args:
        distributed: None takes all processes if torch.distributed is initialised; False this process alone; True
            demands several processes; or a process group.

    Raises:
        OptionError: several processes are asked for, but there are none, or this one is not of the group.

    >>> find_shards(None) is None
    True
    """
    if distributed is False:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if distributed is None:
            return None
        raise OptionError(
            "distributed asks for several processes, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first, or leave distributed out."
        )
    group = None if isinstance(distributed, bool) or distributed is None else distributed
    if dist.get_rank(group) < 0:
        raise OptionError("distributed is a process group that this process is not a member of; do not call it here.")
    shards = Shards(group)
    return shards if shards.size > 1 else None


class Shards:
    """The processes of a group, seen from one of them.

    All methods but the properties are collective: every process of the group must call them in the same order. That
    is so when all decisions are based on numbers that are equal everywhere, as summed ones are.

    Args:
        group: The process group; None for all processes.

    Attributes:
        rank: This process's place in the group.
        size: How many processes there are.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __repr__(self) -> str:
        """Say which one it is."""
        return f"Shards(process {self.rank} of {self.size})"

    def part_of(self, count: int) -> range:
        """This process's share of ``count`` things, in order, sizes differing by one at most.

        The only method that asks nobody.
        """
        share, rest = divmod(count, self.size)
        start = self.rank * share + min(self.rank, rest)
        return range(start, start + share + (self.rank < rest))

    # ------------------------------------------------------------------ meeting

    def meet(self, what: str) -> None:
        """Wait until every process is here.

        Raises:
            DistributedError: some did not come in time.
        """
        store = _store()
        if store is None:  # the group's own timeout has to do
            return
        ranks = list(range(dist.get_world_size())) if self.group is None else dist.get_process_group_ranks(self.group)
        name = f"kronscope/{what}/{','.join(map(str, ranks)) if self.group is not None else 'all'}"
        # counters in the store rather than a collective: giving up then leaves the group as it was
        number = store.add(f"{name}/{self.rank}", 1)
        store.add(name, 1)
        limit, pause = time.monotonic() + MEETING_SECONDS, 1e-4
        while store.add(name, 0) < number * self.size:
            if time.monotonic() > limit:
                late = [str(rank) for rank in range(self.size) if store.add(f"{name}/{rank}", 0) < number]
                for counter in (name, f"{name}/{self.rank}"):
                    store.add(counter, -1)
                raise DistributedError(
                    f"{what} was called on process {self.rank} of {self.size}, but for {MEETING_SECONDS:.0f} seconds "
                    f"not on process {', '.join(late)}. With torch.distributed initialised it must be called on every "
                    "process, each with its own part of the data; to work on one process alone, pass "
                    "distributed=False."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def compare(self, what: str, values: Mapping[str, Any]) -> None:
        """Check that named values, compared by their texts, are the same everywhere.

        Raises:
            DistributedError: some differ; the text names them.
        """
        texts = {name: str(value) for name, value in values.items()}
        gathered = self.gathered(texts)
        found = []
        for name in dict.fromkeys(name for other in gathered for name in other):
            for rank, other in enumerate(gathered):
                if other.get(name) != gathered[0].get(name):
                    here, there = (_shortened(text.get(name)) for text in (gathered[0], other))
                    found.append(f"{name} is {here} on process 0 and {there} on process {rank}")
                    break
        if found:
            more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
            raise DistributedError(
                f"{what} must be called alike on every process, but {'; '.join(found[:5])}{more}. "
                "Only the data may differ."
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails inside on one process fails on all of them, instead of leaving the others waiting."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001  # raised when the others know
            failure = error
        flag = torch.tensor([failure is not None], dtype=torch.int32, device=self._wire)
        dist.all_reduce(flag, group=self.group)
        if int(flag):
            raise self._told(failure)

    def _told(self, error: BaseException | None) -> BaseException:
        """Exchange failures; return what to raise."""
        told = self.gathered(("", "") if error is None else (type(error).__name__, str(error)))
        if error is not None:
            return error
        rank, (name, text) = next((rank, item) for rank, item in enumerate(told) if item[0])
        if name == "KeyboardInterrupt":
            return KeyboardInterrupt()
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.KronscopeError):
            return kind(f"On process {rank}: {text}")
        return DistributedError(f"Process {rank} failed with {name}: {text}")

    # ------------------------------------------------------------------ exchanging

    def sums(self, local: Callable[[], tuple[Tensor, ...]], shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """The sums over processes of the float64 tensors each computes; equal to the last bit on all of them.

        What fails on one process fails on all, as under :meth:`together`.
        """
        sizes = [math.prod(shape) for shape in shapes]
        # one number more says how many failed: a single message is most of what small sums cost
        wire = torch.zeros(1 + sum(sizes), dtype=torch.float64, device=self._wire)
        failure: BaseException | None = None
        devices: list[torch.device] = []
        try:
            parts = local()
            devices = [part.device for part in parts]
            torch.cat([part.reshape(-1).to(wire) for part in parts], out=wire[1:])
        except BaseException as error:  # noqa: BLE001  # raised when the others know
            failure = error
            wire.zero_()
            wire[0] = 1.0
        dist.all_reduce(wire, group=self.group)
        if float(wire[0]):
            raise self._told(failure)
        totals = wire[1:].split(sizes)
        return tuple(
            total.reshape(tuple(shape)).to(device, copy=True)
            for total, shape, device in zip(totals, shapes, devices, strict=True)
        )

    def gathered(self, value: _T) -> list[_T]:
        """Every process's value, in their order."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def told_by(self, rank: int, value: _T) -> _T:
        """One process's value."""
        box: list[Any] = [value if self.rank == rank else None]
        dist.broadcast_object_list(box, src=self._global(rank), group=self.group, device=self._wire)
        given: _T = box[0]
        return given

    def by_first(self, action: Callable[[], _T]) -> _T:
        """What the first process returns; it alone acts, and if it fails all do."""
        value: Any = None
        with self.together():
            if self.rank == 0:
                value = action()
        given: _T = self.told_by(0, value)
        return given

    def copied(self, rank: int, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One process's tensor, of known shape and type."""
        if tensor is not None:
            wire = tensor.detach().to(self._wire).contiguous()
        else:
            wire = torch.empty(tuple(shape), dtype=dtype, device=self._wire)
        if wire.numel():
            dist.broadcast(wire, src=self._global(rank), group=self.group)
        return wire if tensor is None else tensor

    def neighbours(self) -> int:
        """How many processes of the group run on this machine."""
        return self.gathered(socket.gethostname()).count(socket.gethostname())

    @property
    def _wire(self) -> torch.device:
        """Where tensors must be to be sent."""
        nccl = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@contextmanager
def together(shards: Shards | None) -> Iterator[None]:
    """As :meth:`Shards.together`; nothing for a process alone."""
    if shards is None:
        yield
        return
    with shards.together():
        yield


def _store() -> Any:
    """The key-value store the processes were introduced by."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):
        return None


def _shortened(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= 80 else f"{text[:77]}..."
