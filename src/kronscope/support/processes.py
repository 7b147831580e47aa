"""One process or several that work together, in the words of torch.distributed.

Code that may run on several processes is written once, with the methods of :class:`Processes`.
:func:`find_processes` returns those of a process group, or :data:`ALONE`, whose collective calls return at once.
"""

from __future__ import annotations

import hashlib
import math
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from kronscope import errors
from kronscope.errors import DistributedError, OptionError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ALONE", "Difference", "GroupProcesses", "Processes", "explained", "find_processes"]

# How long the others may take to reach a barrier; the work before one differs by less between processes.
BARRIER_SECONDS = 120.0
_T = TypeVar("_T")


def find_processes(distributed: bool | ProcessGroup | None) -> Processes:
    """Return the processes that work together, which may be this one alone.

    Args:
        distributed: None takes all processes if torch.distributed is initialised; False this process alone; True
            demands several processes; or a process group.

    Raises:
        OptionError: several processes are asked for, but there are none, or this one is not of the group.

    >>> find_processes(None).world_size
    1
    """
    if distributed is False:
        return ALONE
    if not (dist.is_available() and dist.is_initialized()):
        if distributed is None:
            return ALONE
        raise OptionError(
            "distributed asks for several processes, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first, or leave distributed out."
        )
    group = None if isinstance(distributed, bool) or distributed is None else distributed
    if dist.get_rank(group) < 0:
        raise OptionError("distributed is a process group that this process is not a member of; do not call it here.")
    return GroupProcesses(group) if dist.get_world_size(group) > 1 else ALONE


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn the failure of a collective call into an error that says what to do.

    >>> with explained("Gathering"):
    ...     raise RuntimeError("connection closed by peer")
    Traceback (most recent call last):
    kronscope.errors.DistributedError: Gathering failed: connection closed by peer. Another process has probably ...
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"{what} failed: {error}. Another process has probably died, hangs, or does something else; look at its "
            "log. The others cannot go on without it: start all processes again, training from the last checkpoint."
        ) from error


@dataclass(frozen=True)
class Difference:
    """A named value that is not the same on all processes.

    Attributes:
        name: Its name.
        first: Its text on rank 0; ``"missing"`` where there is none.
        other: Its text on another process.
        rank: That process's rank, the first that differs from rank 0.
    """

    name: str
    first: str
    other: str
    rank: int


class Processes(ABC):
    """The processes that work together, seen from one of them.

    All methods but :meth:`share_of` are collective: every process must call them in the same order. That is so when
    all decisions are based on numbers that are equal everywhere, as summed ones are.

    Attributes:
        rank: This process's number, counted from 0.
        world_size: How many processes there are.
        distributed: The argument of :func:`find_processes` that finds these processes again.
    """

    rank: int
    world_size: int
    distributed: bool | ProcessGroup | None

    def __repr__(self) -> str:
        """Say which one it is."""
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size})"

    def share_of(self, count: int) -> range:
        """This process's share of ``count`` things, in order, sizes differing by one at most. It asks nobody.

        >>> ALONE.share_of(5)
        range(0, 5)
        """
        share, rest = divmod(count, self.world_size)
        start = self.rank * share + min(self.rank, rest)
        return range(start, start + share + (self.rank < rest))

    def on_rank_0(self, action: Callable[[], _T]) -> _T:
        """Return on all processes what ``action`` returns on rank 0, the only one to call it; if it fails, all fail.

        >>> ALONE.on_rank_0(lambda: "made once")
        'made once'
        """
        value: Any = None
        with self.failing_together():
            if self.rank == 0:
                value = action()
        return self.broadcast_object(value)  # type: ignore[no-any-return]

    def check_equal(self, what: str, values: Mapping[str, Any]) -> None:
        """Check that ``what`` was called alike on all processes: named values, compared by their texts, are the same.

        Raises:
            DistributedError: some differ; the text names them.
        """
        found = [
            f"{one.name} is {_shortened(one.first)} on process 0 and {_shortened(one.other)} on process {one.rank}"
            for one in self.differences(values)
        ]
        if found:
            more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
            raise DistributedError(
                f"{what} must be called alike on every process, but {'; '.join(found[:5])}{more}. "
                "Only the data may differ."
            )

    @abstractmethod
    def barrier(self, what: str) -> None:
        """Wait until every process is here.

        Args:
            what: The call that all processes must make, for the error.

        Raises:
            DistributedError: some did not come in time.
        """

    @abstractmethod
    def differences(self, values: Mapping[str, Any]) -> list[Difference]:
        """Compare named values, by their texts, with those of rank 0; return the names that some process differs in."""

    @abstractmethod
    def failing_together(self) -> AbstractContextManager[None]:
        """What fails inside on one process fails on all of them, instead of leaving the others waiting."""

    @abstractmethod
    def all_reduce(
        self, local: Callable[[], tuple[Tensor, ...]], shapes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, ...]:
        """The sums over processes of the float64 tensors each computes; equal to the last bit on all of them.

        What fails on one process fails on all, as under :meth:`failing_together`.

        Args:
            local: Computes this process's tensors.
            shapes: Their shapes.
        """

    @abstractmethod
    def all_gather_object(self, value: _T) -> list[_T]:
        """Every process's value, in the order of ranks."""

    @abstractmethod
    def broadcast_object(self, value: _T, src: int = 0) -> _T:
        """The value of the process with rank ``src``."""

    @abstractmethod
    def broadcast(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, src: int = 0) -> Tensor:
        """The tensor of the process with rank ``src``, of known shape and type; None is given on the others."""

    @abstractmethod
    def local_world_size(self) -> int:
        """How many of the processes run on this machine."""


@final
class _Alone(Processes):
    """This process alone: nobody to wait for, to compare with or to send to."""

    rank, world_size, distributed = 0, 1, False

    def barrier(self, what: str) -> None:
        pass

    def differences(self, values: Mapping[str, Any]) -> list[Difference]:
        return []

    def failing_together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce(
        self, local: Callable[[], tuple[Tensor, ...]], shapes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, ...]:
        return local()

    def all_gather_object(self, value: _T) -> list[_T]:
        return [value]

    def broadcast_object(self, value: _T, src: int = 0) -> _T:
        return value

    def broadcast(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, src: int = 0) -> Tensor:
        assert tensor is not None
        return tensor

    def local_world_size(self) -> int:
        return 1


ALONE: Processes = _Alone()


@final
class GroupProcesses(Processes):
    """The processes of a torch.distributed group.

    Args:
        group: The process group; None for all processes.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = self.distributed = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def barrier(self, what: str) -> None:
        """Wait for all, no longer than :data:`BARRIER_SECONDS`."""
        store = _store()
        if store is None:  # the group's own timeout has to do
            return
        ranks = "all" if self._group is None else ",".join(map(str, dist.get_process_group_ranks(self._group)))
        name = f"kronscope/{what}/{ranks}"
        # counters in the store rather than a collective: giving up then leaves the group as it was
        number = store.add(f"{name}/{self.rank}", 1)
        store.add(name, 1)
        limit, pause = time.monotonic() + BARRIER_SECONDS, 1e-4
        while store.add(name, 0) < number * self.world_size:
            if time.monotonic() > limit:
                late = [str(rank) for rank in range(self.world_size) if store.add(f"{name}/{rank}", 0) < number]
                for counter in (name, f"{name}/{self.rank}"):
                    store.add(counter, -1)
                raise DistributedError(
                    f"{what} was called on process {self.rank} of {self.world_size}, but for {BARRIER_SECONDS:.0f} "
                    f"seconds not on process {', '.join(late)}. With torch.distributed initialised it must be called "
                    "on every process, each with its own part of the data; to work on one process alone, pass "
                    "distributed=False."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def differences(self, values: Mapping[str, Any]) -> list[Difference]:
        """Gather a checksum of all texts, and the texts themselves only where those differ."""
        own = {name: str(value) for name, value in values.items()}
        digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
        if len(set(self.all_gather_object(digest))) == 1:
            return []
        found = []
        texts = self.all_gather_object(own)
        for name in dict.fromkeys(name for other in texts for name in other):
            every = [other.get(name, "missing") for other in texts]
            rank = next((rank for rank, text in enumerate(every) if text != every[0]), 0)
            if rank:
                found.append(Difference(name, every[0], every[rank], rank))
        return found

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Exchange one flag at the end, and the errors if it is set anywhere."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001  # raised when the others know
            failure = error
        flag = torch.tensor([failure is not None], dtype=torch.int32, device=self._wire)
        with explained("Exchanging whether all is well"):
            dist.all_reduce(flag, group=self._group)
        if int(flag):
            raise self._exchanged(failure)

    def _exchanged(self, error: BaseException | None) -> BaseException:
        """Exchange failures; return what to raise."""
        told = self.all_gather_object(("", "") if error is None else (type(error).__name__, str(error)))
        if error is not None:
            return error
        rank, (name, text) = next((rank, item) for rank, item in enumerate(told) if item[0])
        if name == "KeyboardInterrupt":
            return KeyboardInterrupt()
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.KronscopeError):
            return kind(f"On process {rank}: {text}")
        return DistributedError(f"Process {rank} failed with {name}: {text}")

    def all_reduce(
        self, local: Callable[[], tuple[Tensor, ...]], shapes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, ...]:
        """Add all tensors, and the number of failures, in one message."""
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
        with explained("Adding up numbers over processes"):
            dist.all_reduce(wire, group=self._group)
        if float(wire[0]):
            raise self._exchanged(failure)
        totals = wire[1:].split(sizes)
        return tuple(
            total.reshape(tuple(shape)).to(device, copy=True)
            for total, shape, device in zip(totals, shapes, devices, strict=True)
        )

    def all_gather_object(self, value: _T) -> list[_T]:
        """Call ``torch.distributed.all_gather_object``."""
        out: list[Any] = [None] * self.world_size
        with explained("Gathering from all processes"):
            dist.all_gather_object(out, value, group=self._group)
        return out

    def broadcast_object(self, value: _T, src: int = 0) -> _T:
        """Call ``torch.distributed.broadcast_object_list``."""
        box = [value]
        with explained(f"Receiving from process {src}"):
            dist.broadcast_object_list(box, src=self._global(src), group=self._group, device=self._wire)
        return box[0]

    def broadcast(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, src: int = 0) -> Tensor:
        """Call ``torch.distributed.broadcast`` on a device that the backend sends from."""
        if tensor is not None:
            wire = tensor.detach().to(self._wire).contiguous()
        else:
            wire = torch.empty(tuple(shape), dtype=dtype, device=self._wire)
        if wire.numel():
            with explained(f"Receiving from process {src}"):
                dist.broadcast(wire, src=self._global(src), group=self._group)
        return wire if tensor is None else tensor

    def local_world_size(self) -> int:
        """Count the processes with this one's host name."""
        return self.all_gather_object(socket.gethostname()).count(socket.gethostname())

    @property
    def _wire(self) -> torch.device:
        """Where tensors must be to be sent."""
        nccl = dist.get_backend(self._group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _store() -> Any:
    """The key-value store the processes were introduced by."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):
        return None


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
