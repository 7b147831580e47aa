"""The order of a step over stacks: gradients are taken in, roots that are due are taken, updates are formed.

What is computed is the rule's (:mod:`kronscope.optim.rules`). The blocks of a stack are treated in portions that fit a
cache. On a CPU each thread takes whole portions, where there are enough of them to keep all threads busy; roots are
dealt out to the threads one by one, whichever stack they belong to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kronscope.kron.precision import exact_products
from kronscope.kron.rescues import lost_places
from kronscope.kron.threads import divided, in_threads
from kronscope.optim.block_math import joined
from kronscope.optim.block_state import Tensors
from kronscope.optim.calls import PLAIN, Calls
from kronscope.optim.config import Adaptive, Hyper
from kronscope.optim.costs import refresh_cost, step_cost
from kronscope.optim.schedule import due_blocks, residuals_to_check, stale_blocks
from kronscope.optim.stacks import Member, Stack

__all__ = [
    "DEVICE_PORTION",
    "Due",
    "LocalRoots",
    "Portion",
    "RootTaker",
    "carry_over",
    "portions",
    "solve",
    "take_roots",
    "take_step",
]

Put = Callable[[Sequence[tuple[Member, Tensor]]], None]

# Smaller matrices are decomposed faster in one call than handed to threads, and those up to twice as large a few at a
# time: what surrounds a decomposition takes as long as it. How many does not depend on the threads: bits might.
_LEAST_IN_THREADS, _LEAST_ALONE = 64, 128
_TOGETHER = 4
# Multiply-adds below which handing a portion to a thread costs more than it gains.
_LEAST_COST = 2e7
# Numbers in a portion, if one member has no more: a few arrays of them stay in a core's share of the cache.
_PORTION = 2**19
# The same on accelerators, where a few arrays of them (128 MiB each in float32) are what a step needs in passing.
DEVICE_PORTION = 2**25


def portions(stack: Stack, members: Sequence[Member]) -> Iterator[list[Member]]:
    """Cut the members of a stack into runs that are treated together."""
    limit = _PORTION if stack.device.type == "cpu" else DEVICE_PORTION
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


class Portion:
    """The step of some members of a stack, all at the same step.

    Args:
        stack: The stack.
        members: Some of its members, in order.
        grads: The gradients (count, ...) of each member.
        hyper: Options.
        step: The step they are at.
        anew: Every root is due, whatever the schedule says.
        calls: The family's methods, as they are or compiled.

    Attributes:
        block: The blocks' shape.
        count: Number of blocks.
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
        calls: Calls = PLAIN,
    ) -> None:
        self._calls = calls
        self.hyper, self.step, self.block = hyper, step, stack.block
        self.count = sum(member.tile.count for member in members)
        self.due = list[tuple[int, Tensor]]()
        self.cost = step_cost(members[0].tile, hyper) * self.count
        self._stack, self._members, self._grads, self._anew = stack, members, grads, anew
        self._rows = _rows(members)
        # indices of the CPU would be sent over for each tensor
        self._places = self._rows if isinstance(self._rows, slice) else self._rows.to(stack.device)
        self._looks = list[tuple[int, Tensor, Tensor]]()
        self._lost = list[tuple[int, Tensor]]()
        self.state: Tensors = {name: tensor[self._places] for name, tensor in stack.tensors.items()}

    @property
    def is_on_cpu(self) -> bool:
        """Whether threads may do it."""
        return self._stack.device.type == "cpu"

    @property
    def is_for_threads(self) -> bool:
        """Whether gradients may be taken in, and updates formed, by one thread beside others."""
        return self.is_on_cpu and self._calls.in_threads

    def take_in(self) -> None:
        """Take the gradients into factors and moments, and find out which roots are due."""
        grads = joined(self._grads, self._stack.dtype)
        self._grads = ()
        self._moments = self._calls.accumulate(self.state, grads, self._stack.modes, self.hyper, self.step)
        for mode, wanted in enumerate(due_blocks(self._stack, self._rows, self.hyper, self.step, anew=self._anew)):
            if wanted is not None:
                self._find(mode, wanted)

    def _find(self, mode: int, wanted: Tensor) -> None:
        """Find out which of the wanted roots of a mode are due; on an accelerator :func:`decide` does, later."""
        if not self._anew and not self.is_on_cpu:
            rows = self._stack.rows_of(wanted)
            residuals = residuals_to_check(self.state, mode, rows, self.hyper, self.step)
            if residuals is not None:
                self._looks.append((mode, wanted, residuals))
                return
        index = wanted if self._anew else stale_blocks(self.state, mode, wanted, self.hyper, self.step)
        if index.numel():
            self.due.append((mode, index))

    @property
    def looks(self) -> list[Tensor]:
        """Residuals that decide whether roots are due, not yet read; on an accelerator reading them is waiting."""
        return [residuals for _, _, residuals in self._looks]

    def note(self, stale: Sequence[Sequence[bool]]) -> None:
        """Make the roots due whose residuals, in the order of :attr:`looks`, are too large."""
        for (mode, index, _), flags in zip(self._looks, stale, strict=True):
            if any(flags):
                self.due.append((mode, index[torch.tensor(flags)]))
        self._looks = []

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of its state."""
        return self._stack.dtype, self._stack.device

    @property
    def is_adaptive(self) -> bool:
        """Whether its numbers, and not only its step, decide which roots are due."""
        return isinstance(self.hyper.refresh, Adaptive)

    def root_cost(self, mode: int) -> float:
        """Multiply-adds of one root of a mode."""
        return refresh_cost(self._members[0].tile, mode, self.hyper)

    def root_tensors(self, mode: int) -> list[Tensor]:
        """Return what a refresh of a mode changes, apart from moments, one row per block."""
        return self.hyper.rule.root_tensors(self.state, mode)

    def takes_roots_in_threads(self, mode: int) -> bool:
        """Whether the roots of a mode are large enough to be taken one per thread, and may be."""
        return (
            self.is_on_cpu
            and self.block[mode] >= _LEAST_IN_THREADS
            and self.hyper.solver.is_thread_safe
            and self.hyper.rule.has_separate_roots
        )

    def roots_at_once(self, mode: int) -> int:
        """Return how many roots of a mode are taken in one call: all of them, but for the memory of an accelerator."""
        return self.count if self.is_on_cpu else max(1, DEVICE_PORTION // self.block[mode] ** 2)

    def refresh(self, mode: int, index: Tensor) -> Tensor | None:
        """Take the roots of some blocks anew; return what :meth:`carry` needs, None for nothing."""
        with lost_places() as lost:
            found = self.hyper.rule.refresh(self.state, mode, self._stack.rows_of(index), self.hyper, self.step)
        if lost:
            self._lost.append((mode, index[lost]))
        return found

    def carry(self, mode: int, index: Tensor, found: Tensor) -> None:
        """Bring the moments of some blocks up to date with what :meth:`refresh` found."""
        self.hyper.rule.carry(self.state, mode, self._stack.rows_of(index), found, self.hyper, self.step)

    def carry_cost(self, modes: Sequence[int]) -> float:
        """Multiply-adds of :meth:`carry` for one block and some modes."""
        return 2.0 * math.prod(self.block) * sum(self.block[mode] for mode in modes)

    def finish(self, put: Put) -> None:
        """Form the updates with the roots as they are now, and hand them over."""
        refreshed = self._stack.refreshed[self._rows]
        kept = [(mode, index, refreshed[index, mode]) for mode, index in self._lost]
        for mode, index in self.due:
            refreshed[index, mode] = self.step
        for mode, index, before in kept:
            refreshed[index, mode] = before
        update = self._calls.direction(self.state, self._moments, self._stack.modes, self.hyper, self.step)
        del self._moments
        if isinstance(self._rows, Tensor):
            self._stack.refreshed[self._rows] = refreshed
            for name, tensor in self.state.items():
                self._stack.tensors[name][self._places] = tensor
        put(list(zip(self._members, update.split([member.tile.count for member in self._members]), strict=True)))


def _rows(members: Sequence[Member]) -> slice | Tensor:
    """Return the rows of a stack that some of its members have: a slice, which is no copy, where there is no gap."""
    if all(before.stop == after.start for before, after in itertools.pairwise(members)):
        return slice(members[0].start, members[-1].stop)
    return torch.cat([torch.arange(member.start, member.stop) for member in members])


class Due(NamedTuple):
    """Roots that are due: of some blocks of a portion, in one mode."""

    portion: Portion
    mode: int
    blocks: Tensor


class RootTaker(Protocol):
    """Who takes the roots that are due."""

    def may_grow(self, portion: Portion) -> bool:
        """Whether more roots may turn out to be due than the portion itself found, once all processes are asked."""
        ...

    def take(self, work: Sequence[Portion]) -> int:
        """Take the roots that are due; return how many this process took."""
        ...


class LocalRoots:
    """This process takes all roots of its portions."""

    def may_grow(self, portion: Portion) -> bool:
        """Return False: nobody else is asked."""
        return False

    def take(self, work: Sequence[Portion]) -> int:
        """Take the roots that are due; return how many."""
        take_roots(work)
        return sum(index.numel() for portion in work for _, index in portion.due)


def take_step(work: Sequence[Portion], put: Put, roots: RootTaker) -> int:
    """Take the step of all portions: gradients in, roots, updates out; return how many roots this process took.

    Args:
        work: The portions.
        put: Takes the updates of some members' blocks; called from any thread.
        roots: Takes the roots.
    """
    held = [roots.may_grow(portion) for portion in work]

    def begin(portion: Portion, is_held: bool) -> None:
        portion.take_in()
        if not portion.due and not portion.looks and not is_held:
            # at once, while what was taken in is in the cache
            portion.finish(put)

    def cost(portion: Portion) -> float:
        return portion.cost if portion.is_for_threads else 0.0

    pairs = list(zip(work, held, strict=True))
    _side_by_side([partial(begin, *pair) for pair in pairs], [cost(portion) for portion in work])
    waiting = [portion for portion, is_held in pairs if portion.due or portion.looks or is_held]
    decide(waiting)
    with exact_products():
        taken = roots.take(waiting)
    _side_by_side([partial(portion.finish, put) for portion in waiting], [cost(portion) for portion in waiting])
    return taken


def decide(work: Sequence[Portion]) -> None:
    """Read the residuals that decide which roots are due: one look at each device for all of them."""
    places: dict[torch.device, list[Portion]] = {}
    for portion in work:
        if portion.looks:
            places.setdefault(portion.kind[1], []).append(portion)
    for portions_there in places.values():
        stale = [
            ~(residuals <= portion.hyper.refresh.tolerance)
            for portion in portions_there
            if isinstance(portion.hyper.refresh, Adaptive)
            for residuals in portion.looks
        ]
        flags = iter((torch.cat(stale) if len(stale) > 1 else stale[0]).tolist())
        for portion in portions_there:
            portion.note([list(itertools.islice(flags, residuals.numel())) for residuals in portion.looks])


def take_roots(work: Sequence[Portion]) -> None:
    """Take the roots that are due, and use them."""
    due = [Due(portion, mode, index) for portion in work for mode, index in portion.due]
    here = [one for one in due if one.portion.is_on_cpu]
    carry_over(zip(here, solve(here), strict=True))
    for portion, mode, index in due:
        # at once, so that an accelerator need not keep what all of them found
        for part in index.split(portion.roots_at_once(mode)) if not portion.is_on_cpu else ():
            found = portion.refresh(mode, part)
            if found is not None:
                portion.carry(mode, part, found)


def solve(due: Sequence[Due]) -> list[Tensor | None]:
    """Take roots; return what :func:`carry_over` needs to bring moments up to date with them.

    On a CPU it is one block per thread, or a few small ones, whichever stack they belong to.
    """
    found: list[Tensor | None] = [None] * len(due)
    jobs: list[Callable[[], Tensor | None]] = []
    places: list[int] = []
    for place, (portion, mode, index) in enumerate(due):
        if portion.takes_roots_in_threads(mode):
            parts = index.split(1 if portion.block[mode] >= _LEAST_ALONE else _TOGETHER)
            jobs += [partial(portion.refresh, mode, part) for part in parts]
            places += [place] * len(parts)
        else:
            found_here = [portion.refresh(mode, part) for part in index.split(portion.roots_at_once(mode))]
            made = [one for one in found_here if one is not None]
            found[place] = torch.cat(made) if len(made) > 1 else (made[0] if made else None)
    by_place: dict[int, list[Tensor]] = {}
    for place, one in zip(places, in_threads(jobs), strict=True):
        if one is not None:
            by_place.setdefault(place, []).append(one)
    for place, blocks in by_place.items():
        found[place] = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return found


def carry_over(results: Iterable[tuple[Due, Tensor | None]]) -> None:
    """Bring moments up to date, when all roots are there: it gains more from a second thread than a decomposition.

    The modes of a block take their turn as given, since its second moment ends with the sums of the last one. So there
    are rounds, each of modes whose blocks are carried together and then of modes whose blocks are carried in threads.
    """
    rounds: list[list[tuple[Due, Tensor]]] = []
    reached: dict[Portion, tuple[int, bool]] = {}
    for due, found in results:
        if found is None:
            continue
        number, after_threads = reached.get(due.portion, (0, False))
        in_threads_now = due.portion.takes_roots_in_threads(due.mode)
        number += after_threads and not in_threads_now
        reached[due.portion] = number, in_threads_now
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append((due, found))
    for one_round in rounds:
        _carry_round(one_round)


def _carry_round(results: Iterable[tuple[Due, Tensor]]) -> None:
    single: dict[tuple[Portion, int], list[tuple[int, Tensor]]] = {}
    for (portion, mode, index), found in results:
        if not portion.takes_roots_in_threads(mode):
            portion.carry(mode, index, found)
            continue
        for block, one in zip(index.tolist(), found.split(1), strict=True):
            single.setdefault((portion, block), []).append((mode, one))

    def carry(portion: Portion, block: int, sides: Sequence[tuple[int, Tensor]]) -> None:
        for mode, one in sides:
            portion.carry(mode, torch.tensor([block]), one)

    _side_by_side(
        [partial(carry, portion, block, sides) for (portion, block), sides in single.items()],
        [portion.carry_cost([mode for mode, _ in sides]) for (portion, _), sides in single.items()],
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
