"""Headless Chromium, driven over a pipe by its DevTools protocol: no driver, no port and no further package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here: pages are not looked at as a reader does")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)


class Browser:
    """One tab of a browser with a profile of its own.

    Args:
        folder: Holds the profile.
    """

    def __init__(self, folder: Path) -> None:
        assert BROWSER is not None
        # The browser reads commands from its descriptor 3 and writes replies to 4.
        (their_input, self._out), (self._in, their_output) = os.pipe(), os.pipe()
        command = f'exec "$0" "$@" 3<&{their_input} 4>&{their_output}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, BROWSER, *_FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        self._last, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive before it are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._message()
            if reply.get("id") == self._last:
                assert "error" not in reply, reply["error"]
                result: dict[str, Any] = reply["result"]
                return result
            self.events.append(reply)

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page and wait until it is loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        failed = self.send("Page.navigate", url=address).get("errorText")
        assert failed is None, failed
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def run(self, script: str) -> Any:
        """Return the value of a script, which may be a promise."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    @property
    def requests(self) -> list[str]:
        """Addresses that the page has asked for since it was opened."""
        self.send("Runtime.evaluate", expression="0")
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {**size, "scale": 1}
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._session = ""
        self.send("Browser.close")
        self._process.wait(timeout=60)
        os.close(self._in)
        os.close(self._out)
