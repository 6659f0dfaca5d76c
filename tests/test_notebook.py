"""The notebook runs from top to bottom, and has the output that its cells give.

``python -m tests.test_notebook`` writes what they give now into it.
"""

import ast
import contextlib
import io
import json

import numpy as np

from shardspec import DeviceMesh, Layout, LayoutConverter
from tests.test_readme import ROOT

NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def outputs_of(source, names):
    """Run a cell as Jupyter does; return what it prints, and how the value of its end is shown."""
    *statements, last = ast.parse(source).body
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), NOTEBOOK.name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
        else:
            exec(compile(ast.Module([last], []), NOTEBOOK.name, "exec"), names)
    outputs: list[dict[str, object]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/html": [value._repr_html_()], "text/plain": [repr(value)]}
        shown = {"output_type": "execute_result", "execution_count": None}
        outputs.append({"data": data, "metadata": {}, **shown})
    return outputs


def carried_out(notebook):
    """Return the notebook with the outputs of its cells, run one after another."""
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs_of("".join(cell["source"]), names)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def test_the_notebook_shows_what_its_cells_give():
    text = NOTEBOOK.read_text("utf-8")
    assert carried_out(json.loads(text)) == text
    for drawing in ("<table", "shardspec-layout"):
        assert drawing in text


def test_a_mesh_is_shown_as_a_table_of_its_ids():
    named = DeviceMesh([3, 2, 1, 0, 5, 4, 7, 6], (2, 2, 2), axis_names=("a", "b", "c"))
    assert named._repr_html_() == (
        "<table><caption>mesh a=2,b=2,c=2</caption>"
        "<tr><th></th><th>c 0</th><th>c 1</th></tr>"
        "<tr><th>a 0, b 0</th><td>3</td><td>2</td></tr>"
        "<tr><th>a 0, b 1</th><td>1</td><td>0</td></tr>"
        "<tr><th>a 1, b 0</th><td>5</td><td>4</td></tr>"
        "<tr><th>a 1, b 1</th><td>7</td><td>6</td></tr></table>"
    )
    assert DeviceMesh([1, 0])._repr_html_() == (
        "<table><caption>mesh 2</caption><tr><th></th><th>0</th><th>1</th></tr>"
        "<tr><th></th><td>1</td><td>0</td></tr></table>"
    )
    large = DeviceMesh(range(2000))
    assert large._repr_html_() == f"<code>{large!r}</code>"


def test_a_cost_table_is_shown_darker_where_it_takes_longer():
    table = LayoutConverter().cost_table(DeviceMesh(range(4)), (64, 64), "bf16", partial=("sum",))
    html = table._repr_html_()
    assert html.count("<tr>") == 1 + len(table.labels)
    assert html.count("<td") == len(table.labels) ** 2
    finite = table.seconds[np.isfinite(table.seconds)]
    assert html.count("rgba(31,111,235,0.50)") == (table.seconds == finite.max()).sum() > 0
    assert html.count(">–<") == table.seconds.size - finite.size > 0
    wide = LayoutConverter().cost_table(DeviceMesh(range(8), (2, 2, 2)), (8, 8, 8, 8), "bf16")
    assert len(wide.labels) > 64
    assert wide._repr_html_() == f"<code>{wide!r}</code>"


def test_what_is_too_large_to_draw_is_shown_as_text():
    mesh = DeviceMesh(range(5000))
    layout = Layout(mesh, "[S0]", (5000,), "float32")
    plan = LayoutConverter().plan(layout, "[R]")
    assert layout._repr_html_() == f"<pre>{layout}</pre>"
    assert plan._repr_html_() == f"<pre>{plan}</pre>"
    small = LayoutConverter().plan(Layout(DeviceMesh(range(2)), "[S0]", (4,), "float32"), "[R]")
    assert small._repr_html_() == f"{small.svg()}<pre>{small}</pre>"


if __name__ == "__main__":
    NOTEBOOK.write_text(carried_out(json.loads(NOTEBOOK.read_text("utf-8"))), "utf-8")
