"""Results: what is saved is what is loaded, every bad file says what is wrong with it, and the table can be read."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kronscope.errors import OptionError, ResultsError
from kronscope.measures import schema, table
from kronscope.measures.results import Results
from kronscope.measures.rows import COLUMNS, Detail, Row
from kronscope.support import files
from tests.figures import synthetic

finite = st.floats(-2, 2)
maybe = st.one_of(finite, st.just(math.nan))
names = st.text(max_size=20)
rows = st.builds(
    Row,
    layer=names,
    rows=st.integers(1, 4096),
    cols=st.integers(1, 4096),
    step=st.integers(0, 10**9),
    truth=st.sampled_from(["gauss_newton", "empirical_fisher", "adagrad"]),
    labels=st.sampled_from(["exact", "sampled", "real"]),
    batch_size=st.integers(1, 4096),
    approximation=names,
    cosine=maybe,
    stderr=maybe,
    relative_error=maybe,
    samples=st.integers(0, 10**7),
    seconds=maybe,
    note=names,
    options=names,
)
details = st.builds(
    Detail,
    layer=names,
    step=st.integers(0, 1000),
    truth=names,
    labels=names,
    batch_size=st.integers(1, 256),
    kind=st.sampled_from(["spectrum", "exponents", "batch_sizes"]),
    values=st.dictionaries(names, st.one_of(st.lists(maybe, max_size=4), maybe, names), max_size=3),
    options=names,
)
settings = st.dictionaries(
    names.filter(lambda name: name != "runs"),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), finite, names),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
        max_leaves=6,
    ),
    max_size=4,
)
any_results = st.builds(Results, st.lists(rows, max_size=4), st.lists(details, max_size=3), settings, st.booleans())


# ---------------------------------------------------------------- what it is


def test_columns_are_the_contract() -> None:
    frame = synthetic.one_step(2).to_pandas()
    columns = "layer rows cols step truth labels batch_size approximation cosine stderr relative_error samples seconds"
    assert " ".join(frame.columns) == columns
    assert len(frame) == 8
    assert frame["stderr"].isna().all()
    assert frame["cosine"].dtype == np.float64
    assert frame["step"].dtype == np.int64


def test_an_empty_one_still_has_the_columns() -> None:
    assert tuple(Results([]).to_pandas().columns) == COLUMNS


def test_it_cannot_be_changed() -> None:
    given_settings = {"cut": ["a"]}
    results = Results(synthetic.make_rows(), settings=given_settings)
    given_settings["cut"].append("b")
    assert results.settings == {"cut": ["a"]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        results.partial = True  # type: ignore[misc]
    assert dataclasses.replace(results, partial=True).partial


def test_it_counts_iterates_and_names_what_it_holds() -> None:
    results = synthetic.training_run((0, 10))
    assert len(results) == len(list(results)) == 30
    assert results.layers == ("layer1.1.conv1.weight",)
    assert results.steps == (0, 10)
    assert results.approximations == synthetic.FOUR
    assert results.conditions[-1] == ("gauss_newton", "real", 256)
    assert repr(results) == "<Results: 30 rows, 1 layers, 2 steps>"


def test_nan_equals_nan_and_nothing_else() -> None:
    one, same = (Row("a", 1, 2, 0, "adagrad", "real", 1, "kl", float("nan")) for _ in range(2))
    other = dataclasses.replace(one, cosine=0.5)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert Results([one]) == Results([same]) != Results([other])
    assert Results([one]) != Results([one], partial=True)


def test_tensors_arrays_and_infinities_become_plain_numbers() -> None:
    row = Row("a", torch.tensor(3), np.int64(4), 0, "t", "l", 1, "kl", torch.tensor(0.5), math.inf)  # type: ignore[arg-type]
    assert (row.rows, row.cols, row.cosine) == (3, 4, 0.5)
    assert math.isnan(row.stderr)
    curve = Detail("a", 0, "t", "l", 1, "spectrum", {"sigma": torch.tensor([1.0, math.inf]), "ratio": np.float32(0.5)})  # type: ignore[dict-item]
    assert curve.series("sigma")[0] == 1.0
    assert math.isnan(curve.series("sigma")[1])
    assert curve.number("ratio") == 0.5
    results = Results([], settings={"dtype": torch.float32, "shape": (1, 2), "bad": math.nan, "array": np.arange(2)})
    assert results.settings == {"dtype": "torch.float32", "shape": [1, 2], "bad": None, "array": [0, 1]}


def test_a_missing_curve_is_empty() -> None:
    curve = Detail("a", 0, "t", "l", 1, "spectrum", {"word": "x"})
    assert curve.series("sigma") == []
    assert math.isnan(curve.number("word"))


# ---------------------------------------------------------------- select and merge


def test_select_takes_values_lists_and_patterns() -> None:
    results = synthetic.transformer_run()
    assert results.select(layer="*.mlp.*", truth="adagrad").layers == results.layers[:2]
    assert results.select(approximation=["optimal", "shampoo"], step=[0, 50]).steps == (0, 50)
    chosen = results.select(approximation="kfac-reduce", labels="exact", batch_size=1)
    assert {row.condition for row in chosen} == {synthetic.GAUSS_NEWTON}
    assert {item.truth for item in chosen.details} == {"gauss_newton"}
    assert len(chosen.details) == len(results.details) / 2
    assert chosen.settings == results.settings
    assert chosen.partial


def test_a_row_slice_is_a_name_and_not_a_pattern() -> None:
    results = synthetic.transformer_run()
    assert results.select(layer="blocks.3.attn.qkv[0:1024]").layers == ("blocks.3.attn.qkv[0:1024]",)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layer": "blocks.3.mlp.fc3.weight"}, "No row has layer 'blocks.3.mlp.fc3.weight'.*'blocks.3.mlp.fc2.weight'"),
        ({"step": 7}, "No row has step 7; there is: 0, 100"),
        ({"approximation": ["optimal", "soap"]}, "No row has approximation 'soap'"),
    ],
)
def test_select_refuses_what_does_not_exist(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        synthetic.transformer_run().select(**asked)


def test_merge_keeps_the_later_of_two_answers() -> None:
    first = Results(synthetic.make_rows(steps=(0, 1)), synthetic.make_details(steps=(0,)), {"seed": 0})
    again = [dataclasses.replace(row, cosine=0.125) for row in synthetic.make_rows(steps=(1,))]
    merged = first.merge(Results(again, settings={"seed": 0}), Results(synthetic.make_rows(steps=(2,)), partial=True))
    assert merged.steps == (0, 1, 2)
    assert {row.cosine for row in merged if row.step == 1} == {0.125}
    assert merged.partial
    assert len(merged.details) == 3


def test_merge_keeps_common_settings_and_lists_the_others() -> None:
    a, b, c = (Results([], settings={"seed": 0, "model": "net", "step": step, "cut": [f"{step}"]}) for step in range(3))
    merged = a.merge(b).merge(c)
    assert merged.settings == {
        "seed": 0,
        "model": "net",
        "runs": [{"step": 0, "cut": ["0"]}, {"step": 1, "cut": ["1"]}, {"step": 2, "cut": ["2"]}],
    }
    assert a.merge(b, c).settings == merged.settings
    assert table.setting_lines(merged.settings, "cut") == ["0", "1", "2"]
    assert a.merge(a).settings == a.settings


def test_merge_refuses_another_model() -> None:
    with pytest.raises(ResultsError, match=r"'fc.weight' is 10×64 in one and 3×64 in another"):
        Results(synthetic.make_rows()).merge(Results(synthetic.make_rows(shape=(3, 64))))


@given(any_results, any_results)
def test_merging_with_nothing_or_itself_changes_nothing(one: Results, other: Results) -> None:
    unique = Results({row.key: row for row in one}.values(), {item.key: item for item in one.details}.values())
    shapes = {row.layer: row.shape for row in unique}
    unique = Results([row for row in unique if row.shape == shapes[row.layer]], unique.details, other.settings)
    assert unique.merge() == unique.merge(unique) == unique


# ---------------------------------------------------------------- files


@given(any_results)
def test_what_is_saved_is_what_is_loaded(results: Results) -> None:
    text = schema.dumps(results)
    assert schema.loads(text) == results
    assert schema.dumps(schema.loads(text)) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_file_round_trip(tmp_path: Path) -> None:
    results = synthetic.transformer_run()
    path = results.save(tmp_path / "new" / "run.json")
    assert path == tmp_path / "new" / "run.json"
    assert Results.load(path) == Results.load(str(path)) == results
    head = json.loads(path.read_text())
    assert (head["format"], head["schema_version"], head["partial"]) == ("kronscope-results", 3, True)
    assert None in [row["cosine"] for row in head["rows"]]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_older_versions_are_read(version: int) -> None:
    results = synthetic.one_step(1)
    data = json.loads(schema.dumps(results))
    data["schema_version"] = version
    newer = {"trace", "norm", "effective_rank", "leading_eigenvalue"} | ({"options"} if version == 1 else set())
    data["rows"] = [{name: value for name, value in row.items() if name not in newer} for row in data["rows"]]
    assert schema.loads(json.dumps(data)) == results


def test_one_row_is_one_line(tmp_path: Path) -> None:
    lines = synthetic.one_step(2).save(tmp_path / "a.json").read_text().splitlines()
    assert sum('"approximation"' in line for line in lines) == 8


def damaged(change: dict[str, Any]) -> str:
    data = json.loads(schema.dumps(synthetic.one_step(1)))
    row = {**data["rows"][0], **change.pop("row", {})}
    row = {name: value for name, value in row.items() if value != "gone"}
    return json.dumps({**data, "rows": [row], **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello", "is not JSON .*line 1, column 1"),
        ('{"a": 1,}', "is not JSON"),
        ("[1, 2]", 'expected .*"format": "kronscope-results".* holds other JSON'),
        ('{"format": "other"}', "holds other JSON"),
        (damaged({"schema_version": 4}), "newer kronscope: its schema_version is 4.*pip install --upgrade"),
        (damaged({"schema_version": "x"}), "no valid schema_version"),
        (damaged({"settings": None}), "'settings' is missing or no dict"),
        (damaged({"row": {"cosine": "gone"}}), "row 1 of .* missing or unknown entries cosine"),
        (damaged({"row": {"extra": 1}}), "missing or unknown entries extra"),
        (damaged({"row": {"options": "gone"}}), "missing or unknown entries options"),
        (damaged({"row": {"options": 3}}), "options must be text, but is 3"),
        (damaged({"row": {"layer": 3}}), "layer must be text, but is 3"),
        (damaged({"row": {"rows": 1.5}}), "row 1 of .* is damaged"),
        (damaged({"row": {"cosine": [1]}}), "row 1 of .* is damaged"),
        (damaged({"details": [7]}), "detail 1 of .* is damaged"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=message) as caught:
        Results.load(path)
    assert "bad.json" in str(caught.value)


def test_every_cut_of_a_file_is_an_error_that_says_so() -> None:
    text = schema.dumps(Results(synthetic.make_rows(), settings={"a": [1, "b"]}))
    for end in range(2, len(text) - 2, 7):
        with pytest.raises(ResultsError, match="'x' is cut short: it ends in the middle of line"):
            schema.loads(text[:end], "x")


def test_missing_folders_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"There is no results file .*check the path"):
        Results.load(tmp_path / "none.json")
    with pytest.raises(ResultsError, match="is a folder; give the name"):
        Results.load(tmp_path)
    synthetic.one_step(1).save(tmp_path / "results.json")
    with pytest.raises(ResultsError, match=re.escape(f"load '{tmp_path}/results.json' instead")):
        Results.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ResultsError, match="is not text"):
        Results.load(tmp_path / "binary")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = synthetic.one_step(1).save(tmp_path / "run.json")
    before = path.read_bytes()

    def fail(file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        files.write_atomically(path, fail)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    small, large = synthetic.one_step(1), synthetic.one_step(40)
    path = small.save(tmp_path / "run.json")
    done = threading.Event()

    def keep_writing() -> None:
        for number in range(20):
            (large if number % 2 else small).save(path)
        done.set()

    writer = threading.Thread(target=keep_writing)
    writer.start()
    while not done.is_set():
        assert Results.load(path) in (small, large)
    writer.join()


def test_links_and_permissions_survive(tmp_path: Path) -> None:
    target = synthetic.one_step(1).save(tmp_path / "target.json")
    target.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(target)
    synthetic.one_step(2).save(link)
    assert link.is_symlink()
    assert len(Results.load(target)) == 8
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_it_refuses_to_replace_what_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="is a folder"):
        synthetic.one_step(1).save(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ResultsError, match="not a regular file"):
        synthetic.one_step(1).save(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="Could not write"):
        synthetic.one_step(1).save(tmp_path / "file" / "run.json")


# ---------------------------------------------------------------- the table


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda columns: monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 300])
@pytest.mark.parametrize("error", [math.nan, 0.01])
def test_the_table_fits_and_holds_every_name_and_number(width: Any, columns: int, error: float) -> None:
    width(columns)
    results = synthetic.one_step(5, synthetic.ALL, error=error)
    text = str(results)
    assert max(map(len, text.splitlines())) <= min(max(columns, 80), 120)
    assert "\x1b" not in text
    for row in results:
        assert f"{row.cosine:.4f}" in text
    # A long name goes on at the beginning of the next line.
    starts = "".join(line.split()[0] for line in text.splitlines() if line and line[0] != " ")
    for layer in results.layers:
        assert layer in starts


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("error", [math.nan, 0.01])
@pytest.mark.parametrize("approximations", [("optimal", "shampoo2"), synthetic.ALL])
def test_names_that_fit_into_a_line_are_never_broken(
    width: Any, columns: int, error: float, approximations: tuple[str, ...]
) -> None:
    width(columns)
    names = ["fc.weight", "model.layers.0.self_attn.q_proj.weight+model.layers.0.self_attn.k_proj.weight", "x" * 80]
    rows = [row for name in names for row in synthetic.make_rows(name, names=approximations, error=error)]
    lines = str(Results(rows)).splitlines()
    assert max(map(len, lines)) <= columns
    for name in names:
        assert sum(line.split()[0] == name for line in lines if line) == 1
    for row in rows:
        assert f"{row.cosine:.4f}" in str(Results(rows))


def test_few_approximations_stand_side_by_side(width: Any) -> None:
    width(100)
    lines = str(synthetic.one_step(3)).splitlines()
    assert lines[0] == "Cosine with the Gauss–Newton matrix, fitted on exact labels, batch size 1"
    assert lines[1] == "step 0 · 1,024 samples"
    assert lines[2].split() == ["layer", "shape", "optimal", "shampoo2", "shampoo", "kfac-reduce"]
    assert lines[4].split()[:4] == ["encoder.layer.0.mlp.down.weight", "64", "×", "256"]
    assert len(lines[4].split()) == 8


def test_many_approximations_stand_below_each_other(width: Any) -> None:
    width(80)
    lines = str(synthetic.one_step(2, synthetic.ALL)).splitlines()
    assert lines[2].split() == ["layer", "shape", "approximation", "cosine", "relative", "error"]
    assert sum("shampoo2" in line for line in lines) == 2


def test_steps_are_lines_when_there_are_several(width: Any) -> None:
    width(100)
    text = str(synthetic.training_run((0, 1000)))
    assert text.count("Cosine with") == 4
    assert "layer1.1.conv1.weight, 64 × 576 · 1,024 samples" in text
    assert re.search(r"^1,000 +0\.\d{4} ±0\.\d{4}", text, re.MULTILINE)
    assert "fitted on real labels, batch size 256" in text


def test_a_layers_steps_stand_together_however_they_were_merged(width: Any) -> None:
    width(100)
    parts = [Results(synthetic.make_rows(layer, steps=(step,))) for step in (5, 0) for layer in "ab"]
    lines = [line.split() for line in str(parts[0].merge(*parts[1:])).splitlines()]
    assert [(line[0], line[4]) for line in lines if line and line[0] in "ab"] == [
        ("a", "0"),
        ("a", "5"),
        ("b", "0"),
        ("b", "5"),
    ]


def test_nan_is_a_dash_with_its_reason_below(width: Any) -> None:
    width(120)
    text = str(synthetic.transformer_run())
    assert text.splitlines()[0].startswith("PARTIAL")
    assert text.count("– (1)") == 15
    assert "(1) K-FAC needs inputs and output gradients" in text
    assert "nan" not in text.lower()
    assert "Cut: width: 128 instead of 512" in text


def test_a_long_table_is_cut_and_says_so(width: Any) -> None:
    width(100)
    text = str(synthetic.one_step(100))
    assert "… 60 of 100 lines shown; results.to_pandas() has all." in text
    many = Results([row for layer in "abcd" for row in synthetic.make_rows(layer, steps=range(50))])
    lines = [line.split()[4] for line in str(many).splitlines() if re.match(r"[abcd] ", line)]
    assert lines == ["0", "24", "49"] * 4
    one = [line.split()[0] for line in str(Results(synthetic.make_rows(steps=range(500)))).splitlines() if line]
    assert {"0", "499"} <= set(one)
    assert len(one) < 70


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({}, math.nan, "Exact for these 1,024 samples: nothing is estimated, so there are no error bars."),
        ({"population": True}, 0.1, "Estimated for the population from which the 1,024 samples came; ± is one"),
        ({"estimator": "probes"}, 0.1, "Estimated with random probes on these 1,024 samples, as the paper did; ±"),
        ({}, 0.1, "For these 1,024 samples; ± is one standard error of what was drawn, and no ± means exact."),
    ],
)
def test_it_says_which_question_it_answers(settings: dict[str, Any], error: float, sentence: str) -> None:
    results = Results(synthetic.make_rows(error=error), settings=settings)
    assert results.question.startswith(sentence)
    assert sentence in " ".join(str(results).split())


def test_where_there_is_no_cosine_it_does_not_say_that_the_answer_is_exact() -> None:
    rows = [dataclasses.replace(row, cosine=math.nan, note="the truth is zero") for row in synthetic.make_rows()]
    assert Results(rows).question == "For these 1,024 samples there is no cosine; the notes say why."


def test_the_best_attainable_one_is_marked_on_a_terminal() -> None:
    from rich.console import Console

    console = Console(force_terminal=True, color_system="standard", width=100, record=True, file=io.StringIO())
    console.print(synthetic.one_step(2))
    html = console.export_html(inline_styles=True)
    best = re.findall(r"font-weight: bold\">\s*(0\.\d{4})", html)
    shampoo2 = [f"{row.cosine:.4f}" for row in synthetic.one_step(2) if row.approximation == "shampoo2"]
    assert best == shampoo2


def test_plain_ascii_where_the_terminal_knows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr("sys.stdout", Ascii())
    text = str(Results(synthetic.make_rows("größe", error=0.1)))
    assert text.isascii()
    assert "gr??e, 10 x 64" in text
    assert "+-0." in text


def test_odd_names_are_shown_as_they_are() -> None:
    results = Results([row for name in ("[bold]x[/]", "<b>&") for row in synthetic.make_rows(name)])
    assert "[bold]x[/]" in str(results)
    html = results._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert "<b>&" not in html


def test_nothing_measured_is_said() -> None:
    assert str(Results([])) == "Nothing was measured."
    assert str(Results([], partial=True)).startswith("PARTIAL")


@pytest.mark.parametrize(
    ("done", "words"),
    [
        ({"layers": ["a", "b"], "of": 5}, "2 of 5 layers done"),
        ("all", "what was done"),
        ({"layers": 3, "of": 5}, "what was done"),
        (None, "what was done"),
    ],
)
def test_how_much_is_done_is_said_if_the_file_says_it(done: object, words: str) -> None:
    assert words in str(Results([], settings={"done": done}, partial=True))
