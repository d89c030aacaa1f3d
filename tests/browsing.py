"""A real Chromium for tests, steered over a pipe (its DevTools protocol): pages, keys, colours, pictures, axe-core."""

import base64
import json
import os
import select
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from report.test_page_in_browser import BROWSER, OPTIONS

AXE = find_spec("axe_playwright_python")


def axe_source():
    (path,) = (path for where in AXE.submodule_search_locations for path in Path(where).rglob("axe.min.js"))
    return path.read_text(encoding="utf-8")


class Chromium:
    """A browser with one page."""

    def __init__(self, folder):
        (read_in, self._out), (self._in, write_out) = os.pipe(), os.pipe()
        options = [option for option in OPTIONS if "resolver" not in option]
        options += ["--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        arguments = [BROWSER, *options, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
        shell = ["bash", "-c", f'exec "$@" 3<&{read_in} 4>&{write_out}', "bash", *arguments]
        with (folder / "browser.log").open("w") as log:
            self.process = subprocess.Popen(shell, pass_fds=(read_in, write_out), stdout=log, stderr=log)
        os.close(read_in)
        os.close(write_out)
        self._number, self._rest, self.complaints = 0, b"", []
        self._session = None
        try:
            self._open_page()
        except BaseException:
            self.close()
            raise

    def _open_page(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{part}.enable")

    def close(self):
        self.process.kill()
        self.process.wait(30)
        os.close(self._out)
        os.close(self._in)

    def call(self, method, **parameters):
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        end_s = time.monotonic() + 60
        while True:
            answer = self._next(end_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(answer["params"])

    def _next(self, end_s):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def run(self, script):
        """Value of a script in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script, limit_s=30.0):
        end_s = time.monotonic() + limit_s
        while not (found := self.run(script)):
            assert time.monotonic() < end_s, (script, self.run("document.body.innerText"))
            time.sleep(0.1)
        return found

    def go(self, url, ready="document.querySelector('h1')"):
        self.call("Page.navigate", url=url)
        return self.until(f"location.href === {url!r} && document.readyState === 'complete' && !!{ready}")

    def key(self, name, text=""):
        for kind in ("keyDown", "keyUp"):
            shown = {"text": text} if text and kind == "keyDown" else {}
            code = {"Tab": 9, "Enter": 13}.get(name, 0)
            self.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **shown)

    def look(self, width, scheme):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path, height=None):
        tall = height or self.run("Math.ceil(document.documentElement.getBoundingClientRect().height)")
        width = self.run("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": tall, "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def violations(self):
        """What axe-core finds wrong."""
        self.run(axe_source() + "; 0")
        script = "axe.run().then(f => f.violations.map(v => [v.id, v.nodes.map(n => n.html.slice(0, 300))]))"
        return self.run(script)

    def too_wide(self):
        """Elements beyond the right edge that no region scrolls."""
        return self.run(
            "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll > *') && "
            "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"
        )
