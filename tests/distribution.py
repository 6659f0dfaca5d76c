"""Builds the wheel and the sdist, and runs the README's quick starts where they are installed.

``python -m tests.distribution [--release] [PYTHON …]`` builds both into ``dist/``. The wheel is
installed without torch into a new environment of each interpreter that runs, by default this one,
``python3.12`` and ``python3.13``; into that of this one also with torch, and from the sdist. With
``--release`` they are built from the committed files, with the links of the README made absolute,
and ``twine`` checks them.
"""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE_BLOCKS = ROOT / "tests" / "page_blocks.py"
SETTINGS = {
    "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PYTHONPATH": "",
}


def run(*command, cwd=None):
    subprocess.run(command, cwd=cwd, check=True, env=os.environ | SETTINGS)


def version(python):
    """Return an interpreter's version, and None if it does not run."""
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.strip()


def new_environment(python, place, requirement):
    """Make a virtual environment with one requirement, and return its interpreter."""
    run(python, "-m", "venv", place)
    inside = str(place / "bin" / "python")
    run(inside, "-m", "pip", "install", "--quiet", requirement)
    return inside


def try_pages(python, *options):
    """Run the README's quick starts, isolated from this checkout but for the example's files."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(ROOT / "examples" / "checkpoint", Path(place, "examples", "checkpoint"))
        run(python, "-I", PAGE_BLOCKS, ROOT / "README.md", *options, cwd=place)


def absolute_links(page, source):
    """Return a page whose links into the repository work where a package index shows it."""
    page = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{source}/raw/main/", page)
    page = re.sub(r'(src(?:set)?=")(?!https?:)', rf"\1{source}/raw/main/", page)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\1{source}/blob/main/", page)


def release_sources(place):
    """Copy the committed files to a folder, with the README that a release has."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], cwd=place, check=True, input=archive.stdout)
    settings = configparser.ConfigParser()
    settings.read(place / "setup.cfg", "utf-8")
    urls = dict(
        line.split(" = ") for line in settings["metadata"]["project_urls"].split("\n") if line
    )
    readme = place / "README.md"
    readme.write_text(absolute_links(readme.read_text("utf-8"), urls["Source"]), "utf-8")
    if "example.org" in urls["Source"]:
        print("setup.cfg: project_urls are placeholders; fill them in before a release")
    return place


def main(pythons, *, release=False):
    """Build, install and try; the first failure ends it."""
    dist = ROOT / "dist"
    for old in dist.glob("shardspec-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as sources:
        place = release_sources(Path(sources)) if release else ROOT
        run(sys.executable, "-m", "build", "--outdir", dist, place)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    if release:
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for python in [sys.executable, *pythons]:
            number = version(python)
            if number is None:
                print(f"{python} does not run here; not tried")
                continue
            inside = new_environment(python, place / f"{number}-plain", str(wheel))
            try_pages(inside, "--without-torch")
            print(f"Python {number} without torch: the quick starts print what the README shows")
        inside = new_environment(sys.executable, place / "torch", f"{wheel}[torch]")
        try_pages(inside)
        print("with torch: the quick starts print what the README shows")
        inside = new_environment(sys.executable, place / "sdist", str(sdist))
        try_pages(inside, "--without-torch")
        print("from the sdist: the same")


if __name__ == "__main__":
    others = [word for word in sys.argv[1:] if word != "--release"]
    main(others or ["python3.12", "python3.13"], release="--release" in sys.argv)
