"""The size of the library by folder. A change that needs more raises its row, and says for what."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Folder: (lines, modules). The first table with budgets; a feature adds its lines and a comment.
# `checkpoint` and `cli`: checkpoints summed with weights, and adapters merged into their base.
# `cli`: the move of a model from one layout to another at a glance.
# `cli` and `text.py`: tables and notes that fit the terminal, and the run of a Megatron checkpoint.
# `cli`: bars after a second, and help that fits narrow terminals; `resharding`: digests read again.
# `families`: aliases of config keys, ties of multimodal heads; `mesh`, `tensor`: words of torch.
# `resharding`: maps in turn with several factors a slice; `comm`: rates between hosts from logs.
# `input_files.py`: TOML that takes minutes to parse is refused.
BUDGET = {
    "shardspec": (46111, 183),  # 57 lines of worked examples
    "shardspec/checkpoint": (19461, 72),
    "shardspec/cli": (3595, 13),
    "shardspec/comm": (4314, 20),
    "shardspec/explorer": (232, 1),
    "shardspec/families": (2039, 9),
    "shardspec/interop": (669, 4),
    "shardspec/layout": (4861, 18),
    "shardspec/mesh": (1152, 5),
    "shardspec/profiling": (380, 3),
    "shardspec/resharding": (4690, 13),  # ways between hosts priced from merged copies
    "shardspec/tensor": (3384, 16),
    "tests": (57192, 352),  # 98 lines hold the rules of plain English
}


def size(folder):
    """Return the lines and the modules of a folder, those of its subfolders among them."""
    files = list((ROOT / folder).rglob("*.py"))
    return sum(len(file.read_text("utf-8").splitlines()) for file in files), len(files)


@pytest.mark.parametrize("folder", BUDGET)
def test_a_folder_stays_within_its_budget(folder):
    lines, modules = size(folder)
    assert lines <= BUDGET[folder][0]
    assert modules <= BUDGET[folder][1]


def test_every_folder_has_a_budget():
    folders = {f"shardspec/{path.name}" for path in (ROOT / "shardspec").iterdir() if path.is_dir()}
    assert folders - {"shardspec/__pycache__"} == {key for key in BUDGET if "/" in key}
