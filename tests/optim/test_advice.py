"""Arguments that are another optimizer's, or misspelt, are refused with what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from kronscope.errors import OptionError
from kronscope.optim import SOAP, KLShampoo, Shampoo
from tests.optim.tools import parameters

KINDS = (Shampoo, SOAP, KLShampoo)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fused", "treated together.*Leave it out"),
        ("foreach", "treated together.*Leave it out"),
        ("amsgrad", "second moments.*Leave it out"),
        ("capturable", "CUDA graph.*Leave it out"),
        ("learning_rate", "did you mean 'lr'"),
        ("weight_dacay", "did you mean 'weight_decay'"),
        ("epsilon", "did you mean 'eps'"),
        ("refesh", "did you mean 'refresh'"),
        ("precondition_frequency", "did you mean 'refresh'"),
        ("max_precond_dim", "did you mean 'block_size'"),
    ],
)
def test_a_wrong_argument_is_refused_with_advice_in_the_constructor_and_in_a_group(kind, name, words):
    makers: list[Any] = [
        lambda: kind(parameters((4, 3)), **{name: True}),
        lambda: kind([{"params": parameters((4, 3)), name: True}]),
        lambda: kind(parameters((4, 3))).add_param_group({"params": parameters((4, 3)), name: True}),
    ]
    for make in makers:
        with pytest.raises(OptionError, match=f"{kind.__name__} has no option '{name}'.*{words}"):
            make()


def test_what_resembles_nothing_is_answered_with_the_options_there_are():
    with pytest.raises(OptionError, match=r"no option 'banana'; it has lr, betas, .*memory_budget"):
        Shampoo(parameters((4, 3)), banana=1)  # type: ignore[call-arg]


def test_notes_in_groups_and_switches_that_are_off_are_let_pass():
    groups = torch.optim.AdamW(parameters((4, 3)), lr=0.1).param_groups
    optimizer = Shampoo([{**groups[0], "name": "backbone", "lr_scale": 0.5}])
    assert optimizer.param_groups[0]["name"] == "backbone"


@pytest.mark.parametrize("kind", KINDS)
def test_the_signature_is_what_it_was(kind):
    assert list(inspect.signature(kind).parameters)[:3] == ["params", "lr", "betas"]
