"""A step in three rounds: gradients are taken in, roots that are due are taken, updates that wait for them are formed.

The blocks of a stack are treated in portions that fit a cache. On a CPU each portion is one thread's, where there are
enough of them to keep all threads busy; so are the roots, whichever stack they belong to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kronscope.kron.roots import CoupledNewton, Eigh, WarmQR
from kronscope.kron.threads import divided, in_threads
from kronscope.optim.batched import accumulate, direction, refresh_roots
from kronscope.optim.config import Hyper
from kronscope.optim.costs import step_cost
from kronscope.optim.pieces import Tensors
from kronscope.optim.schedule import due_blocks, stale_blocks
from kronscope.optim.soap_batched import new_bases, turn_moments
from kronscope.optim.solvers import CostModel
from kronscope.optim.stacks import Member, Stack

__all__ = ["Work", "portions", "take_roots", "together"]

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
        self.cost = step_cost(members[0].tile, hyper) * sum(member.tile.count for member in members)
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

    def refresh(self, mode: int, index: Tensor) -> None:
        """Take the roots of some blocks anew."""
        refresh_roots(self.state, mode, index, self.hyper, self.step)

    def basis(self, mode: int, index: Tensor) -> Tensor:
        """Return the new eigenbases (k, d, d) of some blocks."""
        return new_bases(self.state, mode, index, self.hyper, self.step)

    def turn(self, block: int, sides: Sequence[tuple[int, Tensor]]) -> None:
        """Carry a block's moments into new bases of some modes."""
        for mode, basis in sides:
            turn_moments(self.state, mode, torch.tensor([block]), basis, self.hyper)

    def turn_cost(self, modes: Sequence[int]) -> float:
        """Multiply-adds of :meth:`turn`."""
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


def together(works: Sequence[Work], put: Put) -> None:
    """Take the step of all works: gradients in, roots, updates out.

    Args:
        works: The works.
        put: Takes the updates of some members' blocks; called from any thread.
    """

    def begin(work: Work) -> None:
        work.take_in()
        if not work.due:
            # at once, while what was taken in is in the cache
            work.finish(put)

    def cost(work: Work) -> float:
        return work.cost if work.is_on_cpu else 0.0

    _side_by_side([partial(begin, work) for work in works], [cost(work) for work in works])
    waiting = [work for work in works if work.due]
    take_roots(waiting)
    _side_by_side([partial(work.finish, put) for work in waiting], [cost(work) for work in waiting])


def take_roots(works: Sequence[Work]) -> None:
    """Take the roots that are due; on a CPU one block per thread, whichever stack it belongs to."""
    roots: list[Callable[[], Tensor | None]] = []
    bases: list[tuple[Work, int, int]] = []
    for work in works:
        for mode, index in work.due:
            if not _in_threads(work, mode):
                refresh_roots(work.state, mode, index, work.hyper, work.step)
            elif work.hyper.family == "soap":
                bases += [(work, mode, block) for block in index.tolist()]
            else:
                roots += [partial(work.refresh, mode, torch.tensor([block])) for block in index.tolist()]
    found = in_threads(roots + [partial(work.basis, mode, torch.tensor([block])) for work, mode, block in bases])
    # moments are turned when all bases are there: it gains more from a second thread than a decomposition does
    turns: dict[tuple[Work, int], list[tuple[int, Tensor]]] = {}
    for (work, mode, block), basis in zip(bases, found[len(roots) :], strict=True):
        assert basis is not None
        turns.setdefault((work, block), []).append((mode, basis))
    _side_by_side(
        [partial(work.turn, block, sides) for (work, block), sides in turns.items()],
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
