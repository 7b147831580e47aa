r"""The model half of the dense oracle: H from full Jacobians, one sample and one output at a time.

A sample's loss :math:`\ell_i` is the loss module applied to that sample alone, :math:`f_i` its outputs and
:math:`J_i = \partial f_i / \partial W`. All derivatives are torch's own, of the loss module itself; no formula for
softmax, sigmoid or squared error is written down here. The model is copied, put in eval mode and made float64 first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronscope.errors import LayerError, OptionError

__all__ = [
    "ModelAtoms",
    "empirical_fisher",
    "empirical_fisher_atoms",
    "fisher_of_draws",
    "fisher_of_draws_atoms",
    "gauss_newton",
    "gauss_newton_atoms",
    "layer_factors",
]

Forward = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class ModelAtoms:
    """Gradients of one layer with their weights.

    Attributes:
        grads: Gradients (M, m, n).
        weights: Weights (M,).
    """

    grads: Tensor
    weights: Tensor

    def matrix(self) -> Tensor:
        """Return H (mn, mn)."""
        flat = self.grads.reshape(len(self.grads), -1)
        return torch.einsum("i,ia,ib->ab", self.weights, flat, flat)


@dataclass(frozen=True)
class Layer:
    """Which weight is looked at.

    Attributes:
        parameters: Names of parameters; each is flattened from dimension 1, and several are stacked by rows.
        rows: Rows taken of that matrix; default all.
    """

    parameters: Sequence[str]
    rows: slice

    def find(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters.

        Raises:
            LayerError: one of them does not exist.
        """
        known = dict(model.named_parameters(remove_duplicate=False))
        if missing := [name for name in self.parameters if name not in known]:
            raise LayerError(f"the model has no parameter {missing[0]!r}; it has: {', '.join(known)}.")
        return [known[name] for name in self.parameters]

    def matrix(self, values: Sequence[Tensor]) -> Tensor:
        """Stack values shaped like the parameters into the layer's matrix."""
        return torch.cat([value.flatten(1) for value in values])[self.rows]


def gauss_newton(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    targets: Tensor,
    parameters: str | Sequence[str],
    *,
    rows: slice = slice(None),
    forward: Forward | None = None,
) -> Tensor:
    r"""Return the Gauss–Newton matrix :math:`H = \frac1N \sum_i J_i^\top \nabla_f^2 \ell_i J_i` (mn, mn).

    Args:
        model: Copied, not changed.
        loss: A loss module with mean or sum reduction.
        inputs: A batch, first dimension samples; a tensor, or tensors in tuples, lists or dictionaries.
        targets: Its targets.
        parameters: Name of the parameter, or several whose matrices are stacked by rows.
        rows: Rows of the matrix to take.
        forward: Maps (model, inputs) to the outputs; default ``model(inputs)``.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> gauss_newton(model, nn.MSELoss(), torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1), "weight")
    tensor([[2., 4.],
            [4., 8.]], dtype=torch.float64)
    """
    layer = Layer([parameters] if isinstance(parameters, str) else parameters, rows)
    H: Tensor | float = 0.0
    count = len(targets)
    for sample in _samples(model, loss, inputs, targets, forward):
        jacobian = sample.jacobian(layer).flatten(1)
        H = H + jacobian.T @ sample.output_hessian() @ jacobian / count
    assert isinstance(H, Tensor)
    return H


def gauss_newton_atoms(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    targets: Tensor,
    parameters: str | Sequence[str],
    *,
    rows: slice = slice(None),
    forward: Forward | None = None,
) -> ModelAtoms:
    r"""Return atoms of the same matrix: per sample one for each eigenvector of :math:`\nabla_f^2 \ell_i`.

    The arguments are those of :func:`gauss_newton`.
    """
    layer = Layer([parameters] if isinstance(parameters, str) else parameters, rows)
    whole = torch.cat(
        [
            torch.einsum("ko,omn->kmn", _root_rows(sample.output_hessian()), sample.jacobian(layer))
            for sample in _samples(model, loss, inputs, targets, forward)
        ]
    )
    return ModelAtoms(whole, whole.new_full((len(whole),), 1 / len(targets)))


def empirical_fisher(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    targets: Tensor,
    parameters: str | Sequence[str],
    *,
    rows: slice = slice(None),
    forward: Forward | None = None,
) -> Tensor:
    r"""Return :math:`H = \frac1N \sum_i g_i g_i^\top` with the real labels; arguments as for :func:`gauss_newton`."""
    return empirical_fisher_atoms(model, loss, inputs, targets, parameters, rows=rows, forward=forward).matrix()


def empirical_fisher_atoms(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    targets: Tensor,
    parameters: str | Sequence[str],
    *,
    rows: slice = slice(None),
    forward: Forward | None = None,
) -> ModelAtoms:
    """Return each sample's gradient with its real label; arguments as for :func:`gauss_newton`."""
    layer = Layer([parameters] if isinstance(parameters, str) else parameters, rows)
    grads = [sample.gradient(layer) for sample in _samples(model, loss, inputs, targets, forward)]
    return ModelAtoms(torch.stack(grads), torch.full((len(grads),), 1 / len(grads), dtype=torch.float64))


def fisher_of_draws(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    drawn: Tensor,
    parameters: str | Sequence[str],
    *,
    rows: slice = slice(None),
    forward: Forward | None = None,
) -> Tensor:
    r"""Return the Fisher matrix for labels that were drawn already, on the scale of the Gauss–Newton matrix.

    Args:
        model: Copied, not changed.
        loss: A loss module with mean or sum reduction.
        inputs: A batch, first dimension samples.
        drawn: Targets (D, N, ...): D draws for every sample, with ``ignore_index`` where a token does not count.
        parameters: Name of the parameter, or several whose matrices are stacked by rows.
        rows: Rows of the matrix to take.
        forward: Maps (model, inputs) to the outputs.
    """
    return fisher_of_draws_atoms(model, loss, inputs, drawn, parameters, rows=rows, forward=forward).matrix()


def fisher_of_draws_atoms(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    drawn: Tensor,
    parameters: str | Sequence[str],
    *,
    rows: slice = slice(None),
    forward: Forward | None = None,
) -> ModelAtoms:
    r"""Return the atoms of :func:`fisher_of_draws`: gradients for drawn labels times :math:`\sqrt{T_i}`.

    A mean over :math:`T_i` terms divides the Hessian by :math:`T_i` but the square of a gradient by :math:`T_i^2`.
    """
    layer = Layer([parameters] if isinstance(parameters, str) else parameters, rows)
    grads = [
        sample.terms() ** 0.5 * sample.gradient(layer)
        for targets in drawn
        for sample in _samples(model, loss, inputs, targets, forward)
    ]
    return ModelAtoms(torch.stack(grads), torch.full((len(grads),), 1 / len(grads), dtype=torch.float64))


def layer_factors(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    targets: Tensor,
    module: str,
    *,
    real: bool = False,
    forward: Forward | None = None,
) -> list[tuple[Tensor, Tensor]]:
    r"""Return inputs and output gradients of a Linear, Conv2d or Embedding: what K-FAC is made of.

    Args:
        model: Copied, not changed.
        loss: A loss module with mean or sum reduction.
        inputs: A batch, first dimension samples.
        targets: Its targets.
        module: Name of the module; calling it several times makes further positions.
        real: Gradients of the loss (one column) in place of those of the Gauss–Newton matrix.
        forward: Maps (model, inputs) to the outputs.

    Returns:
        For each sample the row factors (c, t, m) and the column factors (t, n), or for an Embedding (t, m) and
        (c, t, n), where the row side is the one-hot input.
    """
    out = []
    for sample in _samples(model, loss, inputs, targets, forward, watch=module):
        columns = sample.output_gradient()[None] if real else _root_rows(sample.output_hessian())
        out.append(sample.factors(columns))
    return out


class _Sample:
    """One sample's forward pass in a copy of the model."""

    def __init__(self, model: nn.Module, loss: nn.Module, inputs: Any, target: Tensor, forward: Forward | None) -> None:
        self.model, self.loss, self.target = model, loss, target
        self.outputs = model(inputs) if forward is None else forward(model, inputs)
        self.calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def is_ignored(self) -> bool:
        """Whether nothing of the sample counts; torch's mean is then 0/0."""
        ignored = getattr(self.loss, "ignore_index", None)
        return ignored is not None and bool((self.target == ignored).all())

    def terms(self) -> int:
        """Number of terms that the loss averages over; 1 when it sums."""
        weights = [getattr(self.loss, option, None) for option in ("weight", "pos_weight")]
        smoothing: float = getattr(self.loss, "label_smoothing", 0.0)
        if smoothing or any(given is not None for given in weights):
            raise OptionError(
                "gradients for drawn labels give the Fisher matrix of losses without weights and smoothing; compare "
                "with gauss_newton, to which sampled labels lead in expectation."
            )
        if self.loss.reduction == "sum":
            return 1
        if isinstance(self.loss, nn.CrossEntropyLoss):
            return int((self.target != self.loss.ignore_index).sum())
        return self.target.numel()

    def output_hessian(self) -> Tensor:
        """Hessian (o, o) of the sample's loss in its flat outputs."""
        size = self.outputs.numel()
        if self.is_ignored():
            return torch.zeros(size, size, dtype=torch.float64)
        shape = self.outputs.shape

        def loss_of(flat: Tensor) -> Tensor:
            value: Tensor = self.loss(flat.view(shape), self.target)
            return value

        hessian: Tensor = torch.autograd.functional.hessian(loss_of, self.outputs.detach().flatten())
        return hessian

    def output_gradient(self) -> Tensor:
        """Gradient (o,) of the sample's loss in its flat outputs."""
        if self.is_ignored():
            return torch.zeros(self.outputs.numel(), dtype=torch.float64)
        outputs = self.outputs.detach().requires_grad_()
        return torch.autograd.grad(self.loss(outputs, self.target), outputs)[0].flatten()

    def jacobian(self, layer: Layer) -> Tensor:
        """Derivative (o, m, n) of the flat outputs, one output at a time."""
        parameters = layer.find(self.model)
        return torch.stack([layer.matrix(self._pull(output, parameters)) for output in self.outputs.flatten()])

    def gradient(self, layer: Layer) -> Tensor:
        """Gradient (m, n) of the sample's loss."""
        parameters = layer.find(self.model)
        if self.is_ignored():
            return layer.matrix([torch.zeros_like(parameter) for parameter in parameters]).detach()
        return layer.matrix(self._pull(self.loss(self.outputs, self.target), parameters))

    def factors(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column factors of the watched module, all its calls one after the other."""
        parts = []
        for module, given, made in self.calls:
            grads = [self._pull((column * self.outputs.flatten()).sum(), [made])[0] for column in columns]
            parts.append(_call_factors(module, given, torch.stack(grads)))
        rows, cols = zip(*parts, strict=True)
        return torch.cat(rows, -2), torch.cat(cols, -2)

    def _pull(self, value: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
        # zeros for what the value does not depend on
        return list(torch.autograd.grad(value, wanted, retain_graph=True, materialize_grads=True))


def _samples(
    model: nn.Module,
    loss: nn.Module,
    inputs: Any,
    targets: Tensor,
    forward: Forward | None,
    watch: str | None = None,
) -> list[_Sample]:
    reduction = getattr(loss, "reduction", "mean")  # a loss of one's own may have none
    if reduction not in ("mean", "sum"):
        raise OptionError(f"the oracle needs a loss with mean or sum reduction, got {reduction!r}.")
    double = copy.deepcopy(model).double().eval().requires_grad_(True)
    targets = targets.double() if targets.is_floating_point() else targets
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    if watch is not None:
        double.get_submodule(watch).register_forward_hook(lambda m, given, made: calls.append((m, given[0], made)))
    samples = []
    for index in range(len(targets)):
        calls.clear()
        sample = _Sample(double, loss, _one(inputs, index), targets[index : index + 1], forward)
        sample.calls = list(calls)
        samples.append(sample)
    return samples


def _one(inputs: Any, index: int) -> Any:
    if isinstance(inputs, Tensor):
        single = inputs[index : index + 1]
        return single.double() if single.is_floating_point() else single
    if isinstance(inputs, dict):
        return {key: _one(value, index) for key, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(_one(value, index) for value in inputs)
    return inputs


def _root_rows(hessian: Tensor) -> Tensor:
    """Rows v with the sum of their outer products equal to the matrix."""
    values, vectors = torch.linalg.eigh(hessian)
    rows: Tensor = (vectors * values.clamp_min(0).sqrt()).T
    return rows


def _call_factors(module: nn.Module, given: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of one call: ``given`` is its input (1, ...), ``grads`` (c, 1, ...) pulls back to its output."""
    if isinstance(module, nn.Linear):
        return grads.reshape(len(grads), -1, module.out_features), given.detach().reshape(-1, module.in_features)
    if isinstance(module, nn.Embedding):
        tokens = nn.functional.one_hot(given.flatten(), module.num_embeddings).double()
        return tokens, grads.reshape(len(grads), -1, module.embedding_dim)
    if isinstance(module, nn.Conv2d) and isinstance(module.padding, tuple) and module.padding_mode == "zeros":
        return _conv_factors(module, given.detach(), grads)
    raise OptionError(f"the oracle knows the factors of Linear, Conv2d and Embedding, not of {type(module).__name__}.")


def _conv_factors(module: nn.Conv2d, given: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Each group of channels is a position of its own whose gradient is zero outside the group's rows."""
    assert isinstance(module.padding, tuple)
    patches = nn.functional.unfold(given, module.kernel_size, module.dilation, module.padding, module.stride)[0]
    width = patches.shape[0] // module.groups
    height = module.out_channels // module.groups
    flat = grads.reshape(len(grads), module.out_channels, -1)
    rows, cols = [], []
    for group in range(module.groups):
        inside = torch.zeros_like(flat)
        chosen = slice(group * height, (group + 1) * height)
        inside[:, chosen] = flat[:, chosen]
        rows.append(inside.mT)
        cols.append(patches[group * width : (group + 1) * width].T)
    return torch.cat(rows, 1), torch.cat(cols)
