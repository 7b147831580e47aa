"""From a model, a loss and data to one gradient stream per layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.errors import LayerError, NonFiniteError, OptionError
from kronscope.gradients.atoms import Atoms
from kronscope.gradients.chunk import ChunkCapture, check_finite
from kronscope.gradients.data import Batch, Batches, map_tensors, tensors_of
from kronscope.gradients.forward import Forward, ForwardFunction, common_device
from kronscope.gradients.guard import untouched
from kronscope.gradients.layer_plan import LayerPlan
from kronscope.gradients.losses import LABEL_MODES, Columns, Draws, LossFunction, read_loss
from kronscope.gradients.matrices import LayerSpec, check_plain, unwrap
from kronscope.gradients.probe import Route, Routes, choose_routes
from kronscope.gradients.stream import GradientStream
from kronscope.kron.devices import host_if_narrow
from kronscope.kron.workspace import give_back, work_bytes
from kronscope.support.processes import ALONE, Processes

__all__ = ["Recorder"]

BACKENDS = ("auto", "hooks", "func")
FORMS = ("auto", "factored", "dense")
_BLOWN_UP_RATIO = 8
_BLOWN_UP_BYTES = 4 << 20
# Bytes of the outputs, in float64, that are looked at together.
_OUTPUT_BYTES = 64 << 20
# Numbers in the outputs that are looked at before choosing columns: more samples than these are a sample of them.
_OUTPUT_NUMBERS = 1 << 26


@dataclass(frozen=True)
class _Request:
    """What one sweep has to deliver."""

    specs: tuple[LayerSpec, ...]
    labels: str
    draws: int
    seed: int
    form: str
    fixed: int = 0

    def columns(self, exact: int) -> int:
        """Columns of each sample, where exact labels need ``exact`` of them."""
        counts = {"exact": exact, "sampled": self.draws, "mixed": self.fixed + self.draws, "real": 1}
        return counts[self.labels]


class Recorder:
    """Captures the gradient of every sample for chosen layers, as one :class:`~kronscope.GradientStream` per layer.

    Making a recorder reads the data once, to count and check it, and tries out on a few samples how the gradients of
    each layer can be captured. The model runs in eval mode and is left exactly as it was.

    Args:
        model: The model.
        loss: A module or function ``(outputs, targets) -> number``, as for :func:`kronscope.measure`.
        data: Pairs ``(inputs, targets)``, first dimension = samples, that can be iterated several times.
        specs: The layers, from :func:`~kronscope.gradients.matrices.resolve_layers`.
        forward: ``(model, inputs) -> logits`` for models with their own conventions.
        max_samples: Use only the first samples.
        seed: For the labels drawn with ``labels="sampled"``.
        backend: ``"hooks"`` (from inputs and output gradients of each layer), ``"func"`` (``torch.func``), or
            ``"auto"``: the first of these that gives the right gradients.
        chunk_bytes: Atoms of one chunk stay below this (but a chunk has at least one sample).
        progress: Called with the samples done and the samples in all, during every pass over the data.
        skip_unreached: Leave out layers that the loss does not reach (listed in ``unreached``) instead of raising.
        processes: The processes whose data together is the data, in the order of ranks.

    Attributes:
        num_samples: Samples in the data, of all processes.
        own_samples: Samples in the data of this process.
        most_samples: Samples of the process that has most.
        processes: The processes.
        classes: Classes of cross-entropy, otherwise outputs per sample.
        exact_columns: Columns per sample that exact labels need.
        specs: The layers that are captured.
        unreached: Names of layers that were left out.
        doubt: Why another loss may be meant, if so.

    Raises:
        DataError: The data cannot be used.
        LayerError: The loss does not reach a layer.
        ModelError: The model mixes samples, or cannot be differentiated.
        OptionError: An option of the loss or an argument cannot be honoured.

    >>> from kronscope.gradients.matrices import resolve_layers
    >>> model = nn.Linear(3, 4)
    >>> data = [(torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0]))]
    >>> recorder = Recorder(model, nn.CrossEntropyLoss(), data, resolve_layers(model))
    >>> recorder.streams("exact")["weight"]
    GradientStream(4x3, 5 samples, 3 columns)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        data: Iterable[Any],
        specs: Sequence[LayerSpec],
        forward: ForwardFunction | None = None,
        max_samples: int | None = None,
        seed: int = 0,
        backend: str = "auto",
        chunk_bytes: int = 64 << 20,
        progress: Callable[[int, int], None] | None = None,
        skip_unreached: bool = False,
        processes: Processes = ALONE,
    ) -> None:
        if backend not in BACKENDS:
            raise OptionError(f"backend must be one of {BACKENDS}, got {backend!r}.")
        if chunk_bytes < 1:
            raise OptionError(f"chunk_bytes must be positive, got {chunk_bytes}.")
        self._loss = read_loss(loss)
        self._model = unwrap(model)
        self._forward = Forward(self._model, forward)
        self._device = common_device(self._model)
        self._seed, self._chunk_bytes, self._progress = seed, chunk_bytes, progress
        named = dict(self._model.named_parameters(remove_duplicate=False))
        self._parameters = {name: named[name] for spec in specs for name in spec.parameters}
        for name, parameter in self._parameters.items():
            check_plain(name, parameter)
        self._probe_batch: Batch | None = None
        self._terms = 1
        self.processes = processes
        with processes.failing_together():
            self._batches = Batches(data, self._limit(max_samples), self._note)
        self.own_samples: int = self._batches.num_samples
        counts = processes.all_gather_object((self.own_samples, self._terms))
        # samples are numbered over all processes
        self._batches.first = sum(count for count, _ in counts[: processes.rank])
        self.num_samples: int = sum(count for count, _ in counts)
        self.most_samples: int = max(count for count, _ in counts)
        self._terms = max(terms for _, terms in counts)
        # all try the back ends on samples of rank 0, so that they choose alike
        probe = self._probe_batch
        assert probe is not None
        plain = Batch(map_tensors(lambda t: t.detach().cpu(), probe.inputs), probe.targets.detach().cpu(), probe.first)
        self._probe_batch = processes.broadcast_object(plain)
        self._probe_size: int = _entries_per_sample(self._probe_batch)
        self._routes: Routes = self._choose(specs, backend, skip_unreached)
        self.doubt: str = self._loss.doubt(self._probe_batch.targets)
        self.unreached: tuple[str, ...] = tuple(self._routes.unreached)
        self.specs: tuple[LayerSpec, ...] = tuple(spec for spec in specs if spec.name in self._routes.by_layer)
        outputs = self._routes.outputs
        self.classes: int = outputs[1] if len(outputs) > 1 else 1
        self.exact_columns: int = self._loss.exact_columns(outputs, self._terms)
        self._probe_batch = None

    def _limit(self, max_samples: int | None) -> int | None:
        """What this process may take of ``max_samples``."""
        if max_samples is None or max_samples < 1:
            return max_samples
        if max_samples < self.processes.world_size:
            raise OptionError(
                f"max_samples={max_samples} is divided over {self.processes.world_size} processes; each needs one at "
                "least."
            )
        share = self.processes.share_of(max_samples)
        return share.stop - share.start  # len() ends at the machine's largest number

    def remainders(self, most: int) -> Tensor:
        """Say how much of the output Hessians remains when the largest exact columns are taken out.

        Args:
            most: The largest number of columns to take out.

        Returns:
            For each r from 0 to ``most`` the sum over samples of the squared trace that remains without r columns; over
            some of the samples, where the outputs are very many numbers.
        """
        left = torch.zeros(most + 1, dtype=torch.float64)
        numbers = math.prod(self._routes.outputs[1:])
        stride = max(1, self.num_samples * numbers // _OUTPUT_NUMBERS)

        def own() -> tuple[Tensor]:
            count = 0
            for batch in self._batches:
                step = max(1, work_bytes(_OUTPUT_BYTES) // 8 // max(1, numbers))
                for start in range(0, batch.size, step):
                    count += 1
                    if (count - 1) % stride:
                        continue
                    chunk = batch.take(slice(start, min(start + step, batch.size))).to(self._device)
                    with untouched(self._model, self._parameters.values()), torch.no_grad():
                        outputs = self._forward.outputs(chunk)
                        self._check_outputs(outputs, chunk)
                    place = host_if_narrow(outputs.device)
                    sizes = self._loss.column_sizes(outputs.to(place), chunk.targets.to(place))
                    taken = sizes.topk(min(most, sizes.shape[1]), dim=1).values.cumsum(1)
                    rest = (sizes.sum(1, keepdim=True) - taken).clamp_min(0.0).square().sum(0).cpu()
                    left[0] += float(sizes.sum(1).square().sum())
                    left[1 : 1 + len(rest)] += rest
            return (left,)

        return self.processes.all_reduce(own, [left.shape])[0]

    def plan(self, labels: str = "exact", draws: int = 1, form: str = "auto", fixed: int = 0) -> list[LayerPlan]:
        """Say for every layer how it would be captured and how large its gradients are, without capturing."""
        request = self._request(labels, draws, None, form, None, fixed)
        return [self._plan(spec, request) for spec in self.specs]

    def streams(
        self,
        labels: str = "exact",
        draws: int = 1,
        names: Sequence[str] | None = None,
        cache: bool = True,
        form: str = "auto",
        seed: int | None = None,
        fixed: int = 0,
    ) -> dict[str, GradientStream]:
        """Capture gradients, one stream per layer.

        Args:
            labels: ``"exact"``, ``"sampled"``, ``"mixed"`` or ``"real"``.
            draws: Draws per sample for ``"sampled"`` and ``"mixed"``.
            names: The layers; ``None`` for all.
            cache: True makes one pass over the data now and keeps the gradients of all layers in memory; False makes
                one pass for each layer whenever its stream is iterated.
            form: ``"factored"`` (where the layer has that form), ``"dense"``, or ``"auto"``: factored unless that takes
                much more memory.
            seed: To draw labels with another seed than the recorder's.
            fixed: Exact columns before the draws for ``"mixed"``.

        Returns:
            A stream for every layer, with weights 1/N.

        Raises:
            LabelError: Labels do not fit the outputs.
            NonFiniteError: NaN or infinity in outputs, activations or gradients.
            DataError: The data changed since the first sweep.
        """
        request = self._request(labels, draws, names, form, seed, fixed)
        columns, mixed = request.columns(self.exact_columns), draws if labels == "mixed" else 0
        kept: dict[str, list[Atoms]] = {spec.name: [] for spec in request.specs}
        if cache:
            with self.processes.failing_together():
                for atoms in self._sweep(request):
                    for name, chunk in atoms.items():
                        kept[name].append(chunk)
        streams = {}
        drawn, processes = labels == "sampled", self.processes
        whole = (self.num_samples, columns)
        for spec in request.specs:
            if cache:
                chunks = kept.pop(spec.name)
                streams[spec.name] = GradientStream.of_chunks(
                    *chunks, draws=drawn, random_columns=mixed, processes=processes, whole=whole
                )
                continue
            streams[spec.name] = GradientStream(
                self._source(spec, request),
                spec.shape,
                self.num_samples,
                columns,
                draws=drawn,
                random_columns=mixed,
                processes=processes,
                own_samples=self.own_samples,
            )
        return streams

    def _request(
        self, labels: str, draws: int, names: Sequence[str] | None, form: str, seed: int | None, fixed: int
    ) -> _Request:
        if labels not in LABEL_MODES:
            raise OptionError(f"labels must be one of {LABEL_MODES}, got {labels!r}.")
        if form not in FORMS:
            raise OptionError(f"form must be one of {FORMS}, got {form!r}.")
        if draws < 1:
            raise OptionError(f"draws must be at least 1, got {draws}.")
        known = {spec.name: spec for spec in self.specs}
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise LayerError(f"Layer {unknown[0]!r} is not among the recorded ones: {', '.join(known)}.")
        specs = self.specs if names is None else tuple(known[name] for name in dict.fromkeys(names))
        return _Request(specs, labels, draws, self._seed if seed is None else seed, form, fixed)

    def _source(self, spec: LayerSpec, request: _Request) -> Callable[[], Iterator[Atoms]]:
        alone = replace(request, specs=(spec,))
        return lambda: (atoms[spec.name] for atoms in self._sweep(alone))

    def _note(self, batch: Batch) -> None:
        """Remember the first batch with enough samples to try on, and the most terms a sample has."""
        self._terms = max(self._terms, self._loss.terms(batch.targets))
        best = self._probe_batch
        if best is None or best.size < min(batch.size, 3):
            self._probe_batch = batch.take(slice(0, 64))

    def _choose(self, specs: Sequence[LayerSpec], backend: str, skip_unreached: bool) -> Routes:
        assert self._probe_batch is not None
        with self.processes.failing_together(), untouched(self._model, self._parameters.values()):
            batch = self._probe_batch.to(self._device)
            self._loss.check(self._forward.outputs(batch), batch.targets)
            routes = choose_routes(self._forward, specs, self._parameters, batch, backend)
        if routes.unreached and routes.depends_on_data:
            for name in self._reached_later([spec for spec in specs if spec.name in routes.unreached]):
                routes.by_layer[name] = Route("loop", "only some samples reach it")
                routes.unreached.remove(name)
        if routes.unreached and not skip_unreached:
            raise LayerError(
                f"The loss does not depend on {', '.join(map(repr, routes.unreached))}: no gradient reaches it from "
                "the model's outputs. Leave it out of layers, or return the outputs that use it (forward=...)."
            )
        if not routes.by_layer:
            raise LayerError("The loss reaches none of the layers.")
        return routes

    def _reached_later(self, specs: Sequence[LayerSpec]) -> set[str]:
        """Which layers any batch reaches; only a model with branches needs the whole data to answer."""
        own = {name: self._parameters[name] for spec in specs for name in spec.parameters}
        reached: set[str] = set()
        with self.processes.failing_together():
            for batch in self._batches:
                with untouched(self._model, own.values()):
                    outputs = self._forward.outputs(batch.to(self._device))
                    if outputs.requires_grad:
                        found: tuple[Tensor | None, ...] = torch.autograd.grad(
                            outputs, list(own.values()), torch.ones_like(outputs), allow_unused=True
                        )
                        reached |= {name for name, grad in zip(own, found, strict=True) if grad is not None}
        reached = set().union(*self.processes.all_gather_object(reached))
        return {spec.name for spec in specs if reached.intersection(spec.parameters)}

    def _plan(self, spec: LayerSpec, request: _Request, columns: int | None = None) -> LayerPlan:
        """The plan for a whole request, or with another number of columns but in the same form."""
        route, (m, n), size = self._routes.by_layer[spec.name], spec.shape, self._dtype(spec).itemsize

        def both(count: int) -> tuple[int | None, int]:
            factors = None if route.sizes is None else route.sizes.entries(spec.shape, count) * size
            return factors, count * m * n * size

        most = request.columns(self.exact_columns)
        factored, dense = both(most)
        # Whole gradients serve everything but K-FAC; they win where many positions or groups blow the factors up.
        blown_up = factored is not None and factored > _BLOWN_UP_RATIO * dense and factored > _BLOWN_UP_BYTES
        if factored is None:
            form = "dense"
        elif request.form == "auto":
            form = "dense" if blown_up else "factored"
        else:
            form = request.form
        reason = route.reason
        if blown_up and request.form == "auto":
            reason += "; dense, because its factors would be much larger than its gradients"
        if columns is not None:
            factored, dense = both(columns)
        positions = route.sizes.positions if route.sizes is not None else 0
        return LayerPlan(
            spec.name, spec.shape, route.backend, reason, form, columns or most, positions, factored, dense
        )

    def _dtype(self, spec: LayerSpec) -> torch.dtype:
        dtype = torch.float32
        for name in spec.parameters:
            dtype = torch.promote_types(dtype, self._parameters[name].dtype)
        return dtype

    def _sweep(self, request: _Request) -> Iterator[dict[str, Atoms]]:
        done = 0
        for number, batch in enumerate(self._batches):
            plans = {plan.name: plan for plan in self._plans_for(batch, request)}
            step = self._chunk_size(batch, plans.values(), request.labels)
            for start in range(0, batch.size, step):
                chunk = batch.take(slice(start, min(start + step, batch.size)))
                # Batches 0, 1, 3, 7, ...: enough to notice samples that lie elsewhere, depending on the data.
                checked = start == 0 and number & (number + 1) == 0
                yield self._capture(chunk, request, plans, checked)
                give_back()
                done += chunk.size
                if self._progress is not None:
                    self._progress(done, self.own_samples)

    def _chunk_size(self, batch: Batch, plans: Iterable[LayerPlan], labels: str) -> int:
        """Samples per chunk; longer sequences than the probe's have more positions."""
        growth = max(1.0, _entries_per_sample(batch) / self._probe_size)
        needed = 0.0
        for plan in plans:
            # vmap returns all columns before they are stacked, hence twice the memory
            needed += plan.bytes * (2 if plan.backend == "func" else growth)
            sizes = self._routes.by_layer[plan.name].sizes
            if sizes is not None:
                # while atoms are made of windows, those are there too: often far more than the atoms themselves
                needed += growth * 4 * sizes.windows
        if labels in ("exact", "mixed"):
            needed += self._loss.kept_bytes(self._routes.outputs)
        return max(1, int(self._chunk_bytes / max(needed, 1)))

    def _plans_for(self, batch: Batch, request: _Request) -> list[LayerPlan]:
        columns = request.columns(self._loss.exact_columns(self._routes.outputs, self._loss.terms(batch.targets)))
        return [self._plan(spec, request, columns) for spec in request.specs]

    def _capture(self, chunk: Batch, request: _Request, plans: dict[str, LayerPlan], checked: bool) -> dict[str, Atoms]:
        own = {name: self._parameters[name] for spec in request.specs for name in spec.parameters}
        parts: dict[str, dict[LayerSpec, tuple[str, torch.dtype]]] = {"hooks": {}, "func": {}, "loop": {}}
        for spec in request.specs:
            parts[plans[spec.name].backend][spec] = (plans[spec.name].form, self._dtype(spec))
        watched = [name for spec in parts["hooks"] for name in spec.parameters]
        with untouched(self._model, own.values()):
            chunk = chunk.to(self._device)
            captured = ChunkCapture(self._forward, self._routes, chunk, own, watched, 1 / self.num_samples)
            columns = self._columns(captured.outputs, chunk, request)
            for spec in captured.misfits(parts["hooks"]):
                parts["loop"][spec] = parts["hooks"].pop(spec)
            atoms = {
                **captured.by_hooks(parts["hooks"], columns),
                **captured.by_func(parts["func"], columns),
                **captured.by_loop(parts["loop"], columns),
            }
            for spec in request.specs:
                check_finite(atoms[spec.name], spec.name, chunk.describe())
            fast = [*parts["hooks"], *parts["func"]]
            if fast and chunk.size > 1 and (checked or self._routes.depends_on_data):
                captured.spot_check(fast, atoms, columns)
        return {name: chunk.to(host_if_narrow(captured.outputs.device)) for name, chunk in atoms.items()}

    def _check_outputs(self, outputs: Tensor, chunk: Batch) -> None:
        if not bool(torch.isfinite(outputs).all()):
            raise NonFiniteError(
                f"The model's outputs for samples {chunk.describe()} contain NaN or infinity; "
                "check these samples and the parameters."
            )
        self._loss.check(outputs, chunk.targets)

    def _columns(self, outputs: Tensor, chunk: Batch, request: _Request) -> Columns:
        self._check_outputs(outputs, chunk)
        # their numbers are float64
        place = host_if_narrow(outputs.device)
        outputs, chunk = outputs.to(place), chunk.to(place)
        if request.labels == "exact":
            return self._loss.exact(outputs, chunk.targets)
        if request.labels == "real":
            return self._loss.real(outputs, chunk.targets)
        draws = Draws(request.seed, chunk.samples, request.draws, request.fixed)
        if request.labels == "mixed":
            return self._loss.mixed(outputs, chunk.targets, draws)
        return self._loss.sampled(outputs, chunk.targets, draws)


def _entries_per_sample(batch: Batch) -> int:
    return max(1, sum(tensor.numel() for tensor in tensors_of(batch.inputs)) // batch.size)
