"""Names of layers where there is little room: shorter, and still different from each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["short_labels", "short_names"]

_GAP = "…"
# Of pages, from a wide window to a phone.
_WIDTHS = (42, 34, 28, 23, 18)
# Words of letters within a dotted part: "self_attention", "SelfAttention".
_WORD = re.compile(r"[A-Z]?[a-z]+|[^\W\d_]+")

_Parts = tuple[str, ...]


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Shorten names so that they stay different, and none has more than ``width`` letters where that can be done.

    If all names fit, they stay. Otherwise the last dotted part goes where all have the same, and a name that is still
    too long loses, as far as needed: parts that follow from those before them, leading parts without which it is still
    known, and the ends of words or the middle of parts. A part whose abbreviation would be another's stays whole, as do
    numbers. Names that differ in their numbers alone are shortened alike.

    Args:
        names: The names; equal ones get equal labels.
        width: The letters there is room for.

    Returns:
        A label for each name, never longer than the name.

    >>> names = [f"encoder.layers.{i}.self_attention_output_projection.weight" for i in (0, 1)] + ["head.weight"]
    >>> short_names(names, 36)
    ['…0.self_attention_output_projection', '…1.self_attention_output_projection', 'head']
    >>> short_names(names, 24)
    ['…0.self_atte_outp_proj', '…1.self_atte_outp_proj', 'head']
    """
    different = list(dict.fromkeys(names))
    if all(len(name) <= width for name in different):
        return list(names)
    split = _without_common_end([tuple(name.split(".")) for name in different])
    families: dict[str, list[_Name]] = {}
    branching = _branching(split)
    endings = Counter(parts[start:] for parts in split for start in range(1, len(parts)))
    for name, parts in zip(different, split, strict=True):
        tells = branching[parts]
        known = [start for start in range(1, len(parts)) if tells[start] and endings[parts[start:]] == 1]
        families.setdefault(re.sub(r"\d+", "0", name), []).append(_Name(name, parts, tells, known))
    ways = _ways({part for parts in split for part in parts})
    labels: dict[str, str] = {}
    for members in families.values():
        labels |= _fitting(members, ways, width)
    # What is still the same, for instance because a name has an ellipsis of its own, is not shortened.
    while twice := [label for label, times in Counter(labels.values()).items() if times > 1]:
        labels |= {name: name for name, label in labels.items() if label in twice}
    return [labels[name] for name in names]


def short_labels(names: Sequence[str]) -> list[list[str]]:
    """Labels of several widths for a page's script, which knows how much room there is.

    Args:
        names: The names of all layers.

    Returns:
        For each name that has a shorter label: the name, and its labels, the longest first.

    >>> short_labels(["blocks.0.weight", "blocks.1.weight"])
    []
    """
    tables = [short_names(names, width) for width in _WIDTHS]
    return [list(row) for row in zip(names, *tables, strict=True) if any(label != row[0] for label in row)]


@dataclass(frozen=True)
class _Name:
    """A name, its parts, whether each tells names apart that begin alike, and where endings begin that are its own."""

    name: str
    parts: _Parts
    branching: tuple[bool, ...]
    known: Sequence[int]

    def label(self, start: int, ending: int, way: Callable[[str], str]) -> str:
        """The parts from ``start`` on that tell names apart, with the last ones in any case, each abbreviated."""
        text, gap = "", False
        for i, part in enumerate(self.parts):
            if i < start or not (self.branching[i] or i >= len(self.parts) - ending):
                gap = True
                continue
            text += (_GAP if gap else "." if i else "") + way(part)
            gap = False
        # what follows from the parts before it may be left out in silence
        return text if len(text) <= len(self.name) else self.name


def _without_common_end(split: list[_Parts]) -> list[_Parts]:
    alike = len(split) > 1 and len({parts[-1] for parts in split}) == 1 and all(len(parts) > 1 for parts in split)
    return [parts[:-1] for parts in split] if alike else split


def _branching(split: Sequence[_Parts]) -> dict[_Parts, tuple[bool, ...]]:
    """Of each part, whether names that are the same before it go on differently."""
    follow: dict[_Parts, set[str | None]] = {}
    for parts in split:
        for i in range(len(parts) + 1):
            follow.setdefault(parts[:i], set()).add(parts[i] if i < len(parts) else None)
    alone = len(split) == 1  # keeps its beginning
    return {parts: tuple(len(follow[parts[:i]]) > 1 or (alone and not i) for i in range(len(parts))) for parts in split}


def _fitting(members: Sequence[_Name], ways: Sequence[Callable[[str], str]], width: int) -> dict[str, str]:
    """The first labels that fit; if none do, the shortest."""
    best: dict[str, str] = {}
    for labels in _candidates(members, ways):
        longest = max(map(len, labels))
        if len(set(labels)) == len(labels) and (not best or longest < max(map(len, best.values()))):
            best = {member.name: label for member, label in zip(members, labels, strict=True)}
            if longest <= width:
                break
    return best


def _candidates(members: Sequence[_Name], ways: Sequence[Callable[[str], str]]) -> Iterator[list[str]]:
    yield [".".join(member.parts) for member in members]
    starts = sorted(set.intersection(*(set(member.known) for member in members)))
    for way in ways:
        for start, ending in [(0, 2), (0, 1), *((start, 1) for start in starts)]:
            yield [member.label(start, ending, way) for member in members]


def _ways(parts: set[str]) -> list[Callable[[str], str]]:
    """Ways to abbreviate a part, the most legible first; those that would be the same afterwards stay whole."""
    cuts: list[Callable[[str], str]] = [_words(6), _words(4), *map(_middle, (14, 12, 10, 8, 6)), _words(3), _words(2)]
    return [lambda part: part, *(_injective(cut, parts) for cut in cuts)]


def _words(letters: int) -> Callable[[str], str]:
    return lambda part: _WORD.sub(lambda word: word[0][:letters], part)


def _middle(letters: int) -> Callable[[str], str]:
    head = letters // 2
    tail = letters - 1 - head
    return lambda part: part if len(part) <= letters or part.isdigit() else f"{part[:head]}{_GAP}{part[-tail:]}"


def _injective(cut: Callable[[str], str], parts: set[str]) -> Callable[[str], str]:
    found = {part: cut(part) for part in parts}
    while twice := [short for short, times in Counter(found.values()).items() if times > 1]:
        found |= {part: part for part, short in found.items() if short in twice}
    return found.__getitem__
