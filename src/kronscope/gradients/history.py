r"""A training run's own gradients: what Adagrad's matrix :math:`H_T = \sum_{t \le T} g_t g_t^\top` is made of."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronscope.errors import DataError, LayerError, NonFiniteError, OptionError
from kronscope.gradients.atoms import DenseAtoms
from kronscope.gradients.disk_store import DiskStore
from kronscope.gradients.history_parts import (
    check_averaged,
    folder_of_process,
    keeper_of,
    open_store,
    resume_records,
    write_store,
)
from kronscope.gradients.history_weights import history_weights
from kronscope.gradients.optimizer_gradients import OptimizerGradients
from kronscope.gradients.storage import MemoryStore, Store, record_bytes, to_state
from kronscope.gradients.stream import GradientStream
from kronscope.support.callers import callers_level
from kronscope.support.checks import count
from kronscope.support.processes import ALONE, Processes, find_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GradientHistory"]

_CHUNK_BYTES = 64 << 20


class GradientHistory:
    """The gradients that an optimizer used, step by step.

    :meth:`attach` starts recording a training run, and :meth:`open` reads what an earlier run wrote to a folder.
    Recording happens before each step of the optimizer and changes neither the gradients nor the optimizer. Hand the
    history to :func:`kronscope.measure_history` to measure it.

    With several processes under torch.distributed, all have the same gradients after averaging, so each step is kept by
    one process only.

    Attributes:
        layers: Names of the recorded layers.
        steps: Training steps with a record, counted from 1 at :meth:`attach`.
        processes: The processes that share the records.
        total_steps: How many steps there were, recorded or not.
        every: One step in ``every`` is recorded.

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
        # the recorded steps of all processes; those of this one are the store's
        self._steps = list(steps)
        self.total_steps = total_steps
        self._handle: Any = None
        self._gradients: OptimizerGradients | None = None
        # how many records have been counted, and how many of them each process keeps
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
            path: A folder to write to; None keeps everything in memory.
            every: Record one step in ``every``; None records each step, or goes on as before when resuming.
            dtype: The type in which numbers are kept. ``float16`` halves the space, with one scale for each record.
                None keeps the parameter's type, but at least float32.
            space: The most bytes that the records may take on each process; None for no limit, or the same one when
                resuming. When they would take more, they are first converted to float16; then every second record is
                dropped and ``every`` doubles, as often as needed. Both are said in a warning. Measurements of such a
                thinned history have error bars.
            resume: Go on with the history in ``path``, if there is one. ``every``, ``dtype`` and ``space`` are as
                before unless they are given: a multiple of the old ``every`` drops the records between, and a narrower
                ``dtype`` converts the records that are there. When training goes back to a checkpoint, also call
                :meth:`load_state_dict` with the history's state from that checkpoint, which drops the records of later
                steps.
            distributed: None shares the records among all processes if torch.distributed is initialised; False records
                on this process alone; a process group shares among its members. Every process that shares must call
                this, and gradients must be averaged over the processes before the optimizer's step, as
                DistributedDataParallel and FSDP do.

        Returns:
            The history; it records until :meth:`detach`.

        Raises:
            LayerError: a layer does not exist, is no matrix, or is not trained by this optimizer.
            DataError: the folder holds a history already, is being written by another one, or cannot be written to.
            OptionError: an argument is out of range, or does not fit the history that is resumed.
            DistributedError: another process called this with other arguments, or did not call it.
        """
        if not isinstance(model, nn.Module):
            raise OptionError(
                f"attach takes an optimizer and a model, in this order; got {type(optimizer).__name__} and "
                f"{type(model).__name__}."
            )
        processes = find_processes(distributed)
        processes.barrier("GradientHistory.attach")
        every = None if every is None else count("every", every)
        if isinstance(space, float) and space.is_integer():
            space = int(space)  # 1e9 is how people write many bytes
        space = None if space is None else count("space in bytes", space)
        if dtype not in (None, torch.float16, torch.float32, torch.float64):
            raise OptionError(f"dtype must be float16, float32 or float64, got {dtype}.")
        gradients = OptimizerGradients(optimizer, model, layers)
        names, shapes = gradients.names, gradients.shapes
        dtypes = gradients.dtypes if dtype is None else [dtype] * len(names)
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
                folder = None if path is None else folder_of_process(Path(path), processes)
                store = write_store(names, shapes, dtypes, every or 1, folder, resume, space)
            steps, total = resume_records(store, processes, every, dtype) if isinstance(store, DiskStore) else ([], 0)
        except BaseException:
            # here or on another process; the folder must not stay locked
            if store is not None:
                store.close()
            raise
        history = cls(store, names, shapes, processes=processes, steps=steps, total_steps=total)
        history._gradients = gradients
        history._handle = gradients.before_each_step(history._record)
        return history

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, distributed: bool | ProcessGroup | None = None) -> GradientHistory:
        """Open a folder of records for reading.

        The run that wrote it may have been killed, and may have had any number of processes.

        Args:
            path: The folder.
            distributed: As for :meth:`attach`; each process reads its share.

        Returns:
            The history, which no longer records.

        Raises:
            DataError: there is no history in the folder, it is damaged, the records of a process are missing, or steps
                in between are missing, as when two runs wrote to it at once.
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
        """Stop recording; the records stay."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def close(self) -> None:
        """Stop recording and close the files, so that another history can resume from them."""
        self.detach()
        self._store.close()

    # ------------------------------------------------------------------ reading

    def shape(self, layer: str) -> tuple[int, int]:
        """Return the (m, n) of a layer."""
        self._index(layer)
        return self._shapes[layer]

    def read(self, layer: str, start: int, stop: int) -> Tensor:
        """Return the records ``start`` to ``stop - 1`` of a layer, (k, m, n), of those that this process keeps."""
        return self._store.read(self._index(layer), start, stop)

    def stream(self, layer: str, step: int | None = None, *, beta: float | None = None) -> GradientStream:
        r"""Return the recorded gradients up to a step as a stream.

        Args:
            layer: The layer's name.
            step: The last step to include; None takes all.
            beta: None gives Adagrad's sum (weights 1); a number gives the weights :math:`(1-\beta)\beta^{T-t}` of an
                exponential mean.

        Returns:
            The gradients; Adagrad's matrix is its :class:`~kronscope.SecondMoment`.

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
        # a record's sample number is its place among the records of all processes
        numbers = torch.searchsorted(torch.tensor(steps), torch.tensor(own, dtype=torch.int64))
        count = len(own)
        size = max(1, _CHUNK_BYTES // (4 * shape[0] * shape[1]))

        read = self._store.shared if isinstance(self._store, MemoryStore) else self._store.read
        checked: set[int] = set()

        def chunks() -> Iterator[DenseAtoms]:
            for at in range(0, count, size):
                stop = min(at + size, count)
                grads = read(index, at, stop)
                if at not in checked and not bool(torch.isfinite(grads).all()):
                    bad = (~torch.isfinite(grads).flatten(1).all(1)).nonzero().flatten()
                    raise NonFiniteError(
                        f"the gradient of {layer!r} at step {own[at + int(bad[0])]} contains NaN or infinity; "
                        "measure earlier steps, or train with gradients that are finite."
                    )
                checked.add(at)
                yield DenseAtoms(grads.unsqueeze(1), weights[numbers[at:stop]], numbers[at:stop])

        cheap = isinstance(self._store, MemoryStore) or self._store.dtypes[index] != torch.float16
        return GradientStream(
            chunks, shape, len(steps), 1, in_memory=cheap, processes=self.processes, own_samples=count
        )

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a training checkpoint must contain so that recording can be resumed from it.

        Records of a folder are on the disk when this returns, so that a checkpoint never counts on what a power failure
        would take away.

        For records on disk that is little, and the same on every process. For records in memory it is the records that
        this process keeps, so every process must save its own state and load it again.
        """
        self._store.sync()
        state = {**to_state(self._store, len(self.layers)), "total_steps": self.total_steps, "every": self.every}
        if self.processes.world_size > 1:
            state |= {"own steps": state["steps"], "steps": list(self._steps), "process": self.processes.rank}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a saved state; records of later steps are dropped.

        Args:
            state_dict: What :meth:`state_dict` returned.

        Raises:
            DataError: the files lack records of the state, or the state was saved by another process.
        """
        # steps after the checkpoint may have thinned the files, and would do so again
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
            shapes = [self._shapes[name] for name in self.layers]
            store = MemoryStore(shapes, dtypes, int(state_dict["every"]), self._store.space)
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
        self._store.note_step(self.total_steps)

    # ------------------------------------------------------------------ recording

    def _record(self) -> None:
        gradients = self._gradients
        assert gradients is not None
        if gradients.will_be_skipped():
            return
        self.total_steps += 1
        try:
            self._keep(gradients)
        except BaseException:
            # the optimizer does not take this step
            self.total_steps -= 1
            raise

    def _keep(self, gradients: OptimizerGradients) -> None:
        if self._is_due() and self._store.space is not None:
            self._make_room(self._store.space)
        if not self._is_due():
            self._store.note_step(self.total_steps)
            return
        own, first = self._is_own(self.total_steps), not self._steps
        # reading a sharded gradient takes all processes, and so does the comparison at the first record
        if own or first or gradients.sharded:
            grads = gradients.read()
            if first and self.processes.world_size > 1:
                check_averaged(self.processes, self.layers, grads)
            if own:
                self._store.append(self.total_steps, grads)
        if not own:
            self._store.note_step(self.total_steps)
        self._steps.append(self.total_steps)

    def _is_due(self) -> bool:
        return (self.total_steps - 1) % self.every == 0

    def _is_own(self, step: int) -> bool:
        return keeper_of(step, self.processes.world_size) == self.processes.rank

    def _most_records(self) -> int:
        """How many records the process with most of them keeps; the same number on all processes, for decisions."""
        known, counts = self._counted
        if known > len(self._steps) or known == 0:
            known, counts = 0, [0] * self.processes.world_size
        for step in self._steps[known:]:
            counts[keeper_of(step, self.processes.world_size)] += 1
        self._counted = len(self._steps), counts
        return max(counts)

    def _make_room(self, space: int) -> None:
        store = self._store
        shapes = [self._shapes[name] for name in self.layers]

        def needed() -> int:
            sizes = zip(shapes, store.dtypes, strict=True)
            return (self._most_records() + 1) * sum(record_bytes(shape, dtype) for shape, dtype in sizes)

        while needed() > space:
            if any(dtype != torch.float16 for dtype in store.dtypes):
                store.rewrite(range(len(store.steps)), [torch.float16] * len(shapes), self.every)
                self._warn(
                    f"the gradient history reached its space of {space} bytes: gradients are kept in float16 from now "
                    "on, with three digits each, and measurements are no longer exact."
                )
                continue
            every = 2 * self.every
            keep = [index for index, step in enumerate(store.steps) if (step - 1) % every == 0]
            store.rewrite(keep, store.dtypes, every)
            self.every = every
            self._steps = [step for step in self._steps if (step - 1) % every == 0]
            self._warn(
                f"the gradient history reached its space of {space} bytes: one step in {every} is kept from now on, "
                "and measurements will have error bars."
            )

    def _warn(self, text: str) -> None:
        if self.processes.rank == 0:
            warnings.warn(text, stacklevel=callers_level())

    def _index(self, layer: str) -> int:
        if layer not in self._shapes:
            raise LayerError(f"layer {layer!r} is not recorded; there are: {', '.join(self.layers)}.")
        return self.layers.index(layer)
