"""Every cosine of a model by full matrices: Jacobians, textbook formulas, no code of the measuring path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kronscope import testing
from kronscope.errors import ConvergenceError
from kronscope.testing import oracle

ON_TRUTH = ("optimal", "optimal-paper", "kronecker-sum")
KFAC = ("kfac-reduce", "kfac-expand", "ekfac")
NAMES = (*oracle.matrix_approximations(), *KFAC)


@dataclass(frozen=True)
class Layer:
    """A layer's name for ``ks.measure``, and the same for the oracle; ``modules`` are the calls K-FAC is made of."""

    name: str
    parameters: tuple[str, ...]
    rows: slice = field(default_factory=lambda: slice(None))
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A model in float64 with its data."""

    model: nn.Module
    loss: nn.Module
    inputs: Tensor
    targets: Tensor
    memo: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made once: Jacobians one by one are slow."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs.split(size), self.targets.split(size), strict=True))

    def outputs(self) -> Tensor:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            found: Tensor = self.model(self.inputs)
        for module, mode in modes:
            module.training = mode
        return found


@dataclass(frozen=True)
class Setting:
    """One question."""

    truth: str = "gauss_newton"
    labels: str | None = None
    batch_size: int = 1
    replacement: bool = True
    draws: int = 1
    seed: int = 0

    @property
    def fitted(self) -> str:
        return self.labels or {"gauss_newton": "exact", "empirical_fisher": "real"}[self.truth]


def drawn_labels(problem: Problem, setting: Setting) -> Tensor:
    """The targets (D, N, ...) that ``labels="sampled"`` draws, from the numbers that belong to seed and sample."""
    outputs, loss = problem.outputs(), problem.loss
    drawn = []
    for sample, output in enumerate(outputs):
        # what is fitted is drawn with the seed after the truth's
        stream = np.random.Generator(np.random.Philox(key=setting.seed + 1, counter=[0, 0, 0, sample]))
        if isinstance(loss, nn.MSELoss):
            noise = torch.from_numpy(stream.standard_normal((setting.draws, *output.shape)))
            drawn.append(output - noise / math.sqrt(2))
        elif isinstance(loss, nn.BCEWithLogitsLoss):
            uniform = torch.from_numpy(stream.random((setting.draws, *output.shape)))
            drawn.append((uniform < output.sigmoid()).double())
        else:
            tokens = output.reshape(output.shape[0], -1)
            uniform = torch.from_numpy(stream.random((setting.draws, tokens.shape[1])))
            cumulative = tokens.softmax(0).cumsum(0)
            labels = (uniform[:, None] >= cumulative[None]).sum(1).reshape(setting.draws, *output.shape[1:])
            ignored = problem.targets[sample] == loss.ignore_index
            drawn.append(labels.masked_fill(ignored, int(loss.ignore_index)))  # type: ignore[arg-type]
    return torch.stack(drawn, 1)


def dense_cosines(problem: Problem, layer: Layer, setting: Setting, names: Iterable[str] = NAMES) -> dict[str, float]:
    """Every approximation's cosine with the truth; NaN where it does not exist."""
    arguments = (problem.model, problem.loss, problem.inputs)
    where: dict[str, Any] = {"parameters": layer.parameters, "rows": layer.rows}
    make = testing.oracle.gauss_newton if setting.truth == "gauss_newton" else testing.oracle.empirical_fisher
    truth = problem.once((setting.truth, layer.name), lambda: make(*arguments, problem.targets, **where))
    single, batched = _fitted(problem, layer, setting, where)
    shape = _shape(problem.model, layer)
    found = {}
    for name in names:
        if name in KFAC:
            K = _kfac(name, problem, layer, setting, single)
        else:
            K = _of_matrix(name, truth if name in ON_TRUTH else batched, shape)
        found[name] = math.nan if K is None else oracle.cosine(truth, K)
    return found


def _fitted(problem: Problem, layer: Layer, setting: Setting, where: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The second moment of what is fitted on, of single samples and of batches."""
    arguments = (problem.model, problem.loss, problem.inputs)
    if setting.fitted == "exact":
        H = problem.once(
            ("gauss_newton", layer.name), lambda: oracle.gauss_newton(*arguments, problem.targets, **where)
        )
        return H, H
    if setting.fitted == "real":
        atoms = problem.once(
            ("atoms", layer.name), lambda: oracle.empirical_fisher_atoms(*arguments, problem.targets, **where)
        )
    else:
        atoms = oracle.fisher_of_draws_atoms(*arguments, drawn_labels(problem, setting), **where)
    single, count, size = atoms.matrix(), len(problem.targets), setting.batch_size
    if setting.fitted == "sampled":  # drawn anew for every batch, they have mean zero (Lemma 7)
        return single, single
    mean = torch.einsum("i,imn->mn", atoms.weights, atoms.grads).flatten()
    if setting.replacement:
        return single, single + (size - 1) * torch.outer(mean, mean)
    return single, single + (size - 1) * (count * torch.outer(mean, mean) - single) / (count - 1)


def _of_matrix(name: str, H: Tensor, shape: tuple[int, int]) -> Tensor | None:
    try:
        return oracle.approximation_of_matrix(name, H, shape)
    except ConvergenceError:
        return None


def _shape(model: nn.Module, layer: Layer) -> tuple[int, int]:
    known = dict(model.named_parameters(remove_duplicate=False))
    matrix = torch.cat([known[name].detach().flatten(1) for name in layer.parameters])[layer.rows]
    return matrix.shape[0], matrix.shape[1]


def _kfac(name: str, problem: Problem, layer: Layer, setting: Setting, single: Tensor) -> Tensor | None:
    if not layer.modules:
        return None
    left, right = _kfac_factors(problem, layer, setting, reduce=name == "kfac-reduce")
    return torch.kron(left, right) if name != "ekfac" else oracle.in_eigenbasis(single, left, right)


def _kfac_factors(problem: Problem, layer: Layer, setting: Setting, *, reduce: bool) -> tuple[Tensor, Tensor]:
    """Sums over samples of the moments of each side, whose scales do not matter to a cosine.

    Several uses of one weight, and the parts of a stack, are further positions. A side that has no columns (inputs) is
    the same for all of them and counts once.
    """
    drawn = setting.fitted == "sampled"
    targets = drawn_labels(problem, setting) if drawn else problem.targets[None]
    sizes = [_shape(problem.model, Layer("", (name,))) for name in layer.parameters]
    height = sum(rows for rows, _ in sizes)
    moments = [torch.zeros(size, size, dtype=torch.float64) for size in (height, sizes[0][1])]
    exact = setting.fitted == "exact"
    for draw, labels in enumerate(targets):
        arguments = (problem.model, problem.loss, problem.inputs, labels)
        uses = [
            problem.once(
                (module, setting.fitted, draw, setting.seed if drawn else 0),
                lambda given=arguments, module=module: oracle.layer_factors(*given, module, real=not exact),  # type: ignore[misc]
            )
            for module in layer.modules
        ]
        for sample in range(len(labels)):
            # sampled gradients of a mean over T_i terms count for √T_i; a mean over draws is taken at the end
            scale = _terms(problem.loss, labels[sample]) ** 0.5 if drawn else 1.0
            parts = []
            for index, use in enumerate(uses):
                rows, cols = (side * (scale if side.dim() == 3 else 1.0) for side in use[sample])
                if len(layer.parameters) > 1:
                    rows = nn.functional.pad(rows, (index * sizes[0][0], height - (index + 1) * sizes[0][0]))
                parts.append((rows, cols))
            for side, moment in enumerate(moments):
                moment += _moment([part[side] for part in parts], reduce)
    return moments[0][layer.rows, layer.rows], moments[1]


def _moment(parts: list[Tensor], reduce: bool) -> Tensor:
    """The second moment of one side (c, t, d) or (t, d) of all uses of a sample."""
    if not reduce:
        return torch.stack([flat.T @ flat for flat in (part.reshape(-1, part.shape[-1]) for part in parts)]).sum(0)
    # summed over all positions of all uses; with a single column inputs and gradients alike, with the columns of exact
    # labels apart, since the mean of their product over labels is zero
    summed = [part.sum(-2) for part in parts]
    columns = [part for part in summed if part.dim() == 2 and len(part) > 1]
    single = [part.reshape(-1) for part in summed if part.dim() == 1 or len(part) == 1]
    moment = torch.zeros(parts[0].shape[-1], parts[0].shape[-1], dtype=torch.float64)
    if single:
        total = torch.stack(single).sum(0)
        moment = moment + torch.outer(total, total)
    if columns:
        wide = torch.stack(columns).sum(0)
        moment = moment + wide.T @ wide
    return moment


def _terms(loss: nn.Module, target: Tensor) -> float:
    if loss.reduction == "sum":
        return 1.0
    if isinstance(loss, nn.CrossEntropyLoss):
        return float((target != loss.ignore_index).sum())
    return float(target.numel())


def classes_for(loss: Callable[[], nn.Module], outputs: Tensor) -> Tensor:
    """Targets that fit a loss."""
    generator = torch.Generator().manual_seed(5)
    if isinstance(loss(), nn.CrossEntropyLoss):
        shape = (outputs.shape[0], *outputs.shape[2:])
        targets = torch.randint(0, outputs.shape[1], shape, generator=generator)
        if loss().ignore_index == -1:
            targets[0, 1], targets[2, :2], targets[-1] = -1, -1, -1
        return targets
    values = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    return values if isinstance(loss(), nn.MSELoss) else (values > 0).double()
