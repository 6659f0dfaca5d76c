"""Imports go downwards by the layers, in no circle, and to torch only where tensors are."""

import ast
import pkgutil
import subprocess
import sys
from functools import cache
from importlib import import_module

import networkx as nx
import pytest

import shardspec
from tests.sources import ROOT, nodes_of, tree_of

# Lowest first. A module may import from layers below its own, and from its own folder.
LAYERS = [
    {"text"},
    {"errors"},
    {"input_files"},
    {"boxes", "dtypes"},
    {"mesh"},
    {"comm"},
    {"layout"},
    {"interop", "tracing"},
    {"tensor"},
    {"parallel"},
    {"resharding"},
    {"families"},
    {"checkpoint"},
    {"explorer", "profiling"},
    {"cli"},
    {"__main__"},
]
WITH_TENSORS = {
    "shardspec.comm.execute",
    "shardspec.comm.notes",
    "shardspec.comm.transports.messages",
    "shardspec.comm.transports.peer_memory",
    "shardspec.comm.transports.stage",
    "shardspec.comm.process_group",
    "shardspec.comm.results",
    "shardspec.tensor.dtensor",
    "shardspec.tensor.run",
    "shardspec.tensor.factories",
    "shardspec.tensor.for_modules",
    "shardspec.interop.torch_cost",
    "shardspec.interop.torch_dtensor",
    "shardspec.mesh.initialization",
    "shardspec.mesh.job",
    "shardspec.tensor.operators.apply",
    "shardspec.tensor.operators.call",
    "shardspec.tensor.operators.gradients",
    "shardspec.tensor.operators.lookups",
    "shardspec.tensor.operators.propagate",
    "shardspec.tensor.operators.tensor",
    "shardspec.parallel",
    "shardspec.profiling.measure",
    "shardspec.resharding.execute",
    "shardspec.resharding.inputs",
    "shardspec.resharding.receipts",
    "shardspec.tensor.shards",
    "shardspec.tensor.redistribute",
}
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(ROOT)], prefix="shardspec."))
KNOWN = frozenset(MODULES)


def source(module):
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(node):
    """Return the modules that one import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    assert node.module is not None
    assert node.level == 0
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in KNOWN else node.module for name in names]


def imports(node, at_once=True):
    """Yield every import as (module, whether it runs when the importing module is imported)."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        for name in imported(node):
            yield name, at_once
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        at_once = False
    elif isinstance(node, ast.If):
        at_once &= ast.unparse(node.test) != "TYPE_CHECKING"
    for inner in ast.iter_child_nodes(node):
        # Whatever holds statements; expressions import nothing.
        if isinstance(inner, ast.stmt | ast.excepthandler | ast.match_case):
            yield from imports(inner, at_once)


@cache
def edges():
    return [
        (module, name, at_once)
        for module in MODULES
        for name, at_once in imports(tree_of(source(module)))
    ]


def layer(module):
    part = module.split(".")[1]
    found = [number for number, parts in enumerate(LAYERS) if part in parts]
    assert found, f"{module} has no place among the layers"
    return found[0]


def test_the_modules_are_found():
    assert {"shardspec.layout.converter", "shardspec.cli", "shardspec.mesh.job"} <= set(MODULES)
    assert set(MODULES) > WITH_TENSORS
    assert ("shardspec.layout.layout", "shardspec.mesh.device_mesh", True) in edges()
    assert ("shardspec.mesh.device_mesh", "shardspec.mesh.job", False) in edges()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module):
    up = set()
    for importer, name, _ in edges():
        if importer != module or name.split(".")[0] != "shardspec":
            continue
        assert name in MODULES, f"{module} imports {name}; import from the module that defines it"
        same_part = name.split(".")[1] == module.split(".")[1]
        if layer(name) > layer(module) or (layer(name) == layer(module) and not same_part):
            up.add((importer, name))
    assert up == set()


# The rooms of resharding/, lowest first.
RESHARDING = [
    *("views", "map_file", "name_map", "total", "state", "digests", "stages"),
    *("rows", "inputs", "receipts", "execute", "plan"),
]


def test_rooms_of_resharding_import_downwards():
    rooms = [f"shardspec.resharding.{room}" for room in RESHARDING]
    assert {m for m in MODULES if m.startswith("shardspec.resharding.")} == set(rooms)
    up = {
        (importer, name)
        for importer, name, _ in edges()
        if importer in rooms and name in rooms and rooms.index(name) > rooms.index(importer)
    }
    assert up == set()


# The rooms of checkpoint/, lowest first; single modules where they are apart from their room.
ROOMS = [
    *("storage", "catalog", "convert.numeric", "convert.copy", "compare.coverage"),
    *("convert.sidecars", "state.state_dict", "torch_files", "formats", "open"),
    *("convert.select", "convert.layout", "quantization", "state", "compare"),
    *("convert.model_names", "convert", "deltas", "job", "quantization.plan", "job.plan"),
]


def room(module):
    inner = module.removeprefix("shardspec.checkpoint.")
    return next(
        (at for at in sorted(ROOMS, key=len, reverse=True) if f"{inner}.".startswith(f"{at}.")),
        None,
    )


def test_rooms_of_checkpoints_import_downwards():
    up = {
        (importer, name)
        for importer, name, _ in edges()
        if importer.startswith("shardspec.checkpoint.") and name.startswith("shardspec.checkpoint.")
        if ROOMS.index(room(name)) > ROOMS.index(room(importer))
    }
    assert up == set()
    assert {room(module) for module in MODULES if ".checkpoint." in module} == set(ROOMS)


def test_imports_go_in_no_circle():
    """Late imports and those for types alone count too."""
    graph = nx.DiGraph((importer, name) for importer, name, _ in edges())
    assert graph.number_of_edges() > 500
    assert list(nx.simple_cycles(graph)) == []


def test_only_modules_with_tensors_import_torch_at_once():
    importers = {
        importer for importer, name, at_once in edges() if at_once and name.split(".")[0] == "torch"
    }
    assert importers == WITH_TENSORS


def test_everything_else_works_without_torch():
    """Import all other modules, hand on their public names, and look what came with them."""
    names = ["shardspec", *(module for module in MODULES if module not in WITH_TENSORS)]
    script = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "from shardspec import DeviceMesh, Layout, LayoutConverter, ShardingSpec\n"
        "layout = Layout(DeviceMesh(range(8), (2, 4)), '[S0,R]', (8, 8), 'bf16')\n"
        "LayoutConverter().plan(layout, '[R,S01]')\n"
        "assert 'torch' not in sys.modules, 'planning'\n"
        "print(len(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(names)


def test_plans_and_costs_work_without_isal():
    """Only checkpoints need it, and it cannot be installed everywhere."""
    plain = [m for m in MODULES if m.split(".")[1] not in ("checkpoint", "cli", "__main__")]
    script = (
        "import importlib, sys\n"
        "sys.modules['isal'] = None\n"
        f"for name in {[m for m in plain if m not in WITH_TENSORS]}:\n"
        "    importlib.import_module(name)\n"
        "from shardspec import DeviceMesh, Layout, LayoutConverter\n"
        "layout = Layout(DeviceMesh(range(8), (2, 4)), '[S0,R]', (8, 8), 'bf16')\n"
        "plan = LayoutConverter().plan(layout, '[R,S01]')\n"
        "assert plan.cost_seconds > 0, plan\n"
        "try:\n"
        "    from shardspec import merge\n"
        "except ImportError:\n"
        "    print('no checkpoints')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "no checkpoints\n"), done.stderr


def test_public_names_are_handed_on():
    home = shardspec._HOME
    assert sorted(home) == sorted(shardspec.__all__)
    for name, module in home.items():
        assert getattr(shardspec, name) is getattr(import_module(module), name)
        # Defined there, not imported by it.
        assert getattr(import_module(module), name).__module__ == module
    assert dir(shardspec) == sorted(shardspec.__all__)
    with pytest.raises(AttributeError) as caught:
        shardspec.Nothing  # type: ignore[attr-defined]  # noqa: B018  # the access is the test
    assert str(caught.value) == "module 'shardspec' has no attribute 'Nothing'"


@pytest.mark.parametrize("module", [m for m in MODULES if source(m).name != "__init__.py"])
def test_modules_say_what_they_are_for(module):
    loaded = import_module(module)
    assert loaded.__doc__
    assert all(hasattr(loaded, name) for name in getattr(loaded, "__all__", ()))


def test_help_works_without_torch():
    """What needs torch is left out of the list that help() and pydoc go through."""
    script = (
        "import pydoc, sys\n"
        "from importlib.machinery import PathFinder\n"
        "finders = list(sys.meta_path)\n"
        "class WithoutTorch:\n"
        "    find_distributions = PathFinder.find_distributions\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            return None\n"
        "        found = (finder.find_spec(name, path, target) for finder in finders)\n"
        "        return next(filter(None, found), None)\n"
        "sys.meta_path[:] = [WithoutTorch]\n"
        "import shardspec\n"
        "text = pydoc.plain(pydoc.render_doc(shardspec))\n"
        "assert 'class DeviceMesh' in text and 'class DTensor' not in text\n"
        "assert {'merge', 'LayoutConverter'} < set(dir(shardspec))\n"
        "assert not {'DTensor', 'zeros', 'redistribute'} & set(dir(shardspec))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


MOST_PARAMETERS = 10


def parameters(function):
    """Return the names of a function's parameters, as its callers see them."""
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [argument.arg for argument in every if argument and argument.arg not in ("self", "cls")]


def is_command(function):
    """Whether the parameters of a function are the options of a command."""
    return any("click.command" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_functions_have_few_parameters():
    many, counted = {}, 0
    for module in MODULES:
        for node in nodes_of(source(module)):
            if isinstance(node, ast.FunctionDef) and not is_command(node):
                counted += 1
                if len(parameters(node)) > MOST_PARAMETERS:
                    many[f"{module}.{node.name}"] = parameters(node)
    assert many == {}
    assert counted > 2000


# The format of each module of formats; short names of arrays and sizes, which mean the same.
ONE_MEANING = {"FORMAT", "Floats", "Ints", "Shape", "T"}


def test_a_public_name_has_one_meaning():
    homes: dict[str, set[str]] = {}
    for module in MODULES:
        for node in tree_of(source(module)).body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    homes.setdefault(name, set()).add(module)
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    homes.setdefault(name, set()).add(module)
    several = {name for name, modules in homes.items() if name[0] != "_" and len(modules) > 1}
    assert several == ONE_MEANING
