"""curvlinops' Gauss–Newton, empirical Fisher and K-FAC operators against ours."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.testing import oracle
from tests.crosscheck.models import Sequence, convnet, inputs_of, mlp, normal, stream_of, targets_of

pytestmark = pytest.mark.crosscheck

CASES = {
    "mlp-first": (mlp, "0.weight"),
    "mlp-last": (mlp, "2.weight"),
    "conv": (convnet, "0.weight"),
    "sequence": (lambda: Sequence().double(), "shared.weight"),
}


def dense(operator: Any, like: Tensor) -> Tensor:
    """The operator's matrix, column by column."""
    eye = torch.eye(like.numel(), dtype=like.dtype)
    matrix: Tensor = operator @ eye
    return matrix.detach()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(), nn.BCEWithLogitsLoss()],
    ids=str,
)
def test_the_gauss_newton_matrix(curvlinops: ModuleType, case: str, loss: nn.Module) -> None:
    build, layer = CASES[case]
    model = build()
    inputs, targets = inputs_of(model), targets_of(loss)
    parameter = dict(model.named_parameters())[layer]
    # two batches of unequal size: their mean is over samples, not over batches
    data = [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]
    operator = curvlinops.GGNLinearOperator(model, loss, [parameter], data)
    share = 1 if loss.reduction == "mean" else len(inputs)
    theirs = dense(operator, parameter) / share
    ours = ks.SecondMoment(stream_of(model, loss, data, layer)).to_dense()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(oracle.gauss_newton(model, loss, inputs, targets, layer), theirs)


def test_the_gauss_newton_matrix_of_a_token_loss(curvlinops: ModuleType) -> None:
    """Under mean reduction over T tokens a sequence's atom carries √(1/T); one matrix over N·T tokens agrees."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.shared(x).cumsum(1)
            return logits.transpose(1, 2)

    model, loss = Tokens().double(), nn.CrossEntropyLoss()
    inputs, targets = normal(0, 4, 3, 4), torch.arange(12).view(4, 3) % 3
    operator = curvlinops.GGNLinearOperator(model, loss, [model.shared.weight], [(inputs, targets)])
    theirs = dense(operator, model.shared.weight)
    torch.testing.assert_close(
        ks.SecondMoment(stream_of(model, loss, [(inputs, targets)], "shared.weight")).to_dense(), theirs
    )


@pytest.mark.parametrize("case", CASES)
def test_the_empirical_fisher(curvlinops: ModuleType, case: str) -> None:
    build, layer = CASES[case]
    model, loss = build(), nn.CrossEntropyLoss()
    data = [(inputs_of(model), targets_of(loss))]
    parameter = dict(model.named_parameters())[layer]
    theirs = dense(curvlinops.EFLinearOperator(model, loss, [parameter], data), parameter)
    ours = ks.SecondMoment(stream_of(model, loss, data, layer, labels="real")).to_dense()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(oracle.empirical_fisher(model, loss, *data[0], layer), theirs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", ["expand", "reduce"])
def test_k_fac_has_the_same_direction(curvlinops: ModuleType, case: str, variant: str) -> None:
    build, layer = CASES[case]
    model, loss = build(), nn.CrossEntropyLoss()
    data = [(inputs_of(model), targets_of(loss))]
    parameter = dict(model.named_parameters())[layer]
    theirs = dense(
        curvlinops.KFACLinearOperator(
            model, loss, [parameter], data, fisher_type="type-2", kfac_approx=variant, check_deterministic=False
        ),
        parameter,
    )
    op = ks.approx.get(f"kfac-{variant}").fit(stream_of(model, loss, data, layer))
    assert oracle.cosine(op.to_dense(), theirs) >= 1 - 1e-9
