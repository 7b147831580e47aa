"""timm: the optimizers in its registry, and its parameter groups with names."""

from __future__ import annotations

from typing import Any

from timm import optim
from timm.optim._optim_factory import default_registry  # timm exports functions that read it, none that adds to it
from torch import nn

from kronscope.integrations.wrapped import named_groups
from kronscope.optim import SOAP, KLShampoo, Shampoo

__all__ = ["NAMES", "param_groups", "register"]

# timm reads what stands before an underscore as another optimizer around this one, so the names have none.
NAMES = {"kronscope-shampoo": Shampoo, "kronscope-soap": SOAP, "kronscope-klshampoo": KLShampoo}


def register() -> list[str]:
    """Add our optimizers to timm's registry; calling it again changes nothing.

    Returns:
        The names that ``timm.optim.create_optimizer_v2`` and ``--opt`` then know.

    >>> register()
    ['kronscope-shampoo', 'kronscope-soap', 'kronscope-klshampoo']
    """
    known = set(optim.list_optimizers())
    for name, family in NAMES.items():
        if name not in known:
            summary = f"kronscope's {family.__name__}: AdamW for vectors, embeddings and heads"
            default_registry.register(optim.OptimInfo(name=name, opt_class=family, description=summary, has_betas=True))
    return list(NAMES)


def param_groups(
    model: nn.Module, *, weight_decay: float = 0.0, layer_decay: float | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Return timm's own parameter groups with names and roles, so that embeddings and heads are recognised.

    For timm's argument ``param_group_fn``: ``partial(param_groups, weight_decay=0.05, layer_decay=0.75)``.

    Args:
        model: The model; parameters that its ``no_weight_decay()`` lists are not decayed.
        weight_decay: Weight decay of all parameters but vectors.
        layer_decay: By how much the learning rate falls from each layer to the one before it (as ``lr_scale``, with
            which timm's schedulers multiply the learning rate); None gives all the same learning rate.
        options: Further options of timm's ``param_groups_weight_decay`` or ``param_groups_layer_decay``.

    Returns:
        The groups.

    >>> [group["weight_decay"] for group in param_groups(nn.Linear(3, 2), weight_decay=0.05)]
    [0.0, 0.05]
    """
    undecayed: set[str] = getattr(model, "no_weight_decay", set)()
    options = {"weight_decay": weight_decay, "no_weight_decay_list": undecayed, **options}
    if layer_decay is None:
        return named_groups(model, optim.param_groups_weight_decay(model, **options))
    return named_groups(model, optim.param_groups_layer_decay(model, layer_decay=layer_decay, **options))
