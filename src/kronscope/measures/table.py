"""Results as a table: on a terminal, as plain text, and in a notebook."""

from __future__ import annotations

import html
import io
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kronscope.measures.results import Results
from kronscope.measures.rows import Detail, Row
from kronscope.measures.whole import WHOLE_MODEL, WholeModel
from kronscope.support.texts import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["condition_title", "setting_lines", "text_width", "to_html", "to_rich", "to_text"]

_MATRICES = {
    "gauss_newton": "the Gauss–Newton matrix",
    "empirical_fisher": "the empirical Fisher matrix",
    "adagrad": "Adagrad's matrix",
}
_MOST_LINES = 60
_GAP = 3
_ASCII = str.maketrans({"–": "-", "±": "+-", "×": "x", "…": "...", "·": "|", "²": "^2", "−": "-", "─": "-"})


@dataclass(frozen=True)
class _Column:
    title: str
    numeric: bool = False


@dataclass(frozen=True)
class _Block:
    """One table: the rows that answer one question."""

    title: str
    subtitle: str
    columns: list[_Column]
    lines: list[list[str]]
    best: set[tuple[int, int]]
    left_out: str = ""


def condition_title(truth: str, labels: str, batch_size: int) -> str:
    """Which matrix, and what the approximations were fitted on.

    >>> condition_title("gauss_newton", "real", 256)
    'the Gauss–Newton matrix, fitted on real labels, batch size 256'
    """
    matrix = _MATRICES.get(truth, truth)
    return matrix if truth == "adagrad" else f"{matrix}, fitted on {labels} labels, batch size {batch_size}"


def setting_lines(settings: Mapping[str, Any], name: str) -> list[str]:
    """A setting such as ``cut`` or ``notes`` as lines of text, from all merged runs.

    >>> setting_lines({"cut": {"steps": "100 of 10,000"}, "runs": [{"notes": "a"}, {"notes": ["a", "b"]}]}, "notes")
    ['a', 'b']
    """
    lines: list[str] = []
    for part in [settings, *(settings.get("runs") or [])]:
        value = part.get(name) or []
        if isinstance(value, Mapping):
            lines += [f"{key}: {item}" for key, item in value.items()]
        else:
            lines += [value] if isinstance(value, str) else [str(item) for item in value]
    return list(dict.fromkeys(lines))


def text_width() -> int:
    """How wide plain text is: as the terminal, but between 80 and 120 columns."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)


def to_text(results: Results) -> str:
    """Plain text without colours, as wide as the terminal but between 80 and 120 columns."""
    width = text_width()
    text = _render(results, width, ascii_only=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return _render(results, width, ascii_only=True).encode("ascii", "replace").decode()
    return text


def _render(results: Results, width: int, *, ascii_only: bool) -> str:
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, _environ={})
    for part in to_rich(results, width, ascii_only=ascii_only):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def to_rich(results: Results, width: int, *, ascii_only: bool = False) -> Iterator[RenderableType]:
    """Renderables for a rich console: one table for each truth, labels and batch size, then what to know."""
    from rich.text import Text

    def text(content: str, style: str = "") -> Text:
        content = printable(content)
        return Text(content.translate(_ASCII) if ascii_only else content, style=style)

    if results.partial:
        yield text(f"PARTIAL: the work was interrupted; {_done(results.settings)}.", "bold red")
    notes: dict[str, int] = {}
    for block in _blocks(results, width, notes):
        yield text(block.title, "bold")
        if block.subtitle:
            yield text(block.subtitle, "dim")
        for cells in _lines(block, width):
            line = Text()
            for content, style in cells:
                line.append_text(text(content, style))
            line.rstrip()
            yield line
        if block.left_out:
            yield text(block.left_out, "dim")
        yield text("")
    yield from (text(line, style) for line, style in _footer(results, notes))


def _done(settings: Mapping[str, Any]) -> str:
    match settings.get("done"):
        case {"layers": list(layers), "of": int(count)}:
            return f"{len(layers)} of {count} layers done"
    return "this is what was done until then"


def _lines(block: _Block, width: int) -> Iterator[list[tuple[str, str]]]:
    """Head, rule and lines of a table, as pieces of text with their styles.

    Where layer names and numbers do not fit beside each other, a name has a line of its own above its numbers.
    """
    widths = _widths(block.columns, block.lines)
    own_lines = not block.columns[0].numeric and sum(widths) + _GAP * (len(widths) - 1) > width
    if own_lines:
        widths[0] = len(block.columns[0].title)

    def cell(content: str, x: int, style: str = "") -> tuple[str, str]:
        content = content.rjust(widths[x]) if block.columns[x].numeric else content.ljust(widths[x])
        return (" " * _GAP if x else "") + content, style

    yield [cell(column.title, x) for x, column in enumerate(block.columns)]
    yield [("─" * (sum(widths) + _GAP * (len(widths) - 1)), "")]
    for y, line in enumerate(block.lines):
        if own_lines:
            # only a name that is longer than a line is broken
            yield from ([(part, "")] for part in _fold(line[0], width).split("\n") if part)
            line = ["", *line[1:]]
        yield [cell(content, x, "bold green" if (y, x) in block.best else "") for x, content in enumerate(line)]


def to_html(results: Results) -> str:
    """The same tables for a notebook."""
    notes: dict[str, int] = {}
    parts = ["<p><strong>Partial:</strong> the work was interrupted.</p>"] if results.partial else []
    for block in _blocks(results, 10**6, notes):
        head = "".join(f"<th>{html.escape(column.title)}</th>" for column in block.columns)
        body = ""
        for y, line in enumerate(block.lines):
            tags = ["strong" if (y, x) in block.best else "span" for x in range(len(line))]
            cells = zip(tags, map(html.escape, line), strict=True)
            body += "<tr>" + "".join(f"<td><{tag}>{cell}</{tag}></td>" for tag, cell in cells) + "</tr>"
        parts.append(
            f"<p><b>{html.escape(block.title)}</b><br>{html.escape(block.subtitle)}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{html.escape(block.left_out)}</p>"
        )
    parts += [f"<p>{html.escape(line)}</p>" for line, _ in _footer(results, notes)]
    return "".join(parts)


def _footer(results: Results, notes: Mapping[str, int]) -> list[tuple[str, str]]:
    lines = [(f"({number}) {note}", "yellow") for note, number in notes.items()]
    lines += [(f"Cut: {line}", "yellow") for line in setting_lines(results.settings, "cut")]
    lines += [(f"Note: {line}", "yellow") for line in setting_lines(results.settings, "notes")]
    lines += [(line, "") for line in _held_out_lines(results.settings)]
    lines.append((results.question, "italic"))
    seconds = sum(row.seconds for row in results if math.isfinite(row.seconds))
    if seconds:
        lines.append((f"Fitted and compared in {_duration(seconds)}.", "dim"))
    return lines


def _held_out_lines(settings: Mapping[str, Any]) -> list[str]:
    found = settings.get("held_out") or []
    counts = list(dict.fromkeys(int(item["samples"]) for item in found))
    return [
        f"On {count:,} samples never trained on: "
        + "; ".join(
            f"step {item['step']:,} accuracy {item['accuracy']:.1%}, loss {item['loss']:.3g}"
            for item in found
            if item["samples"] == count
        )
        + "."
        for count in counts
    ]


def _blocks(results: Results, width: int, notes: dict[str, int]) -> Iterator[_Block]:
    places = {layer: place for place, layer in enumerate(results.layers)}
    for condition in results.conditions:
        rows = [row for row in results if row.condition == condition]
        # Results merged step by step would jump between the layers.
        rows.sort(key=lambda row: (places[row.layer], row.step))
        counts = {row.samples for row in rows if not math.isnan(row.cosine)} or {rows[0].samples}
        single = {
            "layer": len({row.layer for row in rows}) == 1,
            "step": len({row.step for row in rows}) == 1,
            "samples": len(counts) == 1,
        }
        facts = [f"{rows[0].layer}, {rows[0].rows} × {rows[0].cols}"] if single["layer"] else []
        facts += [f"step {rows[0].step:,}"] if single["step"] else []
        facts += [f"{max(counts):,} sample{'s' * (counts != {1})}"] if single["samples"] else []
        title = f"Cosine with {condition_title(*condition)}"
        shown, left_out = _shorten(rows)
        form = _wide(shown, single, notes)
        # Many approximations of a single layer read better down than across.
        if not _fits(form, width) or (len(form[1]) == 1 and len({row.variant for row in rows}) > 6):
            form = _long(shown, single, notes)
        yield _Block(title, " · ".join(facts), *form, left_out)
    for detail in results.details:
        if detail.kind == WHOLE_MODEL:
            yield from _whole_model(detail, results)


def _whole_model(detail: Detail, results: Results) -> Iterator[_Block]:
    """What each layer is to all of them, and the cosines of the block-diagonal approximations."""
    model = WholeModel.of(detail, results.rows)
    facts = [f"norm {model.norm:.4g}", *([] if len(results.steps) == 1 else [f"step {detail.step:,}"])]
    shares = sorted(model.shares.items(), key=lambda item: -item[1])
    lines = [[layer, _percent(share)] for layer, share in shares[:_MOST_LINES]]
    lines.append(["between layers", _percent(model.cross_share)])
    hidden = len(shares) - _MOST_LINES
    yield _Block(
        "Shares of the squared norm of all layers' matrix",
        " · ".join(facts),
        [_Column("layer"), _Column("share", numeric=True)],
        lines,
        set(),
        f"… {hidden} more layers; results.whole_model() has all." if hidden > 0 else "",
    )
    yield _Block(
        f"All layers together, {condition_title(*detail.condition)}",
        "cosines of block-diagonal approximations, each block at its best scale",
        [_Column("approximation"), _Column("with the whole", True), _Column("with its block diagonal", True)],
        [[name, *map(_number, both)] for name, both in model.cosines.items()],
        set(),
    )


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.2f} %"


_Form = tuple[list[_Column], list[list[str]], set[tuple[int, int]]]


def _lead(row: Row, single: Mapping[str, bool]) -> list[tuple[_Column, str]]:
    lead = [] if single["layer"] else [(_Column("layer"), row.layer)]
    lead += [] if single["layer"] else [(_Column("shape", numeric=True), f"{row.rows} × {row.cols}")]
    lead += [] if single["step"] else [(_Column("step", numeric=True), f"{row.step:,}")]
    return lead + ([] if single["samples"] else [(_Column("samples", numeric=True), f"{row.samples:,}")])


def _wide(rows: Sequence[Row], single: Mapping[str, bool], notes: dict[str, int]) -> _Form:
    """Layers (and steps) down, approximations across."""
    names = list(dict.fromkeys(row.variant for row in rows))
    groups: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.layer, row.step), {})[row.variant] = row
    lines, best = [], set()
    for y, group in enumerate(groups.values()):
        lead = [cell for _, cell in _lead(next(iter(group.values())), single)]
        lines.append(lead + [_cosine(group[name], notes) if name in group else "" for name in names])
        best |= {(y, len(lead) + names.index(name)) for name in _winners(group.values())}
    columns = [column for column, _ in _lead(rows[0], single)]
    return columns + [_Column(name, numeric=True) for name in names], lines, best


def _long(rows: Sequence[Row], single: Mapping[str, bool], notes: dict[str, int]) -> _Form:
    """One line per row; what repeats from the line above is left blank."""
    lines: list[list[str]] = []
    best = set()
    previous: list[str] = []
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.layer, row.step), []).append(row)
    for group in groups.values():
        winners = _winners(group)
        for row in group:
            lead = [cell for _, cell in _lead(row, single)]
            blank = ["" if lead[: x + 1] == previous[: x + 1] else cell for x, cell in enumerate(lead)]
            previous = lead
            if row.variant in winners:
                best.add((len(lines), len(lead) + 1))
            error = _number(row.relative_error)
            lines.append([*blank, row.variant, _cosine(row, notes), error])
    columns = [column for column, _ in _lead(rows[0], single)]
    columns += [_Column("approximation"), *(_Column(name, numeric=True) for name in ("cosine", "relative error"))]
    return columns, lines, best


def _winners(rows: Any) -> set[str]:
    """The best of a line by cosine, leaving out the optimum, which is best by definition."""
    values = {row.variant: row.cosine for row in rows if row.approximation != "optimal"}
    finite = [value for value in values.values() if not math.isnan(value)]
    return {name for name, value in values.items() if len(finite) > 1 and value >= max(finite) - 1e-9}


def _cosine(row: Row, notes: dict[str, int]) -> str:
    text = _number(row.cosine)
    if math.isfinite(row.stderr) and math.isfinite(row.cosine):
        text += f" ±{row.stderr:.4f}" if row.stderr >= 5e-5 or row.stderr == 0 else " ±<0.0001"
    return f"{text} ({notes.setdefault(row.note, len(notes) + 1)})" if row.note else text


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _shorten(rows: list[Row]) -> tuple[list[Row], str]:
    """At most sixty lines: fewer steps first (but the first and the last), then the first layers only."""
    total = dict.fromkeys((row.layer, row.step) for row in rows)
    if len(total) <= _MOST_LINES:
        return rows, ""
    steps = sorted({step for _, step in total})
    many = min(len(steps), 3 if len({layer for layer, _ in total}) > 1 else _MOST_LINES)
    few = {steps[round(place * (len(steps) - 1) / max(many - 1, 1))] for place in range(many)}
    shown = set([line for line in total if line[1] in few][:_MOST_LINES])
    hint = f"… {len(shown)} of {len(total)} lines shown; results.to_pandas() has all."
    return [row for row in rows if (row.layer, row.step) in shown], hint


def _fold(name: str, width: int) -> str:
    """Break a long layer name after its dots, so that its parts stay readable."""
    lines = [""]
    for part in name.replace(".", ".\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _widths(columns: Sequence[_Column], lines: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column.title), *(len(line[x]) for line in lines)]) for x, column in enumerate(columns)]


def _fits(form: _Form, width: int) -> bool:
    """Whether the numbers fit, beside layer names or below them."""
    columns, lines, _ = form
    widths = _widths(columns, lines)
    if not columns[0].numeric:
        widths[0] = len(columns[0].title)
    return sum(widths) + _GAP * (len(widths) - 1) <= width


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
