"""What a format is stands in its module: others know formats by the registry alone."""

import ast
import inspect
from dataclasses import fields
from importlib import import_module

import pytest

from shardspec.checkpoint.formats import DEFAULTS, MODULES, Format, built_in
from tests.sources import ROOT, nodes_of

HOME = ROOT / "checkpoint" / "formats"
LOWER = {"formats", "torch_files", "storage"}  # a format, and what formats are made of
ELSEWHERE = sorted(
    path
    for path in {*ROOT.glob("checkpoint/**/*.py"), *ROOT.glob("cli/*.py")}
    if path.parent.name not in LOWER
)
NAMES = {text for form in built_in() for text in (form.name, form.called)}
NOT_FORMATS = {
    ("main.py", "shardspec"),  # the program
    # Whose names tensors have.
    ("model_names.py", "megatron"),
    ("checkpoint_options.py", "megatron"),
}


def texts(path):
    """Yield the string constants of a module that are not docstrings."""
    docs = {
        id(node.value)
        for node in nodes_of(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_every_module_of_formats_has_one():
    modules = {path.stem for path in HOME.glob("*.py")} - {"__init__", "cut_rules", "model_files"}
    assert modules == set(MODULES)
    assert set(DEFAULTS.values()) <= modules
    for module in MODULES:
        found = import_module(f"shardspec.checkpoint.formats.{module}").FORMAT
        assert type(found) is Format
        assert found.open.__module__.startswith("shardspec.checkpoint.formats.")


@pytest.mark.parametrize("path", ELSEWHERE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_other_module_names_a_format(path):
    assert {"safetensors", "dcp", "deepspeed", "Megatron-LM"} <= NAMES
    named = {text for text in texts(path) if text in NAMES}
    assert named == {text for name, text in NOT_FORMATS if name == path.name}


def test_other_modules_import_formats_by_the_registry():
    """But for the format of `save_sharded`, headers of deltas, and the run that `inspect` shows."""
    importers = set()
    for path in ELSEWHERE:
        for node in nodes_of(path):
            if not isinstance(node, ast.ImportFrom) or "checkpoint.formats" not in str(node.module):
                continue
            home = str(node.module).partition("checkpoint.formats")[2].strip(".")
            modules = [home] if home else [alias.name for alias in node.names]
            importers |= {path.name for module in modules if module in MODULES}
    assert importers == {
        "apply.py",
        "inspect.py",
        "save.py",
    }


def test_members_have_a_line_that_says_what_they_mean():
    source = inspect.getsource(Format)
    for field in fields(Format):
        assert f"\n    {field.name}: " in source
        after = source.partition(f"\n    {field.name}: ")[2]
        assert after.partition("\n")[2].lstrip().startswith('"""'), field.name
