"""The report is one whole HTML file: nothing outside it is needed, and no name can break out of its place."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kronscope.errors import OptionError, ResultsError
from kronscope.measures.results import Detail, Results
from kronscope.report import write_report
from kronscope.report.page import render
from tests.figures import synthetic

EVIL = '<b>"x"&\'</script><script>alert(1)</script>{{script}}\u2028'
VOID = {"meta", "link", "input", "br", "wbr", "img", "hr"}


class Page(HTMLParser):
    """Keeps the text of each element by its identifier or name, and fails on elements that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag not in VOID:
            self.stack.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.stack:
            tag, attributes = self.stack[-1]
            key = attributes.get("id") or tag
            self.texts[key] = self.texts.get(key, "") + data

    @property
    def data(self) -> Any:
        return json.loads(self.texts["data"])


REPORTS = {
    "run": synthetic.training_run(),
    "transformer": synthetic.transformer_run(),
    "model": synthetic.one_step(4, synthetic.ALL, error=0.01),
    "empty": Results([]),
}


@pytest.mark.parametrize("name", REPORTS)
def test_it_is_well_formed_and_whole(name: str) -> None:
    text = render(REPORTS[name])
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert {"chart-section", "table-section", "notes-section", "settings-section", "data"} <= set(page.ids)
    assert not re.search(r"\{\{\w+\}\}", text.replace(page.texts["data"], ""))


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_loaded_from_anywhere(name: str) -> None:
    text = render(REPORTS[name])
    # The only addresses are names of the SVG vocabulary, which nobody fetches.
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    for tag, attributes in Page(text).tags:
        assert "src" not in attributes, tag
        if "href" in attributes:
            assert str(attributes["href"]).startswith(("#", "data:")), tag


def test_the_policy_allows_this_script_and_style_and_nothing_else() -> None:
    page = Page(render(synthetic.one_step(2)))
    policy = next(
        str(attributes["content"])
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ")
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not [attributes for _, attributes in page.tags if "style" in attributes]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_odd_names_stay_text() -> None:
    results = Results(
        synthetic.make_rows(EVIL, names=(EVIL, "optimal")),
        [Detail(EVIL, 0, "gauss_newton", "exact", 1, "batch_sizes", {"batch_size": [1.0], EVIL: [0.5]})],
        {EVIL: EVIL, "cut": EVIL, "notes": [EVIL]},
    )
    text = render({EVIL: results}, title=EVIL)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "alert(1)</script>" not in text
    assert page.texts["title"] == page.texts["h1"] == EVIL
    (run,) = page.data["runs"]
    assert (
        run["name"]
        == run["columns"]["layer"]["value"]
        == run["settings"][EVIL]
        == run["cut"][0]
        == run["notes"][0]
        == EVIL
    )
    assert EVIL in page.data["styles"]
    assert EVIL in page.texts["pre"]


@settings(max_examples=20)
@given(st.text(max_size=30))
def test_any_name_survives(name: str) -> None:
    results = Results(synthetic.make_rows(name), settings={"title": name})
    text = render(results, title=name or None)
    page = Page(text.encode("utf-8", "replace").decode())
    assert page.data["runs"][0]["columns"]["layer"]["value"] == name


def _values(column: Any, count: int) -> list[Any]:
    if isinstance(column, list):
        return column
    return [column["values"][at] for at in column["at"]] if "at" in column else [column["value"]] * count


def test_the_numbers_are_the_results() -> None:
    results = synthetic.transformer_run()
    data = Page(render(results)).data
    (run,) = data["runs"]
    assert run["count"] == len(results)
    for field in data["fields"]:
        expected = [row.variant if field == "approximation" else getattr(row, field) for row in results]
        expected = [None if isinstance(value, float) and math.isnan(value) else value for value in expected]
        assert json.dumps(_values(run["columns"][field], run["count"])) == json.dumps(expected)
    assert len(run["details"]) == len(results.details)
    assert run["partial"] is True
    assert run["question"] == results.question
    assert run["cut"] == ["width: 128 instead of 512"]
    assert run["settings"] == {"workload": "cifar-vit"}
    assert data["conditions"] == {
        "gauss_newton|exact|1": "Gauss–Newton · exact labels",
        "adagrad|real|1": "Adagrad",
    }


def test_colours_come_from_the_figures_table() -> None:
    page = Page(render(synthetic.one_step(1)))
    look = page.data["styles"]["shampoo2"]
    assert look["name"] == "Shampoo²"
    variable = re.fullmatch(r"var\((--[\w-]+)\)", look["color"])
    assert variable
    assert re.findall(rf"{variable[1]}:(#\w+)", page.texts["style"]) == ["#0072b2", "#4aa8e0"]


def test_titles_come_from_the_caller_or_the_settings() -> None:
    named = Results([], settings={"title": "My run"})
    assert Page(render(named)).texts["h1"] == "My run"
    assert Page(render(named, "Other")).texts["h1"] == "Other"
    assert Page(render(synthetic.training_run())).texts["h1"] == "Kronecker approximations: cifar-resnet18"
    assert Page(render(Results([]))).texts["h1"] == "Kronecker approximations"


def test_without_scripts_the_table_is_there() -> None:
    results = synthetic.one_step(2)
    assert Page(render(results)).texts["pre"].strip() == str(results)


def test_several_results_by_name() -> None:
    data = Page(render({"linear": synthetic.one_step(1), "ViT": synthetic.transformer_run()})).data
    assert [run["name"] for run in data["runs"]] == ["linear", "ViT"]
    with pytest.raises(OptionError, match="empty dictionary"):
        render({})


def test_it_is_written_whole_and_alike_each_time(tmp_path: Path) -> None:
    results = synthetic.training_run()
    path = results.report(tmp_path / "new" / "report.html", title="A run")
    first = path.read_bytes()
    assert write_report(results, path, "A run").read_bytes() == first
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(ResultsError, match="is a folder"):
        results.report(tmp_path)
