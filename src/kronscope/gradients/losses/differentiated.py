"""Any loss that torch can differentiate: gradients and small Hessians of each sample's loss by autograd."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.errors import LabelError, NonFiniteError, OptionError
from kronscope.gradients.data import checksum
from kronscope.gradients.losses.columns import Columns, Draws, mixed_units
from kronscope.kron.devices import wide

__all__ = ["DifferentiatedLoss"]

# A sample's Hessian is a matrix of this size at most, of which a chunk keeps one for every sample.
_MOST_OUTPUTS = 256
# Eigenvalues below this part of the largest are rounding, also of a loss that computes in float32.
_ROUNDING = 1e-6
_LINEAR = (nn.NLLLoss, nn.L1Loss)
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class DifferentiatedLoss:
    r"""A loss without a formula here, which is called for every sample by itself and differentiated.

    Real columns are its gradients. Exact ones are :math:`\sqrt{\lambda_k} u_k` from the eigenvalues and eigenvectors of
    the sample's Hessian :math:`\nabla_f^2 \ell_i`; they exist where it is positive semidefinite, and so for every
    convex loss. A distribution of labels to draw from is not known.

    Attributes:
        text: What tells it from other losses, the same on every process.
        function: The loss, of float64 outputs.
    """

    text: str
    function: Callable[[Tensor, Tensor], Any] = field(compare=False, repr=False)

    @staticmethod
    def of(loss: Callable[[Tensor, Tensor], Any]) -> DifferentiatedLoss:
        """Take a function or a module; of a module a float64 copy in eval mode.

        Raises:
            OptionError: A module cannot be copied.
        """
        text = _describe(loss)
        if not isinstance(loss, nn.Module):
            return DifferentiatedLoss(text, loss)
        try:
            own = copy.deepcopy(loss)
        except Exception as error:
            raise OptionError(
                f"The loss {type(loss).__name__} cannot be copied ({error}); wrap it in a function (outputs, targets) "
                "-> number."
            ) from error
        return DifferentiatedLoss(text, own.double().eval().requires_grad_(False))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Try the loss on the first sample.

        Raises:
            LabelError: It fails.
            OptionError: It does not give one number that can be differentiated.
        """
        self._value(wide(outputs[:1].detach()).requires_grad_(), targets[:1])

    def check_curved(self) -> None:
        """Raise OptionError if the Hessian is known to be zero."""
        if isinstance(self.function, _LINEAR):
            raise OptionError(
                f"The loss must be curved in the outputs, but {self.text} is linear, so the Gauss–Newton matrix is "
                "zero. Measure with truth='empirical_fisher'; for NLLLoss, return logits instead of log-probabilities "
                "(forward=...) and use nn.CrossEntropyLoss."
            )

    def doubt(self, targets: Tensor) -> str:
        """None."""
        return ""

    def terms(self, targets: Tensor) -> int:
        """Taken as one."""
        return 1

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """One per output."""
        return math.prod(outputs[1:])

    def kept_bytes(self, outputs: torch.Size) -> int:
        """Eigenvectors, twice while they are put together."""
        return 16 * math.prod(outputs[1:]) ** 2

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Eigenvectors of the Hessians times the roots of the eigenvalues, the largest first."""
        roots, vectors = self._roots(outputs, targets)
        columns = vectors.mul_(roots.unsqueeze(1))
        return Columns(roots.shape[1], lambda index: columns[:, :, index].reshape(outputs.shape))

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Raise OptionError: a loss alone does not say from what labels to draw."""
        raise OptionError(
            f"Labels cannot be drawn for {self.text}: the distribution it stands for is not known. Use labels='exact' "
            "or 'real', or nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss."
        )

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """The largest exact columns, then ± sums of the others."""
        roots, vectors = self._roots(outputs, targets)
        coordinates = mixed_units(roots, roots, draws)

        def column(index: int) -> Tensor:
            values: Tensor = vectors @ coordinates.make(index).unsqueeze(2)
            return values.reshape(outputs.shape)

        return Columns(coordinates.count, column)

    def column_sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The eigenvalues."""
        each = [self._spectrum(outputs, targets, index)[0] for index in range(len(outputs))]
        return torch.stack(each)

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """The gradient of each sample's loss."""
        each = [self._gradient(outputs, targets, index)[1].detach() for index in range(len(outputs))]
        whole = torch.cat(each)
        return Columns(1, lambda _: whole)

    def _roots(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Roots (samples, D) of the eigenvalues and eigenvectors (samples, D, D)."""
        values, vectors = zip(*(self._spectrum(outputs, targets, index) for index in range(len(outputs))), strict=True)
        return torch.stack(values).sqrt(), torch.stack(vectors)

    def _spectrum(self, outputs: Tensor, targets: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Eigenvalues of a sample's Hessian, the largest first, and its eigenvectors."""
        size = outputs[0].numel()
        if size > _MOST_OUTPUTS:
            raise OptionError(
                f"The Hessian of {self.text} is taken by differentiating, which is done for up to {_MOST_OUTPUTS} "
                f"outputs per sample, got {size}. Measure with truth='empirical_fisher', or use nn.CrossEntropyLoss, "
                "nn.MSELoss or nn.BCEWithLogitsLoss, whose Hessians are known."
            )
        self.check_curved()
        point, gradient = self._gradient(outputs, targets, index, twice=True)
        hessian = _jacobian(gradient.flatten(), point).reshape(size, size)
        if not bool(torch.isfinite(hessian).all()):
            raise NonFiniteError(f"The Hessian of {self.text} contains NaN or infinity at the model's outputs.")
        values, vectors = torch.linalg.eigh((hessian + hessian.mT) / 2)
        if float(values[0]) < -_ROUNDING * float(values.abs().max()):
            raise OptionError(
                f"{self.text} is not convex: the Hessian of a sample's loss has the eigenvalue {float(values[0]):.3g} "
                "at the model's outputs, so there is no Gauss–Newton matrix. Measure with truth='empirical_fisher'."
            )
        return values.clamp_min(0.0).flip(0), vectors.flip(1)

    def _gradient(self, outputs: Tensor, targets: Tensor, index: int, twice: bool = False) -> tuple[Tensor, Tensor]:
        """A sample's outputs (1, ...), and the gradient of its loss there."""
        point = wide(outputs[index : index + 1].detach()).requires_grad_()
        value = self._value(point, targets[index : index + 1])
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(value, point, create_graph=twice, materialize_grads=True)
        return point, gradient

    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.function, nn.Module):
            self.function.to(outputs.device)
        targets = targets.to(outputs.device)
        targets = targets.double() if targets.is_floating_point() else targets
        try:
            with torch.enable_grad():
                value = self.function(outputs, targets)
        except Exception as error:
            raise LabelError(
                f"{self.text} fails for the outputs {tuple(outputs.shape)} in float64 and the targets "
                f"{tuple(targets.shape)} in {targets.dtype} of one sample: {error}"
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise OptionError(
                f"{self.text} must give one number for a sample, a tensor with one entry, got {shown}; use the mean or "
                "the sum (reduction='mean')."
            )
        if not value.requires_grad:
            raise OptionError(
                f"{self.text} cannot be differentiated: its value does not depend on the outputs, or they leave torch "
                "on the way (detach, numpy, item, argmax)."
            )
        return value.reshape(())


def _jacobian(values: Tensor, point: Tensor) -> Tensor:
    """Derivatives (values, *point), all at once where every operation can be batched."""
    if not values.requires_grad:  # linear in the outputs
        return values.new_zeros(len(values), *point.shape)
    unit = torch.eye(len(values), dtype=values.dtype, device=values.device)

    def pull(vectors: Tensor, batched: bool) -> Tensor:
        found: tuple[Tensor, ...] = torch.autograd.grad(
            values, point, vectors, retain_graph=True, is_grads_batched=batched, materialize_grads=True
        )
        return found[0]

    try:
        return pull(unit, batched=True)
    except RuntimeError:
        return torch.stack([pull(vector, batched=False) for vector in unit])


def _describe(loss: object) -> str:
    """A text with the name of a loss and its options, without anything that differs between processes."""
    if isinstance(loss, functools.partial):
        given = [*map(_plainly, loss.args), *(f"{name}={_plainly(value)}" for name, value in loss.keywords.items())]
        return f"partial({', '.join([_describe(loss.func), *given])})"
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    name = f"{named.__module__}.{named.__qualname__}"
    if named is loss:
        return name
    kept = {
        key: value
        for key, value in getattr(loss, "__dict__", {}).items()
        if not key.startswith("_") and key != "training"
    }
    if isinstance(loss, nn.Module):
        kept |= dict(loss.named_children()) | dict(loss.named_parameters(recurse=False))
        kept |= dict(loss.named_buffers(recurse=False))
    return f"{name}({', '.join(f'{key}={_plainly(kept[key])}' for key in sorted(kept))})"


def _plainly(value: object) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}, checksum {checksum(value):08x}"
    known = isinstance(value, (nn.Module, functools.partial)) or hasattr(value, "__qualname__")
    return _describe(value) if known else type(value).__name__
