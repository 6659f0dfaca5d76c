"""The examples in docstrings print what they show."""

import doctest
from importlib import import_module

import pytest

from tests.test_imports import MODULES, source

WITH_EXAMPLES = [name for name in MODULES if ">>> " in source(name).read_text("utf-8")]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_show(module):
    results = doctest.testmod(import_module(module))
    assert results.attempted
    assert results.failed == 0
