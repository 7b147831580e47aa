"""A headless Chromium over its debugging pipe: enough to open a page, press, type, look and listen to the console."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    # what is drawn needs neither, and no page is gone back to: a fifth of the browser's time
    "--disable-software-rasterizer",
    "--disable-features=BackForwardCache,SpareRendererForSitePerProcess",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# The browser reads commands from descriptor 3 and answers on 4. Moving them there in a fresh interpreter keeps the
# tests' own process, with its threads, from forking Python code.
_LAUNCH = """
import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 20) for fd in sys.argv[1:3])
os.dup2(reading, 3), os.dup2(writing, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. ``console`` collects errors and warnings, ``requests`` every address the page asked for."""

    def __init__(self, profile: Path, executable: str) -> None:
        reading, self._out = os.pipe()
        self._in, writing = os.pipe()
        command = [sys.executable, "-c", _LAUNCH, str(reading), str(writing), executable]
        self._process = subprocess.Popen(
            [*command, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(reading, writing),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reading)
        os.close(writing)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(30)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser did not answer")
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.console.append(str([item.get("value", item.get("description")) for item in event["args"]]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.console.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path | str, timeout: float = 30) -> None:
        """Open a file, or an address."""
        self.console.clear()
        self.requests.clear()
        self._loaded = False
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while not self._loaded:
            self._receive(timeout)
        # a page that is told its width draws again in the next frame
        self.settle()
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for has been drawn."""
        # what is posted before a frame is drawn comes after it; a second frame would be a wait for the clock
        self.run(
            "new Promise(done => requestAnimationFrame(() => {"
            " const { port1, port2 } = new MessageChannel(); port1.onmessage = () => done(1); port2.postMessage(0); }))"
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def scheme(self, name: str) -> None:
        # pages are told in a later frame than the one in which the query already matches
        new = self.run(
            f"(() => {{ const asked = matchMedia('(prefers-color-scheme: {name})');"
            " window.told = new Promise(done => asked.addEventListener('change', done, { once: true }));"
            " return !asked.matches; })()"
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])
        if new:
            self.run("window.told.then(() => 1)")
        self.settle()

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent.trim())"
        )
        return found

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def _middle(self, selector: str, at: tuple[float, float] = (0.5, 0.5)) -> tuple[float, float]:
        box = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
            "return [box.x, box.y, box.width, box.height]; })()"
        )
        return box[0] + at[0] * box[2], box[1] + at[1] * box[3]

    def hover(self, selector: str, at: tuple[float, float] = (0.5, 0.5)) -> None:
        x, y = self._middle(selector, at)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, selector: str, *, shift: bool = False) -> None:
        x, y = self._middle(selector)
        common = {"x": x, "y": y, "button": "left", "clickCount": 1, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **common)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **common)
        self.settle()

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32}
        # Chromium presses a focused button only for a key that also brings text.
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common = {"key": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextlib.contextmanager
def browser(profile: Path, executable: str) -> Iterator[Browser]:
    page = Browser(profile, executable)
    try:
        yield page
    finally:
        page.close()
