"""The blocks of a page of the docs, run one after another; with the standard library alone.

``python -I tests/page_blocks.py PAGE [--without-torch]`` runs those of a page in the folder it is
started in, with the library and the commands that are installed. It ends with an error if what a
block prints is not what the page shows.
"""

import contextlib
import difflib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What differs from run to run: the name of a save, its digest, and how long writing took.
VARYING = re.compile(
    r"\b[0-9a-f]{16}\b| in [\d.e-]+ \S+ \([\d.]+ \w+/s\), CRC-32 [0-9a-f]{8}$", re.MULTILINE
)


def steady(text):
    return VARYING.sub("…", text)


def in_a_process(words, directory):
    """Run a command as a shell would, with the commands of this environment."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


def rewritten(text, directory, *, shared=False, command=in_a_process):
    """Return a page with all output as it is when its blocks run one after another.

    Each block starts afresh, or goes on with the names of those before it.
    """
    printed: list[str] = []
    names: dict[str, object] = {}

    def run_block(match):
        kind, body = match.groups()
        if kind == "python":
            printed.extend(filter(None, [run_python(body, directory, names if shared else {})]))
        elif kind == "text":
            body = printed.pop(0)
        elif kind == "console":
            body = run_command(body.splitlines()[0], directory, command)
        return f"```{kind}\n{body}```"

    text = BLOCK.sub(run_block, text)
    assert not printed, "a snippet is shown without its output"
    return text


def run_python(source, directory, names):
    output = io.StringIO()
    names["__name__"] = "readme"
    with contextlib.chdir(directory), contextlib.redirect_stdout(output):
        exec(compile(source, "README.md", "exec"), names)
    return output.getvalue()


def run_command(line, directory, command):
    """Run a line, and return it with what it prints."""
    assert line.startswith("$ ")
    exit_code, output, errors = command(shlex.split(line[2:]), directory)
    notes = errors.splitlines(keepends=True)
    others = [note for note in notes if not note.startswith("note: ")]
    assert (exit_code, others) == (0, []), (line, others)
    return f"{line}\n{''.join(notes)}{output}"


def without_torch(text):
    """Return a page without the sections in which a block imports torch."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(part for part in sections if not re.search(r"^import torch", part, re.MULTILINE))


def main(page, *options):
    """Run the blocks of a page; return how what they print differs from what it shows."""
    text = Path(page).read_text("utf-8")
    if "--without-torch" in options:
        text = without_torch(text)
    printed, shown = steady(rewritten(text, Path.cwd())), steady(text)
    changes = difflib.unified_diff(shown.splitlines(), printed.splitlines(), "shown", "printed")
    return "\n".join(changes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
