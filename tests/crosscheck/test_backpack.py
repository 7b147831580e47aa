"""BackPACK's exact square root of the Gauss–Newton matrix against the oracle's and ours."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.testing import oracle
from tests.crosscheck.models import convnet, inputs_of, mlp, stream_of, targets_of

pytestmark = pytest.mark.crosscheck


def square_root(
    backpack: ModuleType, model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """BackPACK's (C, N, *shape) for every parameter: the sum of all outer products is the Gauss–Newton matrix."""
    from backpack.extensions import SqrtGGNExact

    extended = backpack.extend(copy.deepcopy(model))
    with backpack.backpack(SqrtGGNExact()):
        backpack.extend(copy.deepcopy(loss))(extended(inputs), targets).backward()
    return {name: parameter.sqrt_ggn_exact.detach() for name, parameter in extended.named_parameters()}


CASES = {
    "mlp-first": (mlp, "0.weight"),
    "mlp-last": (mlp, "2.weight"),
    "conv": (convnet, "0.weight"),
    "conv-last": (convnet, "3.weight"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss()], ids=str)
def test_the_square_root_has_our_gauss_newton_matrix(backpack: ModuleType, case: str, loss: nn.Module) -> None:
    build, layer = CASES[case]
    model = build()
    inputs, targets = inputs_of(model), targets_of(loss)
    root = square_root(backpack, model, loss, inputs, targets)[layer].flatten(2)
    # the mean over samples is part of torch's mean, and of our weights whatever the reduction
    share = 1 if loss.reduction == "mean" else len(inputs)
    theirs = torch.einsum("cni,cnj->ij", root, root) / share
    torch.testing.assert_close(oracle.gauss_newton(model, loss, inputs, targets, layer), theirs)
    ours = ks.SecondMoment(stream_of(model, loss, [(inputs, targets)], layer))
    torch.testing.assert_close(ours.to_dense(), theirs)
    for name in ("shampoo2", "shampoo", "optimal"):
        expected = oracle.cosine(theirs, oracle.approximation_of_matrix(name, theirs, ours.shape))
        assert abs(ks.cosine(ours, ks.approx.get(name).fit(ours.stream)) - expected) <= 1e-9


@pytest.mark.parametrize("case", CASES)
def test_every_sample_s_atoms_span_the_same_matrix(backpack: ModuleType, case: str) -> None:
    """C columns there, C−1 here: for each sample their outer products add up to the same."""
    build, layer = CASES[case]
    model, loss = build(), nn.CrossEntropyLoss()
    inputs, targets = inputs_of(model), targets_of(loss)
    root = square_root(backpack, model, loss, inputs, targets)[layer].flatten(2)
    stream = stream_of(model, loss, [(inputs, targets)], layer)
    grads, weights = oracle.atoms(stream)
    assert stream.columns == 2
    scaled = (grads.flatten(1) * weights.sqrt()[:, None]).view(len(inputs), 2, -1)
    ours = torch.einsum("nci,ncj->nij", scaled, scaled)
    torch.testing.assert_close(ours, torch.einsum("cni,cnj->nij", root, root))
