"""What the command line is pointed at: models, losses and data by name or by file."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kronscope import approx
from kronscope.errors import DataError, KronscopeError, ModelError, OptionError
from kronscope.gradients import forward
from kronscope.gradients.data import map_tensors, tensors_of
from kronscope.gradients.losses import LossFunction
from kronscope.measures.fits import DEFAULT_APPROXIMATIONS
from kronscope.support.processes import Processes
from kronscope.support.texts import wants_to_run

__all__ = [
    "approximation_names",
    "blaming_the_model",
    "load_data",
    "load_forward",
    "load_loss",
    "load_model",
    "load_object",
    "own_part",
]

_LOSSES = {"cross-entropy": nn.CrossEntropyLoss, "mse": nn.MSELoss, "bce": nn.BCEWithLogitsLoss}
_BATCH = 256
_SAVE_ARRAYS = "save arrays of numbers: np.savez(path, inputs=inputs, targets=targets)"
_SAVE_TENSORS = 'save tensors: torch.save({"inputs": inputs, "targets": targets}, path)'
_SAVE_WEIGHTS = "save the weights alone: torch.save(model.state_dict(), path)"


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
        state = _read(checkpoint, ModelError, _SAVE_WEIGHTS)
        try:
            model.load_state_dict(state.get("model", state) if isinstance(state, dict) else state)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{checkpoint} cannot be loaded into the model: {_line(error)}") from error
    checked: nn.Module = model
    return checked


@contextmanager
def blaming_the_model() -> Iterator[None]:
    """Say in words what fails in the user's model, for example on data of another width.

    Raises:
        ModelError: The model's forward pass failed; the text names the error and the line of the user's code.
    """
    try:
        yield
    except KronscopeError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = next((at for at, frame in enumerate(frames) if frame.filename == forward.__file__), None)
        if inside is None:
            raise
        others = (str(Path(torch.__file__).parent), forward.__file__)
        own = [frame for frame in frames[inside:] if not frame.filename.startswith(others)]
        where = f" (line {own[-1].lineno} of {own[-1].filename})" if own else ""
        raise ModelError(
            f"the model fails on this data{where}: {type(error).__name__}: {_line(error)}. "
            "Give data that the model can be called with."
        ) from error


def load_forward(target: str | None) -> forward.ForwardFunction | None:
    """The function ``(model, inputs) -> logits`` of a name; None for None.

    Raises:
        OptionError: There is no such module or name, or it is no function.

    >>> load_forward("torch.nn.functional:linear").__name__
    'linear'
    """
    if target is None:
        return None
    found = load_object(target)
    if isinstance(found, (type, nn.Module)) or not callable(found):
        raise OptionError(
            f"--forward {target!r} must be a function (model, inputs) -> logits, got {type(found).__name__}."
        )
    function: forward.ForwardFunction = found
    return function


def load_loss(name: str) -> LossFunction:
    """A loss: a short name or ``package.module:name``, either with options, as ``cross-entropy(label_smoothing=0.1)``.

    ``package.module:name`` is a loss module, a class of them, or a function of outputs and targets. A class is called
    with the options; so is a function that has some, to return the loss.

    Raises:
        OptionError: There is no such loss, or it does not take these options.

    >>> load_loss("cross-entropy(label_smoothing=0.1)").label_smoothing
    0.1
    >>> load_loss("torch.nn:HuberLoss(delta=2.0)").delta
    2.0
    """
    target, options = _with_options(name)
    if target in _LOSSES:
        found: Any = _LOSSES[target]
    elif ":" in target:
        found = load_object(target)
    else:
        raise OptionError(
            f"--loss must be one of {', '.join(_LOSSES)}, or 'package.module:name' of a loss of yours, got {name!r}."
        )
    if isinstance(found, type) or options is not None:
        try:
            found = found(**(options or {}))
        except (TypeError, ValueError) as error:
            raise OptionError(f"--loss {name!r}: {_line(error)}.") from error
    if not callable(found):
        raise OptionError(f"--loss {name!r} must be a module or a function (outputs, targets) -> number.")
    loss: LossFunction = found
    return loss


def _with_options(name: str) -> tuple[str, dict[str, Any] | None]:
    """A name, and what stands in parentheses behind it; None without parentheses."""
    target, found, rest = name.strip().partition("(")
    if not found:
        return target, None
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("options have names")
        return target.strip(), {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise OptionError(
            f"--loss {name!r}: options are numbers, texts or lists by name, as in 'cross-entropy(label_smoothing=0.1)'."
        ) from error


def approximation_names(asked: Sequence[str] | None) -> tuple[str, ...]:
    """The names asked for, the default ones for none, and every one for ``all``.

    Raises:
        OptionError: ``all`` is not alone.

    >>> approximation_names(["shampoo2", "diagonal"])
    ('shampoo2', 'diagonal')
    """
    if "all" not in (asked or ()):
        return tuple(asked or DEFAULT_APPROXIMATIONS)
    if others := [name for name in asked or () if name != "all"]:
        raise OptionError(
            f"--approximation all takes every one already; leave out {', '.join(others)}, or leave out all."
        )
    return approx.names()


def load_data(target: str, model: nn.Module | None = None, tell: Callable[[str], object] = lambda line: None) -> Any:
    """Batches: a named object or function, or a ``.pt`` or ``.npz`` file with ``inputs`` and ``targets``.

    Args:
        target: The name or the file.
        model: Numbers of a file that are floating-point are converted to the type of this model's parameters.
        tell: Called with a line that says so, if that changes anything.

    Raises:
        DataError: The file is missing, does not hold inputs and targets, or not equally many of them.
    """
    path = Path(target)
    if path.suffix not in (".pt", ".pth", ".npz"):
        found = load_object(target)
        return found() if callable(found) and not hasattr(found, "__iter__") else found
    content = _read(path, DataError, _SAVE_ARRAYS if path.suffix == ".npz" else _SAVE_TENSORS)
    if isinstance(content, dict):
        names = [("inputs", "targets"), ("x", "y")]
        pair = next(((content[a], content[b]) for a, b in names if a in content and b in content), None)
    else:
        pair = tuple(content) if isinstance(content, (list, tuple)) and len(content) == 2 else None
    if pair is None:
        raise DataError(f"{path} must hold 'inputs' and 'targets' (or 'x' and 'y'), or a pair of tensors.")
    inputs, targets = _converted(_checked(pair, path), path, model, tell)
    return [(_cut(inputs, at, at + _BATCH), targets[at : at + _BATCH]) for at in range(0, len(targets), _BATCH)]


def own_part(batches: Any, processes: Processes) -> Any:
    """Of batches that every process has in full, the samples this process measures; all for a process alone.

    Raises:
        DataError: There are fewer samples than processes.
    """
    if processes.world_size == 1 or hasattr(batches, "__next__"):
        return batches  # what can be iterated only once is refused by whoever measures
    try:
        counts = [len(targets) for _, targets in batches]
    except (TypeError, ValueError):
        return batches  # and so is what is not made of pairs
    part = processes.share_of(sum(counts))
    if not part:
        raise DataError(
            f"The data has {sum(counts)} samples for {processes.world_size} processes; each needs one at least."
        )
    own, first = [], 0
    for (inputs, targets), count in zip(batches, counts, strict=True):
        start, stop = max(part.start - first, 0), min(part.stop - first, count)
        if start < stop:
            own.append((_cut(inputs, start, stop), targets[start:stop]))
        first += count
    return own


def _cut(inputs: Any, start: int, stop: int) -> Any:
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, inputs)


def _read(path: Path, kind: type[KronscopeError], advice: str) -> Any:
    """What a file holds: the arrays of an ``.npz`` as tensors, or what ``torch.save`` wrote."""
    try:
        _check_size(path, kind)
        if path.suffix == ".npz":
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                return {name: torch.from_numpy(file[name]) for name in file.files}
        return torch.load(path, map_location="cpu", weights_only=True)
    except KronscopeError:
        raise
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror or _line(error)}.") from error
    except Exception as error:  # bytes that are something else fail anywhere in the reader
        if isinstance(error, pickle.UnpicklingError) and wants_to_run(error):
            raise kind(
                f"{path} holds other things than tensors and is not opened, since they may run code; {advice}."
            ) from error
        raise kind(f"{path} cannot be read: it is damaged or of another format; {advice}.") from error


def _check_size(path: Path, kind: type[KronscopeError]) -> None:
    """Both formats are zip archives, in which a few megabytes can stand for more than the memory holds."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            size = sum(member.file_size for member in archive.infolist())
    if size > total // 2:
        raise kind(
            f"{path} holds {size / 2**30:.1f} GiB, and the memory of this machine is {total / 2**30:.1f} GiB; give "
            "fewer samples."
        )


def _checked(pair: tuple[Any, Any], path: Path) -> tuple[Any, Tensor]:
    inputs, targets = pair
    if not isinstance(targets, Tensor) or not targets.dim():
        raise DataError(f"The targets in {path} must be a tensor with one entry or row a sample.")
    counts = sorted({tensor.shape[0] for tensor in tensors_of(inputs) if tensor.dim()})
    if not counts:
        raise DataError(f"The inputs in {path} must be a tensor, or a dictionary, list or tuple of tensors.")
    if counts != [len(targets)]:
        raise DataError(
            f"{path} has inputs for {' and '.join(map(str, counts))} samples but {len(targets)} targets; "
            "the first dimension of every tensor must be the samples."
        )
    return inputs, targets


def _converted(
    pair: tuple[Any, Tensor], path: Path, model: nn.Module | None, tell: Callable[[str], object]
) -> tuple[Any, Tensor]:
    """The pair in the model's floating-point type; NumPy writes float64 unless told otherwise."""
    own = {item.dtype for item in (model.parameters() if model is not None else ()) if item.is_floating_point()}
    found = {tensor.dtype for tensor in tensors_of(pair) if tensor.is_floating_point()}
    if len(own) != 1 or found <= own:
        return pair
    (dtype,) = own
    names = ", ".join(sorted(str(item).removeprefix("torch.") for item in found - own))
    tell(f"{path}: {names} converted to the model's {str(dtype).removeprefix('torch.')}")
    converted: tuple[Any, Tensor] = map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, pair
    )
    return converted


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
