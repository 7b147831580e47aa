"""One step of one stack in two halves, so that the roots due in all stacks can be taken side by side between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kronscope.kron.roots import CoupledNewton, Eigh, WarmQR
from kronscope.kron.threads import in_threads
from kronscope.optim.batched import accumulate, direction, refresh_roots
from kronscope.optim.config import Hyper
from kronscope.optim.pieces import Tensors
from kronscope.optim.schedule import due_blocks, stale_blocks
from kronscope.optim.solvers import CostModel
from kronscope.optim.stacks import Member, Stack

__all__ = ["Work", "take_roots"]

# Smaller matrices are decomposed faster in one call than handed to threads one by one.
_LEAST_IN_THREADS = 64
# A solver of the user's own may not be made for threads.
_KNOWN = (Eigh, WarmQR, CoupledNewton, CostModel)


class Work:
    """The step of some members of a stack, all at the same step: begun when made, with the gradients taken in.

    Attributes:
        members: The members.
        due: Pairs of a mode and the blocks whose roots of that mode are to be taken before :meth:`finish`.
    """

    def __init__(
        self, stack: Stack, members: Sequence[Member], grads: Tensor, hyper: Hyper, step: int, *, anew: bool = False
    ) -> None:
        self.members, self.hyper, self.step = members, hyper, step
        self._stack = stack
        self.block = stack.block
        self._rows: Tensor | None = None
        self.state: Tensors = stack.tensors
        if len(members) < len(stack.members):
            self._rows = torch.cat([torch.arange(member.start, member.stop) for member in members])
            self.state = {name: tensor[self._rows] for name, tensor in stack.tensors.items()}
        self._moments = accumulate(self.state, grads, stack.factored, hyper, step)
        self.due: list[tuple[int, Tensor]] = []
        for mode, candidates in enumerate(due_blocks(stack, self._rows, hyper, step, anew=anew)):
            if candidates is not None:
                index = candidates if anew else stale_blocks(self.state, mode, candidates, hyper, step)
                if index.numel():
                    self.due.append((mode, index))

    def finish(self) -> Tensor:
        """Return the updates (B, ...), with the roots as they are now."""
        for mode, index in self.due:
            self._stack.refreshed[index if self._rows is None else self._rows[index], mode] = self.step
        update = direction(self.state, self._moments, self._stack.factored, self.hyper, self.step)
        if self._rows is not None:
            for name, tensor in self.state.items():
                self._stack.tensors[name][self._rows] = tensor
        return update


def take_roots(works: Sequence[Work]) -> None:
    """Take the roots that are due; on a CPU one block per thread, whichever stack it belongs to."""
    jobs: dict[tuple[int, ...], list[partial[None]]] = {}
    for number, work in enumerate(works):
        for mode, index in work.due:
            take = partial(refresh_roots, work.state, mode, hyper=work.hyper, step=work.step)
            if _in_threads(work, mode):
                for block in index.tolist():
                    # where the sides of a block share its moments, they stay with one thread
                    key = (number, block) if work.hyper.family == "soap" else (number, block, mode)
                    jobs.setdefault(key, []).append(partial(take, torch.tensor([block])))
            else:
                take(index)
    in_threads([partial(_run, job) for job in jobs.values()])


def _in_threads(work: Work, mode: int) -> bool:
    return (
        work.state[f"factor{mode}"].device.type == "cpu"
        and work.block[mode] >= _LEAST_IN_THREADS
        and isinstance(work.hyper.solver, _KNOWN)
        and not work.hyper.published
    )


def _run(parts: Sequence[partial[None]]) -> None:
    for part in parts:
        part()
