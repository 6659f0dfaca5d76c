import copy
import pickle

import pytest

from shardspec import errors

BUILT_IN = {
    "AxisError": ValueError,
    "CheckpointError": ValueError,
    "CommunicatorError": RuntimeError,
    "DTypeError": TypeError,
    "LayoutError": ValueError,
    "MeshError": ValueError,
    "OutputExistsError": FileExistsError,
    "ShardSpecError": Exception,
    "SpecSyntaxError": ValueError,
}


def test_the_table_of_built_ins_is_complete():
    assert sorted(BUILT_IN) == sorted(errors.__all__)


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items())
def test_one_root_and_the_built_in_that_a_reader_expects(name, built_in):
    error = getattr(errors, name)
    assert issubclass(error, errors.ShardSpecError)
    assert issubclass(error, built_in)
    assert error.__doc__


def test_a_syntax_error_shows_text_and_caret():
    error = errors.SpecSyntaxError("expected R", "[S0,X]", 4)
    assert str(error) == "expected R\n  [S0,X]\n      ^"
    assert str(error).splitlines()[2].index("^") == 2 + error.position


@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_syntax_error_survives_the_way_between_processes(again):
    error = again(errors.SpecSyntaxError("expected R", "[S0,X]", 4))
    assert (error.problem, error.text, error.position) == ("expected R", "[S0,X]", 4)
    assert str(error) == "expected R\n  [S0,X]\n      ^"
