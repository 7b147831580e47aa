"""How each approximation looks, in every figure and in the report: one name, one colour, one marker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kronscope import approx

__all__ = [
    "LABELS",
    "TRUTHS",
    "Style",
    "condition_label",
    "display_name",
    "in_order",
    "styles",
]


@dataclass(frozen=True)
class Style:
    """The look of one approximation.

    Attributes:
        name: What a reader sees.
        color: On a light ground.
        dark: On a dark ground.
        marker: A matplotlib marker; the report draws the same shapes.
        dashes: Lengths of dashes and gaps, empty for a solid line.
        width: Of the line. The optimum's is wide, so that it still shows where another one covers it.
    """

    name: str
    color: str
    dark: str
    marker: str
    dashes: tuple[float, ...] = ()
    width: float = 1.6


# Okabe and Ito's colours for the ones that are usually shown together, Paul Tol's muted ones for the rest: both keep
# apart under the common kinds of colour blindness. Relatives share a hue and differ in dashes and marker.
_STYLES = {
    "optimal": Style("Optimal Kronecker", "#2b2b2b", "#e8e8e8", "o", width=2.4),
    "optimal-paper": Style("Power iteration (paper)", "#2b2b2b", "#e8e8e8", "x", (4, 2)),
    "kronecker-sum": Style("Kronecker sum", "#6b6b6b", "#bdbdbd", "o", (2, 1)),
    "shampoo2": Style("Shampoo²", "#0072b2", "#4aa8e0", "s"),
    "shampoo": Style("Shampoo", "#d55e00", "#ff8a3d", "^"),
    "kfac-reduce": Style("K-FAC (reduce)", "#009e73", "#2fc79b", "D"),
    "kfac-expand": Style("K-FAC (expand)", "#009e73", "#2fc79b", "d", (5, 2)),
    "ekfac": Style("E-KFAC", "#117733", "#6cc08b", "P", (1, 1.5)),
    "soap": Style("SOAP", "#cc79a7", "#e39cc3", "v"),
    "tnt": Style("TNT", "#56b4e9", "#8fd0f7", "X", (4, 2)),
    "caspr": Style("CASPR", "#882255", "#d06a9f", "<", (6, 2)),
    "kl": Style("KL-optimal", "#332288", "#9f8ff0", ">"),
    "one-sided": Style("One-sided", "#b8860b", "#e0b84a", "h", (3, 1.5)),
    "diagonal": Style("Diagonal", "#7f7f7f", "#a8a8a8", "p", (6, 2, 1, 2)),
    "identity": Style("Identity", "#a6a6a6", "#7d7d7d", "*", (1, 2)),
}
_FALLBACK = (
    ("#999933", "#c9c95c"),
    ("#aa4499", "#d983cb"),
    ("#44aa99", "#74d3c3"),
    ("#661100", "#d9805f"),
    ("#6699cc", "#92bde8"),
    ("#888888", "#b0b0b0"),
)
_FALLBACK_MARKERS = ("o", "s", "^", "D", "v", "P")

TRUTHS = {"gauss_newton": "Gauss–Newton", "empirical_fisher": "Empirical Fisher", "adagrad": "Adagrad"}
LABELS = {"exact": "exact labels", "sampled": "sampled labels", "real": "real labels"}


def display_name(approximation: str) -> str:
    """The name a reader sees; a name that is not in the table stays as it is, and so do options.

    >>> display_name("shampoo2"), display_name("my-own"), display_name("shampoo2 (replacement=False)")
    ('Shampoo²', 'my-own', 'Shampoo² (replacement=False)')
    """
    name, gap, options = approximation.partition(" (")
    registered = approx.get(name).title if name in approx.names() else name
    return f"{_STYLES[name].name if name in _STYLES else registered}{gap}{options}"


def in_order(approximations: Iterable[str]) -> list[str]:
    """Without repeats, the known ones first and in the table's order, so that legends agree between figures.

    >>> in_order(["mine", "shampoo", "optimal", "shampoo"])
    ['optimal', 'shampoo', 'mine']
    """
    names = list(dict.fromkeys(approximations))
    return [name for name in _STYLES if name in names] + [name for name in names if name not in _STYLES]


def styles(approximations: Iterable[str]) -> dict[str, Style]:
    """A look for each approximation, in :func:`in_order`; names outside the table get one that is not taken.

    >>> [style.color for style in styles(["mine", "optimal"]).values()]
    ['#2b2b2b', '#999933']
    """
    names = in_order(approximations)
    unknown = [name for name in names if name not in _STYLES]
    looks = {}
    for name in names:
        if name in _STYLES:
            looks[name] = _STYLES[name]
            continue
        place = unknown.index(name)
        color, dark = _FALLBACK[place % len(_FALLBACK)]
        marker = _FALLBACK_MARKERS[(place + place // len(_FALLBACK)) % len(_FALLBACK_MARKERS)]
        looks[name] = Style(display_name(name), color, dark, marker, (4, 1.5))
    return looks


def condition_label(truth: str, labels: str, batch_size: int, options: str = "") -> str:
    """Truth, labels, batch size and options in a few words.

    >>> condition_label("gauss_newton", "real", 256), condition_label("adagrad", "real", 1)
    ('Gauss–Newton · real labels · B = 256', 'Adagrad')
    """
    name = TRUTHS.get(truth, truth)
    if truth == "adagrad":
        return " · ".join(filter(None, [name, options]))
    parts = [name, LABELS.get(labels, labels)]
    # With exact labels the batch size changes nothing, so it would only be noise.
    if labels != "exact" or batch_size != 1:
        parts.append(f"B = {batch_size}")
    return " · ".join(filter(None, [*parts, options]))
