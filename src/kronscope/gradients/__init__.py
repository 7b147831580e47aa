"""From a model, a loss and data to streams of per-sample gradient atoms, one stream per layer."""

from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.capture import Recorder
from kronscope.gradients.layer_plan import LayerPlan
from kronscope.gradients.matrices import LayerSpec, Segment, resolve_layers
from kronscope.gradients.stream import GradientStream

__all__ = [
    "Atoms",
    "DenseAtoms",
    "FactoredAtoms",
    "GradientStream",
    "LayerPlan",
    "LayerSpec",
    "Recorder",
    "Segment",
    "resolve_layers",
]
