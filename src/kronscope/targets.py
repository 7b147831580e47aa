"""What the command line is pointed at: models, losses and data by name or by file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kronscope.errors import DataError, ModelError, OptionError
from kronscope.gradients.data import map_tensors
from kronscope.gradients.shards import Shards

__all__ = ["load_data", "load_loss", "load_model", "load_object", "own_part"]

_LOSSES = {"cross-entropy": nn.CrossEntropyLoss, "mse": nn.MSELoss, "bce": nn.BCEWithLogitsLoss}
_BATCH = 256


def load_object(target: str) -> Any:
    """Import ``package.module:name`` (also from the current folder).

    Raises:
        OptionError: There is no such module or name.

    >>> load_object("math:pi") > 3
    True
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise OptionError(f"expected 'package.module:name', got {target!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise OptionError(
            f"{target!r}: there is no module {error.name!r}; is it installed, or in this folder?"
        ) from error
    except AttributeError as error:
        raise OptionError(f"{target!r}: {error}.") from error
    return found


def load_model(target: str, checkpoint: Path | None = None) -> nn.Module:
    """A model, or what a function of no arguments returns, with a ``state_dict`` loaded if given.

    Raises:
        ModelError: It is not a model, or the checkpoint does not fit it.
    """
    found = load_object(target)
    model = found if isinstance(found, nn.Module) else found() if callable(found) else found
    if not isinstance(model, nn.Module):
        raise ModelError(f"{target!r} must be a torch.nn.Module or return one, got {type(model).__name__}.")
    if checkpoint is not None:
        try:
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
            model.load_state_dict(state.get("model", state) if isinstance(state, dict) else state)
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{checkpoint} cannot be loaded into the model: {error}") from error
    checked: nn.Module = model
    return checked


def load_loss(name: str) -> nn.Module:
    """A loss by its short name.

    Raises:
        OptionError: There is no such loss.
    """
    if name not in _LOSSES:
        raise OptionError(f"--loss must be one of {', '.join(_LOSSES)}, got {name!r}.")
    loss: nn.Module = _LOSSES[name]()
    return loss


def load_data(target: str) -> Any:
    """Batches: a named object or function, or a ``.pt`` or ``.npz`` file with ``inputs`` and ``targets``.

    Raises:
        DataError: The file is missing or does not hold inputs and targets.
    """
    path = Path(target)
    if path.suffix not in (".pt", ".pth", ".npz"):
        found = load_object(target)
        return found() if callable(found) and not hasattr(found, "__iter__") else found
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                content: Any = {name: torch.from_numpy(file[name]) for name in file.files}
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if isinstance(content, dict):
        names = [("inputs", "targets"), ("x", "y")]
        pair = next(((content[a], content[b]) for a, b in names if a in content and b in content), None)
    else:
        pair = tuple(content) if isinstance(content, (list, tuple)) and len(content) == 2 else None
    if pair is None:
        raise DataError(f"{path} must hold 'inputs' and 'targets' (or 'x' and 'y'), or a pair of tensors.")
    inputs, targets = pair
    return [(inputs[at : at + _BATCH], targets[at : at + _BATCH]) for at in range(0, len(inputs), _BATCH)]


def own_part(batches: Any, shards: Shards | None) -> Any:
    """Of batches that every process has in full, the samples this process measures; all for a process alone.

    Raises:
        DataError: There are fewer samples than processes.
    """
    if shards is None or hasattr(batches, "__next__"):
        return batches  # what can be iterated only once is refused by whoever measures
    try:
        counts = [len(targets) for _, targets in batches]
    except (TypeError, ValueError):
        return batches  # and so is what is not made of pairs
    part = shards.part_of(sum(counts))
    if not part:
        raise DataError(f"The data has {sum(counts)} samples for {shards.size} processes; each needs one at least.")
    own, first = [], 0
    for (inputs, targets), count in zip(batches, counts, strict=True):
        start, stop = max(part.start - first, 0), min(part.stop - first, count)
        if start < stop:
            own.append((_cut(inputs, start, stop), targets[start:stop]))
        first += count
    return own


def _cut(inputs: Any, start: int, stop: int) -> Any:
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, inputs)
