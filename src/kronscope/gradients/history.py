r"""A training run's own gradients: what Adagrad's matrix :math:`H_T = \sum_{t \le T} g_t g_t^\top` is made of."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronscope.errors import DataError, LayerError, NonFiniteError, OptionError
from kronscope.gradients.matrices import LayerSpec, resolve_layers, unwrap
from kronscope.gradients.storage import DiskStore, MemoryStore, Store, record_bytes, to_state
from kronscope.gradients.stream import DenseAtoms, GradientStream

__all__ = ["GradientHistory"]

_CHUNK_BYTES = 64 << 20


class GradientHistory:
    """Records the gradients that an optimizer is about to use, step by step.

    Made by :meth:`attach`, or by :meth:`open` from a folder that an earlier process wrote. Recording is a step
    pre-hook: it changes neither the gradients nor the optimizer. Measure with :func:`kronscope.measure_history`.

    Attributes:
        layers: Names of the recorded layers.
        steps: Training steps with a record, counted from 1 at :meth:`attach`.
        total_steps: Steps seen, recorded or not.
        every: Every which step is recorded.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> history = GradientHistory.attach(optimizer, model, layers=["weight"])
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 3)).sum().backward()
    ...     optimizer.step()
    >>> history.detach()
    >>> history.steps, history.stream("weight").shape
    ((1, 2, 3), (2, 3))
    """

    def __init__(self, store: Store, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> None:
        self._store = store
        self.layers = tuple(names)
        self._shapes = dict(zip(names, shapes, strict=True))
        self.every = store.every
        self.total_steps = store.steps[-1] if store.steps else 0
        self._space: int | None = None
        self._handle: Any = None
        self._take: Callable[[], list[Tensor]] | None = None

    @classmethod
    def attach(
        cls,
        optimizer: Optimizer,
        model: nn.Module,
        layers: Sequence[str] | str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        dtype: torch.dtype | None = None,
        space: int | None = None,
        resume: bool = False,
    ) -> GradientHistory:
        """Start recording.

        Args:
            optimizer: Any torch optimizer that steps the model's parameters.
            model: The model.
            layers: Names, globs, row ranges and stacks as for :func:`kronscope.measure`; None takes every matrix.
            path: A folder to write to instead of keeping everything in memory.
            every: Record every k-th step only.
            dtype: ``float16`` halves the space (each record with a scale of its own); default the parameter's type.
            space: Bytes allowed. When they would be exceeded, records first go to half precision, then every second
                one is dropped and ``every`` doubles; measurements then have error bars.
            resume: Go on with the history in ``path`` if there is one, as a resumed training run does; a
                :meth:`load_state_dict` then drops what was recorded after the checkpoint.

        Raises:
            LayerError: a layer does not exist, is no matrix, or is not trained by this optimizer.
            DataError: the folder holds a history already.
            OptionError: an argument is out of range.
        """
        if every < 1:
            raise OptionError(f"every must be 1 or more, got {every}.")
        if dtype not in (None, torch.float16, torch.float32, torch.float64):
            raise OptionError(f"dtype must be float16, float32 or float64, got {dtype}.")
        model = unwrap(model)
        specs = resolve_layers(model, [layers] if isinstance(layers, str) else layers)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for spec in specs:
            for name in spec.parameters:
                if id(parameters[name]) not in trained:
                    raise LayerError(f"layer {spec.name!r}: the optimizer does not train {name!r}; leave it out.")
        dtypes = [dtype or _kept_type([parameters[name] for name in spec.parameters]) for spec in specs]
        names, shapes = [spec.name for spec in specs], [spec.shape for spec in specs]
        smallest = sum(record_bytes(shape, torch.float16) for shape in shapes)
        if space is not None and space < 4 * smallest:
            raise OptionError(
                f"space={space} bytes holds fewer than four records of {smallest} bytes in half precision; allow more, "
                "or record fewer layers."
            )
        store: Store
        if path is None:
            store = MemoryStore(shapes, dtypes, every)
        elif resume and (Path(path) / "history.json").exists():
            store = DiskStore.open(Path(path), append=True)
            if (store.names, store.shapes) != (names, shapes):
                store.close()
                raise DataError(
                    f"the history in {path} is of other layers: {', '.join(store.names)}; use another path."
                )
        else:
            store = DiskStore.create(Path(path), names, shapes, dtypes, every)
        history = cls(store, names, shapes)
        history.every, history._space = max(every, store.every), space
        history._take = lambda: [_matrix(spec, parameters) for spec in specs]
        history._handle = optimizer.register_step_pre_hook(history._before_step)
        return history

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GradientHistory:
        """Open a folder of records, also one whose writer was killed.

        Raises:
            DataError: there is no history in the folder, or it is damaged.
        """
        store = DiskStore.open(Path(path))
        return cls(store, store.names, store.shapes)

    def __len__(self) -> int:
        """Number of records."""
        return len(self._store.steps)

    def __repr__(self) -> str:
        """Say what it holds."""
        return f"GradientHistory({len(self.layers)} layers, {len(self)} of {self.total_steps} steps)"

    @property
    def steps(self) -> tuple[int, ...]:
        """Training steps with a record."""
        return tuple(self._store.steps)

    @property
    def thinned(self) -> bool:
        """Whether some steps have no record."""
        return len(self) != self.total_steps

    def detach(self) -> None:
        """Stop recording; what is recorded stays."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def close(self) -> None:
        """Stop recording and close the files."""
        self.detach()
        self._store.close()

    # ------------------------------------------------------------------ reading

    def shape(self, layer: str) -> tuple[int, int]:
        """The (m, n) of a layer."""
        self._index(layer)
        return self._shapes[layer]

    def read(self, layer: str, start: int, stop: int) -> Tensor:
        """Return records number ``start`` to ``stop`` (k, m, n) of a layer."""
        return self._store.read(self._index(layer), start, stop)

    def stream(self, layer: str, step: int | None = None, *, beta: float | None = None) -> GradientStream:
        r"""Return the recorded gradients up to a step as a stream.

        Args:
            layer: Its name.
            step: The last step to include; None for all.
            beta: None gives Adagrad's sum (weights 1); otherwise the weights :math:`(1-\beta)\beta^{T-t}` that an
                exponential mean holds.

        Raises:
            LayerError: the layer is not recorded.
            DataError: nothing is recorded up to the step.
        """
        index = self._index(layer)
        steps = [at for at in self._store.steps if step is None or at <= step]
        if not steps:
            raise DataError(
                f"nothing is recorded up to step {step}; the first record is {self.steps[:1] or 'missing'}."
            )
        weights = history_weights(torch.tensor(steps), self.total_steps if step is None else step, beta)
        shape, count = self._shapes[layer], len(steps)
        size = max(1, _CHUNK_BYTES // (4 * shape[0] * shape[1]))

        def chunks() -> Iterator[DenseAtoms]:
            for at in range(0, count, size):
                stop = min(at + size, count)
                grads = self._store.read(index, at, stop)
                if not bool(torch.isfinite(grads).all()):
                    bad = (~torch.isfinite(grads).flatten(1).all(1)).nonzero().flatten()
                    raise NonFiniteError(
                        f"the gradient of {layer!r} at step {steps[at + int(bad[0])]} contains NaN or infinity; "
                        "measure earlier steps, or train with gradients that are finite."
                    )
                yield DenseAtoms(grads.unsqueeze(1), weights[at:stop], torch.arange(at, stop))

        cheap = isinstance(self._store, MemoryStore) or self._store.dtypes[index] != torch.float16
        return GradientStream(chunks, shape, count, 1, in_memory=cheap)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a training checkpoint needs to go on recording as if nothing had happened."""
        state = to_state(self._store, len(self.layers))
        return {**state, "total_steps": self.total_steps, "every": self.every}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a state; records written after it are dropped.

        Raises:
            DataError: the files lack records that the state had.
        """
        # what was recorded later may have thinned the records the state had, as it would again
        every = int(state_dict["every"])
        every = every if "grads" in state_dict else max(every, self._store.every)
        steps = [step for step in state_dict["steps"] if (step - 1) % every == 0]
        if "grads" in state_dict:
            dtypes = [getattr(torch, name) for name in state_dict["dtypes"]]
            store = MemoryStore([self._shapes[name] for name in self.layers], dtypes, int(state_dict["every"]))
            for record, step in enumerate(steps):
                store.append(step, [grads[record] for grads in state_dict["grads"]])
            self._store = store
        else:
            known = {step: index for index, step in enumerate(self._store.steps)}
            missing = [step for step in steps if step not in known]
            if missing:
                raise DataError(f"the gradient history lacks step {missing[0]}, which the checkpoint had recorded.")
            if steps == self._store.steps[: len(steps)]:
                self._store.keep_first(len(steps))
            else:
                self._store.rewrite([known[step] for step in steps], self._store.dtypes, every)
        self.total_steps, self.every = int(state_dict["total_steps"]), every

    # ------------------------------------------------------------------ recording

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure") if "closure" in kwargs else next(iter(args[1:]), None)
        if closure is None:
            self._record(optimizer)
            return None
        # the gradients do not exist yet: record when the closure has first been called
        state = {"waiting": True}

        def recording() -> Any:
            loss = closure()
            if state.pop("waiting", False):
                self._record(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": recording}
        return (args[0], recording, *args[2:]), kwargs

    def _record(self, optimizer: Optimizer) -> None:
        # a gradient scaler leaves unscaling, and skipping a step with infinities, to fused optimizers
        scale, found = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if isinstance(found, Tensor) and bool(found):
            return
        self.total_steps += 1
        if (self.total_steps - 1) % self.every or self._take is None:
            return
        if self._space is not None:
            self._make_room(self._space)
            if (self.total_steps - 1) % self.every:
                return
        with torch.no_grad():
            grads = self._take()
            if isinstance(scale, Tensor):
                grads = [grad / scale.to(grad) for grad in grads]
            self._store.append(self.total_steps, grads)

    def _make_room(self, space: int) -> None:
        store = self._store
        shapes = [self._shapes[name] for name in self.layers]

        def needed() -> int:
            sizes = zip(shapes, store.dtypes, strict=True)
            return (len(store.steps) + 1) * sum(record_bytes(shape, dtype) for shape, dtype in sizes)

        while needed() > space:
            if any(dtype != torch.float16 for dtype in store.dtypes):
                store.rewrite(range(len(store.steps)), [torch.float16] * len(shapes), self.every)
                continue
            self.every *= 2
            keep = [index for index, step in enumerate(store.steps) if (step - 1) % self.every == 0]
            store.rewrite(keep, store.dtypes, self.every)
            warnings.warn(
                f"the gradient history reached its space: one step in {self.every} is kept from now on, and "
                "measurements will have error bars.",
                stacklevel=2,
            )

    def _index(self, layer: str) -> int:
        if layer not in self._shapes:
            raise LayerError(f"layer {layer!r} is not recorded; there are: {', '.join(self.layers)}.")
        return self.layers.index(layer)


def history_weights(steps: Tensor, last: int, beta: float | None) -> Tensor:
    """Weights of the gradients at ``steps`` in what is held after step ``last``."""
    if beta is None:
        return torch.ones(len(steps), dtype=torch.float64)
    if not 0 <= beta < 1:
        raise OptionError(f"beta must be at least 0 and below 1, got {beta}.")
    if beta == 0:
        return (steps == last).double()
    return (1 - beta) * torch.exp((last - steps).double() * math.log(beta))


def _kept_type(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype


def _matrix(spec: LayerSpec, parameters: dict[str, nn.Parameter]) -> Tensor:
    """The layer's gradient as it is now; a parameter without one counts as zero, as the optimizer will skip it."""
    parts = []
    for name, start, stop in spec.segments:
        parameter = parameters[name]
        grad = parameter.grad
        whole = torch.zeros_like(parameter) if grad is None else grad.detach()
        whole = whole.to_dense() if whole.is_sparse else whole
        parts.append(whole.reshape(whole.shape[0], -1)[start:stop])
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return rows.to(dtype=torch.promote_types(rows.dtype, torch.float32), copy=True)
