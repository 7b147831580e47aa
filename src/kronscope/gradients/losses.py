r"""Losses, seen from the model's outputs: which vectors to pull back, so that gradients sum up to the wanted matrix.

A sample's loss :math:`\ell_i` is the loss module applied to that sample alone. With :math:`f` the model's output
for it, a mode gives columns :math:`v_{ic}`, and the atoms are the gradients :math:`G_{ic} = J_i^\top v_{ic}`:

========  =====================================================  ==================================================
mode      columns                                                meaning
========  =====================================================  ==================================================
exact     :math:`\sum_c v_{ic}v_{ic}^\top = \nabla_f^2\ell_i`    Gauss–Newton
sampled   one per draw, :math:`E[vv^\top] = \nabla_f^2\ell_i`    Gauss–Newton in expectation (Fisher by sampling)
mixed     the largest exact ones, and ± sums of the others       Gauss–Newton in expectation, with little variance
real      :math:`v_i = \nabla_f\ell_i`                           empirical Fisher
========  =====================================================  ==================================================

With mean reduction over :math:`T_i` terms, :math:`\nabla^2_f` and hence :math:`vv^\top` carry :math:`1/T_i`, so exact
and sampled columns carry :math:`\sqrt{1/T_i}` and real ones :math:`1/T_i`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kronscope.errors import LabelError, OptionError

__all__ = ["LABEL_MODES", "Columns", "Draws", "OutputLoss", "read_loss"]

LABEL_MODES = ("exact", "sampled", "mixed", "real")


@dataclass(frozen=True)
class Columns:
    """Vectors to pull back, one tensor shaped like the outputs per column, made when asked for.

    >>> [column.item() for column in Columns(2, lambda index: torch.tensor(float(index)))]
    [0.0, 1.0]
    """

    count: int
    make: Callable[[int], Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        """Make one column after the other."""
        return (self.make(index) for index in range(self.count))


@dataclass(frozen=True)
class Draws:
    """Random numbers that depend on the seed and the sample's number only, not on how the data is cut into chunks.

    Philox is counter-based: the sample's number is the upper part of the counter, so samples never overlap.

    Attributes:
        seed: The seed.
        samples: Numbers of the samples.
        count: Draws per sample.
        fixed: For ``mixed`` columns: how many exact ones come before the draws.

    >>> both = Draws(0, torch.tensor([4, 7])).uniform((3,))
    >>> torch.equal(both[1:], Draws(0, torch.tensor([7])).uniform((3,)))
    True
    """

    seed: int
    samples: Tensor
    count: int = 1
    fixed: int = 0

    def signs(self, number: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Signs ±1 of one draw, shape ``(samples, size)``."""
        rows = []
        for sample in self.samples.tolist():
            generator = np.random.Generator(np.random.Philox(key=self.seed % 2**64, counter=[0, 0, number, sample]))
            rows.append(np.unpackbits(np.frombuffer(generator.bytes(-(-size // 8)), np.uint8), count=size))
        return torch.from_numpy(np.stack(rows)).to(dtype).mul_(2).sub_(1)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Uniform numbers in [0, 1), shape ``(samples, *shape)``, float64."""
        return self._each(lambda generator: generator.random(shape))

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers, shape ``(samples, *shape)``, float64."""
        return self._each(lambda generator: generator.standard_normal(shape))

    def _each(self, draw: Callable[[np.random.Generator], np.ndarray]) -> Tensor:
        key = self.seed % 2**64
        rows = [
            draw(np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, sample])))
            for sample in self.samples.tolist()
        ]
        return torch.from_numpy(np.stack(rows))


class OutputLoss(Protocol):
    """A loss, seen from the model's outputs."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise LabelError if targets do not fit the outputs."""

    def terms(self, targets: Tensor) -> int:
        """The number of terms the loss sums over, in the sample with most of them."""

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """The number of exact columns for outputs of this shape (samples first) and this many terms."""

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Columns whose outer products sum up to the Hessian of each sample's loss."""

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Gradients for labels drawn from the model's own distribution, scaled to the Hessian in expectation."""

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """The largest exact columns, then random ± sums of all others, scaled to the Hessian in expectation."""

    def column_sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Squared lengths (samples, columns) of the exact columns, in any order."""

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """The gradient of each sample's loss."""


def read_loss(loss: object) -> OutputLoss:
    """Understand a torch loss module.

    Raises:
        OptionError: Another loss, or an option that cannot be honoured.

    >>> read_loss(nn.MSELoss(reduction="sum"))
    SquaredError(mean=False)
    """
    for kind in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss):
        if isinstance(loss, kind) and type(loss).forward is kind.forward:
            break
    else:
        shown = loss.__class__.__name__ if isinstance(loss, nn.Module) else repr(loss)
        raise OptionError(
            f"The loss must be nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss, got {shown}. "
            "Other losses have no Gauss–Newton columns here."
        )
    name, reduction = type(loss).__name__, loss.reduction
    if reduction not in ("mean", "sum"):
        raise OptionError(f"{name} needs reduction 'mean' or 'sum', got {reduction!r}.")
    for option in ("weight", "pos_weight"):
        if getattr(loss, option, None) is not None:
            raise OptionError(f"{name}({option}=...) cannot be honoured; measure without it.")
    if isinstance(loss, nn.CrossEntropyLoss):
        if loss.label_smoothing != 0.0:
            raise OptionError(
                f"{name}(label_smoothing={loss.label_smoothing}) cannot be honoured; measure with label_smoothing=0."
            )
        return CrossEntropy(mean=reduction == "mean", ignore_index=loss.ignore_index)
    if isinstance(loss, nn.MSELoss):
        return SquaredError(mean=reduction == "mean")
    return BinaryCrossEntropy(mean=reduction == "mean")


@dataclass(frozen=True)
class CrossEntropy:
    r"""Softmax cross-entropy over dimension 1 of the outputs, with class indices as targets.

    The Hessian of one token is :math:`\operatorname{diag}(p) - pp^\top`. With :math:`q = \sqrt p` it is
    :math:`S S^\top` for :math:`S = \operatorname{diag}(q)(I - qq^\top)`, and multiplying S by an orthogonal matrix
    whose first column is :math:`\pm q` leaves C−1 columns that are not zero. We take the Householder matrix
    :math:`I - vv^\top/(1+q_a)`, :math:`v = q + e_a`, with :math:`a` the most probable class: then nothing cancels,
    however close the probabilities come to 0 or 1.
    """

    mean: bool = True
    ignore_index: int = -100

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise LabelError if targets are not class indices for these outputs."""
        shape, wanted = tuple(targets.shape), (outputs.shape[0], *outputs.shape[2:])
        if outputs.dim() < 2:
            raise LabelError(
                f"Cross-entropy needs outputs (samples, classes, ...), got {tuple(outputs.shape)}; "
                "for one logit per sample use BCEWithLogitsLoss."
            )
        if shape == tuple(outputs.shape) and targets.is_floating_point():
            raise LabelError("Class probabilities as targets are not supported; pass class indices (argmax).")
        if shape != wanted:
            advice = "dimension 1 of the outputs must be the classes"
            if outputs.dim() == 3 and shape == tuple(outputs.shape[:2]):
                advice = "put the classes second, e.g. forward=lambda model, x: model(**x).logits.transpose(1, 2)"
            raise LabelError(
                f"Outputs of shape {tuple(outputs.shape)} need class indices of shape {wanted}, got {shape}; {advice}."
            )
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise LabelError(f"Class indices must be integers, got {targets.dtype}; convert with targets.long().")
        classes = outputs.shape[1]
        if classes < 2:
            raise LabelError(
                "Cross-entropy over one class is constant and has no curvature; for one logit use BCEWithLogitsLoss."
            )
        wrong = (targets != self.ignore_index) & ((targets < 0) | (targets >= classes))
        if bool(wrong.any()):
            raise LabelError(
                f"Class indices must lie in 0..{classes - 1} (or be ignore_index={self.ignore_index}), "
                f"got {int(targets[wrong][0])}."
            )

    def terms(self, targets: Tensor) -> int:
        """Tokens that count."""
        return max(int((targets != self.ignore_index).reshape(len(targets), -1).sum(1).max()), 1)

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """C−1 for every token."""
        return terms * (outputs[1] - 1)

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Return C−1 columns per token that counts; each is zero outside its token."""
        log_p, counted, scale = self._tokens(outputs, targets)
        samples, classes, _ = log_p.shape
        root, best = (log_p / 2).exp(), log_p.argmax(1)
        # Tokens that count come first, so that padding costs no columns.
        order = torch.sort(counted.int(), dim=1, descending=True, stable=True).indices
        rows = torch.arange(samples, device=outputs.device)
        root_scale = scale.sqrt()

        def column(index: int) -> Tensor:
            slot, free = divmod(index, classes - 1)
            token = order[:, slot]
            q, pivot = root[rows, :, token], best[rows, token]
            label = free + (pivot <= free).long()
            q_label, q_pivot = q[rows, label], q[rows, pivot]
            values = -q.square() * (q_label / (1 + q_pivot)).unsqueeze(1)
            values[rows, pivot] = -q_pivot * q_label
            values[rows, label] += q_label
            whole = torch.zeros_like(log_p)
            whole[rows, :, token] = values * (root_scale * counted[rows, token]).unsqueeze(1)
            return whole.reshape(outputs.shape)

        return Columns(self.exact_columns(outputs.shape, self.terms(targets)), column)

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """One column per draw; every token draws its own label."""
        log_p, counted, scale = self._tokens(outputs, targets)
        p = log_p.exp()
        # (samples, tokens, classes) against (samples, tokens, draws): inverting the distribution function.
        uniform = draws.uniform((draws.count, p.shape[2])).transpose(1, 2).contiguous().to(p.device)
        cumulative = p.transpose(1, 2).cumsum(2)
        labels = torch.searchsorted(cumulative / cumulative[..., -1:], uniform, right=True)
        weight = (scale / draws.count).sqrt()
        return Columns(draws.count, lambda index: _minus_one_hot(p, labels[..., index], counted, weight, outputs))

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        r"""The largest of the exact columns, then ± sums of all others over all tokens.

        A sum :math:`\sum_c x_c s_c` of a token's columns has the entries :math:`q_j x_j - p_j t/(1+q_a)` and
        :math:`-q_a t` at the pivot :math:`a`, with :math:`t = \sum_c x_c q_c`.
        """
        log_p, counted, scale = self._tokens(outputs, targets)
        root, pivot = (log_p / 2).exp(), log_p.argmax(1, keepdim=True)
        root_scale = (scale.sqrt()[:, None] * counted).unsqueeze(1)
        largest = _largest(self._sizes(root, pivot, root_scale).flatten(1), draws.fixed) if draws.fixed else None
        # columns are pulled back in the outputs' type, and nothing cancels in them
        kind = torch.promote_types(outputs.dtype, torch.float32)
        root, root_scale = root.to(kind), root_scale.to(kind)
        top, p = root.gather(1, pivot), root.square()

        def combined(x: Tensor) -> Tensor:
            values = x.view_as(root).scatter_(1, pivot, 0.0).mul_(root)  # a token has one column less than classes
            total = values.sum(1, keepdim=True)
            values.addcmul_(p, total / (1 + top), value=-1).scatter_(1, pivot, -top * total)
            return values.mul_(root_scale).reshape(outputs.shape)

        def column(index: int) -> Tensor:
            if largest is not None and index < draws.fixed:
                return combined(torch.zeros_like(root).flatten(1).scatter_(1, largest[:, index : index + 1], 1.0))
            x = draws.signs(index - draws.fixed, root[0].numel(), kind).to(root.device)
            if largest is not None:
                x = x.scatter_(1, largest, 0.0)
            return combined(x).mul_(draws.count**-0.5)

        return Columns(draws.fixed + draws.count, column)

    def column_sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Squared lengths of all tokens' columns; the pivots' are zero."""
        log_p, counted, scale = self._tokens(outputs, targets)
        root_scale = (scale.sqrt()[:, None] * counted).unsqueeze(1)
        return self._sizes((log_p / 2).exp(), log_p.argmax(1, keepdim=True), root_scale).flatten(1)

    @staticmethod
    def _sizes(root: Tensor, pivot: Tensor, root_scale: Tensor) -> Tensor:
        p, top = root.square(), root.gather(1, pivot)
        shrink = p / (1 + top).square()  # the square of q_c / (1 + q_a)
        rest = p.square().sum(1, keepdim=True) - p.square() - top**4
        own = (root - p * root / (1 + top)).square()
        sizes = shrink * rest.clamp_min(0.0) + own + p * top.square()
        return sizes.scatter_(1, pivot, 0.0) * root_scale.square()

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """One column, p minus the label."""
        log_p, counted, scale = self._tokens(outputs, targets)
        labels = targets.long().reshape(counted.shape).masked_fill(~counted, 0)
        return Columns(1, lambda _: _minus_one_hot(log_p.exp(), labels, counted, scale, outputs))

    def _tokens(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities (samples, classes, tokens), which tokens count, and each sample's 1/T_i or 1."""
        log_p = F.log_softmax(
            outputs.detach().double().flatten(2) if outputs.dim() > 2 else outputs.detach().double().unsqueeze(2), dim=1
        )
        counted = (targets != self.ignore_index).reshape(log_p.shape[0], -1)
        counts = counted.sum(1).double()
        return log_p, counted, 1 / counts.clamp(min=1) if self.mean else torch.ones_like(counts)


def _minus_one_hot(p: Tensor, labels: Tensor, counted: Tensor, weight: Tensor, outputs: Tensor) -> Tensor:
    values = p.clone()
    values.scatter_add_(1, labels.unsqueeze(1), -torch.ones_like(labels, dtype=p.dtype).unsqueeze(1))
    return (values * (weight[:, None] * counted)[:, None]).reshape(outputs.shape)


@dataclass(frozen=True)
class SquaredError:
    r""":math:`\|f - y\|^2` over the D outputs of a sample, divided by D under mean: Hessian :math:`2I` or :math:`2I/D`.

    Draws are :math:`y \sim N(f, I/2)` for the sum, for which the gradient's covariance is the Hessian.
    """

    mean: bool = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise LabelError unless targets are shaped like the outputs."""
        _check_same_shape("MSELoss", outputs, targets)

    def terms(self, targets: Tensor) -> int:
        """Outputs of a sample."""
        return math.prod(targets.shape[1:])

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """One per output."""
        return terms

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Scaled unit vectors."""
        values = torch.full(outputs.shape, math.sqrt(self._factor(outputs)), dtype=torch.float64, device=outputs.device)
        return _unit_columns(values)

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Gaussian vectors."""
        noise = draws.normal((draws.count, *outputs.shape[1:])).to(outputs.device)
        noise *= math.sqrt(self._factor(outputs) / draws.count)
        return Columns(draws.count, lambda index: noise[:, index])

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Unit vectors, then ± sums of the others."""
        return _mixed_units(self.column_sizes(outputs, targets).sqrt(), outputs, draws)

    def column_sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """All the same."""
        flat = outputs.detach().flatten(1)
        return torch.full(flat.shape, self._factor(outputs), dtype=torch.float64, device=outputs.device)

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Twice the difference."""
        return Columns(1, lambda _: self._factor(outputs) * (outputs.detach().double() - targets.double()))

    def _factor(self, outputs: Tensor) -> float:
        return 2.0 / math.prod(outputs.shape[1:]) if self.mean else 2.0


@dataclass(frozen=True)
class BinaryCrossEntropy:
    r"""Sigmoid cross-entropy of each of D outputs: Hessian :math:`\operatorname{diag}(p(1-p))`, over D under mean."""

    mean: bool = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise LabelError unless targets are shaped like the outputs and lie in [0, 1]."""
        _check_same_shape("BCEWithLogitsLoss", outputs, targets)
        wrong = ~((targets >= 0) & (targets <= 1))
        if bool(wrong.any()):
            raise LabelError(f"BCEWithLogitsLoss needs targets in [0, 1], got {targets[wrong][0].item()}.")

    def terms(self, targets: Tensor) -> int:
        """Outputs of a sample."""
        return math.prod(targets.shape[1:])

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """One per output."""
        return terms

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Unit vectors times the standard deviation of the label."""
        logits = outputs.detach().double()
        deviation = ((F.logsigmoid(logits) + F.logsigmoid(-logits)) / 2).exp()
        return _unit_columns(deviation * math.sqrt(self._factor(outputs)))

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """Bernoulli labels."""
        logits, weight = outputs.detach().double(), math.sqrt(self._factor(outputs) / draws.count)
        uniform = draws.uniform((draws.count, *outputs.shape[1:])).to(outputs.device)
        labels = (uniform < logits.sigmoid().unsqueeze(1)).double()
        return Columns(draws.count, lambda index: weight * _sigmoid_minus(logits, labels[:, index]))

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        """The largest deviations, then ± sums of the others."""
        return _mixed_units(self.column_sizes(outputs, targets).sqrt(), outputs, draws)

    def column_sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Variances of the labels."""
        logits = outputs.detach().double()
        return (F.logsigmoid(logits) + F.logsigmoid(-logits)).exp().flatten(1) * self._factor(outputs)

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Sigmoid minus the label."""
        logits = outputs.detach().double()
        return Columns(1, lambda _: self._factor(outputs) * _sigmoid_minus(logits, targets.double()))

    def _factor(self, outputs: Tensor) -> float:
        return 1.0 / math.prod(outputs.shape[1:]) if self.mean else 1.0


def _sigmoid_minus(logits: Tensor, labels: Tensor) -> Tensor:
    """σ(z) − y without cancellation: (1−y) σ(z) − y σ(−z)."""
    return (1 - labels) * logits.sigmoid() - labels * (-logits).sigmoid()


def _mixed_units(sizes: Tensor, outputs: Tensor, draws: Draws) -> Columns:
    """The largest entries as columns of their own, then random signs on the others."""
    largest = _largest(sizes, draws.fixed)

    def column(index: int) -> Tensor:
        if index < draws.fixed:
            at = largest[:, index : index + 1]
            values = torch.zeros_like(sizes).scatter_(1, at, sizes.gather(1, at))
        else:
            signs = draws.signs(index - draws.fixed, sizes.shape[1]).to(sizes.device) * draws.count**-0.5
            values = (sizes * signs).scatter_(1, largest, 0.0)
        return values.reshape(outputs.shape)

    return Columns(draws.fixed + draws.count, column)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Where the largest entries of each sample are; fewer than asked for where there are fewer."""
    return sizes.topk(min(count, sizes.shape[1]), dim=1).indices


def _unit_columns(values: Tensor) -> Columns:
    """Column d holds every sample's d-th value and zero elsewhere."""
    flat = values.reshape(values.shape[0], -1)

    def column(index: int) -> Tensor:
        whole = torch.zeros_like(flat)
        whole[:, index] = flat[:, index]
        return whole.reshape(values.shape)

    return Columns(flat.shape[1], column)


def _check_same_shape(name: str, outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        raise LabelError(
            f"{name} needs targets shaped like the outputs {tuple(outputs.shape)}, got {tuple(targets.shape)}; "
            "reshape one of them (broadcasting would mix samples)."
        )
    if targets.is_complex():
        raise LabelError(f"{name} needs real targets, got {targets.dtype}.")
