"""Short names stay different, whatever the names are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kronscope.support.names import short_labels, short_names

PARTS = st.one_of(
    st.sampled_from(["encoder", "layers", "weight", "self_attention_output", "self_attention_query", "normA", "normB"]),
    st.integers(0, 120).map(str),
    st.text("ab_…0[:]", max_size=9),
)
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=6).map(".".join), max_size=12)

LAYERS = [
    f"encoder.transformer_layers.{i}.{part}.weight"
    for i in range(17)
    for part in ("self_attention_output_projection_dense", "intermediate_feed_forward_expansion")
]


@given(NAMES, st.integers(0, 40))
def test_what_is_different_stays_so_and_nothing_grows(names: list[str], width: int) -> None:
    short = short_names(names, width)
    assert len(short) == len(names)
    assert len(set(short)) == len(set(names))
    assert len(set(zip(names, short, strict=True))) == len(set(names))
    assert all(len(label) <= len(name) for name, label in zip(names, short, strict=True))


@given(NAMES)
def test_names_that_fit_stay(names: list[str]) -> None:
    assert short_names(names, max(map(len, names), default=0)) == names


@pytest.mark.parametrize("width", [42, 30, 24, 18])
def test_layers_of_a_transformer_fit(width: int) -> None:
    short = short_names([*LAYERS, "classifier.weight"], width)
    assert max(map(len, short)) <= width
    assert len(set(short)) == 35
    assert short[-1] == "classifier"
    for i in range(17):
        # the number tells them apart, and all are shortened alike
        assert short[2 * i].replace(f"…{i}.", "…0.") == short[0]


def test_pages_get_labels_of_several_widths() -> None:
    found = short_labels([*LAYERS, "fc"])
    assert [row[0] for row in found] == LAYERS
    for labels in list(zip(*found, strict=True))[1:]:
        assert len({*labels, "fc"}) == 35
    assert [max(map(len, labels)) for labels in list(zip(*found, strict=True))[1:]][-1] <= 18


@given(st.integers(2, 200), st.integers(0, 3))
def test_numbered_layers_fit_into_little(many: int, deep: int) -> None:
    names = [f"{'model.' * deep}transformer_layers.{i}.output_projection.weight" for i in range(many)]
    assert max(map(len, short_names(names, 12))) <= 12


def test_two_towers_stay_apart() -> None:
    names = [f"{tower}.layers.{i}.attention.projection.weight" for tower in ("vision", "text") for i in range(3)]
    assert short_names(names, 24)[2:4] == ["vision…2…projection", "text…0…projection"]


def test_parts_whose_abbreviations_are_the_same_stay_whole() -> None:
    names = ["mlp.projection_transposed", "mlp.projection_transferred"]
    # "pro…ed" would fit into 8 letters and be both
    assert short_names(names, 8) == ["…proj…sed", "…proj…red"]
