"""How much memory measuring may take, and what it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import OptionError
from kronscope.gradients import GradientStream
from kronscope.kron.workspace import limited_workspace, work_bytes
from kronscope.measures.budget import container_limit, layer_bytes, parse_budget, spare_bytes, sweeps
from tests.measures.live_bytes import LiveBytes

GIB = 1 << 30
MIB = 1 << 20


def groups(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/", {"memory.max": str(2 * GIB)}, 2 * GIB),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/a/b", {"a/memory.max": str(GIB), "a/b/memory.max": str(3 * GIB)}, GIB),
        ("4:cpu,memory:/docker/x", {"memory/memory.limit_in_bytes": str(5 * GIB)}, 5 * GIB),
        ("4:memory:/x", {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/x/y": "1"}, None),
        ("0::/../../gone", {}, None),
        ("nonsense", {"memory.max": "-3"}, None),
    ],
)
def test_the_limit_of_a_container_is_found(tmp_path: Path, own: str, files: dict[str, str], limit: int | None) -> None:
    root = groups(tmp_path / "cgroup", files)
    (tmp_path / "own").write_text(own + "\n", encoding="ascii")
    assert container_limit(root, tmp_path / "own") == limit
    assert container_limit(root, tmp_path / "missing") in (limit, None)


def test_the_default_budget_is_a_third_of_what_the_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kronscope.measures.budget.container_limit", lambda: 3 * 100 << 20)
    assert parse_budget(None) == 100 << 20
    monkeypatch.setattr("kronscope.measures.budget.container_limit", lambda: None)
    assert 100 << 20 < parse_budget(None) <= 8 * GIB


@pytest.mark.parametrize("budget", ["1.2.3G", ".", "", "-1", "9" * 400, float("inf"), float("nan"), 0, True, [1], b"2"])
def test_a_budget_that_is_no_number_of_bytes_is_refused_in_words(budget: Any) -> None:
    with pytest.raises(OptionError, match="memory_budget must be"):
        parse_budget(budget)


def test_copies_of_one_layer_at_a_time_count_beside_the_atoms_of_all() -> None:
    sizes = {"a": 10, "b": 10, "c": 10}
    assert list(sweeps(sizes, 1, 30)) == [(["a", "b", "c"], True)]
    assert list(sweeps(sizes, 1, 30, copies=1.0)) == [(["a", "b"], True), (["c"], True)]
    assert list(sweeps(sizes, 1, 15, copies=1.0)) == [(["a"], False), (["b"], False), (["c"], False)]


def test_what_factors_take_is_not_given_to_gradients() -> None:
    assert spare_bytes([(512, 512)], 1 << 28) == (1 << 28) - layer_bytes((512, 512))
    assert spare_bytes([(512, 512)], layer_bytes((512, 512))) == layer_bytes((512, 512)) // 8


def test_a_limit_of_temporaries_ends_with_its_block() -> None:
    with limited_workspace(1 << 22):
        assert work_bytes(1 << 27) == 1 << 22
        with limited_workspace(1):
            assert work_bytes(1 << 27) == 1 << 20  # less would be products of single numbers
    assert work_bytes(1 << 27) == 1 << 27


def test_freed_memory_goes_back_once_the_process_has_grown_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    size, given = [1000], list[int]()
    monkeypatch.setattr("kronscope.kron.workspace._resident", lambda: size[0])
    monkeypatch.setattr("kronscope.kron.workspace._trim", lambda: lambda _: given.append(size[0]))
    with limited_workspace(1 << 20, resident=800):
        for size[0] in (1800, 1801, 1850, 1902, 1000, 1801, 2003):
            work_bytes(1)
    size[0] = 9000
    work_bytes(1)
    # not again before it has grown by an eighth of the limit since
    assert given == [1801, 1902, 2003]


@pytest.mark.parametrize("kind", ["tokens", "convolution", "random columns"])
def test_a_small_budget_changes_no_number(kind: str) -> None:
    """Temporaries are cut smaller, layers take turns, gradients are captured again: the sums are the same."""
    torch.manual_seed(0)
    model: nn.Module
    columns: int | None = None
    if kind == "convolution":
        model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.Flatten(), nn.LazyLinear(5))
        data = [(torch.randn(24, 3, 9, 9), torch.randint(5, (24,)))]
        model(data[0][0])
    elif kind == "tokens":
        model = nn.Sequential(nn.Linear(24, 60), nn.Tanh(), nn.Linear(60, 40), nn.Flatten(), nn.Linear(480, 5))
        data = [(torch.randn(40, 12, 24), torch.randint(5, (40,)))]
    else:
        model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 30))
        # so many samples that they are cut into chunks, each of which must find its own random numbers
        data = [(torch.randn(40, 12), torch.randint(30, (40,)))]
        columns = 8
    layers = ["0.weight", "2.weight"]
    # the model's own rounding depends on how many samples it is given at once: in float32 that is 1e-8 of a cosine
    model, data = model.double(), [(inputs.double(), targets) for inputs, targets in data]
    loss = nn.CrossEntropyLoss()
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    much = ks.measure(model, loss, data, layers, progress=False, max_columns=columns)
    once = len(passes)
    # hardly more than the factors of the larger layer take
    little = 1.3 * max(layer_bytes((row.rows, row.cols)) for row in much)
    few = ks.measure(model, loss, data, layers, progress=False, memory_budget=int(little), max_columns=columns)
    assert len(passes) > 10 * once
    for row, other in zip(much, few, strict=True):
        assert other.cosine == pytest.approx(row.cosine, abs=1e-10)


@pytest.mark.parametrize("max_columns", [None, 8], ids=["exact", "estimated"])
def test_a_layer_that_was_measured_takes_no_memory_any_more(max_columns: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 40))
    data = [(torch.randn(9, 6), torch.randint(40, (9,)))]

    def streams() -> dict[int, GradientStream]:
        return {id(item): item for item in gc.get_objects() if type(item) is GradientStream}

    gc.collect()
    before = streams()
    gc.disable()  # large tensors do not make it run
    try:
        ks.measure(model, nn.CrossEntropyLoss(), data, max_columns=max_columns, progress=False)
        left = streams()
    finally:
        gc.enable()
    assert left.keys() == before.keys()


def images(
    layer: nn.Module, shape: tuple[int, ...], samples: int, classes: int = 10
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.LazyLinear(classes))
    inputs, targets = torch.randn(samples, *shape), torch.randint(classes, (samples,))
    model(inputs[:1])
    return model, [(inputs, targets)]


@pytest.mark.parametrize(
    ("layer", "shape", "classes", "budget"),
    [
        pytest.param(lambda: nn.Conv2d(3, 32, 3, padding=1), (3, 16, 16), 10, 8, id="many positions"),
        pytest.param(lambda: nn.Conv2d(32, 64, 3, 2), (32, 16, 16), 10, 16, id="a large factor"),
        pytest.param(lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64), (64, 16, 16), 10, 8, id="depthwise"),
        pytest.param(lambda: nn.Conv2d(16, 32, 3, 2), (16, 12, 12), 60, 9, id="many columns"),
    ],
)
def test_tensors_stay_within_the_budget(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, budget: int
) -> None:
    """All of them together, beside those of the model's own pass."""
    torch.manual_seed(0)
    model, data = images(layer(), shape=shape, samples=8, classes=classes)
    loss = nn.CrossEntropyLoss()
    inputs, targets = data[0]
    with LiveBytes() as alone:
        loss(model(inputs), targets).backward()
    with LiveBytes() as live:
        ks.measure(model, loss, data, "0.weight", progress=False, memory_budget=budget * MIB)
    assert live.peak - alone.peak < budget * MIB


def test_gradients_that_fit_once_they_are_formed_are_not_captured_at_every_pass() -> None:
    torch.manual_seed(0)
    model, data = images(nn.Conv2d(3, 32, 3, padding=1), shape=(3, 16, 16), samples=16)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    ks.measure(model, nn.CrossEntropyLoss(), data, "0.weight", progress=False, memory_budget=8 * MIB)
    assert len(calls) < 60  # 36; at every pass it would be 200
