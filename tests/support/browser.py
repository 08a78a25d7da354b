"""A headless browser that a test drives: by Chrome's DevTools protocol, over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def browser_path() -> str:
    """The program of a browser; skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH")
    return found


class Tab:
    """A page in a browser.

    Attributes:
        errors: what scripts raised, and what the browser refused to load or run.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> Any:
        """Call a method of the protocol; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": given}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _next(self) -> Any:
        while b"\0" not in self._left:
            part = os.read(self._back, 1 << 20)
            assert part, "the browser has ended"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        found = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")

    def show(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Make the page so wide and high, in pixels, and light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> Any:
        """Wait until an expression in the page is true; returns its value."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"not within {seconds} s: {script}"
            time.sleep(0.05)
        return found

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """A tab of a new browser, whose profile is in a folder of its own."""
    back_read, back_write = os.pipe()
    to_read, to_write = os.pipe()
    # The browser reads descriptor 3 and writes descriptor 4.
    wired = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    process = subprocess.Popen(
        [
            "bash", "-c", wired, "bash", str(to_read), str(back_write),
            browser_path(), "--headless=new", "--no-sandbox", "--disable-gpu",
            "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ],
        pass_fds=(to_read, back_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read)
    os.close(back_write)
    try:
        yield Tab(to_write, back_read)
    finally:
        process.terminate()
        process.wait(60)
        os.close(to_write)
        os.close(back_read)
