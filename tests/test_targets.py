"""Data, weights and names that the command line is given: what is taken, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kronscope import approx
from kronscope.errors import DataError, KronscopeError, ModelError, OptionError
from kronscope.targets import approximation_names, load_data, load_loss, load_model


class Network(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


def _saved(content: Any, path: Path) -> str:
    if path.suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in content.items()})
    else:
        torch.save(content, path)
    return str(path)


@pytest.mark.parametrize("name", ["data.pt", "data.npz"])
@pytest.mark.parametrize("targets", [300, 200])
def test_inputs_and_targets_must_be_equally_many(tmp_path: Path, name: str, targets: int) -> None:
    # a whole number of batches of inputs: no batch by itself shows the surplus
    path = _saved({"inputs": torch.randn(256, 4), "targets": torch.zeros(targets)}, tmp_path / name)
    with pytest.raises(DataError, match=f"inputs for 256 samples but {targets} targets"):
        load_data(path)


def test_inputs_may_be_a_dictionary(tmp_path: Path) -> None:
    inputs, targets = {"a": torch.randn(300, 4), "b": (torch.arange(300), torch.tensor(2.0))}, torch.arange(300)
    batches = load_data(_saved({"inputs": inputs, "targets": targets}, tmp_path / "data.pt"))
    assert [len(part) for _, part in batches] == [256, 44]
    assert torch.equal(torch.cat([part["a"] for part, _ in batches]), inputs["a"])  # type: ignore[arg-type]
    assert torch.equal(torch.cat([part["b"][0] for part, _ in batches]), targets)
    assert all(part["b"][1] == 2.0 for part, _ in batches)


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        ({"a": torch.zeros(5, 4), "b": torch.zeros(6, 4)}, torch.zeros(5), "inputs for 5 and 6 samples but 5 targets"),
        ([1.0, 2.0], torch.zeros(2), "inputs .* must be a tensor"),
        (torch.zeros(2, 4), [0, 1], "targets .* must be a tensor"),
        (torch.zeros(2, 4), torch.tensor(1), "targets .* must be a tensor"),
    ],
)
def test_data_of_another_form_is_refused(tmp_path: Path, inputs: Any, targets: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_data(_saved({"inputs": inputs, "targets": targets}, tmp_path / "data.pt"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floating_point_numbers_get_the_type_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {
        "inputs": {"x": torch.randn(5, 4, dtype=torch.float64), "ids": torch.arange(5)},
        "targets": torch.ones(5),
    }
    path, told = _saved(content, tmp_path / "data.pt"), list[str]()
    ((inputs, targets),) = load_data(path, Network().to(dtype), told.append)
    assert (inputs["x"].dtype, inputs["ids"].dtype, targets.dtype) == (dtype, torch.int64, dtype)
    names = ("float64", "float32") if dtype == torch.float32 else ("float32", "float64")
    assert told == [f"{path}: {names[0]} converted to the model's {names[1]}"]
    told.clear()
    load_data(
        _saved({"x": torch.randn(5, 4, dtype=dtype), "y": torch.arange(5)}, tmp_path / "own.pt"), None, told.append
    )
    assert not told


def test_a_model_of_mixed_types_gets_the_data_as_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double())
    path = _saved({"x": torch.randn(5, 4, dtype=torch.float16), "y": torch.arange(5)}, tmp_path / "data.pt")
    assert load_data(path, model)[0][0].dtype == torch.float16


@pytest.mark.parametrize(
    "content", [b"junk, not a file of torch", b"", b"hello", b"PK\x03\x04 cut", bytes(range(128, 256))]
)
@pytest.mark.parametrize("name", ["data.pt", "data.npz", "weights.pt"])
def test_a_file_that_is_something_else_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(KronscopeError, match="cannot be read: it is damaged or of another format; save") as raised:
        load_data(str(path)) if name.startswith("data") else load_model("torch.nn:Identity", path)
    assert "\n" not in str(raised.value)


def test_a_whole_model_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    torch.save(nn.Sequential(nn.Linear(4, 3)), path)
    with pytest.raises(
        ModelError, match=r"holds other things than tensors.*torch\.save\(model\.state_dict\(\), path\)"
    ):
        load_model("torch.nn:Identity", path)
    with pytest.raises(DataError, match="holds other things than tensors"):
        load_data(str(path))


def test_weights_of_another_model_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save(nn.Linear(4, 3).state_dict(), path)
    with pytest.raises(ModelError, match="cannot be loaded into the model") as raised:
        load_model("torch.nn:Identity", path)
    assert "\n" not in str(raised.value)


def test_all_approximations_means_nothing_besides() -> None:
    assert approximation_names(["all"]) == approx.names()
    with pytest.raises(OptionError, match="leave out nope"):
        approximation_names(["all", "nope"])


def test_a_loss_is_a_name_with_options_or_an_object_of_the_users() -> None:
    smoothed = load_loss("cross-entropy(label_smoothing=0.1, reduction='sum')")
    assert isinstance(smoothed, nn.CrossEntropyLoss)
    assert (smoothed.label_smoothing, smoothed.reduction) == (0.1, "sum")
    assert isinstance(load_loss("torch.nn:SmoothL1Loss"), nn.SmoothL1Loss)
    assert load_loss("torch.nn.functional:mse_loss") is nn.functional.mse_loss
    for wrong, words in (
        ("hinge", "one of cross-entropy, mse, bce, or"),
        ("mse(delta=2)", "delta"),
        ("mse(2)", "options are numbers"),
        ("mse(reduction=open('x'))", "options are numbers"),
        ("math:pi", "must be a module or a function"),
    ):
        with pytest.raises(OptionError, match=words):
            load_loss(wrong)
