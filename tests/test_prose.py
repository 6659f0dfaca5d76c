"""Rules of plain English that a program can check."""

import ast
import re
from pathlib import Path

from tests.sources import FILES, nodes_of, tree_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
MAX_WORDS = 80
# First words that say nothing about the thing; a noun or a verb does.
OF_MODULES = re.compile(r"(Which|What|How|Whether|All)\b")
OF_MEMBERS = re.compile(r"\s*(Of|What|Which|By|Whether|How)\b")
MAX_ERROR = 160
BRITISH = re.compile(
    r"\b\w*?((?:recogn|quant|normal|serial|organ|optim|minim|maxim|initial|synchron|summar"
    r"|special|general|parallel|token|vector|material)is(?:e[ds]?|ing|ation)\b"
    r"|colour|behaviour|neighbour|favour|centre|licence|catalogue|grey|analys(?:e[ds]?|ing)\b"
    r"|(?:model|label|travel|signal)l(?:ed|ing)\b)\w*",
    re.IGNORECASE,
)


def paragraphs(text):
    """Yield the line and the text of each paragraph and list item, but of no table and no code."""
    found: list[str] = []
    fenced, first = False, 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        apart = fence or not line.strip() or line.startswith(("|", "#", "!["))
        if apart or fenced or re.match(r" *(?:[-*>]|\d+\.) ", line):
            if found:
                yield first, " ".join(found)
            found = []
        if not (apart or fenced) and (found or not line.startswith("    ")):
            first = first if found else number
            found.append(line.strip())
        fenced ^= fence


def test_paragraphs_are_short():
    long = [
        f"{page.relative_to(ROOT)}:{number}: {len(words)} words"
        for page in PAGES
        for number, text in paragraphs(page.read_text("utf-8"))
        if len(words := text.split()) > MAX_WORDS
    ]
    assert not long, "\n".join(long)


def test_paragraphs_are_found():
    text = "# a\n\none two\nthree\n- four\n  five\n\n```py\nx\n```\n| six |\n\n    code\n"
    assert list(paragraphs(text)) == [(3, "one two three"), (5, "- four five")]


def test_modules_say_what_they_do():
    docs = {path: ast.get_docstring(tree_of(path)) or "" for path in FILES}
    assert [path for path, doc in docs.items() if OF_MODULES.match(doc)] == []


def test_members_begin_with_a_noun_or_a_verb():
    riddles = [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if OF_MEMBERS.match(str(node.value.value))
    ]
    assert not riddles, "\n".join(riddles)


def test_errors_are_short():
    long = [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for texts in [[text for arg in node.exc.args for text in ast.walk(arg)]]
        if sum(
            len(t.value) for t in texts if isinstance(t, ast.Constant) and isinstance(t.value, str)
        )
        > MAX_ERROR
    ]
    assert not long, "\n".join(long)


def test_spelling_is_american():
    kinds = {".py", ".pyi", ".toml", ".json", ".js", ".css", ".html"}
    files = [path for path in (ROOT / "shardspec").rglob("*") if path.suffix in kinds]
    british = [
        f"{path.relative_to(ROOT)}:{number}: {word[0]}"
        for path in [*PAGES, *sorted(files)]
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for word in BRITISH.finditer(line)
    ]
    assert not british, "\n".join(british)
