"""Whatever comes: shapes, dtypes, missing, zero and non-finite gradients: no crash, no NaN, no silent no-op."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kronscope.errors import GradientError, NonFiniteError, OptionError
from kronscope.optim import SOAP, Adaptive, CoupledNewton, KLShampoo, Shampoo, WarmQR, Warmup
from tests.optim.tools import copies, gradients, parameters, train

OPTIMIZERS: dict[str, Any] = {
    "shampoo": lambda p: Shampoo(p, 0.01),
    "shampoo, adam graft": lambda p: Shampoo(p, 0.01, scale="adam", refresh=3),
    "shampoo, original": lambda p: Shampoo(p, 0.01, betas=(0.0, 1.0), eps=1e-4, exponent=-0.25, scale=None, refresh=1),
    "shampoo, pseudo-inverse": lambda p: Shampoo(p, 0.01, betas=(0.0, 1.0), eps=0.0, scale="trace", refresh=1),
    "shampoo, blocks": lambda p: Shampoo(p, 0.01, block_size=3, refresh=2),
    "shampoo, modes": lambda p: Shampoo(p, 0.01, view="modes", method="kronecker"),
    "shampoo, budget": lambda p: Shampoo(p, 0.01, memory_budget=2000),
    "shampoo, adaptive": lambda p: Shampoo(p, 0.01, refresh=Adaptive(0.1)),
    "shampoo, newton": lambda p: Shampoo(p, 0.01, solver=CoupledNewton()),
    "shampoo, warm": lambda p: Shampoo(p, 0.01, solver=WarmQR()),
    "soap": lambda p: SOAP(p, 0.01, refresh=2),
    "soap, published": lambda p: SOAP(p, 0.01, refresh=2, reference=True),
    "kl": lambda p: KLShampoo(p, 0.01),
}

shapes = st.one_of(
    st.lists(st.integers(0, 4), max_size=5).map(tuple),
    st.sampled_from([(1, 1), (1, 300), (300, 1), (2, 150), (1, 1, 1, 7), (5, 1, 3), (0, 4)]),
)


@settings(max_examples=60)
@given(
    shape_list=st.lists(shapes, min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    maker=st.sampled_from(sorted(OPTIMIZERS)),
    events=st.lists(st.sampled_from(["grad", "zero", "missing", "nan", "inf", "huge", "save", "add"]), max_size=8),
)
def test_nothing_breaks_and_nothing_stands_still(shape_list, dtype, maker, events):
    params = parameters(*shape_list, dtype=dtype)
    optimizer = OPTIMIZERS[maker](params)
    steps = 0
    for number, event in enumerate([*events, "grad", "grad", "grad"]):
        if event == "save":
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
            continue
        if event == "add":
            extra = parameters((2, 3), dtype=dtype, seed=number)
            optimizer.add_param_group({"params": extra})
            params = params + extra
        for place, param in enumerate(params):
            grad = gradients(param.shape, 1, seed=100 * number + place, dtype=dtype)[0]
            if event == "zero":
                grad = torch.zeros_like(grad)
            elif event in ("nan", "inf", "huge"):
                value = {"nan": math.nan, "inf": math.inf, "huge": 3e38 if dtype != torch.float16 else math.inf}[event]
                grad = torch.full_like(grad, value)
            param.grad = None if event == "missing" and place % 2 == 0 else grad
        before = copies(params)
        bad = event in ("nan", "inf") or (event == "huge" and dtype != torch.float64)
        bad = bad and any(param.numel() > 0 for param in params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            optimizer.step()
        steps += not bad
        for param, old in zip(params, before, strict=True):
            assert torch.isfinite(param).all()
            if bad:
                assert torch.equal(param, old)
        if event == "grad" and steps > 2:
            moved = [not torch.equal(param, old) for param, old in zip(params, before, strict=True) if param.numel()]
            # a step may be below the resolution of half precision
            assert all(moved) or dtype in (torch.bfloat16, torch.float16)
    optimizer.explain()
    optimizer.diagnostics()


@pytest.mark.parametrize("maker", OPTIMIZERS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_step_changes_nothing_but_the_counter(maker, value):
    shapes_ = ((4, 3), (5,), (3, 2, 2))
    params = parameters(*shapes_)
    twins = copies(params)
    optimizer, twin = OPTIMIZERS[maker](params), OPTIMIZERS[maker](twins)
    history = [gradients(shape, 8, seed=i) for i, shape in enumerate(shapes_)]
    train(twin, twins, history)
    for step in range(8):
        if step in (0, 4):
            for param, grads in zip(params, history, strict=True):
                param.grad = grads[step].clone()
            spoilt = params[1].grad
            assert spoilt is not None
            spoilt[2] = value
            saved = copy.deepcopy(optimizer.state_dict())
            with pytest.warns(RuntimeWarning, match="skipped"):
                optimizer.step()
            after = optimizer.state_dict()
            for key, tensors in after["state"].items():
                assert all(torch.equal(tensor, saved["state"][key][name]) for name, tensor in tensors.items())
        train(optimizer, params, [grads[step : step + 1] for grads in history])
    assert optimizer.skipped_steps == optimizer.diagnostics().skipped_steps == 2
    for a, b in zip(params, twins, strict=True):
        assert torch.equal(a, b)


def test_a_non_finite_gradient_raises_on_request_and_names_the_parameter():
    model = nn.Linear(3, 2)
    optimizer = Shampoo(model.named_parameters(), nonfinite="raise")
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = math.inf
    before = copies(list(model.parameters()))
    with pytest.raises(NonFiniteError, match="weight"):
        optimizer.step()
    for a, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(a, b)


def test_sparse_and_complex_gradients_raise():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match="sparse"):
        Shampoo(embedding.parameters()).step()
    param = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))
    optimizer = Shampoo([param])
    param.grad = torch.ones_like(param)
    with pytest.raises(GradientError, match="complex"):
        optimizer.step()


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
@pytest.mark.parametrize("decay", ["decoupled", "coupled", "cautious"])
def test_a_tensor_learning_rate_is_the_same_number(kind, decay):
    params = parameters((4, 3), (5,))
    twins = copies(params)
    history = [gradients(param.shape, 6) for param in params]
    train(kind(params, 0.05, weight_decay=0.1, decay=decay), params, history)
    train(kind(twins, torch.tensor(0.05, dtype=torch.float64), weight_decay=0.1, decay=decay), twins, history)
    for a, b in zip(params, twins, strict=True):
        assert torch.allclose(a, b, rtol=1e-10)


def test_closures_run_with_gradients_enabled_and_return_the_loss():
    model = nn.Linear(3, 2)
    optimizer = Shampoo(model.parameters(), 0.01)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        assert torch.is_grad_enabled()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(30):
        last = optimizer.step(closure)
    assert last < first


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_maximize_is_minimize_of_the_negative(kind):
    params = parameters((4, 3), (5,))
    twins = copies(params)
    history = [gradients(param.shape, 6) for param in params]
    train(kind(params, 0.05, maximize=True), params, history)
    train(kind(twins, 0.05), twins, [[-grad for grad in grads] for grads in history])
    for a, b in zip(params, twins, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_cautious_decay_decays_only_where_the_update_agrees():
    param = nn.Parameter(torch.tensor([[1.0, -1.0], [1.0, -1.0]], dtype=torch.float64))
    plain = copies([param])[0]
    grad = torch.tensor([[1.0, 1.0], [2.0, 1.0]], dtype=torch.float64)
    options: dict[str, Any] = {"betas": (0.0, 0.9), "scale": "sgd", "start": math.inf}
    train(Shampoo([param], 0.1, weight_decay=0.5, decay="cautious", **options), [param], [[grad]])
    train(Shampoo([plain], 0.1, **options), [plain], [[grad]])
    assert torch.allclose(plain - param, torch.tensor([[0.05, 0.0], [0.05, 0.0]], dtype=torch.float64))


def test_schedulers_drive_the_learning_rate_and_the_betas():
    model = nn.Linear(3, 2)
    optimizer = Shampoo(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    stacks = None
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        stacks = stacks or optimizer._stacks
        assert optimizer._stacks is stacks, "changed betas must not cost new stacks"
    assert optimizer.param_groups[0]["lr"] < 0.01


@pytest.mark.filterwarnings("ignore:.*GradScaler.*:FutureWarning")
def test_a_grad_scaler_drives_it():
    model = nn.Linear(3, 2)
    optimizer = Shampoo(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = copies(list(model.parameters()))
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before[0], model.weight)
    assert model.weight.grad is not None
    assert model.weight.grad.abs().max() < 100, "gradients were unscaled"


def test_autocast_and_reduced_precision_products_do_not_reach_the_factors():
    grads = gradients((32, 32), 4, dtype=torch.float32)
    results = []
    for surroundings in ("plain", "autocast", "reduced"):
        (param,) = parameters((32, 32), dtype=torch.float32)
        optimizer = Shampoo([param], 0.01, refresh=1)
        before = torch.get_float32_matmul_precision()
        try:
            if surroundings == "reduced":
                torch.set_float32_matmul_precision("medium")
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=surroundings == "autocast"):
                train(optimizer, [param], [grads])
            assert torch.get_float32_matmul_precision() == ("medium" if surroundings == "reduced" else before)
        finally:
            torch.set_float32_matmul_precision(before)
        results.append((param.detach().clone(), optimizer.state[param]["tile0.factor0"]))
    for weight, factor in results[1:]:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(factor, results[0][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_half_precision_parameters_have_float32_state_and_train(dtype, kind):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    optimizer = kind(model.parameters(), 0.01)
    x, y = torch.randn(64, 8).to(dtype), torch.randint(0, 4, (64,))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for tensors in optimizer.state.values():
        assert all(t.dtype == torch.float32 for t in tensors.values() if t.is_floating_point())


def test_the_step_can_be_compiled():
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    optimizer, other = Shampoo(model.parameters(), 0.01), Shampoo(twin.parameters(), 0.01)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        for net in (model, twin):
            net.zero_grad()
            net(torch.ones(4, 3)).square().mean().backward()
        compiled()
        other.step()
    assert torch.equal(model.weight, twin.weight)


def test_zero_gradients_at_first_do_not_freeze_a_parameter():
    """The root of a zero factor must not swallow what comes before its next refresh."""
    for maker in ("shampoo", "shampoo, pseudo-inverse", "shampoo, original", "kl", "soap"):
        (param,) = parameters((4, 3))
        optimizer = OPTIMIZERS[maker]([param])
        for group in optimizer.param_groups:
            group["refresh"] = Warmup(1, 100)
        train(optimizer, [param], [[torch.zeros(4, 3, dtype=torch.float64)]])
        before = param.detach().clone()
        train(optimizer, [param], [gradients((4, 3), 1)])
        assert (param - before).abs().max() > 1e-4, maker


def test_huge_dimensions_do_not_make_huge_factors():
    param = nn.Parameter(torch.zeros(20_000, 8))
    optimizer = Shampoo([param])
    param.grad = torch.randn(20_000, 8)
    optimizer.step()
    assert optimizer.explain().rows[0].factors == (8,)
    assert optimizer.explain().total_bytes < 3 * 20_000 * 8 * 4


def test_options_are_checked_with_advice():
    param = parameters((3, 3))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.5)}, "betas"),
        ({"eps": -1.0}, "eps"),
        ({"scale": "adamw"}, "scale"),
        ({"refresh": 2.5}, "refresh"),
        ({"start": 0}, "start"),
        ({"nesterov": True}, "nesterov"),
        ({"decay": "l2"}, "decay"),
        ({"solver": "newton"}, "solver"),
        ({"power_rounds": 0}, "power_rounds"),
        ({"exponent": (-0.5, -0.5, -0.5)}, "exponents"),
        ({"memory_budget": "1GB"}, "memory_budget"),
        ({"view": "rows"}, "view"),
        ({"nonfinite": "ignore"}, "nonfinite"),
    ]
    for options, word in cases:
        with pytest.raises(OptionError, match=word):
            Shampoo(param, **options)
