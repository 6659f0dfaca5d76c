"""Names the files in which two revisions differ by more than docstrings, comments and strings.

python -m tests.prose_only HEAD~ HEAD
"""

import ast
import subprocess
import sys


class Prose(ast.NodeTransformer):
    """Drops docstrings and the text of strings; expressions in f-strings remain."""

    def visit_Expr(self, node):
        is_text = isinstance(getattr(node.value, "value", None), str)
        return None if is_text else self.generic_visit(node)

    def visit_Constant(self, node):
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node):
        values = [self.visit(value) for value in node.values if not isinstance(value, ast.Constant)]
        return ast.JoinedStr(values) if values else ast.Constant("")


def code_of(source):
    """Return the syntax tree of a source as text, without its prose."""
    return ast.dump(Prose().visit(ast.parse(source)))


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    old, new = sys.argv[1:]
    paths = git("diff", "--name-only", "--diff-filter=M", old, new, "--", "*.py").split()
    wrong = [
        p for p in paths if code_of(git("show", f"{old}:{p}")) != code_of(git("show", f"{new}:{p}"))
    ]
    sys.exit("\n".join(wrong) or 0)
