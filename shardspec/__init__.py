"""shardspec: sharding layouts of tensors, and the cheapest conversions between them.

Public names are imported when they are first used, so that planning and merging do not
import torch. `__init__.pyi` lists them, for type checkers and for this module.
"""

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_HOME: Final = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_name("__init__.pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> the module that defines it."""

_MOVED: Final = {
    "ConversionPlan": "layout.plan",
    "DimSpec": "layout.spec",
    "Link": "comm.curves",
    "PendingSave": "checkpoint.job.background",
    "ProcessGroupCommunicator": "comm.process_group",
    "Receipt": "resharding.receipts",
    "SimulatedCommunicator": "comm.communicator",
    "TensorDigest": "resharding.digests",
    "load_map": "checkpoint.convert.model_names",
}
"""Names that moved to their modules; this version still imports them from here too."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    home = f"shardspec.{_MOVED[name]}" if name in _MOVED else _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'shardspec' has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"shardspec.{name} needs torch: pip install 'torch>=2.10'", name="torch"
        ) from None


def __dir__() -> list[str]:
    # help() and pydoc look up each name, so without torch the list has no name that needs it.
    has_torch = "torch" in sys.modules or find_spec("torch") is not None
    return [name for name in __all__ if has_torch or _can_be_imported(name)]


def _can_be_imported(name: str) -> bool:
    try:
        import_module(_HOME[name])
    except ModuleNotFoundError:
        return False
    return True
