"""Facts: the oracle agrees with what can be worked out by hand, so that others may be held to it."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from kronscope.errors import ConvergenceError, LayerError, NotFactoredError, OptionError
from kronscope.gradients.stream import GradientStream
from kronscope.testing import StreamRecipe, oracle


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=False).double()


# ---------------------------------------------------------------------------- streams and matrices


def test_atoms_are_written_out_with_their_weights() -> None:
    B, A = normal(0, 2, 3, 2), normal(1, 2, 3, 4)
    grads, weights = oracle.atoms(GradientStream.from_factors(B, A, torch.tensor([0.3, 0.7])))
    torch.testing.assert_close(grads, B.mT @ A)
    assert weights.tolist() == pytest.approx([0.3, 0.7])


def test_the_rearrangement_is_the_mean_of_kronecker_squares() -> None:
    stream = StreamRecipe("dense", (2, 3), samples=4, weights="random").build()
    grads, weights = oracle.atoms(stream)
    expected = sum(w * torch.kron(g, g) for g, w in zip(grads, weights, strict=True))
    # G ⊗ G maps vec R to vec(G R Gᵀ): rows (i, j), columns (a, b), as does the rearrangement
    torch.testing.assert_close(oracle.rearrange(oracle.second_moment(stream), (2, 3)), expected)


def test_contractions_of_the_dense_matrix() -> None:
    stream = StreamRecipe("dense", (2, 3), samples=4).build()
    H = oracle.second_moment(stream)
    grads, weights = oracle.atoms(stream)
    L, R = normal(0, 2, 2), normal(1, 3, 3)
    left = sum(w * g @ R @ g.T for g, w in zip(grads, weights, strict=True))
    right = sum(w * g.T @ L @ g for g, w in zip(grads, weights, strict=True))
    torch.testing.assert_close(oracle.left(H, (2, 3), R), left)
    torch.testing.assert_close(oracle.right(H, (2, 3), L), right)


def test_the_cosine() -> None:
    assert oracle.cosine(torch.eye(2), torch.diag(torch.tensor([1.0, 0.0]))) == pytest.approx(math.sqrt(0.5))
    assert oracle.cosine(1e-200 * torch.eye(2).double(), 1e200 * torch.eye(2).double()) == pytest.approx(1.0)
    assert math.isnan(oracle.cosine(torch.zeros(2, 2), torch.eye(2)))


def test_powers_are_pseudo_inverses() -> None:
    matrix = torch.diag(torch.tensor([4.0, 1e-20, 0.0], dtype=torch.float64))
    assert oracle.power(matrix, -0.5).diagonal().tolist() == pytest.approx([0.5, 0.0, 0.0])


def test_singular_values_of_a_matrix_need_its_shape() -> None:
    L, R = torch.diag(torch.tensor([3.0, 4.0])), torch.eye(1)
    assert oracle.rearranged_singular_values(torch.kron(L, R), (2, 1)).tolist() == pytest.approx([5.0])
    with pytest.raises(OptionError, match=r"shape=\(m, n\)"):
        oracle.rearranged_singular_values(torch.eye(2))


def test_approximations_by_hand() -> None:
    """One diagonal gradient diag(1, 2): L = R = diag(1, 4), H = g gᵀ with g = (1, 0, 0, 2)."""
    stream = GradientStream.from_tensors(torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))[None])
    diagonal = {name: oracle.approximation(name, stream).diagonal().tolist() for name in oracle.matrix_approximations()}
    assert diagonal["shampoo2"] == pytest.approx([1 / 5, 4 / 5, 4 / 5, 16 / 5])
    assert diagonal["shampoo"] == pytest.approx([1.0, 2.0, 2.0, 4.0])
    assert diagonal["diagonal"] == pytest.approx([1.0, 0.0, 0.0, 4.0])
    assert diagonal["soap"] == pytest.approx([1.0, 0.0, 0.0, 4.0])
    assert diagonal["identity"] == pytest.approx([1.25] * 4)
    assert diagonal["one-sided"] == pytest.approx([0.5, 0.5, 2.0, 2.0])
    mixed = ((1 + 4**-0.25) / 2) ** -4
    assert diagonal["caspr"] == pytest.approx([1.0, mixed, mixed, 4.0])
    # Ĥ = G ⊗ G has the singular values of G, multiplied in pairs: the largest belongs to the corner
    assert diagonal["optimal"] == pytest.approx([0.0, 0.0, 0.0, 4.0])
    # L = G R⁻¹ Gᵀ/2 and R = Gᵀ L⁻¹ G/2 for R = diag(1, 4)/√17 and L = √17/2 I
    assert diagonal["kl"] == pytest.approx([0.5, 2.0, 0.5, 2.0])


def test_k_fac_by_hand() -> None:
    B, A = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [5.0]]])
    stream = GradientStream.from_factors(B, A)
    assert oracle.approximation("kfac-reduce", stream).item() == pytest.approx(9.0 * 64.0)
    assert oracle.approximation("kfac-expand", stream).item() == pytest.approx(5.0 * 34.0)
    assert oracle.approximation("ekfac", stream).item() == pytest.approx(13.0**2)
    with pytest.raises(NotFactoredError):
        oracle.approximation("kfac-reduce", StreamRecipe("dense").build())


def test_unknown_names_and_missing_answers() -> None:
    with pytest.raises(OptionError, match="from H alone"):
        oracle.approximation_of_matrix("kfac-reduce", torch.eye(4), (2, 2))
    grads = normal(0, 50, 3, 2)
    grads[:, 1:, 1] = 0
    with pytest.raises(ConvergenceError, match="too few"):
        oracle.approximation("kl", GradientStream.from_tensors(grads))
    assert not oracle.approximation("shampoo2", StreamRecipe("dense", scale=0.0).build()).any()


# ---------------------------------------------------------------------------- models


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gauss_newton_of_a_softmax_layer(reduction: str) -> None:
    model, inputs = linear(3, 4), normal(0, 5, 3)
    H = oracle.gauss_newton(model, nn.CrossEntropyLoss(reduction=reduction), inputs, torch.arange(5) % 4, "weight")
    p = model(inputs).softmax(1).detach()
    blocks = [torch.kron(torch.diag(q) - torch.outer(q, q), torch.outer(x, x)) for q, x in zip(p, inputs, strict=True)]
    torch.testing.assert_close(H, torch.stack(blocks).mean(0))


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 2 / 4), ("sum", 2.0)])
def test_gauss_newton_of_squared_error(reduction: str, factor: float) -> None:
    model, inputs = linear(3, 4), normal(0, 5, 3)
    H = oracle.gauss_newton(model, nn.MSELoss(reduction=reduction), inputs, normal(1, 5, 4), "weight")
    second = torch.einsum("ni,nj->ij", inputs, inputs) / 5
    torch.testing.assert_close(H, factor * torch.kron(torch.eye(4).double(), second))


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 1 / 2), ("sum", 1.0)])
def test_gauss_newton_of_sigmoids(reduction: str, factor: float) -> None:
    model, inputs = linear(3, 2), normal(0, 5, 3)
    H = oracle.gauss_newton(model, nn.BCEWithLogitsLoss(reduction=reduction), inputs, torch.zeros(5, 2), "weight")
    s = model(inputs).sigmoid().detach()
    blocks = [torch.kron(torch.diag(v * (1 - v)), torch.outer(x, x)) for v, x in zip(s, inputs, strict=True)]
    torch.testing.assert_close(H, factor * torch.stack(blocks).mean(0))


class Tokens(nn.Module):
    """A small sequence model with a tied head: outputs (N, C, T)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(3, 2)
        self.mix = nn.Linear(2, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embed(tokens))).cumsum(1)
        logits: Tensor = self.head(hidden)
        return logits.transpose(1, 2)


TOKENS = torch.tensor([[0, 1], [2, 2], [1, 0]])
# one sample counts wholly, one in part, one not at all
TARGETS = torch.tensor([[1, 2], [-100, 0], [-100, -100]])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["mix.weight", "embed.weight"])
def test_sampled_labels_give_gauss_newton_in_expectation(reduction: str, name: str) -> None:
    """Every draw of every token's label, weighted by its probability."""
    model, loss = Tokens().double(), nn.CrossEntropyLoss(reduction=reduction)
    expected = oracle.gauss_newton(model, loss, TOKENS, TARGETS, name)
    p = model(TOKENS).softmax(1).detach()
    total = torch.zeros_like(expected)
    for index in range(3):
        places = [t for t in range(2) if int(TARGETS[index, t]) >= 0]
        for labels in itertools.product(range(3), repeat=len(places)):
            drawn = TARGETS[index].clone()
            drawn[places] = torch.tensor(labels, dtype=torch.long)
            chance = math.prod(float(p[index, s, t]) for s, t in zip(labels, places, strict=True))
            one = oracle.fisher_of_draws(model, loss, TOKENS[index][None], drawn[None, None], name)
            total += chance / 3 * one
    torch.testing.assert_close(total, expected)


def test_drawn_labels_of_a_smoothed_loss_are_not_its_fisher_matrix() -> None:
    for loss in (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(torch.ones(3, dtype=torch.float64))):
        with pytest.raises(OptionError, match="without weights and smoothing"):
            oracle.fisher_of_draws(Tokens(), loss, TOKENS, TARGETS[None], "mix.weight")


def test_atoms_of_a_model_add_up_to_its_matrix() -> None:
    model, loss = Tokens(), nn.CrossEntropyLoss()
    for rows in (slice(None), slice(1, 2)):
        H = oracle.gauss_newton(model, loss, TOKENS, TARGETS, "mix.weight", rows=rows)
        made = oracle.gauss_newton_atoms(model, loss, TOKENS, TARGETS, "mix.weight", rows=rows)
        torch.testing.assert_close(made.matrix(), H)
    assert H.shape == (2, 2)


def test_the_empirical_fisher_is_made_of_gradients() -> None:
    model, loss = Tokens().double(), nn.CrossEntropyLoss()
    grads = []
    for index in range(2):
        model.zero_grad()
        loss(model(TOKENS[index : index + 1]), TARGETS[index : index + 1]).backward()
        assert model.embed.weight.grad is not None
        grads.append(model.embed.weight.grad.flatten().clone())
    expected = sum((torch.outer(g, g) for g in grads), torch.zeros(6, 6).double()) / 3
    torch.testing.assert_close(oracle.empirical_fisher(model, loss, TOKENS, TARGETS, "embed.weight"), expected)
    made = oracle.empirical_fisher_atoms(model, loss, TOKENS, TARGETS, "embed.weight")
    assert made.grads.shape == (3, 3, 2)
    assert not made.grads[2].any()


def test_several_parameters_are_stacked_by_rows() -> None:
    model = nn.Sequential(linear(3, 2), nn.Tanh(), nn.Linear(2, 3, bias=False).double())
    inputs, targets = normal(0, 4, 3), torch.arange(4) % 3
    loss = nn.CrossEntropyLoss()
    one = oracle.empirical_fisher_atoms(model, loss, inputs, targets, "0.weight").grads
    both = oracle.empirical_fisher_atoms(model, loss, inputs, targets, ["0.weight", "0.weight"]).grads
    torch.testing.assert_close(both, torch.cat([one, one], 1))
    with pytest.raises(LayerError, match=r"it has: 0\.weight"):
        oracle.gauss_newton(model, loss, inputs, targets, "1.weight")


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(6, 4),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
    ],
    ids=["linear", "conv", "strided-grouped-conv"],
)
@pytest.mark.parametrize("real", [True, False])
def test_factors_of_a_layer_multiply_to_its_gradients(module: nn.Module, real: bool) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = module

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.layer(x))
            # used twice where shapes allow: further positions
            return hidden.flatten(2).square().mean(2) if hidden.dim() == 4 else hidden.square().mean(1)

    model, loss = Pooled(), nn.MSELoss()
    inputs = normal(0, 3, module.in_channels, 5, 6) if isinstance(module, nn.Conv2d) else normal(0, 3, 5, 6)
    targets = normal(1, 3, model(inputs.float()).shape[1])
    factors = oracle.layer_factors(model, loss, inputs, targets, "layer", real=real)
    made = oracle.empirical_fisher_atoms if real else oracle.gauss_newton_atoms
    grads = made(model, loss, inputs, targets, "layer.weight").grads
    products = torch.cat([rows.mT @ cols for rows, cols in factors])
    torch.testing.assert_close(products, grads)


def test_factors_of_an_embedding_have_one_hot_rows() -> None:
    model, loss = Tokens(), nn.CrossEntropyLoss()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # untied
    factors = oracle.layer_factors(model, loss, TOKENS, TARGETS, "embed")
    grads = oracle.gauss_newton_atoms(model, loss, TOKENS, TARGETS, "embed.weight").grads
    torch.testing.assert_close(torch.cat([rows.T @ cols for rows, cols in factors]), grads)
    assert factors[1][0].tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]


def test_dictionaries_go_through_forward() -> None:
    model, inputs = linear(3, 2), normal(0, 4, 3)
    loss, targets = nn.CrossEntropyLoss(), torch.arange(4) % 2
    plain = oracle.gauss_newton(model, loss, inputs, targets, "weight")
    adapted = oracle.gauss_newton(
        model, loss, {"x": inputs, "k": 1}, targets, "weight", forward=lambda m, batch: m(batch["x"])
    )
    torch.testing.assert_close(adapted, plain)


def test_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    H = [
        oracle.gauss_newton(model, nn.CrossEntropyLoss(), normal(0, 4, 3), torch.arange(4) % 2, "0.weight")
        for _ in range(2)
    ]
    # eval mode: no dropout noise between two runs
    assert torch.equal(H[0], H[1])
    assert H[0].dtype == torch.float64
    assert model.training
    assert not model[0].weight.requires_grad
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_reductions_other_than_mean_and_sum_are_refused() -> None:
    with pytest.raises(OptionError, match="mean or sum"):
        oracle.gauss_newton(linear(2, 2), nn.MSELoss(reduction="none"), normal(0, 1, 2), normal(1, 1, 2), "weight")
