"""Capturing the atoms of one chunk of samples, by each back end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from kronscope.errors import ModelError, NonFiniteError
from kronscope.gradients.assemble import Assembler, DenseAssembler, FactoredAssembler, parts_of
from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.coverage import used_otherwise
from kronscope.gradients.data import Batch
from kronscope.gradients.forward import Forward
from kronscope.gradients.functional import gradients_alone, gradients_vmapped
from kronscope.gradients.interception import UseRecorder
from kronscope.gradients.losses import Columns
from kronscope.gradients.matrices import LayerSpec
from kronscope.gradients.probe import Routes, UseKey, agree, leading_shape, matches
from kronscope.gradients.sample_axes import SampleAxis
from kronscope.gradients.uses import Use
from kronscope.kron.devices import host_if_narrow

__all__ = ["ChunkCapture", "check_finite"]


class ChunkCapture:
    """One forward pass over a chunk, and the ways to get gradients out of it.

    Args:
        forward: The model, in eval mode.
        routes: What the probe found.
        batch: The samples.
        parameters: The parameters of the layers to capture; they require gradients.
        watched: Those whose uses are to be recorded.
        weight: The weight of every sample.

    Attributes:
        outputs: The model's outputs.
    """

    def __init__(
        self,
        forward: Forward,
        routes: Routes,
        batch: Batch,
        parameters: Mapping[str, Tensor],
        watched: Sequence[str],
        weight: float,
    ) -> None:
        self._forward, self._routes, self._batch, self._parameters = forward, routes, batch, parameters
        self._uses: list[Use] = []
        if watched:
            recorded = {name: parameters[name] for name in watched}
            with UseRecorder(recorded, batch.size, routes.expanded) as recorder:
                self.outputs = forward.outputs(batch)
            self._uses = recorder.uses
        else:
            # Not under no_grad: a model may take derivatives itself.
            self.outputs = forward.outputs(batch).detach()
        # weights are float64, which some devices have not; their atoms go to the host in the end
        device = host_if_narrow(self.outputs.device)
        self._weights = torch.full((batch.size,), weight, dtype=torch.float64, device=device)
        self._numbers = batch.samples.to(device)
        self._axes: dict[UseKey, SampleAxis] = dict(routes.axes)
        for use in self._uses:
            # A longer unrolling than in the probe goes on as it began.
            known = {axis for key, axis in routes.axes.items() if key[0] == use.place.parameter}
            if len(known) == 1:
                self._axes.setdefault((use.place.parameter, use.place.ordinal), next(iter(known)))

    def misfits(self, specs: Collection[LayerSpec]) -> list[LayerSpec]:
        """The layers that cannot be put together from the uses in this chunk, though they could in the probe."""
        if not self.outputs.requires_grad:
            return list(specs)
        strange = {
            use.place.parameter
            for use in self._uses
            if (axis := self._axes.get((use.place.parameter, use.place.ordinal))) is None
            or not axis.fits(leading_shape(use), self._batch.size)
            or use.place.overwritten
        }
        needed = {name: self._parameters[name] for spec in specs for name in spec.parameters}
        strange |= used_otherwise(self.outputs, self._uses, needed)
        if self._routes.depends_on_data and self._batch.size > 1:
            strange |= self._misplaced(strange)
        return [
            spec
            for spec in specs
            if strange.intersection(spec.parameters) or not parts_of(spec, self._uses, self._axes)
        ]

    def _misplaced(self, ignored: Collection[str]) -> set[str]:
        """Parameters with a use whose samples lie elsewhere here.

        Pulling back the outputs of every sample times a number of its own must multiply the gradients at its positions
        by that number.
        """
        uses = [use for use in self._uses if use.place.parameter not in ignored]
        if not uses:
            return set()
        samples, dtype = self._batch.size, self._routes.dtype
        generator = torch.Generator().manual_seed(self._batch.first)
        vectors = torch.randn(self.outputs.shape, generator=generator, dtype=torch.float64)
        factors = 1 + torch.rand(samples, generator=generator, dtype=torch.float64)
        scaled = vectors * factors.reshape(-1, *[1] * (vectors.dim() - 1))
        edges = [use.place.edge for use in uses]
        plain, multiplied = (self._pull(edges, v.to(self.outputs), keep=True) for v in (vectors, scaled))
        wrong = set()
        for use, one, other in zip(uses, plain, multiplied, strict=True):
            if one is None or other is None:
                continue
            axis = self._axes[use.place.parameter, use.place.ordinal]
            expected, found = (use.grad_side(grad, axis, samples) for grad in (one, other))
            if not agree(found, expected * factors.to(expected)[:, None, None], dtype):
                wrong.add(use.place.parameter)
        return wrong

    def by_hooks(self, layers: Mapping[LayerSpec, tuple[str, torch.dtype]], columns: Columns) -> dict[str, Atoms]:
        """Pull columns back to the outputs of all uses; ``layers`` gives each layer's form and type."""
        if not layers:
            return {}
        assemblers: dict[LayerSpec, Assembler] = {}
        for spec, (form, dtype) in layers.items():
            parts = parts_of(spec, self._uses, self._axes)
            kind = DenseAssembler if form == "dense" else FactoredAssembler
            assemblers[spec] = kind(spec, parts, self._batch.size, columns.count, dtype)
        edges = [use.place.edge for use in self._uses]
        for index, column in enumerate(columns):
            vectors, unscale = self._scaled(column)
            grads = self._pull(edges, vectors, keep=index + 1 < columns.count)
            for assembler in assemblers.values():
                assembler.add(index, grads, unscale)
        return {spec.name: assembler.finish(self._weights, self._numbers) for spec, assembler in assemblers.items()}

    def by_func(self, layers: Mapping[LayerSpec, tuple[str, torch.dtype]], columns: Columns) -> dict[str, Atoms]:
        """Whole gradients of all samples at once."""
        if not layers:
            return {}
        scaled = [self._scaled(column) for column in columns]
        needed = {name: self._parameters[name] for spec in layers for name in spec.parameters}
        found = gradients_vmapped(self._forward, self._batch, needed, [vectors for vectors, _ in scaled])
        atoms: dict[str, Atoms] = {}
        for spec, (_, dtype) in layers.items():
            grads = torch.stack([spec.gather(one, leading=1).to(dtype) for one in found], dim=1)
            for index, (_, unscale) in enumerate(scaled):
                if unscale is not None:
                    grads[:, index] *= unscale[:, None, None]
            atoms[spec.name] = DenseAtoms(grads, self._weights, self._numbers)
        return atoms

    def by_loop(self, layers: Mapping[LayerSpec, tuple[str, torch.dtype]], columns: Columns) -> dict[str, Atoms]:
        """Whole gradients, one sample after the other."""
        if not layers:
            return {}
        samples = self._batch.size
        needed = {name: self._parameters[name] for spec in layers for name in spec.parameters}
        device = self.outputs.device
        grads = {
            spec: torch.zeros(samples, columns.count, *spec.shape, dtype=dtype, device=device)
            for spec, (_, dtype) in layers.items()
        }
        scaled = [self._scaled(column) for column in columns]
        for sample in range(samples):
            own = [vectors[sample : sample + 1] for vectors, _ in scaled]
            alone = self._batch.take(slice(sample, sample + 1))
            for index, found in enumerate(gradients_alone(self._forward, alone, needed, own)):
                whole = {k: torch.zeros_like(needed[k]) if g is None else g for k, g in found.items()}
                unscale = scaled[index][1]
                for spec, target in grads.items():
                    target[sample, index] = spec.gather(whole)
                    if unscale is not None:
                        target[sample, index] *= unscale[sample]
        return {spec.name: DenseAtoms(values, self._weights, self._numbers) for spec, values in grads.items()}

    def spot_check(self, specs: Sequence[LayerSpec], atoms: Mapping[str, Atoms], columns: Columns) -> None:
        """Compare one sample's atoms, randomly mixed over columns, with plain autograd on that sample alone.

        Raises:
            ModelError: They differ.
        """
        generator = torch.Generator().manual_seed(self._batch.first)
        mix = torch.randn(columns.count, generator=generator, dtype=torch.float64)
        pick = self._batch.first % self._batch.size
        vectors = self._mixed(pick, mix, columns)
        if float(vectors.abs().max()) < self._smallest():
            # of a sample that the model is so sure of nothing may be left in the model's type: the largest is looked at
            pick = int(torch.stack([column.abs().flatten(1).amax(1) for column in columns]).amax(0).argmax())
            vectors = self._mixed(pick, mix, columns)
        largest = float(vectors.abs().max())
        if largest < self._smallest():
            return
        # as in the batch: what underflows there must do so here, unless the columns were enlarged against it
        largest = largest if self._routes.dtype == torch.float16 else 1.0
        needed = {name: self._parameters[name] for spec in specs for name in spec.parameters}
        alone = self._batch.take(slice(pick, pick + 1))
        (found,) = gradients_alone(self._forward, alone, needed, [vectors / largest])
        whole = {k: torch.zeros_like(needed[k]) if g is None else g for k, g in found.items()}
        for spec in specs:
            expected = spec.gather(whole)
            # An alarm here ends the measurement, so it must not be a false one.
            if not matches(atoms[spec.name], pick, expected, self._routes.dtype, mix / largest, lenience=10.0):
                raise ModelError(_CHANGED.format(name=spec.name, samples=self._batch.describe()))

    def _mixed(self, sample: int, mix: Tensor, columns: Columns) -> Tensor:
        """The columns of a sample, mixed in float64."""
        return sum(
            (weight * column[sample : sample + 1] for weight, column in zip(mix.tolist(), columns, strict=True)),
            torch.zeros(1, dtype=torch.float64, device=host_if_narrow(self.outputs.device)),
        )

    def _smallest(self) -> float:
        """Columns below this lose digits in the model's type; in half precision they are enlarged."""
        dtype = torch.float32 if self._routes.dtype == torch.float16 else self._routes.dtype
        return torch.finfo(dtype).tiny / torch.finfo(dtype).eps

    def _pull(self, edges: list[GradientEdge], vectors: Tensor, keep: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(self.outputs, edges, vectors, retain_graph=keep, allow_unused=True)

    def _scaled(self, column: Tensor) -> tuple[Tensor, Tensor | None]:
        """The column in the outputs' type; in half precision enlarged against underflow, with the factor to undo it."""
        if self._routes.dtype != torch.float16:
            return column.to(self.outputs), None
        largest = column.abs().flatten(1).amax(1)
        exponent = torch.where(largest > 0, largest, torch.ones_like(largest)).log2().ceil()
        factor = torch.exp2(exponent)
        shaped = factor.reshape(-1, *[1] * (column.dim() - 1))
        return (column / shaped).to(self.outputs), factor.float().to(self.outputs.device)


_CHANGED = (
    "The gradients of layer {name!r} for samples {samples} do not agree with those of one sample alone, though they "
    "did for the first samples: the model computes something else now. Measure it with batches of one sample."
)


def check_finite(atoms: Atoms, name: str, samples: str) -> None:
    """Raise NonFiniteError if atoms contain NaN or infinity."""
    parts = (
        {"inputs": atoms.col_factors, "output gradients": atoms.row_factors}
        if isinstance(atoms, FactoredAtoms)
        else {"gradients": atoms.grads}
    )
    for what, values in parts.items():
        # The sum is finite unless an entry is not or the sum overflows, and needs no copy.
        if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
            raise NonFiniteError(
                f"The {what} of layer {name!r} for samples {samples} contain NaN or infinity; "
                "check these samples and the parameters."
            )
