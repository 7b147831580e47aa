"""Parameters that others have put into the groups of a finished optimizer: whose state they take over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kronscope.errors import StateError
from kronscope.optim.block_state import Tensors
from kronscope.optim.parallel import Placement

__all__ = ["kept_states", "replaced"]


def replaced(planned: Sequence[Tensor], params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return for each parameter the planned one in whose place it stands: itself, or one that is there no more.

    Raises:
        StateError: there are more or fewer than were planned.

    >>> import torch
    >>> a, b, c = (torch.zeros(1) for _ in range(3))
    >>> replaced([a, b], [a, c]) == {a: a, c: b}
    True
    """
    if len(planned) != len(params):
        raise StateError(
            f"param_groups hold {len(params)} parameters, some of them new, where {len(planned)} were planned; add "
            f"parameters with add_param_group(), and replace them one by one, each in its place."
        )
    before, now = set(planned), set(params)
    pairs = zip(params, planned, strict=True)
    return {param: param for param in params if param in before} | {
        new: old for new, old in pairs if new not in before and old not in now
    }


def kept_states(
    places: Mapping[Tensor, Tensor], state: Mapping[Tensor, Tensors], placement: Placement, *, ask: bool
) -> dict[Tensor, Tensors]:
    """Return the states, as one process would have them, of those in whose places parameters stand.

    Args:
        places: What :func:`replaced` returns.
        state: The states of the planned parameters.
        placement: Who keeps which part of them.
        ask: All processes are here, and may be asked for their parts.

    Raises:
        StateError: other processes would have to be asked.
    """
    seen = {new: old for new, old in places.items() if "step" in state.get(old, {})}
    if seen and placement.ranges and not ask:
        raise StateError(
            "the parameters in param_groups are not those of the last step, and their state is divided over "
            "processes: call step() on all of them before anything else."
        )
    return {new: placement.whole(old, state[old]) for new, old in seen.items()}
