"""The number of modules and functions that one merge enters: what a reader has to follow."""

import sys
from pathlib import Path

import torch

import shardspec
from shardspec import DeviceMesh, DTensor, merge, save_sharded

ROOT = Path(shardspec.__file__).parent
MOST_MODULES = 19
"""Of `checkpoint/` and `families/`."""
MOST_FUNCTIONS = 205
"""Of shardspec, those with a name: later versions of Python call fewer comprehensions."""


def entered(run):
    """Return the functions of shardspec that a call enters, as (module, name)."""
    seen = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            seen.add((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return {(module, name) for module, name in seen if not name.endswith(">")}


def test_a_merge_enters_few_modules_and_functions(tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    state = {"w": DTensor(torch.arange(12.0).view(4, 3), mesh, "[S01,R]"), "step": 3}
    save_sharded(state, tmp_path / "saved")
    functions = entered(lambda: merge(tmp_path / "saved", tmp_path / "model.safetensors"))
    modules = {module for module, _ in functions if module.startswith(("checkpoint", "families"))}
    assert 5 < len(modules) <= MOST_MODULES, sorted(modules)
    assert 50 < len(functions) <= MOST_FUNCTIONS, len(functions)
