"""A way from a weight to the outputs counts though the first samples close it: gates, masks, branches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kronscope.gradients.capture import Recorder
from kronscope.gradients.coverage import used_otherwise
from kronscope.gradients.interception import UseRecorder
from kronscope.gradients.matrices import resolve_layers
from tests.gradients import zoo
from tests.gradients.naive import close, matrices, plain_call, stream_matrices

Extra = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gated(nn.Module):
    """What ``extra`` does with the weight reaches the outputs of some samples only."""

    def __init__(self, extra: Extra) -> None:
        super().__init__()
        self.map, self.head, self.extra = nn.Linear(4, 4), nn.Linear(4, 3), extra

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.extra(self.map(x), x, self.map.weight).tanh())
        return out


def normalised(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return out + F.relu(x[:, :1]) * F.linear(x, F.normalize(weight, dim=1))


def only_there(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.where(x[:, :1] > 0, torch.einsum("ni,oi->no", x, weight * weight), out)


def added_in_a_branch(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    mask = x[:, 0] > 0
    return out.index_put((mask,), out[mask] + x[mask] @ weight.exp()) if bool(mask.any()) else out


def penalised(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return out + F.relu(x[:, :1]) * weight.square().sum()


@pytest.mark.parametrize("extra", [normalised, only_there, added_in_a_branch, penalised])
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_what_the_first_samples_do_not_reach_is_not_left_out(extra: Extra, batch: int) -> None:
    model = Gated(extra).double()
    inputs = zoo.images(20, 4)
    inputs[:, 0] = -inputs[:, 0].abs()
    inputs[17, 0] = 2.0
    targets = torch.arange(20) % 3
    loss = nn.CrossEntropyLoss()
    batches = list(zip(inputs.split(batch), targets.split(batch), strict=True))
    (spec,) = resolve_layers(model, ["map.weight"])
    streams = Recorder(model, loss, batches, [spec]).streams("exact")
    truth = matrices(model, plain_call, loss, inputs, targets, spec, "exact")
    assert close(stream_matrices(streams["map.weight"]), truth)


@pytest.mark.parametrize(
    ("found", "forward"),
    [
        (set(), F.linear),
        (set(), lambda x, w: F.linear(F.linear(x, w).tanh(), w[:4])),
        (set(), lambda x, w: torch.addmm(x @ w.T, x, w.T)),
        (set(), lambda x, w: F.linear(x, w.detach() * 2) + x @ w.T),
        ({"w"}, lambda x, w: F.linear(x, w, w.sum(1))),
        ({"w"}, lambda x, w: torch.addmm(w.sum(1), x, w.T)),
        ({"w"}, lambda x, w: F.linear(x * w.mean(), w)),
        ({"w"}, lambda x, w: F.linear(F.linear(x, 2 * w).tanh(), w)),
        ({"w"}, lambda x, w: F.linear(x, w) * w[0, 0]),
    ],
)
def test_every_operand_of_a_use_but_its_weight_is_followed(
    found: set[str], forward: Callable[[Tensor, Tensor], Tensor]
) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    with UseRecorder({"w": weight}, 3) as recorder:
        outputs = forward(torch.randn(3, 4), weight)
    assert recorder.uses
    assert used_otherwise(outputs, recorder.uses, {"w": weight}) == found
