"""Softmax cross-entropy, with class weights, smoothed labels and class probabilities as targets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kronscope.errors import LabelError, OptionError
from kronscope.gradients.losses.columns import Columns, Draws, Weights, largest_entries

__all__ = ["CrossEntropy"]


class _Tokens(NamedTuple):
    """What the Hessian of each token is made of.

    Attributes:
        log_p: Log-probabilities (samples, classes, tokens).
        counted: Which tokens count, (samples, tokens).
        size: The sum of each token's weighted target, zero where it does not count, (samples, tokens).
        scale: One over what each sample's loss is divided by, (samples,).
    """

    log_p: Tensor
    counted: Tensor
    size: Tensor
    scale: Tensor

    def root_scale(self) -> Tensor:
        """What multiplies the columns of diag(p) − ppᵀ, (samples, 1, tokens)."""
        return (self.scale.sqrt()[:, None] * self.size.sqrt()).unsqueeze(1)


@dataclass(frozen=True)
class CrossEntropy:
    r"""Softmax cross-entropy over dimension 1 of the outputs.

    Targets are class indices, or class probabilities shaped like the outputs. With :math:`t` the target of a token as
    a distribution, smoothed to :math:`(1-\epsilon)t + \epsilon/C`, and :math:`w` the class weights, its loss is
    :math:`-\sum_c w_c t_c \log p_c`, the gradient :math:`s p - w \circ t` and the Hessian
    :math:`s (\operatorname{diag}(p) - pp^\top)`, with :math:`s = \sum_c w_c t_c`. As in torch, a mean divides by
    the number of tokens, but for class indices with weights by the sum of the labels' weights.

    With :math:`q = \sqrt p` the matrix :math:`\operatorname{diag}(p) - pp^\top` is
    :math:`S S^\top` for :math:`S = \operatorname{diag}(q)(I - qq^\top)`, and multiplying S by an orthogonal matrix
    whose first column is :math:`\pm q` leaves C−1 columns that are not zero. We take the Householder matrix
    :math:`I - vv^\top/(1+q_a)`, :math:`v = q + e_a`, with :math:`a` the most probable class: then nothing cancels,
    however close the probabilities come to 0 or 1.

    Attributes:
        mean: Whether to take the mean over tokens instead of the sum.
        ignore_index: The class index of tokens that do not count.
        weight: Class weights.
        smoothing: :math:`\epsilon`.
    """

    mean: bool = True
    ignore_index: int = -100
    weight: Weights | None = None
    smoothing: float = 0.0

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check targets and class weights.

        Raises:
            LabelError: Targets are neither class indices nor class probabilities for these outputs.
            OptionError: There are more or fewer class weights than classes.
        """
        if outputs.dim() < 2:
            raise LabelError(
                f"Cross-entropy needs outputs (samples, classes, ...), got {tuple(outputs.shape)}; "
                "for one logit per sample use BCEWithLogitsLoss."
            )
        soft = targets.is_floating_point() and targets.shape == outputs.shape
        if not soft:
            _check_indices(outputs, targets)
        classes = outputs.shape[1]
        if classes < 2:
            raise LabelError(
                "Cross-entropy over one class is constant and has no curvature; for one logit use BCEWithLogitsLoss."
            )
        if self.weight is not None and self.weight.shape != (classes,):
            raise OptionError(
                f"CrossEntropyLoss(weight=...) needs one weight for each of the {classes} classes in dimension 1 of "
                f"the outputs, got weights of shape {self.weight.shape}."
            )
        if soft:
            self._check_probabilities(targets)
            return
        wrong = (targets != self.ignore_index) & ((targets < 0) | (targets >= classes))
        if bool(wrong.any()):
            raise LabelError(
                f"Class indices must lie in 0..{classes - 1} (or be ignore_index={self.ignore_index}), "
                f"got {int(targets[wrong][0])}."
            )
        if self.weight is not None and self.mean and self.smoothing:
            counted, own = self._label_weights(targets.cpu())  # a device may have no float64
            if bool((counted.any(1) & (own.sum(1) == 0)).any()):
                raise LabelError(
                    "All labels of a sample have class weight 0, by which the mean divides its smoothed loss; leave "
                    "such samples out, or use reduction='sum'."
                )

    def _check_probabilities(self, targets: Tensor) -> None:
        if self.ignore_index >= 0:
            raise LabelError(
                f"ignore_index={self.ignore_index} means nothing for class probabilities as targets; pass class "
                "indices, or leave ignore_index out."
            )
        wrong = ~((targets >= 0) & (targets <= 1))
        if bool(wrong.any()):
            raise LabelError(
                f"Class probabilities must lie in [0, 1], got {targets[wrong][0].item()}; for logits take "
                "targets.softmax(1)."
            )

    def doubt(self, targets: Tensor) -> str:
        """Several ones for a sample are labels of another loss more often than weights of classes."""
        labels = targets.sum(1) if targets.is_floating_point() else targets.new_zeros(1)
        if not bool((labels > 1).any() and ((targets == 0) | (targets == 1)).all()):
            return ""
        return (
            "the targets are zeros and ones, several ones for a sample: cross-entropy takes them as weights of the "
            "classes; if a sample may have several labels, use BCEWithLogitsLoss (on the command line: --loss bce)"
        )

    def terms(self, targets: Tensor) -> int:
        """Tokens that count."""
        if targets.is_floating_point():
            return math.prod(targets.shape[2:])
        return max(int((targets != self.ignore_index).reshape(len(targets), -1).sum(1).max()), 1)

    def exact_columns(self, outputs: torch.Size, terms: int) -> int:
        """C−1 for every token."""
        return terms * (outputs[1] - 1)

    def kept_bytes(self, outputs: torch.Size) -> int:
        """Columns are made from the outputs when asked for."""
        return 0

    def exact(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Return C−1 columns per token that counts; each is zero outside its token."""
        tokens = self._tokens(outputs, targets)
        log_p = tokens.log_p
        samples, classes, _ = log_p.shape
        root, best = (log_p / 2).exp(), log_p.argmax(1)
        # Tokens that count come first, so that padding costs no columns.
        order = torch.sort(tokens.counted.int(), dim=1, descending=True, stable=True).indices
        rows = torch.arange(samples, device=outputs.device)
        root_scale = tokens.root_scale()[:, 0]

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
            whole[rows, :, token] = values * root_scale[rows, token].unsqueeze(1)
            return whole.reshape(outputs.shape)

        return Columns(self.exact_columns(outputs.shape, self.terms(targets)), column)

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        r"""One column per draw; every token draws its own label from :math:`p`.

        Class weights and smoothing do not change from what labels are drawn. The gradient :math:`p - e_y` is
        multiplied by :math:`\sqrt s`, so that its second moment is the Hessian of the weighted and smoothed loss.
        """
        tokens = self._tokens(outputs, targets)
        p = tokens.log_p.exp()
        # (samples, tokens, classes) against (samples, tokens, draws): inverting the distribution function.
        uniform = draws.uniform((draws.count, p.shape[2])).transpose(1, 2).contiguous().to(p.device)
        cumulative = p.transpose(1, 2).cumsum(2)
        labels = torch.searchsorted(cumulative / cumulative[..., -1:], uniform, right=True)
        weight = tokens._replace(scale=tokens.scale / draws.count).root_scale()

        def column(index: int) -> Tensor:
            label = labels[..., index].unsqueeze(1)
            values = p.scatter_add(1, label, -torch.ones_like(label, dtype=p.dtype))
            return (values * weight).reshape(outputs.shape)

        return Columns(draws.count, column)

    def mixed(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Columns:
        r"""The largest of the exact columns, then ± sums of all others over all tokens.

        A sum :math:`\sum_c x_c s_c` of a token's columns has the entries :math:`q_j x_j - p_j t/(1+q_a)` and
        :math:`-q_a t` at the pivot :math:`a`, with :math:`t = \sum_c x_c q_c`.
        """
        tokens = self._tokens(outputs, targets)
        root, pivot = (tokens.log_p / 2).exp(), tokens.log_p.argmax(1, keepdim=True)
        root_scale = tokens.root_scale()
        largest = largest_entries(self._sizes(root, pivot, root_scale).flatten(1), draws.fixed) if draws.fixed else None
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
        tokens = self._tokens(outputs, targets)
        pivot = tokens.log_p.argmax(1, keepdim=True)
        return self._sizes((tokens.log_p / 2).exp(), pivot, tokens.root_scale()).flatten(1)

    @staticmethod
    def _sizes(root: Tensor, pivot: Tensor, root_scale: Tensor) -> Tensor:
        p, top = root.square(), root.gather(1, pivot)
        shrink = p / (1 + top).square()  # the square of q_c / (1 + q_a)
        rest = p.square().sum(1, keepdim=True) - p.square() - top**4
        own = (root - p * root / (1 + top)).square()
        sizes = shrink * rest.clamp_min(0.0) + own + p * top.square()
        return sizes.scatter_(1, pivot, 0.0) * root_scale.square()

    def real(self, outputs: Tensor, targets: Tensor) -> Columns:
        """One column, p minus the target, both weighted."""
        tokens = self._tokens(outputs, targets)
        values = tokens.log_p.exp() * tokens.size.unsqueeze(1)
        if targets.is_floating_point():
            values -= self._weighted(targets)
        else:
            counted, own = self._label_weights(targets)
            labels = targets.long().reshape(counted.shape).masked_fill(~counted, 0)
            values.scatter_add_(1, labels.unsqueeze(1), -(1 - self.smoothing) * own.unsqueeze(1))
            if self.smoothing:
                each = self._class_weights(outputs) * (self.smoothing / outputs.shape[1])
                values -= each[:, None] * counted.unsqueeze(1)
        values *= tokens.scale[:, None, None]
        return Columns(1, lambda _: values.reshape(outputs.shape))

    def _tokens(self, outputs: Tensor, targets: Tensor) -> _Tokens:
        log_p = F.log_softmax(_flat_tokens(outputs), dim=1)
        if targets.is_floating_point():
            size = self._weighted(targets).sum(1)
            counted = torch.ones_like(size, dtype=torch.bool)
            divisor = counted.sum(1).double()
        else:
            counted, own = self._label_weights(targets)
            size, divisor = own, own.sum(1)
            if self.smoothing:
                rest = self._class_weights(outputs).mean()  # of 1/C for every class
                size = (1 - self.smoothing) * own + self.smoothing * rest * counted
        # A sample without a token that counts has no loss.
        scale = 1 / torch.where(divisor > 0, divisor, 1.0) if self.mean else torch.ones_like(divisor)
        return _Tokens(log_p, counted, size, scale)

    def _label_weights(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens count, and the weights of their labels."""
        counted = (targets != self.ignore_index).reshape(len(targets), -1)
        own = counted.double()
        if self.weight is not None:
            labels = targets.long().reshape(counted.shape).masked_fill(~counted, 0)
            own = own * self.weight.to(targets.device)[labels]
        return counted, own

    def _class_weights(self, outputs: Tensor) -> Tensor:
        if self.weight is None:
            return torch.ones(outputs.shape[1], dtype=torch.float64, device=outputs.device)
        return self.weight.to(outputs.device)

    def _weighted(self, targets: Tensor) -> Tensor:
        """Class probabilities, smoothed and times the class weights, (samples, classes, tokens)."""
        smoothed = _flat_tokens(targets) * (1 - self.smoothing) + self.smoothing / targets.shape[1]
        return smoothed if self.weight is None else smoothed * self.weight.to(targets.device)[:, None]


def _flat_tokens(values: Tensor) -> Tensor:
    """In float64, (samples, classes, tokens)."""
    values = values.detach().double()
    return values.flatten(2) if values.dim() > 2 else values.unsqueeze(2)


def _check_indices(outputs: Tensor, targets: Tensor) -> None:
    shape, wanted = tuple(targets.shape), (outputs.shape[0], *outputs.shape[2:])
    if shape != wanted:
        advice = "dimension 1 of the outputs must be the classes"
        if outputs.dim() == 3 and shape == tuple(outputs.shape[:2]):
            advice = (
                "put the classes second with forward=lambda model, x: model(x).transpose(1, 2), or, where the model "
                "returns an output object, model(**x).logits.transpose(1, 2) (on the command line --forward "
                "module:function)"
            )
        raise LabelError(
            f"Outputs of shape {tuple(outputs.shape)} need class indices of shape {wanted}, got {shape}; {advice}. "
            "Class probabilities as targets are shaped like the outputs."
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise LabelError(f"Class indices must be integers, got {targets.dtype}; convert with targets.long().")
