"""Capturing the atoms of one chunk of samples, by each back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kronscope.errors import ModelError, NonFiniteError
from kronscope.gradients.assemble import Assembler, DenseAssembler, FactoredAssembler, pieces_of
from kronscope.gradients.data import Batch
from kronscope.gradients.forward import Forward
from kronscope.gradients.functional import gradients_alone, gradients_vmapped
from kronscope.gradients.interception import UseRecorder
from kronscope.gradients.labels import Columns
from kronscope.gradients.layouts import Layout
from kronscope.gradients.matrices import LayerSpec
from kronscope.gradients.probe import Routes, UseKey, leading_shape, matches
from kronscope.gradients.stream import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.uses import Use

__all__ = ["ChunkCapture", "check_finite"]


class ChunkCapture:
    """One forward pass over a chunk, and the ways to get gradients out of it.

    Args:
        forward: The model, in eval mode.
        routes: What the probe found.
        batch: The samples.
        parameters: The parameters of the layers to capture; they require gradients.
        watched: Those whose uses are to be recorded.

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
    ) -> None:
        self._forward, self._routes, self._batch, self._parameters = forward, routes, batch, parameters
        self._uses: list[Use] = []
        if watched:
            recorded = {name: parameters[name] for name in watched}
            with UseRecorder(recorded, batch.size, routes.expanded) as recorder:
                self.outputs = forward.outputs(batch)
            self._uses = recorder.uses
        else:
            with torch.no_grad():
                self.outputs = forward.outputs(batch)

    def by_hooks(
        self, layers: Mapping[LayerSpec, tuple[str, torch.dtype]], columns: Columns, weights: Tensor
    ) -> dict[str, Atoms]:
        """Pull columns back to the outputs of all uses; ``layers`` gives each layer's form and type."""
        if not layers:
            return {}
        layouts = self._layouts()
        samples = self._batch.size
        assemblers: dict[LayerSpec, Assembler] = {}
        for spec, (form, dtype) in layers.items():
            pieces = pieces_of(spec, self._uses, layouts)
            if not pieces:
                raise ModelError(_CHANGED.format(name=spec.name, samples=self._batch.describe()))
            kind = DenseAssembler if form == "dense" else FactoredAssembler
            assemblers[spec] = kind(spec, pieces, samples, columns.count, dtype)
        edges = [use.place.edge for use in self._uses]
        for index, column in enumerate(columns):
            vectors, unscale = self._scaled(column)
            grads = torch.autograd.grad(
                self.outputs, edges, vectors, retain_graph=index + 1 < columns.count, allow_unused=True
            )
            for assembler in assemblers.values():
                assembler.add(index, grads, unscale)
        return {spec.name: assembler.finish(weights, self._batch.samples) for spec, assembler in assemblers.items()}

    def by_func(
        self, layers: Mapping[LayerSpec, tuple[str, torch.dtype]], columns: Columns, weights: Tensor
    ) -> dict[str, Atoms]:
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
            atoms[spec.name] = DenseAtoms(grads, weights, self._batch.samples)
        return atoms

    def by_loop(
        self, layers: Mapping[LayerSpec, tuple[str, torch.dtype]], columns: Columns, weights: Tensor
    ) -> dict[str, Atoms]:
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
        return {spec.name: DenseAtoms(values, weights, self._batch.samples) for spec, values in grads.items()}

    def spot_check(self, specs: Sequence[LayerSpec], atoms: Mapping[str, Atoms], columns: Columns) -> None:
        """Compare one sample's atoms, randomly mixed over columns, with plain autograd on that sample alone.

        Raises:
            ModelError: They differ.
        """
        pick = self._batch.first % self._batch.size
        generator = torch.Generator().manual_seed(self._batch.first)
        mix = torch.randn(columns.count, generator=generator, dtype=torch.float64)
        vectors = sum(
            (weight * column[pick : pick + 1] for weight, column in zip(mix.tolist(), columns, strict=True)),
            torch.zeros(1, dtype=torch.float64, device=self.outputs.device),
        )
        largest = float(vectors.abs().max()) or 1.0
        needed = {name: self._parameters[name] for spec in specs for name in spec.parameters}
        alone = self._batch.take(slice(pick, pick + 1))
        (found,) = gradients_alone(self._forward, alone, needed, [vectors / largest])
        whole = {k: torch.zeros_like(needed[k]) if g is None else g for k, g in found.items()}
        for spec in specs:
            expected = spec.gather(whole)
            # An alarm here ends the measurement, so it must not be a false one.
            if not matches(atoms[spec.name], pick, expected, self.outputs.dtype, mix / largest, lenience=10.0):
                raise ModelError(_CHANGED.format(name=spec.name, samples=self._batch.describe()))

    def _layouts(self) -> dict[UseKey, Layout]:
        """The layouts of all uses; a longer unrolling than in the probe goes on as it began."""
        layouts = dict(self._routes.layouts)
        for use in self._uses:
            name, ordinal = use.place.parameter, use.place.ordinal
            known = {layout for key, layout in self._routes.layouts.items() if key[0] == name}
            if (name, ordinal) not in layouts and len(known) == 1:
                layouts[name, ordinal] = next(iter(known))
            layout = layouts.get((name, ordinal))
            if layout is None or not layout.fits(leading_shape(use), self._batch.size) or use.place.overwritten:
                raise ModelError(_CHANGED.format(name=name, samples=self._batch.describe()))
        return layouts

    def _scaled(self, column: Tensor) -> tuple[Tensor, Tensor | None]:
        """The column in the outputs' type; in half precision enlarged against underflow, with the factor to undo it."""
        if self.outputs.dtype != torch.float16:
            return column.to(self.outputs), None
        largest = column.abs().flatten(1).amax(1)
        exponent = torch.where(largest > 0, largest, torch.ones_like(largest)).log2().ceil()
        factor = torch.exp2(exponent)
        shaped = factor.reshape(-1, *[1] * (column.dim() - 1))
        return (column / shaped).to(self.outputs), factor.float()


_CHANGED = (
    "The gradients of layer {name!r} for samples {samples} do not agree with those of one sample alone, though they "
    "did for the first samples: the model's computation depends on the data. Use backend='func'."
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
