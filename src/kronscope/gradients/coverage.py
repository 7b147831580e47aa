"""Whether all ways from a parameter to the outputs lead through uses that were seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from kronscope.gradients.uses import Use

__all__ = ["used_otherwise"]


def used_otherwise(outputs: Tensor, uses: Sequence[Use], parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the parameters that outputs depend on by other ways than the uses that were seen.

    The autograd graph is walked from the outputs; at a use, the walk goes on with all of its operands but the weight.
    Gradients cannot answer this: a way that is closed for some samples, by a gate, has none there.

    Args:
        outputs: What the model returned.
        uses: The uses seen in that forward pass.
        parameters: Leaves that require gradients, by name.

    >>> import torch
    >>> weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
    >>> used_otherwise((x @ weight.exp()).relu(), [], {"weight": weight})
    {'weight'}
    """
    ends: dict[Node, str] = {get_gradient_edge(parameter).node: name for name, parameter in parameters.items()}
    onwards = {use.place.edge.node: use.place.operands for use in uses}
    found: set[str] = set()
    seen: set[Node] = set()
    waiting = [] if outputs.grad_fn is None else [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in ends:
            found.add(ends[node])
        elif node in onwards:
            waiting.extend(onwards[node])
        else:
            waiting.extend(after for after, _ in node.next_functions if after is not None)
    return found
