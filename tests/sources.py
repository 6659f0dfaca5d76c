"""The source of the library: its files, and their syntax, which a process of tests reads once."""

import ast
from functools import cache
from pathlib import Path

import shardspec

__all__ = ["FILES", "ROOT", "nodes_of", "tree_of"]

ROOT = Path(shardspec.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of it."""
    return tuple(ast.walk(tree_of(path)))
