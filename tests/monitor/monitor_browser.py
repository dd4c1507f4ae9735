"""A headless browser, driven through the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")


def require_browser() -> str:
    """Return a browser's path; without one, skip the test, or fail it in CI, where tests/cluster/install.sh ran."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = "no chromium on the path; tests/cluster/install.sh installs it on Debian"
        required = os.environ.get("CI") == "true" and "browser" not in os.environ.get("MPITRAIN_CANNOT", "").split()
        (pytest.fail if required else pytest.skip)(reason)
    return str(path)


class Browser:
    """One page of a browser. complaints: its console messages, errors, and failed or foreign loads."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            self._handle_event(message)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])

    def _handle_event(self, message: dict[str, Any]) -> None:
        method, event = message.get("method"), message.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Log.entryAdded", "Runtime.exceptionThrown", "Network.loadingFailed"):
            self.complaints.append(
                " ".join([str(a.get("value")) for a in event["args"]] if "args" in event else [json.dumps(event)])[:400]
            )
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"][:200])

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < until, f"{expression} did not become true; {self.complaints}"
            time.sleep(0.05)

    def open(self, path: Path, scheme: str = "light") -> None:
        """Open a file, and wait until its charts are drawn."""
        self.set_colour_scheme(scheme)
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_until_drawn()

    def set_colour_scheme(self, scheme: str) -> None:
        """Emulate the preference for light or dark pages."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def wait_until_drawn(self) -> None:
        """Wait until all charts are drawn."""
        self.wait_for("document.body && document.body.dataset.drawn === 'yes'")

    def picture(self, path: Path) -> None:
        """Write a screenshot of the whole page as PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(program: str, folder: Path, width: int = 1280) -> Iterator[Browser]:
    """Start a browser with an empty page, and end it with the context."""
    import websocket

    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}",
        f"--window-size={width},1000",
        "about:blank",
    ]  # fmt: skip
    with open(folder.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port, until = folder / "DevToolsActivePort", time.monotonic() + 40 * PATIENCE
        while not (port.exists() and port.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < until, "the browser did not start"
            time.sleep(0.05)
        number = port.read_text().split()[0]
        socket = websocket.create_connection(_page_address(number), timeout=40, suppress_origin=True)
        try:
            yield Browser(socket)
        finally:
            socket.close()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _page_address(port: str) -> str:
    """Return the WebSocket address of the browser's first page."""
    from urllib.request import ProxyHandler, build_opener

    with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/json/list", timeout=20) as response:
        pages = [page for page in json.load(response) if page["type"] == "page"]
    return str(pages[0]["webSocketDebuggerUrl"])


def count_marks(page: Browser) -> dict[str, int]:
    """Return the number of visible shapes in each chart of an open page."""
    return dict(
        page.value(
            "Object.fromEntries([...document.querySelectorAll('.chart')].map(c => [c.id, [...c.querySelectorAll("
            "'svg .mark-rect path, svg .mark-line path, svg .mark-area path, svg .mark-symbol path')].filter("
            "m => { const b = m.getBBox(); return b.width + b.height > 1; }).length]))"
        )
    )
