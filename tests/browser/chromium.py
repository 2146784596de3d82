"""A small driver for headless Chromium: the DevTools protocol over a pipe, standard library only.

test -(JSON, NUL-terminated, fd 3)-> chromium -(JSON, NUL-terminated, fd 4)-> reader thread -> test
"""

import base64
import itertools
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ANSWER_S = 120.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class BrowserError(Exception):
    """The browser refused a command or did not answer in time."""


class Chromium:
    """One browser with one tab; collects console errors, exceptions and requests."""

    def __init__(self, binary: str, profile: Path) -> None:
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{down_read} 4>&{up_write}',
                "bash",
                binary,
                *FLAGS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(down_read, up_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down_read)
        os.close(up_write)
        self._down = os.fdopen(down_write, "wb", buffering=0)
        self._up = os.fdopen(up_read, "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._session = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        tab = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(timeout=30)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._down.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        answer: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers[number] = answer
        self._down.write(json.dumps(message).encode() + b"\0")
        try:
            found = answer.get(timeout=ANSWER_S)
        except queue.Empty:
            raise BrowserError(f"{method}: no answer in {ANSWER_S} s") from None
        if "error" in found:
            raise BrowserError(f"{method}: {found['error']['message']}")
        return dict(found["result"])

    def cookie(self, url: str, name: str, value: str) -> None:
        """Set a cookie for a site."""
        self.call("Network.setCookie", url=url, name=name, value=value)

    def size(self, width: int, height: int = 900) -> None:
        """Set the size of the window, CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, url: str) -> None:
        """Go to an address and wait until the page has loaded."""
        self._loaded.clear()
        self.call("Page.navigate", url=url)
        if not self._loaded.wait(ANSWER_S):
            raise BrowserError(f"{url}: not loaded in {ANSWER_S} s")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise BrowserError(f"{script}: {result['exceptionDetails']['text']}")
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse on an element; needs no script in the page."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        if not node:
            raise BrowserError(f"no element {selector}")
        self.call("DOM.scrollIntoViewIfNeeded", nodeId=node)
        quad = self.call("DOM.getBoxModel", nodeId=node)["model"]["content"]
        x, y = (quad[0] + quad[4]) / 2, (quad[1] + quad[5]) / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def html(self) -> str:
        """Return the markup of the page as it is now."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        return str(self.call("DOM.getOuterHTML", nodeId=root)["outerHTML"])

    def wait_for(self, what: Callable[[], bool], seconds: float = ANSWER_S) -> None:
        """Wait until `what` is true."""
        end = time.monotonic() + seconds
        while not self._holds(what):
            if time.monotonic() > end:
                raise BrowserError(f"not true within {seconds} s")
            time.sleep(0.05)

    def screenshot(self, path: Path) -> bytes:
        """Store the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(size["height"], 6000),
            "scale": 1,
        }
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        data = base64.b64decode(shot["data"])
        path.write_bytes(data)
        return data

    def unnamed(self) -> list[str]:
        """Return the roles of controls that have no accessible name."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        wanted = {
            "button",
            "link",
            "textbox",
            "searchbox",
            "combobox",
            "checkbox",
            "progressbar",
            "image",
        }
        return [
            node["role"]["value"]
            for node in nodes
            if not node.get("ignored")
            and node.get("role", {}).get("value") in wanted
            and not node.get("name", {}).get("value", "").strip()
        ]

    @staticmethod
    def _holds(what: Callable[[], bool]) -> bool:
        try:
            return what()
        except BrowserError:  # between two pages there is none to ask
            return False

    def _read(self) -> None:
        buffer = b""
        while chunk := self._up.read(1 << 16):
            *messages, buffer = (buffer + chunk).split(b"\0")
            for message in messages:
                self._take(json.loads(message))
        self._up.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.pop(message["id"]).put(message)
            return
        parameters = message.get("params", {})
        match message["method"]:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(
                    f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}"
                )
