"""The picture of the explorer in the README: ``python -m tests.explorer.picture`` takes it anew.

It needs the browser of the tests, so nothing compares it.
"""

import base64
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from click.testing import CliRunner

from shardspec.cli.main import cli
from tests.explorer.browser import Browser
from tests.test_readme import ROOT

PICTURE = ROOT / "docs" / "images" / "explorer.png"
WIDTH, HEIGHT = 1120, 1600
MESH, SHAPE = "dp=2,tp=2", "4096x4096"
CHOICE = {"mesh": MESH, "shape": SHAPE, "from": "[S(dp),S(tp)]", "to": "[S(tp),S(dp)]"}


def main():
    """Write a page, go to the middle of a step, and take its picture."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        options = ("--mesh", MESH, "--shape", SHAPE, "--links", "h100-nvswitch")
        made = CliRunner().invoke(cli, ["explore", *options, "-o", str(page)])
        assert made.exit_code == 0, made.output
        browser = Browser(Path(folder) / "profile")
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser("Emulation.setDeviceMetricsOverride", **size)
        browser.open(f"{page.as_uri()}#{urlencode(CHOICE)}")
        browser.ask(
            'const at = document.getElementById("position"); at.value = 0.5;'
            'at.dispatchEvent(new Event("input", { bubbles: true }))'
        )
        top = browser.ask('document.getElementById("pick").getBoundingClientRect().top')
        end = browser.ask('document.getElementById("stage").getBoundingClientRect().bottom')
        clip = {"x": 0, "y": top - 12, "width": WIDTH, "height": end - top + 24, "scale": 1}
        taken = browser("Page.captureScreenshot", format="png", clip=clip)
        browser.close()
    PICTURE.write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    main()
