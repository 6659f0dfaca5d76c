import copy
import pickle
from importlib.metadata import version

import numpy as np
import pytest
import torch

import shardspec
from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter, errors
from shardspec.text import Argument

BUILT_IN = {
    "AxisError": ValueError,
    "CheckpointError": ValueError,
    "CommunicatorError": RuntimeError,
    "DTypeError": TypeError,
    "InputFileError": ValueError,
    "LayoutError": ValueError,
    "LossyConversionError": ValueError,
    "MeshError": ValueError,
    "NotTorchMeshError": AttributeError,
    "OutputExistsError": FileExistsError,
    "ProfileError": ValueError,
    "QuantizedError": ValueError,
    "ShardSpecError": Exception,
    "SpecSyntaxError": ValueError,
}


def test_the_table_of_built_ins_is_complete():
    defined = (name for name, value in vars(errors).items() if isinstance(value, type))
    assert sorted(BUILT_IN) == sorted(defined)


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items())
def test_one_root_and_the_built_in_that_a_reader_expects(name, built_in):
    error = getattr(errors, name)
    assert issubclass(error, errors.ShardSpecError)
    assert issubclass(error, built_in)
    assert error.__doc__


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - {"SpecSyntaxError"}))
def test_a_message_names_arguments_as_python_has_them(name):
    parts = ("x: give ", Argument("ranks", 1), ", ", Argument("exclude"), " or ", "nothing")
    error = getattr(errors, name)(*parts)
    for same in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(same) == "x: give ranks=1, exclude= or nothing"
        assert same.parts == parts


@pytest.mark.parametrize(
    ("text", "position", "shows"),
    [
        ("[S0,X]", 4, "character 5 of '[S0,X]'"),
        ("[S0", 3, "at the end of '[S0'"),
        ("[S0\n,X]", 5, r"character 6 of '[S0\n,X]'"),
        ("x" * 1000, 500, f"character 501 of ...'{'x' * 160}'..."),
        ("x" * 1000, 1000, f"at the end of ...'{'x' * 80}'"),
        ("x" * 1000, 0, f"character 1 of '{'x' * 80}'..."),
    ],
)
def test_a_syntax_error_is_one_line_that_names_the_place(text, position, shows):
    error = errors.SpecSyntaxError("expected R", text, position)
    assert str(error) == f"expected R ({shows})"


@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_syntax_error_survives_the_way_between_processes(again):
    error = again(errors.SpecSyntaxError("expected R", "[S0,X]", 4))
    assert (error.problem, error.text, error.position) == ("expected R", "[S0,X]", 4)
    assert str(error) == "expected R (character 5 of '[S0,X]')"


MESH = DeviceMesh(range(4), (2, 2))
WHOLE = torch.ones(4, 4)
CUT = Layout(MESH, "[S0,R]", (4, 4), "f32")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *(
            (call, "SpecSyntaxError", f"a spec is text such as '[S0,R]', not a {kind}")
            for call, kind in [
                (lambda: Layout(MESH, None, (4, 4), "f32"), "NoneType"),  # type: ignore[arg-type]
                (lambda: Layout(MESH, b"[R,R]", (4, 4), "f32"), "bytes"),  # type: ignore[arg-type]
                (lambda: LayoutConverter().plan(CUT, None), "NoneType"),  # type: ignore[arg-type]
                (lambda: DTensor(WHOLE, MESH, "[S0,R]").redistribute(7), "int"),  # type: ignore[arg-type]
            ]
        ),
        (
            lambda: Layout(MESH, ("S0", "R"), (4, 4), "f32"),  # type: ignore[arg-type]
            "LayoutError",
            "'S0' is not a placement; give Shard, Replicate or Partial of torch",
        ),
        (
            lambda: LayoutConverter().plan("[S0,R]", "[R,S0]"),  # type: ignore[arg-type]
            "LayoutError",
            "the source is a str; give a Layout",
        ),
        (
            lambda: DTensor(np.ones((4, 4)), MESH, "[S0,R]"),  # type: ignore[arg-type]
            "LayoutError",
            "got a ndarray",
        ),
        (
            lambda: DTensor([[1.0]], MESH, "[S0,R]"),  # type: ignore[arg-type]
            "LayoutError",
            "got a list",
        ),
        (
            lambda: shardspec.match_rules([("*", "[R]")], {"w": 1}),  # type: ignore[arg-type]
            "LayoutError",
            "the rules are a list; give a dict",
        ),
        *(
            (
                lambda mesh=mesh: shardspec.reshard("a", "b", device_mesh=mesh),
                "CheckpointError",
                f"a {type(mesh).__name__} is not a mesh to shard for",
            )
            for mesh in ((2, 2), "2x2")
        ),
    ],
)
def test_what_is_of_another_kind(call, error, words):
    with pytest.raises(getattr(errors, error)) as caught:
        call()
    assert words in str(caught.value).splitlines()[0]


def test_the_version_is_that_of_the_command():
    assert shardspec.__version__ == version("shardspec")
