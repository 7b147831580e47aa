"""The report in a real browser: it renders, its controls work, its console is clean, and it loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kronscope.measures.results import Detail, Results
from kronscope.report import write_report
from tests.figures import synthetic
from tests.report.chromium import Browser

pytestmark = pytest.mark.browser

EVIL = "<b>\"x\"&'</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports")
    write_report(synthetic.training_run(), path / "run.html")
    write_report(synthetic.transformer_run(), path / "transformer.html")
    write_report(synthetic.one_step(6, synthetic.ALL, error=0.01), path / "model.html")
    write_report(synthetic.one_step(120), path / "large.html")
    write_report(Results([]), path / "empty.html")
    runs = {"linear": synthetic.training_run((0, 5, 10)), "ViT": synthetic.transformer_run()}
    write_report(runs, path / "several.html", title="Several")
    sweep = Detail(EVIL, 1, "gauss_newton", "exact", 1, "batch_sizes", {"batch_size": [1, 2], EVIL: [0.5, 0.4]})
    rows = [row for name in (EVIL, "plain") for row in synthetic.make_rows(name, steps=(0, 1), names=("optimal", EVIL))]
    odd = Results(rows, [sweep], {EVIL: {EVIL: [EVIL]}, "cut": EVIL, "notes": EVIL})
    write_report({EVIL: odd, "other": odd}, path / "odd.html", title=EVIL)
    return path


@pytest.fixture
def page(opened: Browser) -> Iterator[Browser]:
    """The browser, and after each test: a clean console and not one request for another address."""
    found = opened
    found.size(1200, 900)
    found.scheme("light")
    yield found
    found.settle()
    assert found.console == []
    assert [address for address in found.requests if not address.startswith(("file:", "data:", "blob:"))] == []


def series(page: Browser) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('#view [data-series]')].map(g => g.dataset.series)")
    return found


def columns(page: Browser, title: str) -> list[str]:
    heads = page.texts("#table th")
    return page.texts(f"#table td:nth-child({heads.index(title) + 1})")


def test_it_opens_on_an_overview_of_all_panels(page: Browser, folder: Path) -> None:
    page.open(folder / "transformer.html")
    assert page.text("h1") == "Kronecker approximations: cifar-vit"
    assert page.text("#facts") == "3 layers · 5 steps · 4 approximations · 1,024 samples"
    assert page.text("#question").startswith("Exact for these 1,024 samples")
    assert page.text("#partial").startswith("Partial: the run was interrupted")
    assert page.texts("#tabs button") == [
        "Overview",
        "Over training",
        "Across layers",
        "Exponents",
        "Batch sizes",
        "Spectrum",
    ]
    assert len(page.texts("#view svg[role=img]")) == 6
    assert page.texts("#view .group") == ["Gauss–Newton · exact labels", "Adagrad"]
    assert page.texts("#legend button") == ["Optimal Kronecker", "Shampoo²", "Shampoo", "K-FAC (reduce)"]
    assert page.texts("#notes li") == [
        "width: 128 instead of 512",
        "K-FAC needs inputs and output gradients, but only whole gradients were recorded (K-FAC (reduce); 15 rows)",
    ]
    assert page.text("#settings").startswith("workload")


def test_a_panels_title_opens_it(page: Browser, folder: Path) -> None:
    page.open(folder / "transformer.html")
    page.click(".panel:nth-child(2) h3 button")
    assert page.text("[aria-selected=true]") == "Over training"
    assert page.run("document.activeElement.id") == "tab-training"
    assert page.run("document.getElementById('choose-layer').selectedOptions[0].text") == "blocks.3.mlp.fc2.weight"


def test_hovering_shows_the_values_and_their_errors(page: Browser, folder: Path) -> None:
    page.open(folder / "run.html")
    page.click("#tab-training")
    assert not page.run("[...document.querySelectorAll('.tip')].some(tip => !tip.hidden)")
    page.hover("#view .chart", (0.5, 0.4))
    rows = [row for row in synthetic.training_run() if row.condition == synthetic.GAUSS_NEWTON and row.step == 500]
    assert page.text(".tip b") == "Step 500"
    shown = page.texts(".tip div span")
    assert shown == [
        f"{row.cosine:.4f} ± {row.stderr:.4f}" for row in sorted(rows, key=lambda row: row.cosine, reverse=True)
    ]
    assert page.run("document.querySelectorAll('#view .error-bar').length") == 44
    page.hover("h1")
    assert page.run("document.querySelector('.tip').hidden")


def test_arrow_keys_read_the_chart_aloud(page: Browser, folder: Path) -> None:
    page.open(folder / "run.html")
    page.click("#tab-training")
    page.run("document.querySelector('#view .chart').focus()")
    page.press("ArrowRight")
    assert page.text(".tip b") == "Step 0"
    page.press("ArrowRight")
    assert page.text(".tip b") == "Step 100"
    assert page.text("#live").startswith("Step 100: Optimal Kronecker 0.")
    page.press("End")
    assert page.text(".tip b") == "Step 1,000"
    page.press("Escape")
    assert page.run("document.querySelector('.tip').hidden")


def test_the_legend_shows_and_hides(page: Browser, folder: Path) -> None:
    page.open(folder / "run.html")
    page.click("#tab-training")
    assert series(page) == ["Optimal Kronecker", "Shampoo²", "Shampoo", "K-FAC (reduce)"]
    page.click('#legend [data-name="shampoo"]')
    assert series(page) == ["Optimal Kronecker", "Shampoo²", "K-FAC (reduce)"]
    assert page.run("document.querySelector('[data-name=shampoo]').ariaPressed") == "false"
    page.press("Enter")
    assert "Shampoo" in series(page)
    page.click('#legend [data-name="kfac-reduce"]', shift=True)
    assert series(page) == ["K-FAC (reduce)"]
    page.click('#legend [data-name="kfac-reduce"]')
    assert page.text("#view").startswith("Nothing to show")
    page.click("#show-all")
    assert len(series(page)) == 4


def test_the_row_and_the_layer_can_be_chosen(page: Browser, folder: Path) -> None:
    page.open(folder / "transformer.html")
    page.click("#tab-training")
    assert page.texts("#choose-layer option") == list(synthetic.transformer_run().layers)
    page.run("document.getElementById('choose-layer').focus()")
    page.press("ArrowDown")
    page.run("document.getElementById('choose-condition').focus()")
    page.press("ArrowDown")
    assert page.run("document.activeElement.id") == "choose-condition"
    assert "Adagrad · blocks.3.mlp.fc2.weight (512\u00a0×\u00a0512)" in page.text("#caption")
    # K-FAC has no cosine here: it is not in the legend, but the tip says why.
    assert page.texts("#legend button") == ["Optimal Kronecker", "Shampoo²", "Shampoo"]
    page.hover("#view .chart", (0.5, 0.4))
    assert page.text(".tip em").startswith("K-FAC needs inputs")


def test_the_slider_moves_through_the_steps(page: Browser, folder: Path) -> None:
    page.open(folder / "transformer.html")
    page.click("#tab-layers")
    assert page.text("#step-value") == "400"
    page.run("document.getElementById('choose-step').focus()")
    page.press("ArrowLeft")
    assert page.text("#step-value") == "200"
    assert page.run("document.activeElement.id") == "choose-step"
    page.press("Home")
    assert "at step 0" in page.text("#caption")
    page.hover("#view .chart", (0.6, 0.1))
    first = next(row for row in synthetic.transformer_run() if row.step == 0)
    assert page.texts(".tip div span")[0] == f"{first.cosine:.4f}"


def test_zooming_changes_the_axis(page: Browser, folder: Path) -> None:
    page.open(folder / "run.html")
    page.click("#tab-training")
    assert "0.0" in page.texts("#view svg text")
    page.click("#fit")
    assert "0.0" not in page.texts("#view svg text")
    assert page.run("document.getElementById('fit').checked")


def test_tabs_are_moved_with_arrow_keys(page: Browser, folder: Path) -> None:
    page.open(folder / "run.html")
    page.run("document.getElementById('tab-overview').focus()")
    for expected in ("training", "layers", "exponents", "batch_sizes", "spectrum", "overview"):
        page.press("ArrowRight")
        assert page.run("document.activeElement.id") == f"tab-{expected}"
        assert page.run("document.querySelectorAll('#tabs [tabindex=\"0\"]').length") == 1
        assert page.run("document.querySelectorAll('#view svg[role=img]').length") >= 1


def test_sweeps_and_spectra_have_views_of_their_own(page: Browser, folder: Path) -> None:
    page.open(folder / "run.html")
    page.click("#tab-exponents")
    assert sum(name.startswith("step ") for name in series(page)) == 11
    assert sum(name.startswith("best at step") for name in series(page)) == 11
    assert series(page)[-1] == "best exponent"
    page.click("#tab-batch_sizes")
    assert series(page) == ["Optimal Kronecker", "Shampoo²", "Shampoo"]
    page.hover("#view .chart", (0.99, 0.5))
    assert page.text(".tip b") == "B = 1,024"
    page.click("#tab-spectrum")
    assert page.texts("#view h3")[1] == "Leading σᵢ and |αᵢ| at step 1,000, divided by the first"
    detail = [item for item in synthetic.training_run().details if item.kind == "spectrum"][10]
    assert f"σ₁/‖σ‖ = {detail.number('ratio'):.4f}" in page.text("#caption")
    page.hover(".pair > :nth-child(2) .chart", (0.13, 0.5))
    assert page.texts(".pair > :nth-child(2) .tip div span") == ["1.0000"] * 3


def test_the_table_sorts_by_its_heads(page: Browser, folder: Path) -> None:
    page.open(folder / "transformer.html")
    assert "samples" not in page.texts("#table th")
    assert "samples 1,024" in page.text("#constant")
    page.click('#table [data-key="cosine"]')
    cosines = [value.split("(")[0] for value in columns(page, "cosine")]
    numbers = [float(value) for value in cosines if value != "–"]
    assert numbers == sorted(numbers, reverse=True)
    assert cosines[-15:] == ["–"] * 15
    assert page.run("document.querySelector('#table th[aria-sort]').ariaSort") == "descending"
    page.press("Enter")
    cosines = [value.split("(")[0] for value in columns(page, "cosine")]
    assert [float(value) for value in cosines[:-15]] == numbers[::-1]
    assert cosines[-15:] == ["–"] * 15
    page.click('#table [data-key="layer"]')
    assert columns(page, "layer") == sorted(columns(page, "layer"))


def test_the_table_is_filtered_by_words_and_by_the_chart(page: Browser, folder: Path) -> None:
    page.open(folder / "transformer.html")
    page.click("#filter")
    page.write("ADAGRAD k-fac fc1")
    assert page.text("#count") == "5 of 120 rows"
    assert set(columns(page, "approximation")) == {"K-FAC (reduce)"}
    page.run("document.getElementById('filter').select()")
    page.write("nothing like that")
    assert page.text("#count") == "0 of 120 rows"
    page.run("document.getElementById('filter').select()")
    page.write(" ")
    page.click("#tab-layers")
    page.click('#legend [data-name="optimal"]')
    page.click("#only-chart")
    assert page.text("#count") == "9 of 120 rows"
    page.click('#legend [data-name="optimal"]')
    assert page.text("#count") == "12 of 120 rows"


def test_a_long_table_is_shown_in_two_parts(page: Browser, folder: Path) -> None:
    page.open(folder / "large.html")
    assert len(columns(page, "layer")) == 200
    page.click("#more")
    assert len(columns(page, "layer")) == 480
    assert page.run("document.getElementById('more').hidden")


def test_several_runs_are_chosen_by_name(page: Browser, folder: Path) -> None:
    page.open(folder / "several.html")
    assert page.text("#facts").startswith("2 runs · 4 layers")
    assert page.text("#partial").startswith("Partial: ViT was interrupted")
    page.click("#tab-training")
    assert page.texts("#choose-run option") == ["linear", "ViT"]
    page.run("document.getElementById('choose-run').focus()")
    page.press("ArrowDown")
    assert "ViT · Gauss–Newton" in page.text("#caption")
    assert page.texts("#table th")[0].startswith("run")
    assert page.texts("#settings summary") == ["linear", "ViT"]


def test_odd_names_run_no_code(page: Browser, folder: Path) -> None:
    page.open(folder / "odd.html")
    assert page.text("h1") == EVIL
    for tab in page.run("[...document.querySelectorAll('#tabs button')].map(tab => tab.id)"):
        page.click(f"#{tab}")
        page.hover("#view .chart", (0.5, 0.5))
    assert page.run("window.evil") is None
    assert page.run("document.querySelectorAll('img, b > script').length") == 0
    assert EVIL in page.texts("#legend button")
    assert EVIL in columns(page, "layer")
    assert page.texts("#notes li")[:2] == [EVIL, EVIL]


@pytest.mark.parametrize(
    "names",
    [
        (
            "</script><script>window.evil = 1</script>",
            '"><img src=x onerror=window.evil=1>',
            "' onmouseover='window.evil = 1",
        ),
        ("javascript:window.evil=1", "{{script}}", "${window.evil = 1}"),
        ("\u202egnp.exe\u2066", "مرحبا.weight", "two\nlines\r\tand\x0bmore"),
        ("__proto__", "constructor", "toString"),
        ("a" * 10_000,),
        ("layer." * 1_700,),
        ("\x00",),
    ],
    ids=["markup", "code", "writing", "objects", "long", "long-parts", "zero"],
)
def test_hostile_names(page: Browser, tmp_path: Path, names: tuple[str, ...]) -> None:
    layers, kinds, title = (*names, "x"), ("optimal", *names), " ".join(names)
    rows = [row for layer in layers for row in synthetic.make_rows(layer, steps=(0, 1), names=kinds)]
    curves = {name: [0.5, 0.4] for name in names}
    sweeps = [
        Detail(name, 1, "gauss_newton", "exact", 1, "batch_sizes", {"batch_size": [1, 2], **curves}) for name in names
    ]
    results = Results(rows, sweeps, {**{name: {name: [name]} for name in names}, "cut": title, "notes": title})
    write_report({**dict.fromkeys(names, results), "other": results}, tmp_path / "odd.html", title=title)
    page.open(tmp_path / "odd.html")
    for tab in page.run("[...document.querySelectorAll('#tabs button')].map(tab => tab.id)"):
        page.click(f"#{tab}")
        page.hover("#view .chart", (0.5, 0.5))
        assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.run("window.evil") is None
    assert page.run("document.querySelectorAll('img, iframe, object, embed, link[href^=http]').length") == 0
    assert page.run("document.scripts.length") == 2
    assert page.run("[...document.body.innerText].some(sign => '\u202e\u2066'.includes(sign))") is False
    # runs, layers, approximations and steps
    assert len(columns(page, "layer")) == 2 * (1 + len(names)) ** 3
    assert page.run("document.documentElement.scrollHeight") < 30_000


def test_settings_are_in_words_and_names_of_layers_as_they_are(page: Browser, tmp_path: Path) -> None:
    settings = {"max_columns": 4, "capture": {"feed_forward.up_1.weight": "factored"}}
    write_report(Results(synthetic.make_rows("feed_forward.up_1.weight"), settings=settings), tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert page.texts("#settings dt") == ["max columns", "capture", "feed_forward.up_1.weight"]


@pytest.mark.parametrize("width", [1200, 400])
def test_layers_that_differ_in_the_middle_of_their_names_have_different_labels(
    page: Browser, tmp_path: Path, width: int
) -> None:
    parts = ("self_attention_output_projection_dense", "intermediate_feed_forward_expansion")
    names = [f"encoder.transformer_layers.{i}.{part}.weight" for i in range(17) for part in parts]
    rows = [row for name in [*names, "classifier.weight"] for row in synthetic.make_rows(name)]
    write_report(Results(rows), tmp_path / "long.html")
    page.size(width, 900, phone=width < 500)
    page.open(tmp_path / "long.html")
    labels = "[...document.querySelectorAll('#view svg text')].filter((node) => node.querySelector('title'))"
    shown = page.run(f"{labels}.map((node) => node.firstChild.data)")
    assert page.run(f"{labels}.map((node) => node.querySelector('title').textContent)") == [*names, "classifier.weight"]
    assert len(set(shown)) == 35
    # none begins outside of the picture
    assert page.run(f"{labels}.every((node) => node.getBBox().x >= 0)")


@pytest.mark.parametrize(("layers", "steps"), [(100, 50), (5000, 1)])
def test_fifty_thousand_rows_open_in_three_seconds(page: Browser, tmp_path: Path, layers: int, steps: int) -> None:
    """Of the page's own time, since the machine may have other work."""
    row = synthetic.make_rows("x", names=("optimal",))[0]
    rows = [
        replace(row, layer=f"block.{layer}.weight", step=step, approximation=name, cosine=(layer + place) % 97 / 97)
        for step in range(steps)
        for layer in range(layers)
        for place, name in enumerate(synthetic.ALL[:10])
    ]
    assert len(rows) == 50_000
    path = write_report(Results(rows), tmp_path / "large.html")
    assert path.stat().st_size < 5e6
    page.call("Performance.enable", timeDomain="threadTicks")
    page.open(path, timeout=120)
    seconds = {item["name"]: item["value"] for item in page.call("Performance.getMetrics")["metrics"]}["ThreadTime"]
    assert seconds < 3
    assert page.text("#count") == "50,000 rows"
    assert len(columns(page, "layer")) == 200
    assert page.text("#more") == "Show 2,000 more of 49,800 rows"
    page.click("#tab-layers") if page.run("document.getElementById('tab-layers') !== null") else None
    if layers > 60:
        assert page.texts("#choose-part option")[1] == f"61 to {min(layers, 120)} of {layers:,}"
    assert page.run("document.querySelectorAll('*').length") < 20_000
    page.run("document.getElementById('filter').focus()")
    page.write("block.7.weight")
    assert page.text("#count") == f"{10 * steps:,} of 50,000 rows"


def test_nothing_measured_is_a_page_without_a_chart(page: Browser, folder: Path) -> None:
    page.open(folder / "empty.html")
    assert page.text("#question") == "Nothing was measured."
    assert page.run(
        "document.getElementById('chart-section').hidden && document.getElementById('table-section').hidden"
    )


def test_it_follows_the_systems_scheme_and_the_button(page: Browser, folder: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('[data-series=\"Shampoo²\"] path')).stroke"
    page.open(folder / "run.html")
    light = page.run(ground), page.run(line)
    page.scheme("dark")
    dark = page.run(ground), page.run(line)
    assert light[0] != dark[0]
    assert light[1] == "rgb(0, 114, 178)"
    assert dark[1] == "rgb(74, 168, 224)"
    page.click("#theme")
    assert (page.run(ground), page.run(line)) == light
    assert page.text("#theme") == "Dark"


def test_paper_is_white(page: Browser, folder: Path) -> None:
    page.scheme("dark")
    page.open(folder / "run.html")
    page.run(
        "window.seen = []; addEventListener('beforeprint', () => seen.push(document.documentElement.dataset.theme))"
    )
    page.call("Page.printToPDF")
    assert page.run("seen") == ["light"]
    assert page.run("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("name", ["run", "transformer", "model", "several", "odd", "empty"])
def test_a_phone_shows_all_without_scrolling_sideways(page: Browser, folder: Path, name: str) -> None:
    page.size(360, 740, phone=True)
    page.open(folder / f"{name}.html")
    for tab in page.run("[...document.querySelectorAll('#tabs button')].map(tab => tab.id)"):
        page.run(f"document.getElementById('{tab}').click()")
        page.settle()
        assert page.run("document.documentElement.scrollWidth") <= 360


def test_charts_follow_the_windows_width(page: Browser, folder: Path) -> None:
    page.open(folder / "run.html")
    page.click("#tab-training")
    wide = page.run("document.querySelector('#view svg').viewBox.baseVal.width")
    page.size(700, 900)
    for _ in range(4):
        page.settle()
    narrow = page.run("document.querySelector('#view svg').viewBox.baseVal.width")
    assert narrow < 700 < wide


def test_every_control_has_a_name(page: Browser, folder: Path) -> None:
    page.open(folder / "several.html")
    for tab in ("overview", "training", "layers", "spectrum"):
        page.click(f"#tab-{tab}")
        tree = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "combobox", "slider", "checkbox", "searchbox", "tab", "image", "region"}
        nameless = [
            node["role"]["value"]
            for node in tree
            if not node.get("ignored")
            and node.get("role", {}).get("value") in roles
            and not node.get("name", {}).get("value")
        ]
        assert nameless == []
        assert page.run("[...document.querySelectorAll('.chart')].every(chart => chart.ariaLabel.length > 40)")


def test_downloads_hold_the_numbers_and_a_picture_that_stands_alone(page: Browser, folder: Path) -> None:
    page.open(folder / "run.html")
    page.run(
        "window.kept = []; const make = URL.createObjectURL; URL.createObjectURL = blob => {"
        " kept.push(blob.text()); return make.call(URL, blob); };"
        "document.addEventListener('click', event => { if (event.target.download) event.preventDefault(); }, true);"
    )
    page.click("#save-csv")
    page.click("#save-svg")
    table, picture = page.run("Promise.all(kept)")
    lines = table.splitlines()
    results = synthetic.training_run()
    assert lines[0].startswith("layer,rows,cols,step,truth,labels,batch_size,approximation,cosine,stderr")
    assert len(lines) == len(results) + 1
    assert math.isclose(float(lines[1].split(",")[8]), results.rows[0].cosine)
    assert "var(" not in picture
    parsed = page.run(
        f"new DOMParser().parseFromString({json.dumps(picture)}, 'image/svg+xml').documentElement.tagName"
    )
    assert parsed == "svg"
    assert picture.count("<svg") == 5
