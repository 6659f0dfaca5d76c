"""The suite about itself."""

from fnmatch import fnmatch
from pathlib import Path


def test_no_folder_of_tests_is_passed_over(pytestconfig):
    """pytest skips folders by name without a word, by default one called "dist"."""
    root = Path(__file__).parent
    folders = {path.parent for path in root.rglob("test_*.py")}
    assert root / "dist" in folders
    for folder in folders:
        parts = folder.relative_to(root).parts
        for pattern in pytestconfig.getini("norecursedirs"):
            assert not any(fnmatch(part, pattern) for part in parts), (folder, pattern)
