"""A check of every error that these tests provoke: three lines of a terminal at most."""

import re

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

LINES, COLUMNS = 3, 80
# Paths, lists and names of a test may be of any length: a terminal gets them shortened.
LONG_WORD = re.compile(r"\S{25,}")


@pytest.fixture(autouse=True)
def errors_are_short(monkeypatch):
    invoke = CliRunner.invoke

    def checked(*args, **kwargs):
        result = invoke(*args, **kwargs)
        for line in result.stderr.splitlines():
            if line.startswith("Error: "):
                text = LONG_WORD.sub("x" * 25, line)
                assert cell_len(text) <= LINES * COLUMNS, text
        return result

    monkeypatch.setattr(CliRunner, "invoke", checked)
