"""The live page in a real browser, while a run writes; and the server, which gives nothing else away."""

from __future__ import annotations

import http.client
import json
import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kronscope as ks
from kronscope.errors import RunError
from kronscope.watching.server import LiveServer, lines_from
from tests.report.chromium import Browser
from tests.watching.running import LOSS, OPTIMIZERS, network, points, train

EVIL = "<b>\"x\"&'</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(folder) as server:
        # looks as often whether it shall end, which is what shutting it down waits for
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


# The page asks for records once a second: a tenth of that shows the same, sooner.
_HURRY = """(() => {
  const later = window.setTimeout;
  window.longestWait = 0;
  window.setTimeout = (run, wait = 0, ...rest) => {
    window.longestWait = Math.max(window.longestWait, wait);
    return later(run, wait / 10, ...rest);
  };
})()"""


@pytest.fixture
def page(opened: Browser) -> Iterator[Browser]:
    hurry = opened.call("Page.addScriptToEvaluateOnNewDocument", source=_HURRY)["identifier"]
    opened.size(1200, 900)
    opened.scheme("light")
    yield opened
    # whatever the page asked for was on this machine
    assert all(address.startswith(("http://127.0.0.1:", "data:", "about:")) for address in opened.requests)
    assert 0 < opened.run("window.longestWait") <= 1000
    opened.call("Page.removeScriptToEvaluateOnNewDocument", identifier=hurry)
    opened.open("about:blank")


def wait(page: Browser, expression: str, seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not page.run(expression):
        assert time.monotonic() < limit, f"{expression} did not come true; the page says {page.text('body')[:2000]}"
        time.sleep(0.05)


def shows(text: str) -> str:
    return f"document.body.textContent.includes({json.dumps(text)})"


def fabricated(folder: Path, layers: int, records: int, name: Callable[[int], str] = "blocks.{}.weight".format) -> Path:
    """A run's folder with as many layers and records as a test wants."""
    names = [name(i) for i in range(layers)]
    folder.mkdir(parents=True)
    config = {"command": "watch", "optimizer": "SOAP", "layers": {name: [64, 32] for name in names}}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "watch.jsonl").open("w") as file:
        print(json.dumps({"event": "start", "step": 0, "every": 10}), file=file)
        for i in range(1, records + 1):
            print(json.dumps(record(10 * i, names)), file=file)
    return folder


def record(step: int, names: list[str], warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    numbers = ("gradient_norm", "weight_norm", "update_ratio", "condition", "effective_rank", "staleness", "residual")
    found = {number: [(1 + place) / (1 + step % 97) for place in range(len(names))] for number in numbers}
    run = {"skipped_steps": 0.0, "training_seconds": float(step), "watching_seconds": 0.01 * step}
    cosines = [
        {"layer": name, "approximation": kind, "cosine": 0.9 / (1 + place)}
        for place, name in enumerate(names)
        for kind in ("optimal", "shampoo2", "live")
    ]
    line = {"step": step, "time": time.time(), "layers": found, "run": run, "cosines": cosines}
    return {**line, "warnings": list(warnings)}


@pytest.mark.browser
def test_the_page_grows_while_a_run_goes_on(page: Browser, tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["shampoo"](model)
    folder = tmp_path / "my run"
    with (
        ks.watch(optimizer, model, 2, LOSS, [points()], path=folder, budget=math.inf) as watch,
        serving(folder) as server,
    ):
        page.open(server.url)
        wait(page, shows("waiting for the first record"))
        assert page.text("h1") == "my run"
        train(model, optimizer, 4)
        wait(page, shows("step 4 · 2 records"))
        assert page.text("#status") == "live"
        assert page.texts("#tabs button")[:2] == ["Cosine, live", "Update / weight"]
        assert sorted(page.texts(".map .names button")) == ["0.weight", "3.weight"]
        live = {row.layer: row.cosine for row in watch.results if (row.step, row.approximation) == (4, "live")}
        # worst first, in the map and in the table
        assert page.texts(".map .names button") == sorted(live, key=live.__getitem__)
        assert page.texts("#table tbody td:nth-child(3)") == [f"{value:.3g}" for value in sorted(live.values())]
        train(model, optimizer, 20, first=5)
        wait(page, shows("step 24 · 12 records"))
        assert page.run("document.querySelector('.map canvas').width") == 12
        assert page.texts("#warnings li") == (watch.warnings or ["Nothing to warn of at step 24."])
    wait_for = "finished after step 24"
    with serving(folder) as server:
        page.open(server.url)
        wait(page, shows(wait_for))
    wait(page, shows("the server has ended"))
    page.console.clear()  # the browser itself says that the server is gone


@pytest.mark.browser
def test_a_copied_folder_is_enough(page: Browser, tmp_path: Path) -> None:
    folder = fabricated(tmp_path / "there", 3, 5)
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(folder)
    with serving(Path(copy)) as server:
        page.open(server.url)
        wait(page, shows("step 50 · 5 records"))
        assert page.console == []


@pytest.mark.browser
def test_names_choose_layers_and_tabs_choose_numbers(page: Browser, tmp_path: Path) -> None:
    with serving(fabricated(tmp_path / "run", 8, 30)) as server:
        page.open(server.url)
        wait(page, shows("30 records"))
        series = "[...document.querySelectorAll('#view [data-series]')].map(one => one.dataset.series)"
        assert page.run(series) == [f"blocks.{i}.weight" for i in range(7, 1, -1)]
        page.click(".map .names button:nth-child(2)")
        assert page.run(series) == ["Cosine, optimal", "Cosine, Shampoo²", "Cosine, live"]
        page.click("#tab-update_ratio")
        assert page.run("document.activeElement.id") == "tab-update_ratio"
        assert page.run(series) == ["blocks.6.weight"]
        page.click("#legend button")
        assert len(page.run(series)) == 6
        page.hover(".map .cells", (0.99, 0.05))
        assert page.text(".cells .tip b") == "blocks.7.weight, step 300"
        page.press("ArrowRight")
        assert page.text("[aria-selected=true]") == "Update / weight"
        page.run("document.querySelector('.map .cells').focus()")
        page.press("ArrowLeft")
        assert "step" in page.text("#live")
        assert page.console == []


@pytest.mark.browser
def test_of_very_many_layers_the_worst_are_shown(page: Browser, tmp_path: Path) -> None:
    with serving(fabricated(tmp_path / "run", 300, 4)) as server:
        page.open(server.url)
        wait(page, shows("4 records"))
        assert len(page.texts(".map .names button")) == len(page.texts("#table tbody tr")) == 40
        assert page.texts(".map .names button")[0] == "blocks.299.weight"
        page.click("#more")
        assert len(page.texts(".map .names button")) == len(page.texts("#table tbody tr")) == 300
        assert page.console == []


@pytest.mark.browser
def test_the_page_says_when_the_next_cosines_are_due(page: Browser, tmp_path: Path) -> None:
    folder = fabricated(tmp_path / "run", 2, 0)
    names = ["blocks.0.weight", "blocks.1.weight"]
    with serving(folder) as server:
        page.open(server.url)
        with (folder / "watch.jsonl").open("a") as file:
            print(json.dumps({**record(10, names), "cosines": [], "measuring": "at about step 40 a trial"}), file=file)
        wait(page, shows("No cosines yet. Next: at about step 40 a trial."))
        with (folder / "watch.jsonl").open("a") as file:
            print(json.dumps({**record(20, names), "measuring": "at about step 60 cosines of b"}), file=file)
        wait(page, shows("Next cosines: at about step 60 cosines of b."))
        with (folder / "watch.jsonl").open("a") as file:
            print(json.dumps({"event": "end", "step": 20, "how": "finished"}), file=file)
        wait(page, shows("finished after step 20"))
        assert page.run("document.getElementById('due').hidden")
        assert page.console == []


@pytest.mark.browser
def test_warnings_and_odd_names_stay_text(page: Browser, tmp_path: Path) -> None:
    folder = fabricated(tmp_path / "run", 2, 1, name=lambda i: f"{EVIL}{i}")
    with serving(folder) as server:
        page.open(server.url)
        wait(page, shows("1 record"))
        with (folder / "watch.jsonl").open("a") as file:
            print(json.dumps(record(20, [f"{EVIL}{i}" for i in range(2)], (f"roots of {EVIL} are old",))), file=file)
        wait(page, shows("2 records"))
        assert page.texts("#warnings li") == [f"roots of {EVIL} are old"]
        assert page.run("window.evil") is None
        assert page.run("document.querySelectorAll('img').length") == 0
        assert page.console == []


@pytest.mark.browser
def test_a_run_that_went_back_shows_what_counts(page: Browser, tmp_path: Path) -> None:
    folder = fabricated(tmp_path / "run", 2, 5)
    with serving(folder) as server:
        page.open(server.url)
        wait(page, shows("step 50 · 5 records"))
        with (folder / "watch.jsonl").open("a") as file:
            print(json.dumps({"event": "start", "step": 20, "every": 10}), file=file)
            print(json.dumps(record(30, ["blocks.0.weight", "blocks.1.weight"])), file=file)
        wait(page, shows("step 30 · 3 records"))
        (folder / "watch.jsonl").write_text(json.dumps({"event": "start", "step": 0, "every": 10}) + "\n")
        wait(page, shows("waiting for the first record"))
        assert page.console == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 360])
def test_it_fits_every_window(page: Browser, tmp_path: Path, width: int) -> None:
    page.size(width, 740, phone=width < 500)
    with serving(fabricated(tmp_path / "run", 5, 20)) as server:
        page.open(server.url)
        wait(page, shows("20 records"))
        page.settle()
        assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_layers_that_differ_in_the_middle_of_their_names_have_different_labels(
    page: Browser, tmp_path: Path, width: int
) -> None:
    parts = ("self_attention_output_projection_dense", "intermediate_feed_forward_expansion")
    names = [f"encoder.transformer_layers.{i}.{part}.weight" for i in range(17) for part in parts]
    page.size(width, 900, phone=width < 500)
    with serving(fabricated(tmp_path / "run", 34, 4, name=names.__getitem__)) as server:
        page.open(server.url)
        wait(page, shows("4 records"))
        page.settle()
        labels = page.texts(".map .names button")
        assert len(set(labels)) == 34
        assert labels[0].startswith("…16.interm")
        buttons = "[...document.querySelectorAll('.map .names button')]"
        assert sorted(page.run(f"{buttons}.map((button) => button.title)")) == sorted(names)
        # whole, and the map has at least half of the width
        assert page.run(f"{buttons}.every((button) => button.scrollWidth <= button.clientWidth)")
        share = "document.querySelector('.map .cells').clientWidth / document.querySelector('.map').clientWidth"
        assert page.run(share) > 0.5


@pytest.mark.browser
def test_on_a_phone_numbers_stay_whole_and_what_is_counted_begins_at_zero(page: Browser, tmp_path: Path) -> None:
    page.size(400, 740, phone=True)
    names = [f"transformer_layers.{i}.intermediate_feed_forward_expansion.weight" for i in range(3)]
    with serving(fabricated(tmp_path / "run", 3, 20, name=names.__getitem__)) as server:
        page.open(server.url)
        wait(page, shows("20 records"))
        page.click("#tab-update_ratio")
        assert page.run("document.querySelector('.ramp-key').clientHeight") < 25
        assert page.run("document.documentElement.scrollWidth") <= 400
        panel = "[...document.querySelectorAll('#run .panel')].find(one => one.textContent.includes('Skipped steps'))"
        texts = page.run(f"[...{panel}.querySelectorAll('svg text')].map((node) => node.textContent)")
        assert "0" in texts
        assert not [text for text in texts if text.startswith(("-", "−"))]


@pytest.mark.browser
def test_twelve_layers_and_a_thousand_records_stay_responsive(page: Browser, tmp_path: Path) -> None:
    names = [f"blocks.{i}.weight" for i in range(12)]
    folder = fabricated(tmp_path / "run", 12, 1000)
    with serving(folder) as server:
        page.open(server.url)
        wait(page, shows("1,000 records"))
        # what a press costs, until the page is drawn anew
        pressing = "(() => { const began = performance.now(); document.getElementById('tab-%s').click(); %s })()"
        reading = "document.body.offsetHeight; return performance.now() - began;"
        took = [page.run(pressing % (number, reading)) for number in ("update_ratio", "condition", "cosine_live")]
        assert max(took) < 500, took
        with (folder / "watch.jsonl").open("a") as file:
            print(json.dumps(record(10010, names)), file=file)
        wait(page, shows("1,001 records"), seconds=4)
        assert page.console == []


# ---------------------------------------------------------------------- the server


def ask(server: LiveServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_the_server_gives_the_page_and_the_records_and_nothing_else(tmp_path: Path) -> None:
    folder = fabricated(tmp_path / "run", 2, 3)
    (tmp_path / "secret.txt").write_text("secret")
    with serving(folder) as server:
        assert server.url == f"http://127.0.0.1:{server.server_port}/"
        assert ask(server, "/")[0] == 200
        status, content = ask(server, "/records?from=0")
        assert status == 200
        assert len(json.loads(content)["lines"]) == 4
        assert json.loads(ask(server, "/records?from=x")[1])["offset"] > 0
        for path in ("/config.json", "/../secret.txt", "/records/../../secret.txt", "/watch.jsonl", "//etc/passwd"):
            assert ask(server, path)[0] == 404
        assert ask(server, "/", method="POST")[0] == 501
        # a name that somebody else's server gave to this address
        assert ask(server, "/records", host="evil.example")[0] == 403
        assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200


def test_odd_requests_are_answered_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fabricated(tmp_path / "run", 2, 3)
    (folder / "link").symlink_to("/etc/passwd")
    with serving(folder) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        for path in (
            "/%2e%2e/%2e%2e/etc/passwd",
            "/..%2f..%2fetc/passwd",
            "/link",
            "/records/",
            "/records%00",
            "/\\..\\x",
            "/" + "a" * 60_000,
        ):
            assert ask(server, path)[0] == 404
        # whose host is not this one
        assert ask(server, "http://evil.example/")[0] == 403
        assert ask(server, "//[")[0] in (400, 404)
        assert ask(server, "/records?from=" + "9" * 5000)[0] == 200
        for host in ("", "127.0.0.1", f"127.0.0.1:{server.server_port}.evil.example", f"[::1]:{server.server_port}"):
            assert ask(server, "/", host=host)[0] == 403
        for bytes_sent in (b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00", b"GET /records HTTP/1.1\r\nHost:"):
            with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
                connection.sendall(bytes_sent)
        assert ask(server, "/")[0] == 200
    assert capsys.readouterr().err == ""


def test_records_of_strangers_are_refused_or_left_out(tmp_path: Path) -> None:
    folder = fabricated(tmp_path / "run", 2, 3)
    path = folder / "watch.jsonl"
    whole = path.read_bytes()
    with serving(folder) as server:
        path.write_bytes(whole + b'{"st\xff\n[1]\n' + b"[" * 90_000 + b'\n{"event": "x", "y": NaN}\n')
        content = json.loads(ask(server, "/records?from=0")[1])
        assert len(content["lines"]) == 5
        assert content["lines"][4] == {"event": "x", "y": None}
        assert content["offset"] == path.stat().st_size
        path.unlink()
        (tmp_path / "secret.jsonl").write_bytes(whole)
        path.symlink_to(tmp_path / "secret.jsonl")
        assert json.loads(ask(server, "/records?from=0")[1])["lines"] == []
    with pytest.raises(RunError, match="symbolic link"):
        LiveServer(folder)
    for damaged in (b"3\n", b"{\n", b'{"step": 1}\n', b"\xff\n"):
        path.unlink()
        path.write_bytes(whole + damaged)
        with pytest.raises(RunError, match="damaged"):
            LiveServer(folder)
    path.write_bytes(whole)
    for config in ({"command": "watch"}, {"command": "watch", "layers": 3}, {"command": "watch", "layers": {"x": []}}):
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(RunError, match="damaged"):
            LiveServer(folder)


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "watch.jsonl"
    assert lines_from(path, 0)["lines"] == []
    path.write_text('{"step": 1}\n{"st')
    first = lines_from(path, 0)
    assert first["lines"] == [{"step": 1}]
    assert not lines_from(path, first["offset"])["lines"]
    path.write_text('{"step": 1}\n{"step": 2}\n')
    second = lines_from(path, first["offset"])
    assert (second["lines"], second["restarted"]) == ([{"step": 2}], False)
    path.write_text('{"step": 9}\n')
    again = lines_from(path, second["offset"])
    assert (again["lines"], again["restarted"]) == ([{"step": 9}], True)


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "watch.jsonl"
    path.write_bytes(b'{"step": 1}\ngarbage\n\xff\xfe\n[1]\n{"step": 2}\n')
    found = lines_from(path, 0)
    assert found["lines"] == [{"step": 1}, {"step": 2}]
    assert found["offset"] == path.stat().st_size


def test_long_files_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kronscope.watching.server._PIECE", 64)
    path = tmp_path / "watch.jsonl"
    lines = [{"step": i, "text": "x" * (200 if i == 3 else i)} for i in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found: list[dict[str, Any]] = []
    offset, more = 0, True
    while more:
        piece = lines_from(path, offset)
        found += piece["lines"]
        offset, more = piece["offset"], piece["more"]
    assert found == lines


def test_what_is_no_watched_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        LiveServer(tmp_path)
    (tmp_path / "config.json").write_text('{"command": "demo"}')
    with pytest.raises(RunError, match="was not watched"):
        LiveServer(tmp_path)
    folder = fabricated(tmp_path / "run", 1, 1)
    with serving(folder) as server, pytest.raises(RunError, match="cannot be used"):
        LiveServer(folder, server.server_port)
