"""A step in three rounds: gradients are taken in, roots that are due are taken, updates that wait for them are formed.

The blocks of a stack are treated in portions that fit a cache. On a CPU each portion is one thread's, where there are
enough of them to keep all threads busy; so are the roots, whichever stack they belong to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kronscope.kron.roots import CoupledNewton, Eigh, WarmQR
from kronscope.kron.threads import divided, in_threads
from kronscope.optim.batched import accumulate, direction, refresh_roots
from kronscope.optim.config import Adaptive, Hyper
from kronscope.optim.costs import refresh_cost, step_cost
from kronscope.optim.pieces import Tensors
from kronscope.optim.schedule import due_blocks, stale_blocks
from kronscope.optim.soap_batched import new_bases, turn_moments
from kronscope.optim.solvers import CostModel
from kronscope.optim.stacks import Member, Stack

__all__ = ["Due", "LocalRoots", "Roots", "Work", "portions", "solve", "take_roots", "together", "turn"]

Put = Callable[[Sequence[tuple[Member, Tensor]]], None]

# Smaller matrices are decomposed faster in one call than handed to threads one by one.
_LEAST_IN_THREADS = 64
# Multiply-adds below which handing a portion to a thread costs more than it gains.
_LEAST_COST = 2e7
# Numbers in a portion, if one member has no more: a few arrays of them stay in a core's share of the cache.
_PORTION = 2**19
# A solver of the user's own may not be made for threads.
_KNOWN = (Eigh, WarmQR, CoupledNewton, CostModel)


def portions(stack: Stack, members: Sequence[Member]) -> Iterator[list[Member]]:
    """Cut the members of a stack into runs that are treated together: all of them, but on a CPU."""
    limit = _PORTION if stack.device.type == "cpu" else math.inf
    size = math.prod(stack.block)
    portion: list[Member] = []
    entries = 0
    for member in members:
        if portion and entries + size * member.tile.count > limit:
            yield portion
            portion, entries = [], 0
        portion.append(member)
        entries += size * member.tile.count
    if portion:
        yield portion


class Work:
    """The step of some members of a stack, all at the same step.

    Args:
        stack: The stack.
        members: Some of its members, in order.
        grads: The gradients (count, ...) of each member.
        hyper: Options.
        step: The step they are at.
        anew: Every root is due, whatever the schedule says.

    Attributes:
        members: The members.
        due: After :meth:`take_in`, pairs of a mode and the blocks whose roots of that mode are to be taken before
            :meth:`finish`.
        cost: Multiply-adds of a step without roots.
    """

    def __init__(
        self,
        stack: Stack,
        members: Sequence[Member],
        grads: Sequence[Tensor],
        hyper: Hyper,
        step: int,
        *,
        anew: bool = False,
    ) -> None:
        self.members, self.hyper, self.step = members, hyper, step
        self.block, self.due = stack.block, list[tuple[int, Tensor]]()
        self.cost = step_cost(members[0].tile, hyper) * self.count
        self._stack, self._grads, self._anew = stack, grads, anew
        self._rows = _rows(members)
        self.state: Tensors = {name: tensor[self._rows] for name, tensor in stack.tensors.items()}

    @property
    def is_on_cpu(self) -> bool:
        """Whether threads may do it."""
        return self._stack.device.type == "cpu"

    def take_in(self) -> None:
        """Take the gradients into factors and moments, and find out which roots are due."""
        grads = _joined(self._grads, self._stack.dtype)
        self._grads = ()
        self._moments = accumulate(self.state, grads, self._stack.factored, self.hyper, self.step)
        for mode, wanted in enumerate(due_blocks(self._stack, self._rows, self.hyper, self.step, anew=self._anew)):
            if wanted is not None:
                index = wanted if self._anew else stale_blocks(self.state, mode, wanted, self.hyper, self.step)
                if index.numel():
                    self.due.append((mode, index))

    @property
    def count(self) -> int:
        """Number of blocks."""
        return sum(member.tile.count for member in self.members)

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of its state."""
        return self._stack.dtype, self._stack.device

    @property
    def turns(self) -> bool:
        """Whether :meth:`refresh` returns bases, which moments are turned into afterwards."""
        return self.hyper.family == "soap" and not self.hyper.published

    @property
    def is_adaptive(self) -> bool:
        """Whether its numbers, and not only its step, decide which roots are due."""
        return isinstance(self.hyper.refresh, Adaptive)

    def root_cost(self, mode: int) -> float:
        """Multiply-adds of one root of a mode."""
        return refresh_cost(self.members[0].tile, mode, self.hyper)

    def refresh(self, mode: int, index: Tensor) -> Tensor | None:
        """Take the roots of some blocks anew; SOAP's eigenbases (k, d, d) are returned, to be used by :meth:`turn`."""
        if self.turns:
            return new_bases(self.state, mode, index, self.hyper, self.step)
        refresh_roots(self.state, mode, index, self.hyper, self.step)
        return None

    def root_tensors(self, mode: int) -> list[Tensor]:
        """Return what :meth:`refresh` (or, for bases, :meth:`turn`) writes, one row per block."""
        names = [name for name in (f"root{mode}", f"basis{mode}") if name in self.state]
        spectrum = [self.state["spectrum"][:, mode]] if "spectrum" in self.state else []
        return [*(self.state[name] for name in names), *spectrum]

    def turn(self, mode: int, index: Tensor, bases: Tensor) -> None:
        """Carry the moments of some blocks into new bases of a mode."""
        turn_moments(self.state, mode, index, bases, self.hyper)

    def turn_cost(self, modes: Sequence[int]) -> float:
        """Multiply-adds of :meth:`turn`, for one block."""
        return 2.0 * math.prod(self.block) * sum(self.block[mode] for mode in modes)

    def finish(self, put: Put) -> None:
        """Form the updates with the roots as they are now, and hand them over."""
        refreshed = self._stack.refreshed[self._rows]
        for mode, index in self.due:
            refreshed[index, mode] = self.step
        update = direction(self.state, self._moments, self._stack.factored, self.hyper, self.step)
        del self._moments
        if isinstance(self._rows, Tensor):
            self._stack.refreshed[self._rows] = refreshed
            for name, tensor in self.state.items():
                self._stack.tensors[name][self._rows] = tensor
        put(list(zip(self.members, update.split([member.tile.count for member in self.members]), strict=True)))


def _rows(members: Sequence[Member]) -> slice | Tensor:
    """Return the rows of a stack that some of its members have: a slice, which is no copy, where there is no gap."""
    if all(before.stop == after.start for before, after in itertools.pairwise(members)):
        return slice(members[0].start, members[-1].stop)
    return torch.cat([torch.arange(member.start, member.stop) for member in members])


def _joined(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return gradients (count, ...) as one tensor; may be the gradient itself."""
    if len(grads) == 1:
        return grads[0].to(dtype).contiguous()
    return torch.cat([grad.to(dtype) for grad in grads])


class Due(NamedTuple):
    """Roots that are due: of some blocks of a work, in one mode."""

    work: Work
    mode: int
    blocks: Tensor


class Roots(Protocol):
    """Who takes the roots that are due."""

    def may_grow(self, work: Work) -> bool:
        """Whether more roots may turn out to be due than the work itself found, once all works have been asked."""
        ...

    def take(self, works: Sequence[Work]) -> None:
        """Take the roots that are due."""
        ...


class LocalRoots:
    """This process takes all roots of its works."""

    def may_grow(self, work: Work) -> bool:
        """Return False: nobody else is asked."""
        return False

    def take(self, works: Sequence[Work]) -> None:
        """Take the roots that are due."""
        take_roots(works)


def together(works: Sequence[Work], put: Put, roots: Roots) -> None:
    """Take the step of all works: gradients in, roots, updates out.

    Args:
        works: The works.
        put: Takes the updates of some members' blocks; called from any thread.
        roots: Takes the roots.
    """
    held = [roots.may_grow(work) for work in works]

    def begin(work: Work, is_held: bool) -> None:
        work.take_in()
        if not work.due and not is_held:
            # at once, while what was taken in is in the cache
            work.finish(put)

    def cost(work: Work) -> float:
        return work.cost if work.is_on_cpu else 0.0

    pairs = list(zip(works, held, strict=True))
    _side_by_side([partial(begin, *pair) for pair in pairs], [cost(work) for work in works])
    waiting = [work for work, is_held in pairs if work.due or is_held]
    roots.take(waiting)
    _side_by_side([partial(work.finish, put) for work in waiting], [cost(work) for work in waiting])


def take_roots(works: Sequence[Work]) -> None:
    """Take the roots that are due, and use them."""
    due = [Due(work, mode, index) for work in works for mode, index in work.due]
    turn(zip(due, solve(due), strict=True))


def solve(due: Sequence[Due]) -> list[Tensor | None]:
    """Take roots; return SOAP's bases, which wait for :func:`turn`.

    On a CPU it is one block per thread, whichever stack it belongs to.
    """
    found: list[Tensor | None] = [None] * len(due)
    jobs: list[Callable[[], Tensor | None]] = []
    places: list[int] = []
    for place, (work, mode, index) in enumerate(due):
        if _in_threads(work, mode):
            jobs += [partial(work.refresh, mode, torch.tensor([block])) for block in index.tolist()]
            places += [place] * index.numel()
        else:
            found[place] = work.refresh(mode, index)
    bases: dict[int, list[Tensor]] = {}
    for place, basis in zip(places, in_threads(jobs), strict=True):
        if basis is not None:
            bases.setdefault(place, []).append(basis)
    for place, blocks in bases.items():
        found[place] = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return found


def turn(found: Iterable[tuple[Due, Tensor | None]]) -> None:
    """Carry moments into new bases, when all are there: it gains more from a second thread than a decomposition."""
    turns: dict[tuple[Work, int], list[tuple[int, Tensor]]] = {}
    for (work, mode, index), bases in found:
        if bases is None:
            continue
        if not _in_threads(work, mode):
            work.turn(mode, index, bases)
            continue
        for block, basis in zip(index.tolist(), bases.split(1), strict=True):
            turns.setdefault((work, block), []).append((mode, basis))

    def one(work: Work, block: int, sides: Sequence[tuple[int, Tensor]]) -> None:
        for mode, basis in sides:
            work.turn(mode, torch.tensor([block]), basis)

    _side_by_side(
        [partial(one, work, block, sides) for (work, block), sides in turns.items()],
        [work.turn_cost([mode for mode, _ in sides]) for (work, _), sides in turns.items()],
    )


def _side_by_side(jobs: Sequence[Callable[[], None]], costs: Sequence[float]) -> None:
    """Do small pieces here, and large ones in threads where that keeps all of them busy."""
    large = [index for index, cost in enumerate(costs) if cost >= _LEAST_COST]
    alone, apart = divided(tuple(costs[index] for index in large), torch.get_num_threads())
    for index, cost in enumerate(costs):
        if cost < _LEAST_COST:
            jobs[index]()
    for place in alone:
        jobs[large[place]]()
    in_threads([jobs[large[place]] for place in apart])


def _in_threads(work: Work, mode: int) -> bool:
    return (
        work.is_on_cpu
        and work.block[mode] >= _LEAST_IN_THREADS
        and isinstance(work.hyper.solver, _KNOWN)
        and not work.hyper.published
    )
