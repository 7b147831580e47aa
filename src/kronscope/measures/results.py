"""What a measurement returns: one row per layer, step, truth and approximation, and what is needed to read it."""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronscope.errors import OptionError, ResultsError
from kronscope.measures.rows import COLUMNS, MATRIX_COLUMNS, Detail, Row
from kronscope.measures.whole import WHOLE_MODEL, WholeModel

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["COLUMNS", "Detail", "Results", "Row"]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Results:
    """The result of a measurement: rows, the curves behind them, what was asked, and whether it was finished.

    Print it for a table, save it as JSON, or turn it into a data frame, a picture or an interactive report. It never
    changes: :meth:`select` and :meth:`merge` return new results.

    Args:
        rows: One :class:`~kronscope.measures.Row` for each cosine.
        details: Curves, for figures and the report.
        settings: What was asked and how it was done. Anything that is not plain data is kept as its text. Tables and
            reports show these in places of their own: ``title``, ``population``, ``estimator``, ``cut`` (what was made
            smaller than asked, or smaller than in the paper) and ``notes``; the last two are text, a list or a
            dictionary. ``held_out`` is a list of dictionaries with ``step``, ``accuracy``, ``loss`` and ``samples``.
        partial: Whether the measurement was interrupted.

    >>> row = Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.97, samples=128)
    >>> results = Results([row], settings={"seed": 0})
    >>> len(results), results.layers, results.question
    (1, ('fc.weight',), 'Exact for these 128 samples: nothing is estimated, so there are no error bars.')
    """

    rows: tuple[Row, ...]
    details: tuple[Detail, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    partial: bool = False

    def __init__(
        self,
        rows: Iterable[Row],
        details: Iterable[Detail] = (),
        settings: Mapping[str, Any] | None = None,
        partial: bool = False,
    ) -> None:
        object.__setattr__(self, "rows", tuple(rows))
        object.__setattr__(self, "details", tuple(details))
        object.__setattr__(self, "settings", _plain(settings or {}))
        object.__setattr__(self, "partial", bool(partial))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Results):
            return NotImplemented
        mine = (self.rows, self.details, self.settings, self.partial)
        return mine == (other.rows, other.details, other.settings, other.partial)

    def __hash__(self) -> int:
        return hash((self.rows, self.partial))

    @property
    def layers(self) -> tuple[str, ...]:
        """Every layer, in the order measured."""
        return tuple(dict.fromkeys(row.layer for row in self.rows))

    @property
    def steps(self) -> tuple[int, ...]:
        """Every step, ascending."""
        return tuple(sorted({row.step for row in self.rows}))

    @property
    def approximations(self) -> tuple[str, ...]:
        """Every approximation's name, in the order asked for."""
        return tuple(dict.fromkeys(row.approximation for row in self.rows))

    @property
    def variants(self) -> tuple[str, ...]:
        """Every approximation with its options, as tables and figures name them, in the order asked for."""
        return tuple(dict.fromkeys(row.variant for row in self.rows))

    @property
    def conditions(self) -> tuple[tuple[str, str, int], ...]:
        """Every (truth, labels, batch size), in the order measured."""
        return tuple(dict.fromkeys(row.condition for row in self.rows))

    @property
    def question(self) -> str:
        """A sentence that says whether the numbers are for these samples, or for the population they came from."""
        return _question(self.rows, self.settings)

    def select(
        self,
        *,
        layer: str | Iterable[str] | None = None,
        truth: str | Iterable[str] | None = None,
        approximation: str | Iterable[str] | None = None,
        labels: str | Iterable[str] | None = None,
        batch_size: int | Iterable[int] | None = None,
        step: int | Iterable[int] | None = None,
        options: str | Iterable[str] | None = None,
    ) -> Results:
        """Return only the rows (and curves) that match every argument.

        Args:
            layer: A value, several values, or a pattern with ``*``; so are the others. None takes every row.
            truth: As in :class:`~kronscope.measures.Row`.
            approximation: The registered name.
            labels: As in :class:`~kronscope.measures.Row`.
            batch_size: As in :class:`~kronscope.measures.Row`.
            step: As in :class:`~kronscope.measures.Row`.
            options: As in :class:`~kronscope.measures.Row`.

        Returns:
            New results with the same settings.

        Raises:
            OptionError: a value occurs in no row; the nearest ones that do are listed.

        >>> row = Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.97)
        >>> len(Results([row]).select(layer="fc.*", approximation=["shampoo2"]))
        1
        >>> Results([row]).select(approximation="shampoo")
        Traceback (most recent call last):
            ...
        kronscope.errors.OptionError: No row has approximation 'shampoo'; there is: 'shampoo2'.
        """
        asked = {
            "layer": layer,
            "truth": truth,
            "approximation": approximation,
            "labels": labels,
            "batch_size": batch_size,
            "step": step,
            "options": options,
        }
        tests = {
            name: _matcher(name, value, {getattr(row, name) for row in self.rows})
            for name, value in asked.items()
            if value is not None
        }
        rows = [row for row in self.rows if all(test(getattr(row, name)) for name, test in tests.items())]
        # Curves belong to a layer, a step and a condition, not to one approximation.
        for name in ("approximation", "options"):
            tests.pop(name, None)
        details = [item for item in self.details if all(test(getattr(item, name)) for name, test in tests.items())]
        return Results(rows, details, self.settings, self.partial)

    def merge(self, *others: Results) -> Results:
        """Put several results together; where two measured the same thing, the later one counts.

        Fits with different options (of the approximation, or batches drawn without replacement) are different things.
        Settings on which all agree stay; the others are listed run by run under ``"runs"``. The whole is partial if one
        of the results is.

        Args:
            others: The other results, in order.

        Returns:
            New results with all rows.

        Raises:
            ResultsError: a layer has another shape in one of them, so they are of different models; or two measured the
                same thing as answers to different questions, for example exactly and for the population.

        >>> before = Results([Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.97)])
        >>> after = Results([Row("fc.weight", 10, 64, 100, "gauss_newton", "exact", 1, "shampoo2", 0.95)])
        >>> before.merge(after).steps
        (0, 100)
        """
        parts = (self, *others)
        given: tuple[object, ...] = parts
        if strange := [part for part in given if not isinstance(part, Results)]:
            raise ResultsError(f"merge takes results, one by one, got a {type(strange[0]).__name__}: a.merge(b, c).")
        shapes: dict[str, tuple[int, int]] = {}
        for row in (row for part in parts for row in part.rows):
            if shapes.setdefault(row.layer, row.shape) != row.shape:
                first, second = ("×".join(map(str, shape)) for shape in (shapes[row.layer], row.shape))
                raise ResultsError(
                    f"Results of one model are expected, but layer {row.layer!r} is {first} in one and {second} "
                    "in another; keep results of different models apart, for example in a dictionary."
                )
        _check_questions(parts)
        rows = {row.key: row for part in parts for row in part.rows}
        details = {item.key: item for part in parts for item in part.details}
        settings = _merged_settings([part.settings for part in parts])
        return Results(rows.values(), details.values(), settings, any(part.partial for part in parts))

    def whole_model(self) -> WholeModel:
        """Return what the layers are to the matrix of all of them together.

        Returns:
            Each layer's share of the squared norm, the share between layers, and each approximation's cosine.

        Raises:
            ResultsError: it was not measured, or there are several: then select a step or a condition first.

        >>> import torch, kronscope as ks
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> whole = ks.measure(model, torch.nn.CrossEntropyLoss(), data, whole_model=True).whole_model()
        >>> round(sum(whole.shares.values()) + whole.cross_share, 6)
        1.0
        """
        found = [item for item in self.details if item.kind == WHOLE_MODEL]
        if not found:
            raise ResultsError(
                "These results say nothing of the whole model; measure with whole_model=True, and keep all layers."
            )
        if len(found) > 1:
            texts = "; ".join(
                f"step {item.step}, {item.labels} labels, batch size {item.batch_size}, {item.truth}"
                for item in found[:5]
            )
            raise ResultsError(
                f"There are {len(found)} answers for the whole model ({texts}); select one of them first."
            )
        return WholeModel.of(found[0], self.rows)

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows as a data frame, with a column ``options`` if any row has some.

        The last columns are of the matrix itself, where it was looked at: ``trace``, ``norm``, ``effective_rank`` and
        ``leading_eigenvalue``.

        Returns:
            One line per row.

        >>> row = Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.97)
        >>> Results([row]).to_pandas()[["layer", "approximation", "cosine"]].values.tolist()
        [['fc.weight', 'shampoo2', 0.97]]
        """
        import pandas as pd

        names: tuple[str, ...] = (*COLUMNS, "options") if any(row.options for row in self.rows) else COLUMNS
        names += tuple(name for name in MATRIX_COLUMNS if any(not math.isnan(getattr(row, name)) for row in self.rows))
        return pd.DataFrame({name: [getattr(row, name) for row in self.rows] for name in names})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything to one JSON file, which :meth:`load` reads back unchanged.

        The file appears whole or not at all. NaN is written as null.

        Args:
            path: The file to write.

        Returns:
            The path.

        Raises:
            ResultsError: The file cannot be written there.
        """
        from kronscope.measures import schema
        from kronscope.support import files

        text = schema.dumps(self)
        return files.write_atomically(path, lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Read what :meth:`save` wrote.

        Args:
            path: The file.

        Returns:
            The results, equal to those that were saved.

        Raises:
            ResultsError: The file is missing, is not a results file, is cut short, or is of a newer version.

        >>> import tempfile
        >>> row = Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.97)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Results([row]).save(f"{folder}/run.json")
        ...     same = Results.load(path) == Results([row])
        >>> same
        True
        """
        from kronscope.measures import schema

        return schema.loads(schema.read_text(path), os.fspath(path))

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the cosines to a ``.png``, ``.pdf`` or ``.svg`` file, as :func:`kronscope.figures.cosines` does.

        Args:
            path: The file to write.

        Returns:
            The path.
        """
        from kronscope import figures

        return figures.save(figures.cosines(self), path)

    def report(self, path: str | os.PathLike[str], title: str | None = None) -> Path:
        """Write one interactive HTML file that needs no network, as :func:`kronscope.report.write_report` does.

        Args:
            path: The file to write.
            title: The page's heading; None takes the one in the settings.

        Returns:
            The path.
        """
        from kronscope.report import write_report

        return write_report(self, path, title=title)

    def __repr__(self) -> str:
        state = ", partial" if self.partial else ""
        return f"<Results: {len(self.rows)} rows, {len(self.layers)} layers, {len(self.steps)} steps{state}>"

    def __str__(self) -> str:
        from kronscope.measures import table

        return table.to_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from kronscope.measures import table

        yield from table.to_rich(self, options.max_width, ascii_only=options.ascii_only)

    def _repr_html_(self) -> str:
        from kronscope.measures import table

        return table.to_html(self)


def _plain(value: Any) -> Any:
    """Plain data as JSON knows it, so that settings are the same before saving and after loading."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [_plain(item) for item in sorted(value, key=str)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def _matcher(name: str, asked: object, present: set[Any]) -> Callable[[object], bool]:
    """A test for one column, after checking that every value asked for occurs at all."""
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        asked = (asked,)
    wanted: set[object] = set()
    for value in asked:
        # An exact name wins over a pattern: "in_proj_weight[0:64]" is a row slice, not a set of letters.
        if value in present:
            wanted.add(value)
            continue
        matches = {item for item in present if isinstance(value, str) and fnmatch.fnmatchcase(item, value)}
        if not matches:
            texts = sorted(map(str, present))
            if len(texts) > 8:
                texts = difflib.get_close_matches(str(value), texts, n=8, cutoff=0.0)
            there = ", ".join(repr(text) if isinstance(value, str) else text for text in texts) or "nothing"
            raise OptionError(f"No row has {name} {value!r}; there is: {there}.")
        wanted |= matches
    return lambda value: value in wanted


_QUESTIONS = ("population", "estimator", "weights")


def _check_questions(parts: Sequence[Results]) -> None:
    """Rows that answer different questions must not replace each other."""
    asked: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        question = {name: part.settings.get(name) for name in _QUESTIONS if name in part.settings}
        for row in part.rows:
            before = asked.setdefault(row.key, question)
            different = [name for name in question if name in before and before[name] != question[name]]
            if different:
                name = different[0]
                raise ResultsError(
                    f"Both results have layer {row.layer!r}, step {row.step}, approximation {row.variant!r}, but "
                    f"one with {name}={before[name]!r} and one with {name}={question[name]!r}; keep them apart, for "
                    "example in a dictionary."
                )


def _merged_settings(all_settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for settings in all_settings:
        common = {name: value for name, value in settings.items() if name != "runs"}
        runs += [{**common, **run} for run in settings.get("runs") or [{}]]
    runs = [run for place, run in enumerate(runs) if run not in runs[:place]]
    if len(runs) == 1:
        return runs[0]
    agreed = {name for name in runs[0] if all(name in run and run[name] == runs[0][name] for run in runs)}
    parts = [{name: value for name, value in run.items() if name not in agreed} for run in runs]
    return {**{name: runs[0][name] for name in runs[0] if name in agreed}, "runs": parts}


def _question(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    measured = [row for row in rows if not math.isnan(row.cosine)] or rows
    counts = sorted({row.samples for row in measured})
    if not counts:
        return "Nothing was measured."
    unit = "recorded gradient" if all(row.truth == "adagrad" for row in rows) else "sample"
    many = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    samples = f"{many} {unit}{'' if counts == [1] else 's'}"
    estimated = any(math.isfinite(row.stderr) for row in rows)
    bars = "; ± is one standard error" if estimated else ""
    if settings.get("estimator") == "probes":
        return f"Estimated with random probes on these {samples}, as the paper did{bars}."
    if settings.get("population"):
        return f"Estimated for the population from which the {samples} came{bars}."
    if estimated:
        return f"For these {samples}; ± is one standard error of what was drawn, and no ± means exact."
    if all(math.isnan(row.cosine) for row in rows):
        return f"For these {samples} there is no cosine; the notes say why."
    return f"Exact for these {samples}: nothing is estimated, so there are no error bars."
