"""From a model, a loss and data to streams of per-sample gradient atoms, one stream per layer."""

from kronscope.gradients.capture import LayerPlan, Recorder
from kronscope.gradients.matrices import LayerSpec, resolve_layers
from kronscope.gradients.stream import Atoms, DenseAtoms, FactoredAtoms, GradientStream

__all__ = [
    "Atoms",
    "DenseAtoms",
    "FactoredAtoms",
    "GradientStream",
    "LayerPlan",
    "LayerSpec",
    "Recorder",
    "resolve_layers",
]
