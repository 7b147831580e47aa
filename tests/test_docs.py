"""The documentation is true: its python blocks run, print what it says they print, and it leaves nothing out.

The blocks of README.md and of each file in docs/ run in order, with one namespace per file. A block opened by
```` ```python no-run ```` is shown but not run. A ```` ```text ```` block right after a python block is what that
block prints: the same words, and numbers that differ by no more than 0.002.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import typer

import kronscope
from kronscope import approx, cli, errors, optim
from kronscope.approx import registry
from kronscope.measures.rows import COLUMNS

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=ticks)`*[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
TOLERANCE = 0.002
# Times differ from machine to machine, and the line under a table's head with the widths of its numbers.
UNCHECKED = re.compile(r"^Fitted and compared in .*$|─+", re.MULTILINE)


class Block(NamedTuple):
    """A code block, the number of its first line, and what it should print, if the document says so."""

    line: int
    code: str
    output: str | None = None


def blocks(text: str, info: str = "python") -> list[Block]:
    """Find the blocks whose info string is exactly ``info``."""
    found = []
    for match in FENCE.finditer(text):
        if match["info"].strip() != info:
            continue
        after = FENCE.match(text, match.end() + 2)
        output = after["code"] if after is not None and after["info"].strip() == "text" else None
        found.append(Block(text.count("\n", 0, match.start("code")) + 1, match["code"], output))
    return found


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def differences(expected: str, actual: str) -> Iterator[str]:
    """What a reader would find wrong with the output a document shows."""
    shown, printed = (UNCHECKED.sub("", text).split() for text in (expected, actual))
    for one, other in zip(shown, printed, strict=False):
        parts = [re.split(r"(\d+\.\d+)", word) for word in (one, other)]
        same = [len(part) for part in parts] == [len(parts[0])] * 2 and all(
            a == b or (place % 2 and abs(float(a) - float(b)) <= TOLERANCE)
            for place, (a, b) in enumerate(zip(*parts, strict=True))
        )
        if not same:
            yield f"{one!r} is shown, {other!r} is printed"
    if len(shown) != len(printed):
        yield f"{len(shown)} words are shown, {len(printed)} are printed"


WITH_BLOCKS = [path for path in documents() if blocks(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=named)
def test_code_blocks_run_and_print_what_is_shown(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # examples may save files
    monkeypatch.setenv("COLUMNS", "100")
    # A document may register an approximation; the tests after it must not see it.
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks(path.read_text(encoding="utf-8")):
        # Blank lines in front make a traceback name the line of the document.
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, str(path), "exec", dont_inherit=True), namespace)
        printed = capsys.readouterr().out
        if block.output is not None:
            wrong = list(differences(block.output, printed))
            assert not wrong, f"{named(path)}:{block.line}: {wrong[:5]}; the block prints\n{printed}"


def test_the_readme_has_an_example_that_runs() -> None:
    assert ROOT / "README.md" in WITH_BLOCKS


def test_only_blocks_marked_python_run() -> None:
    shown = "```python no-run\nboom\n```\n```\nboom\n```\n"
    text = "a\n```python\nx = 1\n```\n" + shown + "````python\n'''\n```\n'''\n````"
    assert blocks(text) == [Block(3, "x = 1\n"), Block(12, "'''\n```\n'''\n")]


def test_output_is_the_text_block_that_follows() -> None:
    text = "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nprint(2)\n```\nThat was it.\n\n```text\n3\n```\n"
    assert [block.output for block in blocks(text)] == ["1\n", None]


@pytest.mark.parametrize(
    ("printed", "good"),
    [
        ("cosine 0.9101 ±0.001\nFitted and compared in 7 s.", True),
        ("cosine 0.9201 ±0.001", False),
        ("cosine 0.9101", False),
        ("cosines 0.9101 ±0.001", False),
        ("cosine 0.9101 ±0.001 more", False),
    ],
)
def test_outputs_are_compared_word_by_word(printed: str, good: bool) -> None:
    assert (not list(differences("cosine  0.9100 ±0.002\nFitted and compared in 5 s.", printed))) is good


# ---------------------------------------------------------------------- nothing is left out


@pytest.mark.parametrize("path", [*documents(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        target = match["target"] or match["image"]
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), f"{named(path)} links to {target}, which does not exist"
        assert ROOT in (other, *other.parents), f"{named(path)} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(other), f"{named(path)} links to {target}, but there is no such heading"


def anchors(path: Path) -> set[str]:
    """The anchors GitHub makes of a document's headings."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_cells(text: str) -> list[str]:
    """What stands in backticks in the first cell of each table line."""
    return re.findall(r"^\| *`([^`]+)` *\|", text, re.MULTILINE)


def test_the_table_of_approximations_is_the_registry() -> None:
    text = (DOCS / "approximations.md").read_text(encoding="utf-8")
    ours = [item for item in approx.all_approximations() if type(item).__module__.startswith("kronscope.")]
    assert first_cells(text) == [item.name for item in ours]
    for item in ours:
        line = next(line for line in text.splitlines() if line.startswith(f"| `{item.name}` |"))
        assert item.title in line, f"the line of {item.name} does not say its title, {item.title}"
        for option in inspect.signature(type(item)).parameters:
            assert f"`{option}" in line, f"the line of {item.name} does not mention its option {option}"


def test_the_table_of_options_has_the_defaults_of_shampoo() -> None:
    text = (DOCS / "optimizers.md").read_text(encoding="utf-8")
    table = text.split("| option | default | meaning |")[1].split("\n\n")[0].splitlines()[2:]
    parameters = inspect.signature(optim.Shampoo).parameters
    for line in table:
        names, default, _ = line.strip("| ").split(" | ", 2)
        for name in re.findall(r"`(\w+)", names):
            assert eval(default.strip("`"), dict(vars(optim))) == parameters[name].default, name


def test_the_columns_of_results_are_all_explained() -> None:
    text = (DOCS / "measuring.md").read_text(encoding="utf-8")
    cells = [name for cell in re.findall(r"^\| *(`[^|]+`) *\|", text, re.MULTILINE) for name in cell.split("`")[1::2]]
    assert set(COLUMNS) <= set(cells)


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    for name in kronscope.__all__:
        assert f"`ks.{name}`" in text, f"docs/reference.md does not mention ks.{name}"
    for name in errors.__all__:
        assert f"`{name}`" in text, f"docs/reference.md does not mention errors.{name}"


def stubs() -> dict[str, ast.FunctionDef]:
    """The signatures the reference shows, by dotted name."""
    found = {}
    for block in blocks((DOCS / "reference.md").read_text(encoding="utf-8"), "python no-run"):
        for node in ast.parse(block.code).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{item.name}": item for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("name", sorted(stubs()))
def test_the_signatures_in_the_reference_are_the_real_ones(name: str) -> None:
    shown = stubs()[name].args
    actual: Any = kronscope
    for part in name.split("."):
        actual = getattr(actual, part)
    parameters = [item for item in inspect.signature(actual).parameters.values() if item.name != "self"]
    many = [item for item in (shown.vararg, shown.kwarg) if item is not None]
    names = {item.arg for item in (*shown.args, *shown.kwonlyargs, *many)} - {"self"}
    assert names == {item.name for item in parameters}
    by_place = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
    assert [item.arg for item in shown.args if item.arg != "self"] == by_place
    defaults = [*shown.defaults, *(item for item in shown.kw_defaults if item is not None)]
    expected = [item.default for item in parameters if item.default is not item.empty]
    assert [ast.literal_eval(item) for item in defaults] == expected


def test_the_table_of_error_bars_is_the_benchmarks_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "records" / "population_coverage.json").read_text(encoding="utf-8"))
    text = (DOCS / "mathematics.md").read_text(encoding="utf-8")
    assert record["command"] in text
    for line in record["table"]:
        numbers = [line[name] for name in ("truth", "mean plug-in", "mean estimate")]
        numbers += [line[name] for name in ("standard deviation", "mean standard error")]
        shares = [line[f"coverage at {count} stderr"] for count in (1, 2)]
        cells = [*(f"{number:.3f}" for number in numbers), *(f"{share:.2f}" for share in shares)]
        assert f"| {line['samples']} | {line['approximation']} | {' | '.join(cells)} |" in text


def commands() -> dict[str, set[str]]:
    """Every command of the command line with its options."""
    found: dict[str, set[str]] = {}

    def visit(command: Any, name: str) -> None:
        if hasattr(command, "commands"):
            for part, child in command.commands.items():
                visit(child, f"{name} {part}")
        else:
            found[name] = {option for item in command.params for option in item.opts if option.startswith("--")}

    visit(typer.main.get_command(cli.app), "kronscope")
    return found


def test_the_command_line_is_documented() -> None:
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    for command, options in commands().items():
        assert command in text, f"docs/command-line.md does not mention {command!r}"
        for option in options:
            assert f"`{option}" in text, f"docs/command-line.md does not mention {option} of {command!r}"


def test_documents_show_only_commands_and_options_that_exist() -> None:
    known = commands()
    for path in documents():
        for line in re.findall(r"^\$? *(kronscope .*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            words = line.split("#")[0].split()
            found = next((name for name in known if words[: len(name.split())] == name.split()), None)
            assert found is not None, f"{named(path)} shows {line!r}, but there is no such command"
            options = {word for word in words if word.startswith("--")}
            assert options <= known[found] | {"--help"}, f"{named(path)}: {line!r} has options that do not exist"


def _benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # they use each other
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, script)  # where dataclasses look for their module
    spec.loader.exec_module(script)
    return script


def test_the_tables_that_compare_optimizers_are_their_record(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "optimizer-trials.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- optim_comparison -->\n")[2].partition("<!-- end -->")[0]
    assert shown == _benchmark("optim_training", monkeypatch).comparison(RECORDS / "optim_comparison")


def test_the_table_of_first_roots_is_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "optimizer-trials.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- first_roots -->\n")[2].partition("<!-- end -->")[0]
    script = _benchmark("frontier", monkeypatch)
    assert shown == script.first_roots(RECORDS / "frontier")
    for family, within in script.FIRST_NOW.items():
        (group,) = script.FAMILIES[family]([torch.nn.Parameter(torch.ones(2, 2))]).param_groups
        assert group["refresh"] == kronscope.Warmup(20, 10, within=tuple(map(int, within.split("-"))))


def test_the_table_of_left_out_gradients_is_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "optimizer-trials.md").read_text(encoding="utf-8")
    script = _benchmark("frontier", monkeypatch)
    tables = {"seldom": script.seldom(RECORDS / "frontier"), "seldom_check": script.seldom_check(RECORDS)}
    for name, table in tables.items():
        assert text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0] == table


@pytest.mark.parametrize(("record", "clock"), [("optim_defaults", "wall"), ("optim_defaults_one_thread", "cpu")])
def test_the_times_of_steps_with_defaults_are_their_record(
    record: str, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    shown = text.partition(f"<!-- {record} -->\n")[2].partition("<!-- end -->")[0]
    found = json.loads((RECORDS / f"{record}.json").read_text(encoding="utf-8"))
    assert shown == _benchmark("optim_defaults", monkeypatch).table(found, clock) + "\n"


def test_every_picture_of_the_reproduction_is_shown() -> None:
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("reproduction.md", "reproduction-summary.md"))
    hidden = [path.name for path in (DOCS / "images" / "reproduction").iterdir() if path.name not in text]
    assert not hidden


def test_the_tables_of_the_reproduction_are_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    script = _benchmark("reproduction", monkeypatch)
    for name, least in (("reproduction.md", 10), ("reproduction-summary.md", 1)):
        text = (DOCS / name).read_text(encoding="utf-8")
        assert script.filled(text) == text, "run python benchmarks/reproduction.py tables"
        # a marker that names no run or no kind of table would raise; one that is misspelt would not be filled
        assert len(re.findall("<!-- table", text)) == len(script.MARK.findall(text)) > least
    assert script.commands() in (DOCS / "reproduction.md").read_text(encoding="utf-8"), "the commands are others now"


def _row(text: str, label: str) -> list[str]:
    """The cells of a table's row after its label, without emphasis."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip(" *") for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("`KLShampoo`", "kl-shampoo"),
        ("`Shampoo`", "shampoo"),
        ("`SOAP`", "soap"),
        ("Muon (float32)", "muon"),
        ("published SOAP (`reference=True`)", "soap-published"),
        ("Distributed Shampoo", "distributed-shampoo"),
        ("AdamW", "adamw"),
    ],
)
def test_the_table_of_trained_losses_is_its_record(label: str, name: str) -> None:
    summary = json.loads((RECORDS / "optim_training" / "summary.json").read_text(encoding="utf-8"))
    text = (DOCS / "optimizer-trials.md").read_text(encoding="utf-8").partition("### With the defaults of before")[2]
    cells = _row(text, label)
    for place, workload in enumerate(("cifar", "chars", "mnist")):
        found = summary[workload]["optimizers"][name]
        shown = cells[3 * place : 3 * place + 3]
        assert shown[0] == f"{statistics.mean(found['finals']):.3f}"
        assert len(found["finals"]) >= 3
        if name != "adamw":  # whose own row has its whole run
            assert shown[1] == f"{found['steps_to_adamw']:.0f}"
            assert shown[2] == f"{found['cpu_to_adamw']:.{0 if workload == 'cifar' else 1}f}"


@pytest.mark.parametrize(
    ("label", "ratio"),
    [
        ("Shampoo / Distributed Shampoo, default", "Shampoo / Distributed Shampoo"),
        ("Shampoo / Distributed Shampoo, unpacked (its fastest)", "Shampoo / Distributed Shampoo, unpacked"),
        ("SOAP / published SOAP, in its view", "SOAP / published SOAP"),
        ("a step without a refresh / its bare products", "step without refresh / bare products"),
        ("slowest step / mean step", "slowest step / mean step"),
    ],
)
def test_the_table_of_step_times_is_its_record(label: str, ratio: str) -> None:
    runs = [
        json.loads((RECORDS / name).read_text(encoding="utf-8"))["sets"]
        for name in ("optim_speed.json", "optim_speed_again.json")
    ]
    in_view = "SOAP, as published's view / published SOAP"
    shown = _row((DOCS / "optimizer-trials.md").read_text(encoding="utf-8"), label)
    wanted = []
    for name in ("transformer", "resnet18", "squares"):
        key = in_view if name == "resnet18" and ratio.startswith("SOAP") else ratio
        wanted.append(", ".join(f"{run[name]['ratios']['wall'][key]:.2f}" for run in runs))
    assert shown == wanted


def test_the_ratios_with_one_thread_are_their_record() -> None:
    sets = json.loads((RECORDS / "optim_speed_one_thread.json").read_text(encoding="utf-8"))["sets"]
    text = " ".join((DOCS / "optimizer-trials.md").read_text(encoding="utf-8").split())
    for name, words in (("transformer", "the transformer"), ("resnet18", "ResNet18"), ("squares", "the squares")):
        wall = sets[name]["ratios"]["wall"]
        ours = "Shampoo / Distributed Shampoo"
        soap = "SOAP, as published's view / published SOAP" if name == "resnet18" else "SOAP / published SOAP"
        first, second, third = (wall[key] for key in (ours, f"{ours}, unpacked", soap))
        assert f"{first:.2f}, {second:.2f} and {third:.2f} on {words}" in text


def test_the_table_of_learning_rates_is_its_record() -> None:
    text = (DOCS / "learning-rate.md").read_text(encoding="utf-8")
    record = json.loads((RECORDS / "optim_rates.json").read_text(encoding="utf-8"))
    assert record["after"] == [100, 200, 400]
    for rate, found in record["loss"].items():
        cells = [", ".join(f"{loss:.3f}" for loss in found[name]) for name in ("AdamW", "Shampoo", "KLShampoo", "SOAP")]
        assert f"| {rate} | {' | '.join(cells)} |" in text


def test_the_tables_of_what_is_cheaper_are_their_record() -> None:
    text = (DOCS / "cheaper.md").read_text(encoding="utf-8")
    record = json.loads((RECORDS / "optim_plans.json").read_text(encoding="utf-8"))
    for label, found in record["cheaper"]["Shampoo"].items():
        assert f"| {found['MiB']:.1f} | {found['ms']:.0f} |" in text, label
    adapters, experts = record["adapters"]["Shampoo"], record["experts"]["Shampoo"]
    for row in (
        adapters["one layer, ms"],
        experts["8 experts of 512 x 256, ms"],
        record["head"]["Shampoo"]["32000 x 512, ms"],
    ):
        planned, before = [*row.values()][:2]
        assert f"| {planned:.0f} | {before:.0f} | {row['AdamW']:.0f} |" in text
    for part in (adapters["1.1B"], experts["one layer of Mixtral"]):
        assert " | ".join(f"{found['MiB']:.0f}" for found in part.values()) in text
    for found in record["mixture"]["Shampoo"].values():
        assert f"{found['loss']:.3f}" in text


def test_the_table_of_what_watching_costs_is_its_record() -> None:
    record = json.loads((RECORDS / "watch_cost.json").read_text(encoding="utf-8"))
    text = (DOCS / "watching.md").read_text(encoding="utf-8")
    for kind, found in record["cost"].items():
        share = found["watching, per cent"]
        assert f"| {kind} | {share:.2f} |" in text
        assert share <= 1
        assert found["parameters equal to the bit"]
    for name, found in record["with data"].items():
        shares = [found[f"{what}, per cent"] for what in ("measuring", "most", "watching")]
        assert max(shares[:2]) <= 10
        cells = [f"{shares[0]:.1f}", f"{shares[1]:.1f}" if shares[1] else "-", f"{shares[2]:.1f}"]
        measured = f"{found['layers measured']} of {found['layers']}"
        assert f"| {name} | {' | '.join(cells)} | {found['first cosines at step']} | {measured} |" in text
        assert found["parameters equal to the bit"]


def test_the_table_of_training_by_advice_is_its_record() -> None:
    record = json.loads((RECORDS / "advice_training.json").read_text(encoding="utf-8"))
    text = (DOCS / "advice.md").read_text(encoding="utf-8")
    assert len(record["workloads"]) >= 3
    for found in record["workloads"].values():
        losses = [f"{found[kind]['mean of losses']:.3f}" for kind in ("defaults", "advised")]
        seconds = [f"{found[kind]['mean of seconds']:.0f}" for kind in ("defaults", "advised")]
        assert f"| {' | '.join([*losses, *seconds])} | {found['advice, seconds']:.0f} |" in text
