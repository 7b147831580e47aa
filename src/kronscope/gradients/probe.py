"""Deciding, on a few samples and never by assumption, how each layer is captured.

A sample alone, by plain autograd, is the reference. Compared with it are: the outputs of the same sample in a batch (do
samples mix?), the gradient put together from the uses seen (are all uses seen, is it known where their samples are?),
and the gradient by ``torch.func``. What does not agree is not used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kronscope.errors import ModelError, NonFiniteError
from kronscope.gradients.assemble import DenseAssembler, FactoredAssembler, Sizes, parts_of
from kronscope.gradients.atoms import Atoms, FactoredAtoms
from kronscope.gradients.coverage import used_otherwise
from kronscope.gradients.data import Batch
from kronscope.gradients.forward import Forward
from kronscope.gradients.functional import gradients_alone, gradients_vmapped
from kronscope.gradients.interception import UseRecorder
from kronscope.gradients.matrices import LayerSpec
from kronscope.gradients.sample_axes import SampleAxis, candidate_axes, fitting_axes
from kronscope.gradients.uses import ConvUse, Use
from kronscope.kron.devices import wide
from kronscope.kron.workspace import work_bytes

__all__ = ["Route", "Routes", "UseKey", "agree", "choose_routes", "leading_shape", "matches"]

# What rounding may do to a deep model's outputs and gradients, relative to their norms. Samples sought along a wrong
# axis, a missed use or a mixing layer are off by a sizeable part of the norm itself. (Models in float64 may well take a
# softmax in float32.)
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
# Bytes of factors, and of the windows of a convolution, that are made to try samples on.
_CHECK_BYTES = 64 << 20
# Outputs of a sample with more numbers than this are many terms, and are tried on fewer samples.
_LARGE_OUTPUT = 1 << 17
UseKey = tuple[str, int]


@dataclass(frozen=True)
class Route:
    """How one layer is captured.

    Attributes:
        backend: ``"hooks"`` (inputs and output gradients), ``"func"`` (``torch.func``) or ``"loop"`` (one by one).
        reason: Why.
        sizes: Of the factored form, for ``"hooks"``.
    """

    backend: str
    reason: str
    sizes: Sizes | None = None


@dataclass
class Routes:
    """How all layers are captured.

    Attributes:
        by_layer: One route for every layer that the outputs depend on.
        axes: Where the samples lie, by parameter and use.
        expanded: Uses whose output must get a sample dimension.
        unreached: Layers on which the outputs of the probe samples do not depend.
        outputs: The shape of the outputs for the probe batch.
        dtype: The coarsest type that takes part in the computation.
        depends_on_data: Whether the model looks at values to decide what to compute, so that samples may lie elsewhere.
    """

    by_layer: dict[str, Route] = field(default_factory=dict)
    axes: dict[UseKey, SampleAxis] = field(default_factory=dict)
    expanded: frozenset[UseKey] = frozenset()
    unreached: list[str] = field(default_factory=list)
    outputs: torch.Size = field(default_factory=torch.Size)
    dtype: torch.dtype = torch.float32
    depends_on_data: bool = False


def agree(actual: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 0.0, lenience: float = 1.0) -> bool:
    """Whether two tensors are equal up to the rounding of ``dtype``.

    Args:
        actual: One tensor.
        expected: The other.
        dtype: The type in which both were computed.
        scale: The size of the terms that were summed; where they cancel, rounding is relative to it.
        lenience: A factor on the tolerance.
    """
    actual = actual.detach()
    expected = expected.detach().to(actual)
    error = float(torch.linalg.vector_norm(actual - expected))
    allowed = min(lenience * _TOLERANCE[dtype], 0.5) * float(torch.linalg.vector_norm(expected))
    return error <= allowed + 50 * torch.finfo(dtype).eps * scale


@dataclass(frozen=True)
class _Reference:
    """A few samples, and what plain autograd says about some of them alone."""

    batch: Batch
    picks: tuple[int, ...]
    vectors: Tensor
    outputs: Tensor
    dtype: torch.dtype
    grads: tuple[dict[str, Tensor | None], ...]

    @classmethod
    def of(cls, forward: Forward, batch: Batch, parameters: Mapping[str, Tensor], picks: Collection[int]) -> _Reference:
        # Not under no_grad: a model may take derivatives itself.
        outputs = forward.outputs(batch).detach()
        if not bool(torch.isfinite(outputs).all()):
            raise NonFiniteError(
                "The model's outputs for the first samples contain NaN or infinity; check the data and the parameters."
            )
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
        dtype = forward.precision(outputs)
        grads: list[dict[str, Tensor | None]] = []
        for pick in picks:
            alone = batch.take(slice(pick, pick + 1))
            try:
                output = forward.outputs(alone).detach()
            except (RuntimeError, ValueError, IndexError) as error:
                raise ModelError(f"{_mixing_message(forward, batch, outputs)} (Alone it failed: {error})") from error
            if output.shape[1:] != outputs.shape[1:] or not agree(output[0], outputs[pick], dtype):
                raise ModelError(_mixing_message(forward, batch, outputs))
            try:
                grads += gradients_alone(forward, alone, parameters, [vectors[pick : pick + 1]])
            except RuntimeError as error:
                raise ModelError(f"Autograd cannot differentiate the model: {error}") from error
        return cls(batch, tuple(picks), vectors, outputs, dtype, tuple(grads))

    def reached(self, name: str) -> bool:
        return any(grads[name] is not None for grads in self.grads)

    def gradient(self, spec: LayerSpec, index: int, parameters: Mapping[str, Tensor]) -> Tensor:
        found = {name: self.grads[index][name] for name in spec.parameters}
        return spec.gather({k: torch.zeros_like(parameters[k]) if g is None else g for k, g in found.items()})


def choose_routes(
    forward: Forward, specs: Sequence[LayerSpec], parameters: Mapping[str, nn.Parameter], batch: Batch, backend: str
) -> Routes:
    """Try the back ends on samples of a batch and choose one for every layer.

    Args:
        forward: The model, in eval mode and with the parameters requiring gradients.
        specs: The layers.
        parameters: Their parameters by name.
        batch: Samples to try on; more of them make the check stronger.
        backend: ``"auto"``, ``"hooks"`` (raise where it cannot be used) or ``"func"``.

    Raises:
        ModelError: The model mixes samples, or a back end that was demanded cannot be used.
        NonFiniteError: NaN or infinity in the outputs.
    """
    # Three samples at first: few sizes are divisible by 3 by accident. Then others, to tell apart what is left.
    spread = torch.linspace(0, batch.size - 1, min(batch.size, 11)).long().unique()
    few = batch.take(spread[:3])
    references = [_Reference.of(forward, few, parameters, sorted({0, few.size - 1}))]
    routes = Routes(outputs=references[0].outputs.shape, dtype=references[0].dtype)
    uses, _ = _record(forward, parameters, references[0], routes, ())
    sizes = [use.positions(few.size) * use.window_size for use in uses if isinstance(use, ConvUse)]
    large = references[0].outputs[0].numel() > _LARGE_OUTPUT
    number = 2 if large else max(2, work_bytes(_CHECK_BYTES) // (4 * max(sizes, default=1)))
    del uses
    more = batch.take(spread[3 : 3 + number])
    if more.size > 1:
        references.append(_Reference.of(forward, more, parameters, [more.size // 2]))
    used = {name for reference in references for name in parameters if reference.reached(name)}
    routes.unreached = [spec.name for spec in specs if not used.intersection(spec.parameters)]
    open_specs = [spec for spec in specs if spec.name not in routes.unreached]
    reasons = dict.fromkeys((spec.name for spec in open_specs), "asked for")
    if open_specs and backend != "func":
        reasons = _try_hooks(forward, open_specs, parameters, references, routes)
    rest = [spec for spec in open_specs if spec.name not in routes.by_layer]
    if rest and backend == "hooks":
        spec = rest[0]
        raise ModelError(f"backend='hooks' cannot capture layer {spec.name!r}: {reasons[spec.name]}.")
    if rest:
        needed = {name: parameters[name] for spec in rest for name in spec.parameters}
        obstacle = _vmap_obstacle(forward, rest, needed, references[0])
        for spec in rest:
            if obstacle is None:
                routes.by_layer[spec.name] = Route("func", reasons[spec.name])
            else:
                routes.by_layer[spec.name] = Route("loop", f"{reasons[spec.name]}; {obstacle}")
    return routes


def _try_hooks(
    forward: Forward,
    specs: Sequence[LayerSpec],
    parameters: Mapping[str, Tensor],
    references: Sequence[_Reference],
    routes: Routes,
) -> dict[str, str]:
    """Fill in the routes of layers whose uses are all seen and understood; say why not for the others."""
    candidates: dict[UseKey, list[SampleAxis]] = {}
    for reference in references:
        uses, outputs = _record(forward, parameters, reference, routes, routes.expanded)
        _narrow(candidates, uses, outputs, reference)
        lost = {key for key, axes in candidates.items() if not axes}
        if reference is references[0] and lost:
            # The output of such a use is the same for all samples; give it a sample dimension and look again.
            try:
                uses, outputs = _record(forward, parameters, reference, routes, lost)
                again = {key: axes for key, axes in candidates.items() if axes}
                _narrow(again, uses, outputs, reference)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            if agree(outputs, reference.outputs, reference.dtype):
                routes.expanded = frozenset(key for key in lost if again.get(key))
                candidates = (
                    again
                    if routes.expanded == lost
                    else {key: again[key] if key in routes.expanded else axes for key, axes in candidates.items()}
                )
    routes.axes = {key: axes[0] for key, axes in candidates.items() if axes}
    reasons: dict[str, str] = {}
    for reference in references:
        uses, outputs = _record(forward, parameters, reference, routes, routes.expanded)
        edges = [use.place.edge for use in uses]
        seen = edges and outputs.requires_grad
        needed = {name: parameters[name] for spec in specs for name in spec.parameters}
        otherwise = used_otherwise(outputs, uses, needed)
        grads = torch.autograd.grad(outputs, edges, reference.vectors, allow_unused=True) if seen else ()
        for spec in specs:
            if spec.name not in reasons:
                problem = _hooks_obstacle(spec, uses, grads, parameters, reference, routes)
                if problem is None and otherwise.intersection(spec.parameters):
                    problem = "the outputs depend on it in another way than by the uses seen, too"
                if problem is not None:
                    reasons[spec.name] = problem
                    routes.by_layer.pop(spec.name, None)
    return reasons


def _record(
    forward: Forward,
    parameters: Mapping[str, Tensor],
    reference: _Reference,
    routes: Routes,
    expanded: Collection[UseKey],
) -> tuple[list[Use], Tensor]:
    with UseRecorder(parameters, reference.batch.size, expanded) as recorder:
        outputs = forward.outputs(reference.batch)
    routes.depends_on_data |= recorder.depends_on_data
    return recorder.uses, outputs


def _narrow(
    candidates: dict[UseKey, list[SampleAxis]], uses: Sequence[Use], outputs: Tensor, reference: _Reference
) -> None:
    """Keep for every use the axes under which pulling back one sample's outputs reaches that sample's positions."""
    if not uses or not outputs.requires_grad:
        return
    samples = reference.batch.size
    picks = range(samples) if samples <= 3 else (0, samples // 2, samples - 1)
    masses: list[list[Tensor]] = [[] for _ in uses]
    for pick in picks:
        vectors = torch.zeros_like(reference.vectors)
        vectors[pick] = reference.vectors[pick]
        edges = [use.place.edge for use in uses]
        grads = torch.autograd.grad(outputs, edges, vectors, retain_graph=True, allow_unused=True)
        found: tuple[Tensor | None, ...] = grads
        for mass, use, grad in zip(masses, uses, found, strict=True):
            leading = leading_shape(use)
            if grad is None or not grad.numel():
                mass.append(torch.zeros(leading))
            else:
                mass.append(wide(grad.abs()).reshape(*leading, -1).sum(-1).cpu())
    for mass, use in zip(masses, uses, strict=True):
        key = (use.place.parameter, use.place.ordinal)
        known = candidates.get(key)
        if known is None:
            known = candidate_axes(leading_shape(use), samples)
        tolerance = 10 * torch.finfo(reference.dtype).eps
        candidates[key] = fitting_axes(known, torch.stack(mass), picks, samples, tolerance)


def leading_shape(use: Use) -> torch.Size:
    """The sizes of the dimensions of a use's output that may hold the samples."""
    if isinstance(use, ConvUse) and use.place.inputs.dim() == len(use.kernel) + 1:
        return torch.Size((1,))
    return use.place.shape[: use.sample_dims()]


def _hooks_obstacle(
    spec: LayerSpec,
    uses: Sequence[Use],
    grads: Sequence[Tensor | None],
    parameters: Mapping[str, Tensor],
    reference: _Reference,
    routes: Routes,
) -> str | None:
    """Why a layer cannot be put together from its uses; None (and a route) if it can."""
    own = [
        use
        for use in uses
        if any(True for _ in spec.overlaps(use.place.parameter, use.place.start, use.place.start + use.place.rows))
    ]
    if not own or not grads:
        return "no linear map, convolution or table lookup uses it directly"
    samples = reference.batch.size
    for use in own:
        axis = routes.axes.get((use.place.parameter, use.place.ordinal))
        if axis is None or not axis.fits(leading_shape(use), samples):
            return "the positions of a use cannot be assigned to samples"
        if use.place.overwritten:
            return "the input of a use is overwritten later in the forward pass"
    parts = parts_of(spec, uses, routes.axes)
    sizes = Sizes.of(parts, samples)
    dtype = torch.promote_types(parameters[spec.parameters[0]].dtype, torch.float32)
    small = 4 * sizes.entries(spec.shape, 1) * samples <= work_bytes(_CHECK_BYTES)
    assembler = (FactoredAssembler if small else DenseAssembler)(spec, parts, samples, 1, dtype)
    assembler.add(0, grads)
    atoms = assembler.finish(torch.ones(samples), torch.arange(samples))
    for index, pick in enumerate(reference.picks):
        expected = reference.gradient(spec, index, parameters)
        if not matches(atoms, pick, expected, reference.dtype):
            return "the uses seen do not add up to its gradient"
    names = sorted({type(use).__name__.removesuffix("Use").lower() for use in own})
    routes.by_layer[spec.name] = Route("hooks", f"all its uses are seen ({', '.join(names)})", sizes)
    return None


def matches(
    atoms: Atoms, index: int, expected: Tensor, dtype: torch.dtype, mix: Tensor | None = None, lenience: float = 1.0
) -> bool:
    """Whether a sample's atoms, mixed over columns (default: the only one), are the expected gradient."""
    one = atoms.part(index, index + 1)
    scale = 0.0
    if isinstance(one, FactoredAtoms):
        norms = [float(torch.linalg.vector_norm(factor)) for factor in (one.row_factors, one.col_factors)]
        scale = norms[0] * norms[1]
    grads = one.dense().grads[0]
    mixed = grads.sum(0) if mix is None else torch.tensordot(mix.to(grads), grads, 1)
    return agree(mixed, expected, dtype, scale, lenience)


def _vmap_obstacle(
    forward: Forward, specs: Sequence[LayerSpec], parameters: Mapping[str, Tensor], reference: _Reference
) -> str | None:
    """Why ``torch.func`` cannot be used; None if it can."""
    try:
        (grads,) = gradients_vmapped(forward, reference.batch, parameters, [reference.vectors])
    except Exception as error:  # noqa: BLE001  # vmap raises errors of many types, and each means: take the loop
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"torch.func cannot follow the model ({first_line[:160]})"
    for spec in specs:
        stacked = spec.gather(grads, leading=1)
        for index, pick in enumerate(reference.picks):
            expected = reference.gradient(spec, index, parameters)
            if not agree(stacked[pick], expected, reference.dtype):
                return "torch.func gives another gradient than autograd"
    return None


def _mixing_message(forward: Forward, batch: Batch, outputs: Tensor) -> str:
    """Say why a sample alone and in a batch may differ."""
    again = forward.outputs(batch)
    if not agree(again, outputs, forward.precision(outputs)):
        return (
            "The model is random in eval mode: the same batch gave two different outputs. Per-sample gradients are not "
            "defined then; make it deterministic, for example F.dropout(..., training=self.training)."
        )
    culprits = [
        f"{name} ({type(module).__name__} without running statistics)"
        for name, module in forward.model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
    ]
    return (
        "The model mixes the samples of a batch even in eval mode: a sample alone gives other outputs than the same "
        "sample in a batch, so per-sample gradients are not defined. "
        + (f"Likely: {', '.join(culprits[:5])}. " if culprits else "")
        + "Use running statistics, GroupNorm or LayerNorm, and compute nothing over the batch dimension."
    )
