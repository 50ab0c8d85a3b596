"""A headless browser, driven through its debugging pipe: what a page really shows."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 60

# Of all text that is shown, the lowest ratio of contrast to what is behind it, by WCAG's formula.
LOWEST_CONTRAST = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => linear(v / 255));
    return .2126 * x + .7152 * y + .0722 * z;
  };
  let lowest = [99, ''];
  for (const element of document.body.querySelectorAll('*')) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility()) continue;
    let behind = element, back = [0, 0, 0, 0];
    while (behind && (back.length === 4 && back[3] === 0)) {
      back = parse(getComputedStyle(behind).backgroundColor);
      behind = behind.parentElement;
    }
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(back)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < lowest[0]) lowest = [ratio, element.outerHTML.slice(0, 120)];
  }
  return lowest;
})()"""


def installed() -> str | None:
    """The path of a browser; None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


class Browser:
    """One page of a browser; a context manager."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp()
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4, so neither may be one of these.
        given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20) for descriptor in (commands, answers)]
        os.close(commands)
        os.close(answers)
        line = f'exec "$0" "$@" 3<&{given[0]} 4>&{given[1]}'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
                   f"--user-data-dir={self._folder}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", line, program, *options],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for descriptor in given:
            os.close(descriptor)
        self._numbers = itertools.count(1)
        self._unread = b""
        self.requested: list[str] = []
        """The address of everything that the page asked for."""
        target = next(
            found for found in self._call("Target.getTargets")["targetInfos"] if found["type"] == "page"
        )
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, path: Path, width: int = 1100, scheme: str = "light") -> None:
        """Shows a file, in a window of some width, to a reader who prefers light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                  mobile=False)  # fmt: skip
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + _TIMEOUT_S
        while self.value("document.readyState + location.href") != f"complete{path.as_uri()}":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.02)

    def value(self, script: str) -> Any:
        """What a script gives in the page."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def picture(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        told = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command for the page."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], _TIMEOUT_S)
            assert ready, "the browser does not answer"
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser has ended"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of a module, which skip where none is installed."""
    program = installed()
    if program is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    with Browser(program) as opened:
        yield opened
