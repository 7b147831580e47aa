"""One look for each approximation, told apart by colour or marker."""

from __future__ import annotations

import re

from kronscope import approx
from kronscope.figures.style import condition_label, display_name, in_order, styles
from tests.figures.synthetic import ALL


def test_every_registered_approximation_has_a_name_and_a_look_of_its_own() -> None:
    looks = styles(approx.names())
    assert set(looks) == set(approx.names())
    assert len({(look.color, look.marker) for look in looks.values()}) == len(looks)
    assert all(display_name(name) != name for name in ALL)


def test_names_are_the_papers() -> None:
    assert display_name("shampoo2") == "Shampoo²"
    assert display_name("optimal") == "Optimal Kronecker"
    assert display_name("kfac-reduce") == "K-FAC (reduce)"


def test_colours_can_be_used_in_a_style_sheet() -> None:
    for look in styles([*ALL, *(f"mine-{number}" for number in range(20))]).values():
        assert re.fullmatch(r"#[0-9a-f]{6}", look.color)
        assert re.fullmatch(r"#[0-9a-f]{6}", look.dark)


def luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_lines_can_be_seen_on_light_and_on_dark() -> None:
    for name, look in styles(ALL).items():
        light = (1.0 + 0.05) / (luminance(look.color) + 0.05)
        dark = (luminance(look.dark) + 0.05) / (luminance("#1c2027") + 0.05)
        assert min(light, dark) > 2.0, name


def test_unknown_names_get_different_looks_that_do_not_depend_on_the_known_ones() -> None:
    looks = styles(["a", "b", "c", "optimal"])
    assert len({(look.color, look.marker) for look in looks.values()}) == 4
    assert looks["b"] == styles(["b2", "b"])["b"] != styles(["b"])["b"]
    many = styles(f"mine-{number}" for number in range(12))
    assert len({(look.color, look.marker) for look in many.values()}) == 12


def test_legends_keep_one_order() -> None:
    assert in_order(["z", "kl", "shampoo", "optimal", "kl"]) == ["optimal", "shampoo", "kl", "z"]


def test_conditions_are_named_by_what_matters() -> None:
    assert condition_label("gauss_newton", "exact", 1) == "Gauss–Newton · exact labels"
    assert condition_label("gauss_newton", "sampled", 1) == "Gauss–Newton · sampled labels · B = 1"
    assert condition_label("adagrad", "real", 1) == "Adagrad"
    assert condition_label("new", "odd", 2) == "new · odd · B = 2"
