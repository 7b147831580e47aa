r"""A training run's own gradients: what Adagrad's matrix :math:`H_T = \sum_{t \le T} g_t g_t^\top` is made of."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronscope.errors import DataError, LayerError, NonFiniteError, OptionError
from kronscope.gradients.matrices import LayerSpec, resolve_layers, unwrap
from kronscope.gradients.spread import check_averaged, go_on, open_store, own_folder, owner, write_store
from kronscope.gradients.storage import DiskStore, MemoryStore, Store, record_bytes, to_state
from kronscope.gradients.stream import DenseAtoms, GradientStream
from kronscope.support.checks import count
from kronscope.support.processes import ALONE, Processes, find_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GradientHistory"]

_CHUNK_BYTES = 64 << 20


class GradientHistory:
    """Records the gradients that an optimizer is about to use, step by step.

    Made by :meth:`attach`, or by :meth:`open` from a folder that an earlier process wrote. Recording is a step
    pre-hook: it changes neither the gradients nor the optimizer. Measure with :func:`kronscope.measure_history`.

    Under torch.distributed the processes share the records: gradients are the same on all of them after averaging, and
    each step is kept by one.

    Attributes:
        layers: Names of the recorded layers.
        steps: Training steps with a record, counted from 1 at :meth:`attach`.
        processes: The processes that share the records.
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

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        *,
        processes: Processes = ALONE,
        steps: Sequence[int] = (),
        total_steps: int = 0,
    ) -> None:
        self._store = store
        self.processes = processes
        self.layers = tuple(names)
        self._shapes = dict(zip(names, shapes, strict=True))
        self.every = store.every
        # of all processes
        self._steps = list(steps)
        self.total_steps = total_steps
        self._space: int | None = None
        self._handle: Any = None
        self._take: Callable[[], list[Tensor]] | None = None
        self._gathers = False
        # records counted so far, and how many each process keeps
        self._counted: tuple[int, list[int]] = (0, [])

    @classmethod
    def attach(
        cls,
        optimizer: Optimizer,
        model: nn.Module,
        layers: Sequence[str] | str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int | None = None,
        dtype: torch.dtype | None = None,
        space: int | None = None,
        resume: bool = False,
        distributed: bool | ProcessGroup | None = None,
    ) -> GradientHistory:
        """Start recording.

        Args:
            optimizer: Any torch optimizer that steps the model's parameters.
            model: The model.
            layers: Names, globs, row ranges and stacks as for :func:`kronscope.measure`; None takes every matrix.
            path: A folder to write to instead of keeping everything in memory.
            every: Record every k-th step only; default all of them.
            dtype: ``float16`` halves the space (each record with a scale of its own); default the parameter's type.
            space: Bytes allowed. When they would be exceeded, records first go to half precision, then every second
                one is dropped and ``every`` doubles; measurements then have error bars.
            resume: Go on with the history in ``path`` if there is one, as a resumed training run does; a
                :meth:`load_state_dict` then drops what was recorded after the checkpoint. ``every`` and ``dtype`` are
                then those of the history. Others are for the whole of it: a multiple of its ``every`` drops the records
                between, and a narrower type converts them.
            distributed: With torch.distributed initialised, every process calls this and each keeps its share of the
                steps; the gradients must be averaged over processes before the optimizer's step, as
                DistributedDataParallel and FSDP do. None infers that, False records on this process alone, a process
                group shares among those in it.

        Raises:
            LayerError: a layer does not exist, is no matrix, or is not trained by this optimizer.
            DataError: the folder holds a history already, is being written by another one, or cannot be written to.
            OptionError: an argument is out of range, or does not fit the history that is gone on with.
            DistributedError: another process was called differently, or did not come.
        """
        processes = find_processes(distributed)
        processes.barrier("GradientHistory.attach")
        every = None if every is None else count("every", every)
        if isinstance(space, float) and space.is_integer():
            space = int(space)  # 1e9 is how people write many bytes
        space = None if space is None else count("space in bytes", space)
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
        asked = {"layers": list(zip(names, shapes, strict=True)), "every": every, "dtypes": dtypes, "space": space}
        processes.check_equal("GradientHistory.attach", {**asked, "path": path is not None, "resume": resume})
        store: Store | None = None
        try:
            with processes.failing_together():
                folder = None if path is None else own_folder(Path(path), processes)
                store = write_store(names, shapes, dtypes, every or 1, folder, resume)
            steps, total = go_on(store, processes, every, dtype) if isinstance(store, DiskStore) else ([], 0)
        except BaseException:
            # here or on another process; the folder must not stay locked
            if store is not None:
                store.close()
            raise
        history = cls(store, names, shapes, processes=processes, steps=steps, total_steps=total)
        history._space = space
        history._gathers = any(hasattr(parameters[name], "full_tensor") for spec in specs for name in spec.parameters)
        history._take = lambda: [_matrix(spec, parameters) for spec in specs]
        history._handle = optimizer.register_step_pre_hook(history._before_step)
        return history

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, distributed: bool | ProcessGroup | None = None) -> GradientHistory:
        """Open a folder of records, also one whose writer was killed, by however many processes it was written.

        Args:
            path: The folder.
            distributed: As for :meth:`attach`: each process reads its share.

        Raises:
            DataError: there is no history in the folder, it is damaged, a part of it is missing, or it is no even
                sample of the steps, as when two wrote it at once.
        """
        processes = find_processes(distributed)
        processes.barrier("GradientHistory.open")
        store, steps, total = open_store(Path(path), processes)
        return cls(store, store.names, store.shapes, processes=processes, steps=steps, total_steps=total)

    def __len__(self) -> int:
        """Number of records."""
        return len(self._steps)

    def __repr__(self) -> str:
        """Say what it holds."""
        return f"GradientHistory({len(self.layers)} layers, {len(self)} of {self.total_steps} steps)"

    @property
    def steps(self) -> tuple[int, ...]:
        """Training steps with a record."""
        return tuple(self._steps)

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
        """Stop recording, close the files, and let another history go on with them."""
        self.detach()
        self._store.close()

    # ------------------------------------------------------------------ reading

    def shape(self, layer: str) -> tuple[int, int]:
        """The (m, n) of a layer."""
        self._index(layer)
        return self._shapes[layer]

    def read(self, layer: str, start: int, stop: int) -> Tensor:
        """Return records number ``start`` to ``stop`` (k, m, n) of a layer, of those that this process keeps."""
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
        steps = [at for at in self._steps if step is None or at <= step]
        if not steps:
            raise DataError(
                f"nothing is recorded up to step {step}; the first record is {self.steps[:1] or 'missing'}."
            )
        weights = history_weights(torch.tensor(steps), self.total_steps if step is None else step, beta)
        shape = self._shapes[layer]
        own = [at for at in self._store.steps if step is None or at <= step]
        # where the own steps stand among all
        numbers = torch.searchsorted(torch.tensor(steps), torch.tensor(own, dtype=torch.int64))
        count = len(own)
        size = max(1, _CHUNK_BYTES // (4 * shape[0] * shape[1]))

        def chunks() -> Iterator[DenseAtoms]:
            for at in range(0, count, size):
                stop = min(at + size, count)
                grads = self._store.read(index, at, stop)
                if not bool(torch.isfinite(grads).all()):
                    bad = (~torch.isfinite(grads).flatten(1).all(1)).nonzero().flatten()
                    raise NonFiniteError(
                        f"the gradient of {layer!r} at step {own[at + int(bad[0])]} contains NaN or infinity; "
                        "measure earlier steps, or train with gradients that are finite."
                    )
                yield DenseAtoms(grads.unsqueeze(1), weights[numbers[at:stop]], numbers[at:stop])

        cheap = isinstance(self._store, MemoryStore) or self._store.dtypes[index] != torch.float16
        return GradientStream(
            chunks, shape, len(steps), 1, in_memory=cheap, processes=self.processes, own_samples=count
        )

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a training checkpoint needs to go on recording as if nothing had happened.

        Records on disk stay there, and the state is the same on every process. Of records in memory each process
        returns its own, and must load its own.
        """
        state = {**to_state(self._store, len(self.layers)), "total_steps": self.total_steps, "every": self.every}
        if self.processes.world_size > 1:
            state |= {"own steps": state["steps"], "steps": list(self._steps), "process": self.processes.rank}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a state; records written after it are dropped.

        Raises:
            DataError: the files lack records that the state had, or the state is of another process.
        """
        # what was recorded later may have thinned the records the state had, as it would again
        every = int(state_dict["every"])
        every = every if "grads" in state_dict else max(every, self._store.every)
        everything = [step for step in state_dict["steps"] if (step - 1) % every == 0]
        steps = [step for step in everything if self._is_own(step)]
        if "grads" in state_dict:
            if state_dict.get("own steps", everything) != steps:
                raise DataError(
                    "the history's state holds other steps than this process keeps: with records in memory every "
                    "process saves and loads a state of its own, among as many processes; or record to a path."
                )
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
            if every == self._store.every and steps == self._store.steps[: len(steps)]:
                self._store.keep_first(len(steps))
            else:
                self._store.rewrite([known[step] for step in steps], self._store.dtypes, every)
        self._steps, self._counted = everything, (0, [])
        self.total_steps, self.every = int(state_dict["total_steps"]), every
        self._store.saw(self.total_steps)

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
        if self._is_due() and self._space is not None:
            self._make_room(self._space)
        if not self._is_due() or self._take is None:
            self._store.saw(self.total_steps)
            return
        own = self._is_own(self.total_steps)
        with torch.no_grad():
            # gathering a sharded gradient takes all processes
            if own or self._gathers or not self._steps:
                grads = self._take()
                if isinstance(scale, Tensor):
                    grads = [grad / scale.to(grad) for grad in grads]
                if self.processes.world_size > 1 and not self._steps:
                    check_averaged(self.processes, self.layers, grads)
                if own:
                    self._store.append(self.total_steps, grads)
        if not own:
            self._store.saw(self.total_steps)
        self._steps.append(self.total_steps)

    def _is_due(self) -> bool:
        return (self.total_steps - 1) % self.every == 0

    def _is_own(self, step: int) -> bool:
        return owner(step, self.processes.world_size) == self.processes.rank

    def _most(self) -> int:
        """The most records that any process keeps: what decides must be the same on all of them."""
        known, counts = self._counted
        if known > len(self._steps) or known == 0:
            known, counts = 0, [0] * self.processes.world_size
        for step in self._steps[known:]:
            counts[owner(step, self.processes.world_size)] += 1
        self._counted = len(self._steps), counts
        return max(counts)

    def _make_room(self, space: int) -> None:
        store = self._store
        shapes = [self._shapes[name] for name in self.layers]

        def needed() -> int:
            sizes = zip(shapes, store.dtypes, strict=True)
            return (self._most() + 1) * sum(record_bytes(shape, dtype) for shape, dtype in sizes)

        while needed() > space:
            if any(dtype != torch.float16 for dtype in store.dtypes):
                store.rewrite(range(len(store.steps)), [torch.float16] * len(shapes), self.every)
                continue
            self.every *= 2
            keep = [index for index, step in enumerate(store.steps) if (step - 1) % self.every == 0]
            store.rewrite(keep, store.dtypes, self.every)
            self._steps = [step for step in self._steps if (step - 1) % self.every == 0]
            if self.processes.rank == 0:
                warnings.warn(
                    f"the gradient history reached its space: one step in {self.every} is kept from now on, and "
                    "measurements will have error bars.",
                    stacklevel=2,
                )

    def _index(self, layer: str) -> int:
        if layer not in self._shapes:
            raise LayerError(f"layer {layer!r} is not recorded; there are: {', '.join(self.layers)}.")
        return self.layers.index(layer)


def history_weights(steps: Tensor, last: int | Tensor, beta: float | None) -> Tensor:
    """Weights of the gradients at ``steps`` in what is held after step ``last``, or after one for each of them."""
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
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        whole = whole.to_dense() if whole.is_sparse else whole
        parts.append(whole.reshape(whole.shape[0], -1)[start:stop])
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return rows.to(dtype=torch.promote_types(rows.dtype, torch.float32), copy=True)
